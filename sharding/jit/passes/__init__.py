"""Passes: functions that change a graph in place and keep what it computes; each returns how many nodes it has changed.

    recorded graph
      | dead_collectives      results that nobody uses
      | common_collectives    one collective where two are the same
      | fuse_casts            casts where fewer elements are handled, gathers in the smaller dtype
      | reduce_scatter        all_reduce, then this rank's slice
      | regather              run again instead of keeping what was gathered, if asked for
      | bucket_bytes          small ones packed
      | overlap               start early, wait late, within max_live_bytes
    graph that runs

`pipeline.run` calls them; `alias.py` knows what shares memory and may not change places, `movement.py` what only moves values. Ranks see different graphs (parts of other sizes, a branch by
rank), so `agreement.py` compares what each pass made of the schedule on all ranks; what they do not do alike is not done.
"""
