"""`sm.jit`: a whole step (forward, backward, collectives, optimizer) as one graph.

    first call      runs eagerly; `recorder.py` records it in a `GraphBuilder`, of which
                    `recording.py` makes a `Recording`
        every operator on local tensors    -> a node            torch.ops.aten....
        every call of a `Group`            -> two nodes         torch.ops.shardmesh.all_gather,
                                                                torch.ops.shardmesh.wait
        numbers that change (lr, a seed)   -> nodes of Python numbers, `scalars.py`
        tensors from outside               -> placeholders: by reference, by slot (`.grad`), or
                                              arguments
    later calls     `state/` compares the state that the program can reach with the recorded one;
                    then one call of the graph, `program.py`

A graph is a `torch.fx.Graph` of operators in the order in which they ran, below autograd, with
in-place operators and views as the program had them. Replayed in that order, it gives the results
of the step bit for bit, and passes preserve that.
"""
