"""Reductions, and operators along a dim that must be whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..decomposition_utils import is_split, reduce_pending, unshard
from ..elementwise.pointwise import casts_linearly
from ..notation import Rule, along_dims, einrule
from ..registry import decomposition, decomposition_maker, handler, rule, rules

Dims = int | Sequence[int] | None


rules(
    {
        "sum(input, dim=None, keepdim=False, *, dtype=None)": lambda a: reduction_of(
            a, linear=_cast_is_linear(a)
        ),
        "nansum(input, dim=None, keepdim=False, *, dtype=None)": lambda a: reduction_of(a),
        "prod(input, dim=None, keepdim=False, *, dtype=None)": lambda a: reduction_of(
            a, combine="product"
        ),
        "count_nonzero(input, dim=None)": lambda a: reduction_of(a),
        "all(input, dim=None, keepdim=False)": lambda a: _boolean(a, "min"),
        "any(input, dim=None, keepdim=False)": lambda a: _boolean(a, "max"),
        "kthvalue(input, k, dim=-1, keepdim=False)": lambda a: whole_reduction(a, results=2),
        "median nanmedian(input, dim=None, keepdim=False)": lambda a: whole_reduction(
            a, results=1 if a.dim is None else 2
        ),
        "mode(input, dim=-1, keepdim=False)": lambda a: whole_reduction(a, results=2),
        "cumsum cumsum_(input, dim, *, dtype=None)": lambda a: along(
            a.input, a.dim, linear=_cast_is_linear(a)
        ),
        "cumprod cumprod_ logcumsumexp(input, dim, *, dtype=None)": lambda a: along(a.input, a.dim),
        "cummax cummin(input, dim)": lambda a: along(a.input, a.dim, results=2),
        "glu(input, dim=-1)": lambda a: along(a.input, a.dim, keeps_size=False),
        "sort(input, dim=-1, descending=False, stable=None)": lambda a: along(
            a.input, a.dim, results=2
        ),
        "argsort(input, dim=-1, descending=False, stable=False)": lambda a: along(a.input, a.dim),
        "msort(input)": lambda a: along(a.input, 0),
    }
)


def normal_dims(dim: Dims, ndim: int) -> tuple[int, ...]:
    """Return the dims that a reduction runs over, counted from 0; all of them for None or ()."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim) if dim else tuple(range(ndim))
    return tuple(d % ndim for d in dims) if ndim else ()


def reduction(
    input: Tensor,
    dim: Dims,
    keepdim: bool,
    *,
    whole: bool = False,
    results: int = 1,
    **options: Any,
) -> Rule:
    """Return the rule of a reduction over `dim`, which with `whole` must not be split."""
    dims = normal_dims(dim, input.ndim)
    return along_dims(input, dims, "1" if keepdim else "", whole=whole, results=results, **options)


def reduction_of(a: Any, **options: Any) -> Rule:
    """Return `reduction` of a call with `dim`, and `keepdim` if there is one, after the tensor."""
    input = next(iter(vars(a).values()))
    return reduction(input, a.dim, getattr(a, "keepdim", False), **options)


whole_reduction = partial(reduction_of, whole=True)


@rule("sum_to_size")
def _sum_to_size(input: Tensor, *size: Any) -> Rule:
    """Sum over all dims that broadcasting from `size` would have made."""
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    extra = input.ndim - len(shape)
    broadcast_dims = [d for d, n in enumerate(shape, extra) if n == 1 != input.shape[d]]
    left = [f"d{i}" for i in range(input.ndim)]
    right = ["1" if i in broadcast_dims else name for i, name in enumerate(left)][max(extra, 0) :]

    def local(part: Tensor, *_: Any) -> Tensor:
        part = part.sum(broadcast_dims, keepdim=True) if broadcast_dims else part
        return part.sum(tuple(range(extra))) if extra else part

    return einrule(f"{' '.join(left)} -> {' '.join(right)}", input, linear=((0,),), local=local)


def _boolean(a: Any, combine: str) -> Rule | str:
    """Return the rule of `all` or `any`, which reduce no dim for `dim=()`."""
    nothing = a.dim is not None and not isinstance(a.dim, int) and not len(a.dim)
    return "... -> ..." if nothing else reduction_of(a, combine=combine)


def _cast_is_linear(a: Any) -> tuple[tuple[int, ...], ...]:
    return ((0,),) if casts_linearly(a.input.dtype, a.dtype) else ()


@handler("equal")
def _equal(input: Any, other: Any) -> bool:
    """Compare all elements; on a rank outside the mesh, which has none, only shapes."""
    if input.shape != other.shape:
        return False
    same = (input == other).all()
    return same.mesh.coordinate is None or bool(same)


