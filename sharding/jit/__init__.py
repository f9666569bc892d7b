"""`sm.jit`: a whole step (forward, backward, collectives, optimizer) as one graph.

    first call      runs eagerly, for real; `recorder.py` watches it
        every operator on local tensors       -> a node             torch.ops.aten....
        every call of a `Group`               -> two nodes          torch.ops.shardmesh.all_gather, torch.ops.shardmesh.wait
        numbers that change (lr, a seed)      -> nodes of Python numbers, `scalars.py`
        tensors that it has not made          -> placeholders: by reference, by slot (`.grad`), or arguments
    later calls     `state/` compares what the program can reach with what it was; then one call of the graph, `program.py`

A graph is a `torch.fx.Graph` of operators in the order in which they ran, below autograd, with in-place operators and views as the program
had them. Replayed in that order it is the step, bit for bit; a pass may do what keeps that true.
"""
