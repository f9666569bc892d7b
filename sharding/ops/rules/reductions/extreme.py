"""amax, amin, and the extreme of all elements.

Over a split dim the result is pending with "max" or "min": it is reduced where it is needed. The gradient of an extreme goes
to all elements that are equal to it, in equal parts. Where that may be wanted they are counted on all ranks, which takes the
value; so an input that requires grad has the extreme reduced at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, return_types

from ....redistribute.autograd import redistribute_local
from ....tensor.autograd.engine_hooks import transforming
from ..decomposition_utils import check_by_torch, from_parts, reduced, settled, splits
from ..notation import Rule
from ..registry import form, rule
from .reduction import Dims, normal_dims, reduction

Extreme = Callable[..., Any]
_KINDS = {torch.amax: "max", torch.amin: "min"}


def _of_part(extreme: Extreme, dims: tuple[int, ...], local: Tensor) -> Tensor:
    """The extreme of this rank's part, the dims kept; of an empty part what the other ranks' values win over."""
    if all(local.shape[d] for d in dims):
        return extreme(local, dims, keepdim=True)
    shape = [1 if d in dims else n for d, n in enumerate(local.shape)]
    return local.new_full(shape, _neutral(local.dtype, extreme is torch.amax))


def _neutral(dtype: torch.dtype, highest: bool) -> float:
    """What max (or min) ignores."""
    if dtype is torch.bool:
        return not highest
    if dtype.is_floating_point:
        return -math.inf if highest else math.inf
    info = torch.iinfo(dtype)
    return info.min if highest else info.max


def _rule(extreme: Extreme, input: Tensor, dim: Dims = (), keepdim: bool = False) -> Rule:
    return reduction(input, dim, keepdim, whole=True)


def _make(extreme: Extreme, input: Tensor, dim: Dims = (), keepdim: bool = False) -> Callable[..., Any] | None:
    check_by_torch(extreme, input, dim, keepdim)
    dims = normal_dims(dim, input.ndim)
    return partial(_run, extreme, dims) if splits(input, dims) else None


def _run(
    extreme: Extreme, dims: tuple[int, ...], input: Any, dim: Dims = (), keepdim: bool = False, *, nan_is_equal: bool = False
) -> Any:
    x = settled(input)
    kind = _KINDS[extreme]
    value = from_parts(reduced(x._layout, dims, kind), partial(_of_part, extreme, dims), x.detach())
    if x.is_floating_point() and (transforming() or (x.requires_grad and torch.is_grad_enabled())):
        value = _with_gradient(x, settled(value), dims, nan_is_equal)
    return value if keepdim else value.squeeze(dims)


def extreme_of_all(extreme: Extreme, input: Tensor) -> Callable[..., Any]:
    """The form of `max(x)` and `min(x)`. Unlike those of amax, torch's gradients have nan equal to nan here."""
    dims = tuple(range(input.ndim))
    check_by_torch(extreme, input)
    return partial(_run, extreme, dims, nan_is_equal=True) if splits(input, dims) else extreme


def _with_gradient(x: Any, value: Any, dims: tuple[int, ...], nan_is_equal: bool) -> Any:
    equal = x.detach() == value
    if nan_is_equal:
        equal = equal | ((x != x) & (value != value))
    count = settled(equal.sum(dims, keepdim=True))
    if transforming():  # by zeros with the derivative of the extreme
        return value + settled((torch.where(equal & value.isfinite(), x - x.detach(), 0) / count).sum(dims, keepdim=True))
    return from_parts(value._layout, partial(_Shared.apply, x._layout, value._layout), x, value, equal, count)


class _Shared(torch.autograd.Function):
    """The extreme of the parts of all ranks as a function of this rank's part: its gradient is shared among equals."""

    @staticmethod
    def forward(ctx: Any, layout: Any, reduced: Any, local: Tensor, value: Tensor, equal: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(equal, count)
        ctx.needed, ctx.arriving = reduced.replace(reduced.spec.with_unreduced(dict.fromkeys(layout.replicated_axes, "sum"))), reduced.dual
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        equal, count = ctx.saved_tensors
        grad = redistribute_local(grads[0], ctx.arriving, ctx.needed)
        return None, None, grad * equal / count, None, None, None


for _extreme in _KINDS:
    rule(_extreme.__name__)(partial(_rule, _extreme))
    form(_extreme.__name__)(partial(_make, _extreme))


@rule("aminmax")
def _aminmax(input: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Rule:
    return reduction(input, dim, keepdim, whole=True, results=2)


@form("aminmax")
def _aminmax_form(input: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Callable[..., Any] | None:
    torch.aminmax(input, dim=dim, keepdim=keepdim)
    dims = normal_dims(dim, input.ndim)
    if not splits(input, dims):
        return None
    return lambda input, **_: _amin_and_amax(settled(input), dims, keepdim)


def _amin_and_amax(x: Any, dims: Any, keepdim: bool) -> Any:
    return return_types.aminmax((x.amin(dims, keepdim), x.amax(dims, keepdim)))
