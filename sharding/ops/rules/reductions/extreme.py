"""amax, amin, and the extreme of all elements.

Over a split dim the result is pending with "max" or "min" and is reduced where it is needed. The
gradient of an extreme goes to all elements equal to it, in equal parts. They are counted on all
ranks, which takes the reduced value; so an input that requires grad has the extreme reduced at
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, return_types

from ....autograd.engine_hooks import transforming
from ....redistribute.autograd import redistribute_local
from ..decomposition_utils import from_parts, is_split, layout_after_reduction, reduce_pending
from ..registry import decomposition
from .reduction import Dims, split_dims, whole_reduction

Extreme = Callable[..., Any]
_KINDS = {"amax": "max", "amin": "min"}


def _of_part(extreme: Extreme, dims: tuple[int, ...], local: Tensor) -> Tensor:
    """Return the extreme of this rank's part; of an empty one, the neutral value. Dims are kept."""
    if all(local.shape[d] for d in dims):
        return extreme(local, dims, keepdim=True)
    shape = [1 if d in dims else n for d, n in enumerate(local.shape)]
    return local.new_full(shape, _neutral(local.dtype, extreme.__name__ == "amax"))


def _neutral(dtype: torch.dtype, highest: bool) -> float:
    """Return the neutral value of max (or min)."""
    if dtype is torch.bool:
        return not highest
    if dtype.is_floating_point:
        return -math.inf if highest else math.inf
    info = torch.iinfo(dtype)
    return info.min if highest else info.max


@decomposition("amax", "amin", with_func=True, check=True, prepare=split_dims, rule=whole_reduction)
def _amax(
    extreme: Extreme, dims: tuple[int, ...], input: Any, dim: Dims = (), keepdim: bool = False
) -> Any:
    return _reduce(extreme, dims, keepdim, input)


def _reduce(
    extreme: Extreme, dims: tuple[int, ...], keepdim: bool, input: Any, nan_is_equal: bool = False
) -> Any:
    x = reduce_pending(input)
    kind = _KINDS[extreme.__name__]
    value = from_parts(
        layout_after_reduction(x._layout, dims, kind), partial(_of_part, extreme, dims), x.detach()
    )
    if x.is_floating_point() and (transforming() or (x.requires_grad and torch.is_grad_enabled())):
        value = _with_gradient(x, reduce_pending(value), dims, nan_is_equal)
    return value if keepdim else value.squeeze(dims)


def extreme_of_all(extreme: Extreme, input: Tensor) -> Callable[..., Any]:
    """Return the decomposition of `max(x)`, in whose gradient nan equals nan, unlike for amax."""
    with torch.no_grad():
        extreme(input)
    return (
        partial(_reduce, extreme, tuple(range(input.ndim)), False, nan_is_equal=True)
        if is_split(input)
        else extreme
    )


def _with_gradient(x: Any, value: Any, dims: tuple[int, ...], nan_is_equal: bool) -> Any:
    equal = x.detach() == value
    if nan_is_equal:
        equal = equal | ((x != x) & (value != value))
    count = reduce_pending(equal.sum(dims, keepdim=True))
    if transforming():  # add zeros that have the derivative of the extreme
        return value + reduce_pending(
            (torch.where(equal & value.isfinite(), x - x.detach(), 0) / count).sum(
                dims, keepdim=True
            )
        )
    return from_parts(
        value._layout, partial(_Shared.apply, x._layout, value._layout), x, value, equal, count
    )


class _Shared(torch.autograd.Function):
    """The extreme of all parts as a function of this one; equal elements share the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        layout: Any,
        reduced: Any,
        local: Tensor,
        value: Tensor,
        equal: Tensor,
        count: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(equal, count)
        ctx.needed = reduced.replace(
            reduced.spec.with_unreduced(dict.fromkeys(layout.replicated_axes, "sum"))
        )
        ctx.arriving = reduced.dual
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        equal, count = ctx.saved_tensors
        grad = redistribute_local(grads[0], ctx.arriving, ctx.needed)
        return None, None, grad * equal / count, None, None, None


@decomposition(
    "aminmax",
    check=torch.aminmax,
    prepare=split_dims,
    rule=lambda a: whole_reduction(a, results=2),
)
def _aminmax(
    dims: tuple[int, ...], input: Any, *, dim: int | None = None, keepdim: bool = False
) -> Any:
    x = reduce_pending(input)
    return return_types.aminmax((x.amin(dims, keepdim), x.amax(dims, keepdim)))
