"""Arguments that torch takes as numbers: the alpha of `add_`, the beta of `addmm`, the value of
`addcmul`.

A 0-d tensor given there, a `ShardedTensor` or a plain one, is read as a number, as torch does.
`torch.optim.LBFGS` calls `p.add_(direction, alpha=step_size)` with a step size computed from
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...tensor.sharded_tensor import ShardedTensor
from .registry import functions

_SCALED = """
    add add_ sub sub_ subtract subtract_ rsub addmm addmm_ addmv addmv_ addr addr_ addbmm addbmm_
    baddbmm baddbmm_ index_add index_add_
"""
_NAMES: dict[Callable[..., Any], tuple[str, ...]] = dict.fromkeys(
    functions(*_SCALED.split()), ("alpha", "beta")
)
_NAMES |= dict.fromkeys(functions("addcmul", "addcmul_", "addcdiv", "addcdiv_"), ("value",))


def has_tensor_as_number(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a tensor is given for an argument that torch takes as a number."""
    return any(isinstance(kwargs.get(name), Tensor) for name in _NAMES.get(func, ()))


def with_numbers(func: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of an operator with numbers in place of tensors; torch refuses
    tensors with dims or a gradient.

    Communication: a `ShardedTensor` that is pending is reduced, as by `item`.
    """
    return {name: _number(x) if name in _NAMES[func] else x for name, x in kwargs.items()}


def _number(x: Any) -> Any:
    """Return the value; one on a rank outside a tensor's mesh, where operators compute nothing."""
    if isinstance(x, ShardedTensor) and x.mesh.coordinate is None:
        return 1
    return x.item() if isinstance(x, Tensor) else x
