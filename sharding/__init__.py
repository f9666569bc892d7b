"""What is where, and how it gets somewhere else: layouts, plans, sharded tensors, operators and their gradients."""

from . import tensor
from .rules import (  # importing them fills the operator table
    factory,
    index,
    init,
    loss,
    matmul,
    metadata,
    nn,
    optim,
    pointwise,
    reduction,
    view,
)

__all__ = [
    "factory",
    "index",
    "init",
    "loss",
    "matmul",
    "metadata",
    "nn",
    "optim",
    "pointwise",
    "reduction",
    "tensor",
    "view",
]
