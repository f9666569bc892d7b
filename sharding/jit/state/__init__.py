"""What a function reaches and changes in Python: a snapshot, gradients of leaves, iterators."""
