"""Backward passes over sharded tensors and the gradients of leaves."""
