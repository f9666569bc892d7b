"""Passes: functions that change a graph in place and keep what it computes; each returns how many nodes it has changed.

    recorded graph
      | dead_collectives      results that nobody uses
      | common_collectives    one collective where two are the same
      | reduce_scatter        all_reduce, then this rank's slice
      | bucket_bytes          small ones packed
      | overlap               start early, wait late, within max_live_bytes
    graph that runs

`pipeline.run` calls them; `alias.py` knows what may not change places. Ranks see different graphs (parts of other sizes, a branch by
rank), so `agreement.py` compares what each pass made of the schedule on all ranks; what they do not do alike is not done.
"""
