"""Softmax and its relatives. Over a split dim they take two small reductions, the maximum and the sum of exponentials.

    x over 2 ranks      [1 2 | 3 4]
    maximum              4   | 4          one number for each row goes round, not the row
    sum of exp(x - 4)    s   | s
    softmax             exp(x - 4) / s    on each rank's part

The maximum only keeps the exponentials in range. The results do not depend on it, so that it has no gradient, and backward
takes one reduction, that of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....tensor.autograd.engine_hooks import transforming
from ..decomposition_utils import check_by_torch, from_parts, reduced, settled, splits
from ..notation import Rule
from ..reductions.reduction import Dims, accumulator_dtype, along, normal_dims, reduction
from ..registry import form, rule

# -- whole ------------------------------------------------------------------------------------------------------------


@rule("softmax", "log_softmax", "softmin")
def _softmax(input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Rule:
    return along(input, _dim(input, dim))


@rule("logsumexp")
def _logsumexp(input: Tensor, dim: Dims, keepdim: bool = False) -> Rule:
    return reduction(input, dim, keepdim, whole=True)


def _dim(input: Any, dim: int | None) -> int:
    """The dim, which must exist (softmax of a meta tensor does not look); the one that `torch.nn.functional` takes where none
    is given."""
    if input.ndim and dim is not None:
        input.size(dim)
    return dim if dim is not None else 0 if input.ndim in (0, 1, 3) else 1


# -- split ------------------------------------------------------------------------------------------------------------


def _divided(x: Any, peak: Any, dims: tuple[int, ...]) -> Any:
    sizes = (x - peak).exp()
    return sizes / settled(sizes.sum(dims, keepdim=True))


def _log_divided(x: Any, peak: Any, dims: tuple[int, ...]) -> Any:
    return x - peak - log_sum_exp(x, peak, dims)


def _needs_form(input: Any, dims: tuple[int, ...], dtype: torch.dtype | None = None) -> bool:
    """Whether one of these dims is split, and torch can take exponentials of this dtype."""
    return (dtype or input.dtype).is_floating_point and splits(input, dims) and all(input.shape[d] for d in dims)


def _maker(finish: Callable[..., Any]) -> Callable[..., Any]:
    def make(
        input: Any, dim: int | None = None, _stacklevel: Any = None, dtype: torch.dtype | None = None
    ) -> Callable[..., Any] | None:
        at = normal_dims(_dim(input, dim), input.ndim)
        return partial(_run, finish, at) if _needs_form(input, at, _dtype_in(_stacklevel, dtype)) else None

    return make


def _dtype_in(_stacklevel: Any, dtype: torch.dtype | None) -> torch.dtype | None:
    """`torch.softmax` takes the dtype where `torch.nn.functional` has an argument of its own."""
    return _stacklevel if isinstance(_stacklevel, torch.dtype) else dtype


def _run(
    finish: Callable[..., Any], at: tuple[int, ...], input: Any, dim: Any = None, _stacklevel: Any = None, dtype: Any = None
) -> Any:
    result = _dtype_in(_stacklevel, dtype) or input.dtype
    x = settled(input.to(result))
    return finish(x, peak_of(x, at), at).to(result)


_softmax_form = form("softmax")(_maker(_divided))
form("log_softmax")(_maker(_log_divided))


@form("softmin")
def _softmin_form(input: Any, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
    return _run_softmin if _softmax_form(input, *args, **kwargs) else None


def _run_softmin(input: Any, *args: Any, **kwargs: Any) -> Any:
    return F.softmax(-input, *args, **kwargs)


@form("logsumexp")
def _logsumexp_form(input: Any, dim: Dims, keepdim: bool = False) -> Callable[..., Any] | None:
    dims = normal_dims(dim, input.ndim)
    check_by_torch(torch.logsumexp, input, dim, keepdim)
    return partial(_run_logsumexp, dims) if _needs_form(input, dims) else None


def _run_logsumexp(dims: tuple[int, ...], input: Any, dim: Dims, keepdim: bool = False) -> Any:
    x = settled(input)
    peak = peak_of(x, dims)
    peak = torch.where(peak.isfinite(), peak, 0)
    result = (log_sum_exp(x, peak, dims) + peak).to(x.dtype)
    return result if keepdim else result.squeeze(dims)


# -- pieces -----------------------------------------------------------------------------------------------------------


def peak_of(x: Any, dims: tuple[int, ...]) -> Any:
    """The maximum over these dims, without gradient, in the dtype in which torch adds up.

    Communication: a reduction of one number for each row.
    """
    return settled(x.detach().amax(dims, keepdim=True)).to(accumulator_dtype(x.dtype))


def log_sum_exp(x: Any, peak: Any, dims: tuple[int, ...]) -> Any:
    """log(sum(exp(x - peak))) over these dims, which stay with one element.

    Communication: a reduction of one number for each row, and the same in backward.
    """
    if transforming():
        return settled((x - peak).exp().sum(dims, keepdim=True)).log()
    layout = reduced(x._layout.replace(dtype=peak.dtype), dims)
    return settled(from_parts(layout, partial(_SumOfExp.apply, dims), x, peak)).log()


class _SumOfExp(torch.autograd.Function):
    """sum(exp(x - peak)), which computes the exponentials again in backward rather than keep them."""

    @staticmethod
    def forward(ctx: Any, dims: tuple[int, ...], x: Tensor, peak: Tensor) -> Tensor:
        ctx.save_for_backward(x, peak)
        return (x - peak).exp_().sum(dims, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, peak = ctx.saved_tensors
        if torch.is_grad_enabled() or transforming():
            return None, ((x - peak).exp() * grads[0]).to(x.dtype), None
        return None, (x - peak).exp_().mul_(grads[0]).to(x.dtype), None
