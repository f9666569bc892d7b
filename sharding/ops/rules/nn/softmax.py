"""Softmax and related functions.

Over a split dim they take two small reductions, the maximum and the sum of exponentials.

    x over 2 ranks      [1 2 | 3 4]
    maximum              4   | 4          one number for each row is communicated, not the row
    sum of exp(x - 4)    s   | s
    softmax             exp(x - 4) / s    on each rank's part

The maximum only prevents overflow. The results do not depend on it, so it has no gradient, and
backward takes one reduction, that of the sum.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....autograd.engine_hooks import transforming
from ..decomposition_utils import from_parts, is_split, layout_after_reduction, reduce_pending
from ..reductions.reduction import Dims, accumulator_dtype, along, normal_dims, whole_reduction
from ..registry import decomposition

# -- operators -------------------------------------------------------------------------------------


def _dim(input: Any, dim: int | None) -> int:
    """Return the dim, which must exist; by default that of `torch.nn.functional`."""
    if input.ndim and dim is not None:
        input.size(dim)
    return dim if dim is not None else 0 if input.ndim in (0, 1, 3) else 1


def _split_dims(
    input: Any, dims: tuple[int, ...], dtype: torch.dtype | None = None
) -> tuple[int, ...] | None:
    """Return the dims if any is split and torch takes exponentials of this dtype, else None."""
    floating = (dtype or input.dtype).is_floating_point
    applies = floating and is_split(input, dims) and all(input.shape[d] for d in dims)
    return dims if applies else None


def _dtype_in(_stacklevel: Any, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype, which `torch.softmax` takes in place of another argument of `F`."""
    return _stacklevel if isinstance(_stacklevel, torch.dtype) else dtype


def _prepare(a: Any) -> tuple[int, ...] | None:
    dims = normal_dims(_dim(a.input, a.dim), a.input.ndim)
    return _split_dims(a.input, dims, _dtype_in(a._stacklevel, a.dtype))


@decomposition(
    "softmax",
    "log_softmax",
    with_func=True,
    prepare=_prepare,
    rule=lambda a: along(a.input, _dim(a.input, a.dim)),
)
def _softmax(
    func: Any,
    at: tuple[int, ...],
    input: Any,
    dim: Any = None,
    _stacklevel: Any = None,
    dtype: Any = None,
) -> Any:
    result = _dtype_in(_stacklevel, dtype) or input.dtype
    x = reduce_pending(input.to(result))
    peak = max_over(x, at)
    if "log_softmax" in func.__name__:  # `special_log_softmax` too
        return (x - peak - log_sum_exp(x, peak, at)).to(result)
    sizes = (x - peak).exp()
    return (sizes / reduce_pending(sizes.sum(at, keepdim=True))).to(result)


@decomposition("softmin", when=_prepare, rule=lambda a: along(a.input, _dim(a.input, a.dim)))
def _softmin(input: Any, dim: Any = None, _stacklevel: Any = None, dtype: Any = None) -> Any:
    return F.softmax(-input, dim, dtype=_dtype_in(_stacklevel, dtype))


@decomposition(
    "logsumexp",
    check=torch.logsumexp,
    prepare=lambda a: _split_dims(a.input, normal_dims(a.dim, a.input.ndim)),
    rule=whole_reduction,
)
def _logsumexp(dims: tuple[int, ...], input: Any, dim: Dims, keepdim: bool = False) -> Any:
    x = reduce_pending(input)
    peak = max_over(x, dims)
    peak = torch.where(peak.isfinite(), peak, 0)
    result = (log_sum_exp(x, peak, dims) + peak).to(x.dtype)
    return result if keepdim else result.squeeze(dims)


# -- steps -----------------------------------------------------------------------------------------


def max_over(x: Any, dims: tuple[int, ...]) -> Any:
    """Return the maximum over these dims, without gradient, in the dtype of torch's sums.

    Communication: a reduction of one number for each row.
    """
    return reduce_pending(x.detach().amax(dims, keepdim=True)).to(accumulator_dtype(x.dtype))


def log_sum_exp(x: Any, peak: Any, dims: tuple[int, ...]) -> Any:
    """Return log(sum(exp(x - peak))) over these dims, which keep one element.

    Communication: a reduction of one number for each row, and the same in backward.
    """
    if transforming():
        return reduce_pending((x - peak).exp().sum(dims, keepdim=True)).log()
    layout = layout_after_reduction(x._layout.replace(dtype=peak.dtype), dims)
    return reduce_pending(from_parts(layout, partial(_SumOfExp.apply, dims), x, peak)).log()


class _SumOfExp(torch.autograd.Function):
    """sum(exp(x - peak)); backward computes the exponentials again instead of saving them."""

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
