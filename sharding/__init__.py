"""Layouts, plans, sharded tensors, operators and their gradients, and the parallelism that is built on them."""

from .ops import torch_compile
from .ops.rules import families
from .tensor import sharded_tensor

__all__ = ["families", "sharded_tensor", "torch_compile"]
