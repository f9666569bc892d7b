"""Layouts, plans, sharded tensors, operators and their gradients, and parallelism built on them."""

from .ops import methods, operator_calls, recomputation, torch_compile
from .ops.rules import families

__all__ = ["families", "methods", "operator_calls", "recomputation", "torch_compile"]
