"""Whether a recorded graph still holds: compare the Python state that a function can reach.

docs/jit.md, "The state check", says what is watched, how a change is noticed, and what that costs.

    names.py         which attributes and globals code may read
    snapshot.py      before a recording: everything that can be reached, once more after it, since
                     a graph would not repeat the changes that the function itself made
    holders.py       the contents of one dict, list, cell or instance, and how they are compared
    guard.py         before each call: the same comparison in little time
    slots.py         gradients; with tensors by reference, they are compared in `entry.py`
    iterators.py     whether a recording has advanced one
    differences.py   a change in words; then the call is recorded again

Functions and classes of torch, the standard library and installed packages are taken as constant;
so is the inside of this library's own objects (meshes, layouts, units), of which the graph records
the effects. Instances of classes of installed packages are inspected.
"""