@handler("allclose")
def _allclose(
    input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    return bool(torch.isclose(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan).all())


# -- means -----------------------------------------------------------------------------------------


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch itself accumulates a sum of this dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@decomposition_maker("mean", rule=lambda a: whole_reduction(a, linear=((0,),)))
def _mean(
    input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Divide the sum over all ranks by the global count, which is right for uneven parts."""
    dims = normal_dims(dim, input.ndim)
    if not is_split(input, dims):
        return None
    result = input.mean(dims, keepdim, dtype=dtype).dtype
    wide, count = accumulator_dtype(result), math.prod(input.shape[d] for d in dims)
    return lambda input, *_, **__: (input.sum(dims, keepdim=keepdim, dtype=wide) / count).to(result)


@decomposition_maker("nanmean", rule=whole_reduction)
def _nanmean(
    input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Divide the sum of the numbers by their count, both over all ranks."""
    dims = normal_dims(dim, input.ndim)
    if not is_split(input, dims):
        return None
    result = input.nanmean(dims, keepdim, dtype=dtype).dtype
    wide = accumulator_dtype(result)

    def run(input: Any, *_: Any, **__: Any) -> Any:
        x = reduce_pending(input)
        count = x.isnan().logical_not().sum(dims, keepdim=keepdim)
        return (x.nansum(dims, keepdim=keepdim, dtype=wide) / count).to(result)

    return run


def safe_root(x: Any) -> Any:
    """Return the square root with gradient 0 at 0, as torch's own norms have it."""
    zero = x == 0
    return torch.where(zero, 0, torch.where(zero, 1, x).sqrt())


# -- norms -----------------------------------------------------------------------------------------


@decomposition_maker("vector_norm", rule=whole_reduction)
def _vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Over split dims sum powers or compare absolute values, then take the root."""
    dims = normal_dims(dim, x.ndim)
    if not is_split(x, dims):
        return None
    result = torch.linalg.vector_norm(x, ord, dims, keepdim, dtype=dtype).dtype
    wide = accumulator_dtype(result)

    def run(x: Any, ord: float = 2, *_: Any, **__: Any) -> Any:
        size = (reduce_pending(x) if dtype is None else reduce_pending(x).to(dtype)).abs().to(wide)
        return _norm_of_magnitudes(size, ord, dims, keepdim).to(result)

    return run


def _norm_of_magnitudes(size: Any, ord: float, dims: Sequence[int], keepdim: bool) -> Any:
    if abs(ord) == math.inf:
        return (torch.amax if ord > 0 else torch.amin)(size, tuple(dims), keepdim=keepdim)
    if ord == 0:
        return size.sign().sum(dims, keepdim=keepdim)
    if ord == 1:
        return size.sum(dims, keepdim=keepdim)
    if ord == 2:
        return safe_root(reduce_pending((size * size).sum(dims, keepdim=keepdim)))
    return (size**ord).sum(dims, keepdim=keepdim) ** (1 / ord)


def split_dims(a: Any) -> tuple[int, ...] | None:
    """Return the dims that a call reduces where any is split, else None."""
    input = next(iter(vars(a).values()))
    dims = normal_dims(a.dim, input.ndim)
    return dims if is_split(input, dims) else None


@decomposition(
    "matrix_norm", check=torch.linalg.matrix_norm, prepare=split_dims, rule=whole_reduction
)
def _matrix_norm(
    dims: tuple[int, int],
    A: Any,
    ord: Any = "fro",
    dim: Dims = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    """Compute norms over split dims; those of singular values need the whole matrix."""
    if ord == "fro":
        return torch.linalg.vector_norm(A, 2, dims, keepdim, dtype=dtype)
    if ord == "nuc" or abs(ord) == 2:
        return torch.linalg.matrix_norm(unshard(A, *dims), ord, dims, keepdim, dtype=dtype)
    sums = reduce_pending(
        torch.linalg.vector_norm(A, 1, dims[0] if abs(ord) == 1 else dims[1], True, dtype=dtype)
    )
    return (torch.amax if ord > 0 else torch.amin)(sums, dims, keepdim)


@decomposition(
    "torch.norm", "Tensor.norm", check=torch.norm, prepare=split_dims, rule=whole_reduction
)
def _norm(
    dims: tuple[int, ...],
    input: Any,
    p: Any = "fro",
    dim: Dims = None,
    keepdim: bool = False,
    out: None = None,
    dtype: Any = None,
) -> Any:
    """Compute a vector norm (of all elements without `dim`), or the sum of singular values."""
    if p == "nuc":
        return torch.linalg.matrix_norm(input, "nuc", dims, keepdim, dtype=dtype)
    return torch.linalg.vector_norm(
        input, 2 if p in ("fro", None) else p, dims, keepdim, dtype=dtype
    )


@decomposition("linalg.norm", check=torch.linalg.norm, prepare=split_dims, rule=whole_reduction)
def _linalg_norm(
    dims: Any,
    A: Any,
    ord: Any = None,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    out: None = None,
    dtype: Any = None,
) -> Any:
    if len(dims) == 1 or ord is None:
        return torch.linalg.vector_norm(A, 2 if ord is None else ord, dims, keepdim, dtype=dtype)
    return torch.linalg.matrix_norm(A, ord, dims, keepdim, dtype=dtype)


@decomposition("nuclear_norm")
def _nuclear_norm(input: Any, dim: Sequence[int] | bool = (-2, -1), keepdim: bool = False) -> Any:
    if isinstance(dim, bool):
        dim, keepdim = (-2, -1), dim
    return torch.linalg.matrix_norm(input, "nuc", tuple(dim), keepdim)


decomposition("frobenius_norm")(
    lambda input, dim=(), keepdim=False: torch.linalg.vector_norm(input, 2, dim, keepdim)
)
decomposition("dist")(lambda input, other, p=2: torch.linalg.vector_norm(input - other, p))


# -- operators along a whole dim -------------------------------------------------------------------


def along(
    input: Tensor, dim: int, *, results: int = 1, keeps_size: bool = True, **options: Any
) -> Rule:
    """Return the rule of an operator that mixes the elements along `dim`, which must be whole."""
    dims = {dim % input.ndim} if input.ndim else ()
    return along_dims(input, dims, None if keeps_size else "1", results=results, **options)
