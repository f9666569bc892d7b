"""Whether a recorded graph still holds: the Python state that a function can reach, compared before
each call.

A graph is right only while everything that the function read in Python is as it was. So before a
recording everything reachable is noted (`snapshot.py`), from the arguments, closures, globals that
the code names, `self`, modules, optimizers, lists, dicts and instances; of the program's own
classes only the attributes that its code names (`names.py`). After the recording the state is
compared once more: a graph would not repeat the changes that the function itself made.

    what is watched                     how a change is noticed               each call costs
    dicts: attributes, modules, groups  versions; contents if one differs     a C call per dict
    lists, sets, tuples, cells, slots,  contents, by identity, then by value  reading them
        globals, classes, numpy arrays, generators of random numbers
    empty containers                    whether they are empty                one loop in C
    sharded tensors                     identity of local part and layout     one loop in C
    tensors                             `requires_grad`                       one loop in C
    tensors that are read by reference  shape, stride, dtype, address         one C guard, one loop
    gradients                           kind of the value in each slot        one loop; `slots.py`
    numbers of optimizers               inputs of the graph, with conditions  each condition
    iterators                           after the recording only              none; `iterators.py`

The first three rows and the next two are `guard.py`, on contents that `holders.py` reads; the rest
is `jit.py`. A change is described in words (`differences.py`), and the call is recorded again.

Functions and classes of torch, the standard library and installed packages are taken as constant;
so is the inside of this library's own objects (meshes, layouts, units), of which the graph records
the effects. Instances of classes of installed packages are inspected.
"""
