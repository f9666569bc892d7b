"""Change graphs in place without changing their results.

Each pass is a function that returns how many nodes it has changed.

    recorded graph
      | dead_collectives      results that are not used
      | common_collectives    one collective where two are the same
      | fuse_casts            casts where fewer elements are handled, gathers in the smaller dtype
      | reduce_scatter        all_reduce, then this rank's slice
      | regather              gather again instead of saving, if asked for
      | bucket_bytes          small ones packed
      | overlap               start early, wait late, within max_live_bytes
    graph that runs

`pipeline.run` calls them; `alias.py` says which nodes must keep their order, `movement.py` which
ones only move values. Ranks see different graphs (parts of other sizes, a branch by rank), so
`agreement.py` compares the schedules after each pass on all ranks; a pass that differs is not
applied.
"""
