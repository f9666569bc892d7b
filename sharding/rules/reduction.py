"""Reductions, and operators that need a dim whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .notation import Rule, einrule
from .pointwise import casts_linearly
from .registry import handler, rule

Dims = int | Sequence[int] | None


def normal_dims(dim: Dims, ndim: int) -> tuple[int, ...]:
    """The dims a reduction runs over, counted from 0; all of them for None or ()."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim) if dim else tuple(range(ndim))
    return tuple(d % ndim for d in dims) if ndim else ()


def reduction(
    input: Tensor, dim: Dims, keepdim: bool, *, whole: bool = False, results: int = 1, **options: Any
) -> Rule:
    """The rule of a reduction over `dim`; with `whole` the reduced dims may not be split."""
    dims = normal_dims(dim, input.ndim)
    left = [f"[d{i}]" if whole and i in dims else f"d{i}" for i in range(input.ndim)]
    right = [("1" if keepdim else "") if i in dims else f"d{i}" for i in range(input.ndim)]
    pattern = f"{' '.join(left)} -> {', '.join([' '.join(right)] * results)}"
    return einrule(pattern, input, **options)


@rule("sum")
def _sum(
    input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, axis: Dims = None
) -> Rule:
    linear = ((0,),) if casts_linearly(input.dtype, dtype) else ()
    return reduction(input, dim if axis is None else axis, keepdim, linear=linear)


