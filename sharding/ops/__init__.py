"""Operators on sharded tensors: dispatch, strategies, and the rules they follow."""
