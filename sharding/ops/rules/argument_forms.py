"""Arguments in forms that torch accepts and rules do not know.

    x.cumsum(axis=0)                  NumPy's names of keyword arguments, of functions in C++
    p.add_(direction, alpha=step)     a 0-d tensor, sharded or plain, is read as a number

`torch.optim.LBFGS` calls the second with a step size that it computes from gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...tensor.sharded_tensor import ShardedTensor
from .registry import functions

_TORCH_NAMES = {"axis": "dim", "keepdims": "keepdim"}


def has_numpy_names(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a keyword argument has NumPy's name, which functions in Python do not know."""
    return not inspect.isfunction(func) and any(name in kwargs for name in _TORCH_NAMES)


def with_torch_names(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments by torch's names; torch refuses one that has both."""
    return {_TORCH_NAMES.get(name, name): item for name, item in kwargs.items()}


# -- numbers ---------------------------------------------------------------------------------------

_SCALED = """
    add add_ sub sub_ subtract subtract_ rsub addmm addmm_ addmv addmv_ addr addr_ addbmm addbmm_
    baddbmm baddbmm_ index_add index_add_
"""
_NUMBERS: dict[Callable[..., Any], tuple[str, ...]] = {
    **dict.fromkeys(functions(*_SCALED.split()), ("alpha", "beta")),
    **dict.fromkeys(functions("addcmul", "addcmul_", "addcdiv", "addcdiv_"), ("value",)),
}


def has_tensor_as_number(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a tensor is given for an argument that torch takes as a number."""
    return any(isinstance(kwargs.get(name), Tensor) for name in _NUMBERS.get(func, ()))


def with_numbers(func: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments with numbers for tensors, which must not require grad.

    Communication: a `ShardedTensor` that is pending is reduced, as by `item`.
    """
    return {name: _number(x) if name in _NUMBERS[func] else x for name, x in kwargs.items()}


def _number(x: Any) -> Any:
    """Return the value; one on a rank outside a tensor's mesh, where operators compute nothing."""
    if isinstance(x, ShardedTensor) and x.mesh.coordinate is None:
        return 1
    return x.item() if isinstance(x, Tensor) else x
