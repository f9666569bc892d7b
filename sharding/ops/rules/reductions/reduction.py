"""Reductions, and operators that need a dim whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..decomposition_utils import settled, splits, whole
from ..elementwise.pointwise import casts_linearly
from ..notation import Rule, einrule
from ..registry import form, handler, rule

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


@rule("sum_to_size")
def _sum_to_size(input: Tensor, *size: Any) -> Rule:
    """The sum over all dims that broadcasting from `size` would have made."""
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    extra = input.ndim - len(shape)
    made = [d for d, n in enumerate(shape, extra) if n == 1 != input.shape[d]]
    left = [f"d{i}" for i in range(input.ndim)]
    right = ["1" if i in made else name for i, name in enumerate(left)][max(extra, 0) :]

    def local(part: Tensor, *_: Any) -> Tensor:
        part = part.sum(made, keepdim=True) if made else part
        return part.sum(tuple(range(extra))) if extra else part

    return einrule(f"{' '.join(left)} -> {' '.join(right)}", input, linear=((0,),), local=local)


@rule("count_nonzero")
def _count_nonzero(input: Tensor, dim: Dims = None) -> Rule:
    return reduction(input, dim, False)


@rule("prod")
def _prod(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Rule:
    return reduction(input, dim, keepdim, combine="product")


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
    """True on a rank outside the mesh, as in torch, if the shapes agree."""
    if input.shape != other.shape:
        return False
    same = (input == other).all()
    return same.mesh.coordinate is None or bool(same)


@handler("allclose")
def _allclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    return bool(torch.isclose(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan).all())


# -- sums in disguise -------------------------------------------------------------------------------------------------


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch itself accumulates a sum of this dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@form("mean")
def _mean_form(
    input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, axis: Dims = None
) -> Any:
    """The sum over all ranks by the global count: right for uneven parts."""
    dims = normal_dims(dim if axis is None else axis, input.ndim)
    if not splits(input, dims):
        return None
    result = input.mean(dims, keepdim, dtype=dtype).dtype
    wide, count = accumulator_dtype(result), math.prod(input.shape[d] for d in dims)
    return lambda input, *_, **__: (input.sum(dims, keepdim=keepdim, dtype=wide) / count).to(result)


@rule("mean")
def _mean(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None, axis: Dims = None) -> Rule:
    return reduction(input, dim if axis is None else axis, keepdim, whole=True, linear=((0,),))


@form("nanmean")
def _nanmean_form(
    input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """The sum of the numbers by how many they are, both over all ranks."""
    dims = normal_dims(dim, input.ndim)
    if not splits(input, dims):
        return None
    result = input.nanmean(dims, keepdim, dtype=dtype).dtype
    wide = accumulator_dtype(result)

    def run(input: Any, *_: Any, **__: Any) -> Any:
        x = settled(input)
        count = x.isnan().logical_not().sum(dims, keepdim=keepdim)
        return (x.nansum(dims, keepdim=keepdim, dtype=wide) / count).to(result)

    return run


@rule("nanmean")
def _nanmean(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Rule:
    return reduction(input, dim, keepdim, whole=True)


def safe_root(x: Any) -> Any:
    """Square root with gradient 0 at 0, as torch's own norms have it."""
    zero = x == 0
    return torch.where(zero, 0, torch.where(zero, 1, x).sqrt())


# -- norms ------------------------------------------------------------------------------------------------------------