@rule("nansum")
def _nansum(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Rule:
    return reduction(input, dim, keepdim)


@rule("count_nonzero")
def _count_nonzero(input: Tensor, dim: Dims = None) -> Rule:
    return reduction(input, dim, False)


@rule("prod")
def _prod(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Rule:
    return reduction(input, dim, keepdim, combine="product")


# -- extremes ---------------------------------------------------------------------------------------------------------


def _extreme_local(
    func: Callable[..., Tensor], highest: bool, local: Tensor, dim: Dims = (), keepdim: bool = False
) -> Tensor:
    """max or min of this rank's part; of an empty part the neutral value, still connected to the graph."""
    dims = normal_dims(dim, local.ndim)
    if all(local.shape[d] for d in dims):
        return func(local, dims, keepdim=keepdim)
    shape = [1 if d in dims else n for d, n in enumerate(local.shape) if keepdim or d not in dims]
    neutral = local.new_full(shape, _neutral(local.dtype, highest))
    return neutral + local.sum(dims, keepdim=keepdim) if local.requires_grad else neutral


def _neutral(dtype: torch.dtype, highest: bool) -> float:
    """What max (or min) ignores."""
    if dtype is torch.bool:
        return not highest
    if dtype.is_floating_point:
        return -math.inf if highest else math.inf
    info = torch.iinfo(dtype)
    return info.min if highest else info.max


_amax_local = partial(_extreme_local, torch.amax, True)
_amin_local = partial(_extreme_local, torch.amin, False)


@rule("amax")
def _amax(input: Tensor, dim: Dims = (), keepdim: bool = False) -> Rule:
    return reduction(input, dim, keepdim, combine="max", local=_amax_local)


@rule("amin")
def _amin(input: Tensor, dim: Dims = (), keepdim: bool = False) -> Rule:
    return reduction(input, dim, keepdim, combine="min", local=_amin_local)


@handler("max")
def _max(input: Any, *args: Any, **kwargs: Any) -> Any:
    return input.amax() if not args and not kwargs else _checked_max(torch.maximum, input, *args, **kwargs)


@handler("min")
def _min(input: Any, *args: Any, **kwargs: Any) -> Any:
    return input.amin() if not args and not kwargs else _checked_max(torch.minimum, input, *args, **kwargs)


def _checked_max(pairwise: Callable[..., Any], input: Any, *args: Any, **kwargs: Any) -> Any:
    """`max(x, other)` is pointwise; `max(x, dim)` is left to its rule."""
    other = kwargs.get("other", args[0] if args else None)
    return pairwise(input, other) if isinstance(other, Tensor) else NotImplemented


@rule("max", "min")
def _max_dim(input: Tensor, dim: int, keepdim: bool = False) -> Rule:
    return reduction(input, dim, keepdim, whole=True, results=2)


@rule("median", "nanmedian")
def _median(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Rule:
    return reduction(input, dim, keepdim, whole=True, results=1 if dim is None else 2)


@rule("mode")
def _mode(input: Tensor, dim: int = -1, keepdim: bool = False) -> Rule:
    return reduction(input, dim, keepdim, whole=True, results=2)


@rule("argmax", "argmin")
def _argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Rule:
    return reduction(input, dim, keepdim, whole=True)


@rule("all")
def _all(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Rule:
    return _truth(input, dim, keepdim, "min")


@rule("any")
def _any(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Rule:
    return _truth(input, dim, keepdim, "max")


def _truth(input: Tensor, dim: Dims, keepdim: bool, combine: str) -> Rule:
    """Unlike other reductions, over no dim these reduce nothing."""
    nothing = dim is not None and not isinstance(dim, int) and not len(dim)
    return einrule("... -> ...", input) if nothing else reduction(input, dim, keepdim, combine=combine)


@handler("equal")
def _equal(input: Any, other: Any) -> bool:
    return input.shape == other.shape and bool((input == other).all())


@handler("allclose")
def _allclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    return bool(torch.isclose(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan).all())


# -- sums in disguise -------------------------------------------------------------------------------------------------


def is_split(x: Any, dims: Sequence[int]) -> bool:
    """Whether an axis of more than one rank splits any of these dims of a `ShardedTensor`, or leaves it pending."""
    size = x.mesh.size
    return any(size(a) > 1 for d in dims for a in x.spec.dims[d]) or any(size(a) > 1 for a, _ in x.spec.unreduced)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch itself accumulates a sum of this dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@handler("mean")
def _mean(
    input: Any, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, axis: Dims = None
) -> Any:
    """The sum over all ranks by the global count: right for uneven parts."""
    dims = normal_dims(dim if axis is None else axis, input.ndim)
    result = dtype or input.dtype
    if not (result.is_floating_point or result.is_complex):
        raise RuntimeError(
            f"mean(): the result of an integer mean is not an integer; cast {input.layout} to a floating dtype"
        )
    if not is_split(input, dims):
        return NotImplemented
    count = math.prod(input.shape[d] for d in dims)
    return (input.sum(dims, keepdim=keepdim, dtype=accumulator_dtype(result)) / count).to(result)


@rule("mean")
def _mean_whole(
    input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None, axis: Dims = None
) -> Rule:
    return reduction(input, dim if axis is None else axis, keepdim, whole=True, linear=((0,),))


def settled(x: Any) -> Any:
    """The tensor with everything pending reduced, so that using it several times communicates once."""
    return x.redistribute(x.spec.with_unreduced({})) if x.layout.pending else x


def safe_root(x: Any) -> Any:
    """Square root with gradient 0 at 0, as torch's own norms have it."""
    zero = x == 0
    return torch.where(zero, 0, torch.where(zero, 1, x).sqrt())


def _moments(input: Any, dim: Dims, keepdim: bool, unbiased: bool, correction: float | None) -> tuple[Any, Any]:
    """Variance in two passes (the mean, then squared distances from it), and the mean."""
    dims = normal_dims(dim, input.ndim)
    wide = settled(input).to(accumulator_dtype(input.dtype))
    mean = settled(wide.mean(dims, keepdim=True))
    count = math.prod(input.shape[d] for d in dims) - (float(unbiased) if correction is None else correction)
    distance = wide - mean
    squares = (distance * distance.conj()).real if input.is_complex() else distance * distance
    return settled(squares.sum(dims, keepdim=keepdim)) / max(count, 0), mean if keepdim else mean.squeeze(dims)


def _variance(finish: Callable[..., Any], input: Any, *args: Any, **kwargs: Any) -> Any:
    bound = _variance_arguments(*args, **kwargs)
    empty = input._local.numel() == 0  # torch warns of too few elements where there is no variance to compute
    if not is_split(input, normal_dims(bound[0], input.ndim)) and not empty:
        return NotImplemented
    real = input.dtype.to_real() if input.is_complex() else input.dtype
    var, mean = _moments(input, *bound)
    return finish(var, real, mean.to(input.dtype))


def _variance_arguments(
    dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> tuple[Dims, bool, bool, float | None]:
    if isinstance(dim, bool):  # var(unbiased)
        return None, keepdim, dim, correction
    return dim, keepdim, unbiased, correction


handler("var")(partial(_variance, lambda var, dtype, mean: var.to(dtype)))
handler("std")(partial(_variance, lambda var, dtype, mean: safe_root(var).to(dtype)))
handler("var_mean")(partial(_variance, lambda var, dtype, mean: (var.to(dtype), mean)))
handler("std_mean")(partial(_variance, lambda var, dtype, mean: (safe_root(var).to(dtype), mean)))


@rule("var", "std")
def _var(input: Tensor, *args: Any, **kwargs: Any) -> Rule:
    dim, keepdim, _, _ = _variance_arguments(*args, **kwargs)
    return reduction(input, dim, keepdim, whole=True)


@rule("var_mean", "std_mean")
def _var_mean(input: Tensor, *args: Any, **kwargs: Any) -> Rule:
    dim, keepdim, _, _ = _variance_arguments(*args, **kwargs)
    return reduction(input, dim, keepdim, whole=True, results=2)


@handler("vector_norm")
def _vector_norm(
    x: Any, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Over split dims: powers summed, or absolute values compared, then the root."""
    dims = normal_dims(dim, x.ndim)
    if not is_split(x, dims):
        return NotImplemented
    result = dtype or (x.dtype.to_real() if x.is_complex() else x.dtype)
    size = (settled(x) if dtype is None else settled(x).to(dtype)).abs().to(accumulator_dtype(result))
    return _norm_of_sizes(size, ord, dims, keepdim).to(result)


def _norm_of_sizes(size: Any, ord: float, dims: Sequence[int], keepdim: bool) -> Any:
    if abs(ord) == math.inf:
        return (torch.amax if ord > 0 else torch.amin)(size, tuple(dims), keepdim=keepdim)
    if ord == 0:
        return size.sign().sum(dims, keepdim=keepdim)
    if ord == 1:
        return size.sum(dims, keepdim=keepdim)
    if ord == 2:
        return safe_root(settled((size * size).sum(dims, keepdim=keepdim)))
    return (size**ord).sum(dims, keepdim=keepdim) ** (1 / ord)


@rule("vector_norm")
def _vector_norm_whole(
    x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Rule:
    return reduction(x, dim, keepdim, whole=True)


@handler("norm")
def _norm(
    input: Any, p: Any = "fro", dim: Dims = None, keepdim: bool = False, out: None = None, dtype: Any = None
) -> Any:
    """A vector norm, of all elements where no dim is given; other matrix norms than Frobenius' are gathered."""
    if p == "nuc" or out is not None:
        return NotImplemented
    return torch.linalg.vector_norm(input, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


@handler(also=(torch.linalg.norm,))
def _linalg_norm(
    A: Any, ord: Any = None, dim: Dims = None, keepdim: bool = False, *, out: None = None, dtype: Any = None
) -> Any:
    """A vector norm, or that of Frobenius; other matrix norms are gathered."""
    dims = normal_dims(dim, A.ndim)
    is_vector = len(dims) == 1 or (ord is None and dim is None) or (ord in (None, "fro") and len(dims) == 2)
    if not is_vector or out is not None:
        return NotImplemented
    return torch.linalg.vector_norm(A, 2 if ord in (None, "fro") else ord, dim, keepdim, dtype=dtype)


# -- operators along a whole dim --------------------------------------------------------------------------------------


def along(input: Tensor, dim: int, *, results: int = 1, keeps_size: bool = True, **options: Any) -> Rule:
    """The rule of an operator that mixes the elements along `dim`, which must be whole, and keeps the other dims."""
    dims = {dim % input.ndim} if input.ndim else set()
    left = " ".join(f"[d{i}]" if i in dims else f"d{i}" for i in range(input.ndim))
    right = left if keeps_size else " ".join("1" if i in dims else f"d{i}" for i in range(input.ndim))
    return einrule(f"{left} -> {', '.join([right] * results)}", input, **options)


@rule("softmax", "log_softmax", "softmin", also=(torch.softmax, torch.log_softmax, torch.special.softmax))
def _softmax(input: Tensor, dim: int, *args: Any, **kwargs: Any) -> Rule:
    return along(input, dim)


@rule("logsumexp")
def _logsumexp(input: Tensor, dim: Dims, keepdim: bool = False) -> Rule:
    return reduction(input, dim, keepdim, whole=True)


@rule("cumsum", "cumsum_")
def _cumsum(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Rule:
    return along(input, dim, linear=((0,),) if casts_linearly(input.dtype, dtype) else ())


@rule("cumprod", "cumprod_", "logcumsumexp")
def _cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Rule:
    return along(input, dim)


@rule("cummax", "cummin")
def _cummax(input: Tensor, dim: int) -> Rule:
    return along(input, dim, results=2)


@rule("sort")
def _sort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Rule:
    return along(input, dim, results=2)


@rule("argsort")
def _argsort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Rule:
    return along(input, dim)


@rule("topk")
def _topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Rule:
    return along(input, dim, results=2, keeps_size=False)


@rule("kthvalue")
def _kthvalue(input: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Rule:
    return reduction(input, dim, keepdim, whole=True, results=2)


@rule("glu")
def _glu(input: Tensor, dim: int = -1) -> Rule:
    return along(input, dim, keeps_size=False)