@form("vector_norm")
def _vector_norm_form(
    x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Over split dims: powers summed, or absolute values compared, then the root."""
    dims = normal_dims(dim, x.ndim)
    if not splits(x, dims):
        return None
    result = torch.linalg.vector_norm(x, ord, dims, keepdim, dtype=dtype).dtype
    wide = accumulator_dtype(result)

    def run(x: Any, ord: float = 2, *_: Any, **__: Any) -> Any:
        size = (settled(x) if dtype is None else settled(x).to(dtype)).abs().to(wide)
        return _norm_of_sizes(size, ord, dims, keepdim).to(result)

    return run


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
def _vector_norm(x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Rule:
    return reduction(x, dim, keepdim, whole=True)


@form("matrix_norm")
def _matrix_norm_form(
    A: Tensor, ord: Any = "fro", dim: Sequence[int] = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Over split dims: Frobenius' norm is that of a vector, and the largest sum of a row or column that of sums. Others take
    singular values, of the whole matrix."""
    dims = row, column = normal_dims(dim, A.ndim)
    if not splits(A, dims):
        return None
    torch.linalg.matrix_norm(A, ord, dims, keepdim, dtype=dtype)  # torch's own complaints

    def run(A: Any, ord: Any = "fro", *_: Any, **__: Any) -> Any:
        if ord == "fro":
            return torch.linalg.vector_norm(A, 2, dims, keepdim, dtype=dtype)
        if ord == "nuc" or abs(ord) == 2:
            return torch.linalg.matrix_norm(whole(A, *dims), ord, dims, keepdim, dtype=dtype)
        summed = row if abs(ord) == 1 else column
        sums = settled(torch.linalg.vector_norm(A, 1, summed, True, dtype=dtype))
        return (torch.amax if ord > 0 else torch.amin)(sums, dims, keepdim)

    return run


@rule("matrix_norm")
def _matrix_norm(
    A: Tensor, ord: Any = "fro", dim: Sequence[int] = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Rule:
    return reduction(A, dim, keepdim, whole=True)


@form(also=(torch.norm, Tensor.norm))
def _norm_form(
    input: Tensor, p: Any = "fro", dim: Dims = None, keepdim: bool = False, out: None = None, dtype: Any = None
) -> Any:
    """A vector norm, of all elements where no dim is given, or the sum of singular values."""
    dims = normal_dims(dim, input.ndim)
    if not splits(input, dims):
        return None
    torch.norm(input, p, dim, keepdim, dtype=dtype)  # torch's own complaints

    def run(input: Any, p: Any = "fro", *_: Any, **__: Any) -> Any:
        if p == "nuc":
            return torch.linalg.matrix_norm(input, "nuc", dims, keepdim, dtype=dtype)
        return torch.linalg.vector_norm(input, 2 if p in ("fro", None) else p, dims, keepdim, dtype=dtype)

    return run


@rule(also=(torch.norm, Tensor.norm))
def _norm(
    input: Tensor, p: Any = "fro", dim: Dims = None, keepdim: bool = False, out: None = None, dtype: Any = None
) -> Rule:
    return reduction(input, dim, keepdim, whole=True)


@form(also=(torch.linalg.norm,))
def _linalg_norm_form(
    A: Tensor, ord: Any = None, dim: Dims = None, keepdim: bool = False, *, out: None = None, dtype: Any = None
) -> Any:
    dims = normal_dims(dim, A.ndim)
    if not splits(A, dims):
        return None
    torch.linalg.norm(A, ord, dim, keepdim, dtype=dtype)  # torch's own complaints

    def run(A: Any, ord: Any = None, *_: Any, **__: Any) -> Any:
        if len(dims) == 1 or ord is None:
            return torch.linalg.vector_norm(A, 2 if ord is None else ord, dims, keepdim, dtype=dtype)
        return torch.linalg.matrix_norm(A, ord, dims, keepdim, dtype=dtype)

    return run


@rule(also=(torch.linalg.norm,))
def _linalg_norm(
    A: Tensor, ord: Any = None, dim: Dims = None, keepdim: bool = False, *, out: None = None, dtype: Any = None
) -> Rule:
    return reduction(A, dim, keepdim, whole=True)


@form("frobenius_norm")
def _frobenius_norm(input: Tensor, dim: Dims = (), keepdim: bool = False) -> Any:
    return lambda input, *_, **__: torch.linalg.vector_norm(input, 2, dim, keepdim)


@form("nuclear_norm")
def _nuclear_norm(input: Tensor, dim: Sequence[int] | bool = (-2, -1), keepdim: bool = False) -> Any:
    keepdim = dim if isinstance(dim, bool) else keepdim
    dims = (-2, -1) if isinstance(dim, bool) else tuple(dim)
    return lambda input, *_, **__: torch.linalg.matrix_norm(input, "nuc", dims, keepdim)


@form("dist")
def _dist(input: Tensor, other: Tensor, p: float = 2) -> Any:
    return lambda input, other, p=2: torch.linalg.vector_norm(input - other, p)


# -- operators along a whole dim --------------------------------------------------------------------------------------


def along(input: Tensor, dim: int, *, results: int = 1, keeps_size: bool = True, **options: Any) -> Rule:
    """The rule of an operator that mixes the elements along `dim`, which must be whole, and keeps the other dims."""
    dims = {dim % input.ndim} if input.ndim else set()
    left = " ".join(f"[d{i}]" if i in dims else f"d{i}" for i in range(input.ndim))
    right = left if keeps_size else " ".join("1" if i in dims else f"d{i}" for i in range(input.ndim))
    return einrule(f"{left} -> {', '.join([right] * results)}", input, **options)


@rule("cumsum", "cumsum_")
def _cumsum(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Rule:
    return along(input, dim, linear=((0,),) if casts_linearly(input.dtype, dtype) else ())


@rule("cumprod", "cumprod_", "logcumsumexp")
def _cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Rule:
    return along(input, dim)


@rule("cummax", "cummin")
def _cummax(input: Tensor, dim: int) -> Rule:
    return along(input, dim, results=2)


@rule("glu")
def _glu(input: Tensor, dim: int = -1) -> Rule:
    return along(input, dim, keeps_size=False)
