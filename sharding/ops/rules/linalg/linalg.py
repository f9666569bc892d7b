"""Decompositions, solvers and functions of matrices: the batch may be split, each matrix is whole.

Columns of right-hand sides are independent, so they may be split as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..decomposition_utils import layout_of
from ..elementwise.pointwise import is_operand
from ..nn.window import unless_empty
from ..notation import Rule, einrule
from ..registry import rule


def _named(names: str) -> tuple[Callable[..., Any], ...]:
    """Return the functions of these names."""
    found = (
        getattr(owner, name, None)
        for name in names.split()
        for owner in (torch.linalg, torch, torch.Tensor)
    )
    return tuple(func for func in found if func is not None)


# -- of one matrix ---------------------------------------------------------------------------------

# What a function of a matrix gives, for each matrix of a batch: `1 1` is a matrix, `1` a vector,
# and nothing a number.
_OF_ONE = {
    "cholesky inv inverse matrix_exp cholesky_inverse": ("1 1",),
    "det logdet": ("",),
    "cholesky_ex inv_ex": ("1 1", ""),
    "slogdet": ("", ""),
    "eigvals eigvalsh svdvals": ("1",),
    "eigh": ("1", "1 1"),
    "lu_factor ldl_factor": ("1 1", "1"),
    "lu_factor_ex ldl_factor_ex": ("1 1", "1", ""),
    "svd": ("1 1", "1", "1 1"),
}


def _of_one(A: Tensor, *results: str, **options: Any) -> Rule:
    return einrule(
        f"... [m] [n] -> {', '.join(f'... {result}' for result in results)}", A, **options
    )


def _register(names: str, results: Sequence[str]) -> None:
    rule(also=_named(names))(lambda A, *args, **kwargs: _of_one(A, *results))


for _names, _results in _OF_ONE.items():
    _register(_names, _results)


@rule(also=_named("matrix_power"))
def _matrix_power(A: Tensor, n: int) -> Rule:
    return _of_one(A, "1 1")


@rule(also=(torch.linalg.eig,))
def _eig(A: Tensor) -> Rule:
    return _of_one(A, "1", "1 1")


@rule(also=_named("pinv pinverse"))
def _pinv(A: Tensor, *tolerances: Any, **named: Any) -> Rule:
    return _with_tolerances("1 1", A, *tolerances, **named)


@rule(also=(torch.linalg.matrix_rank,))
def _matrix_rank(A: Tensor, *tolerances: Any, **named: Any) -> Rule:
    return _with_tolerances("", A, *tolerances, **named)


def _with_tolerances(result: str, A: Tensor, *args: Any, **kwargs: Any) -> Rule:
    """Return the rule; tolerances may be tensors, with a number for each matrix."""
    given = [x for x in (*args, *kwargs.values()) if is_operand(x)]
    return einrule(f"... [m] [n]{', ...' * len(given)} -> ... {result}", A, *given)


@rule(also=(torch.linalg.cond,))
def _cond(A: Tensor, p: Any = None) -> Rule:
    """Return the rule; for an empty batch, torch returns a result that is not in the autograd
    graph.
    """
    return _of_one(A, "", bind=unless_empty(torch.linalg.cond))


@rule(also=_named("qr"))
def _qr(A: Tensor, mode: str | bool = "reduced", **kwargs: Any) -> Rule:
    """Return the rule; with mode="r" there is no Q."""
    return einrule(f"... [m] [n] -> {'1' if mode == 'r' else '... 1 1'}, ... 1 1", A)


@rule(also=(torch.linalg.lu,))
def _lu(A: Tensor, *, pivot: bool = True) -> Rule:
    """Return the rule; without pivoting there is no permutation."""
    return einrule(f"... [m] [n] -> {'... 1 1' if pivot else '1'}, ... 1 1, ... 1 1", A)


@rule(also=(torch.functional.lu, torch.Tensor.lu))
def _lu_packed(A: Tensor, pivot: bool = True, get_infos: bool = False, out: None = None) -> Rule:
    return _of_one(A, *("1 1", "1", "")[: 2 + get_infos])


@rule(also=_named("geqrf"))
def _geqrf(input: Tensor) -> Rule:
    *batch, m, n = input.shape
    made = [torch.empty_like(input), input.new_empty(*batch, min(m, n))]
    return _of_one(input, "1 1", "1", result=torch.return_types.geqrf(made))  # type: ignore[attr-defined]


@rule(also=_named("lu_unpack"))
def _lu_unpack(
    LU_data: Tensor, LU_pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> Rule:
    """Return the rule; results that are not unpacked are empty."""
    permutation, factor = "... 1 1" if unpack_pivots else "1", "... 1 1" if unpack_data else "1"
    return einrule(f"... [m] [n], ... [k] -> {permutation}, {factor}, {factor}", LU_data, LU_pivots)


@rule(also=_named("householder_product orgqr"))
def _householder_product(A: Tensor, tau: Tensor) -> Rule:
    return einrule("... [m] [n], ... [k] -> ... m n", A, tau)


@rule(also=_named("tensorinv"))
def _tensorinv(A: Tensor, ind: int = 2) -> Rule:
    return einrule(f"{_whole('a', A.ndim)} -> {'1 ' * A.ndim}", A)


def _whole(prefix: str, count: int) -> str:
    return " ".join(f"[{prefix}{i}]" for i in range(count))


# -- systems of equations --------------------------------------------------------------------------


def _columns(left: bool, vector: bool = False) -> str:
    return "[n]" if vector else "[n] k" if left else "k [n]"


def _is_vector(A: Tensor, B: Tensor) -> bool:
    """Return whether the right-hand side is one column, without a dim for it."""
    return B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])


@rule(also=(torch.linalg.solve,))
def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Rule:
    columns = _columns(left, _is_vector(A, B))
    return einrule(f"... [n] [n], ... {columns} -> ... {columns}", A, B, linear=((1,),))


@rule(also=_named("solve_ex"))
def _solve_ex(
    A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False
) -> Rule | None:
    """Return the rule; the second result has no columns, so columns must not be split."""
    columns = _columns(left, _is_vector(A, B)).replace("k", "[k]")
    fits = B.ndim <= A.ndim and torch.broadcast_shapes(A.shape[:-2], B.shape[:-2]) == A.shape[:-2]
    return (
        einrule(f"... [n] [n], ... {columns} -> ... {columns}, ...", A, B)
        if fits or B.ndim == 1
        else None
    )


@rule(also=_named("solve_triangular"))
def _solve_triangular(
    A: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Rule:
    return einrule(
        f"... [n] [n], ... {_columns(left)} -> ... {_columns(left)}", A, B, linear=((1,),)
    )


@rule(also=_named("triangular_solve"))
def _triangular_solve(
    b: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Rule:
    """Return the rule; the second result is a copy of the coefficients, which have no columns."""
    return einrule("... [n] [k], ... [n] [n] -> ... n k, ... n n", b, A)


@rule(also=(torch.linalg.lu_solve,))
def _lu_solve(
    LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False
) -> Rule:
    columns = _columns(left)
    return einrule(
        f"... [n] [n], ... [n], ... {columns} -> ... {columns}", LU, pivots, B, linear=((2,),)
    )


@rule(also=(torch.lu_solve, torch.Tensor.lu_solve))
def _lu_solve_first(b: Tensor, LU_data: Tensor, LU_pivots: Tensor) -> Rule:
    return einrule(
        "... [n] k, ... [n] [n], ... [n] -> ... n k", b, LU_data, LU_pivots, linear=((0,),)
    )


@rule(also=_named("cholesky_solve"))
def _cholesky_solve(B: Tensor, L: Tensor, upper: bool = False) -> Rule:
    return einrule("... [n] k, ... [n] [n] -> ... n k", B, L, linear=((0,),))


@rule(also=_named("ldl_solve"))
def _ldl_solve(LD: Tensor, pivots: Tensor, B: Tensor, *, hermitian: bool = False) -> Rule:
    return einrule("... [n] [n], ... [n], ... [n] k -> ... n k", LD, pivots, B, linear=((2,),))


@rule(also=_named("ormqr"))
def _ormqr(
    input: Tensor, tau: Tensor, other: Tensor, left: bool = True, transpose: bool = False
) -> Rule:
    columns = _columns(left)
    return einrule(
        f"... [m] [i], ... [t], ... {columns} -> ... {columns}", input, tau, other, linear=((2,),)
    )


@rule(also=_named("tensorsolve"))
def _tensorsolve(A: Tensor, B: Tensor, dims: Sequence[int] | None = None) -> Rule:
    return einrule(
        f"{_whole('a', A.ndim)}, {_whole('b', B.ndim)} -> {'1 ' * (A.ndim - B.ndim)}", A, B
    )


@rule(also=(torch.linalg.lstsq,))
def _lstsq(A: Tensor, B: Tensor, rcond: Any = None, *, driver: str | None = None) -> Rule | None:
    """Return the rule; with some drivers, whether there are residuals depends on the values of all
    matrices: such calls have no rule.
    """
    *batch, m, n = A.shape
    mesh: Any = layout_of(A).mesh
    known = driver or ("gelsy" if mesh.device_type == "cpu" else "gels")  # torch's own defaults
    is_vector = A.ndim - 1 == B.ndim
    if (
        (m > n and known in ("gelsd", "gelss"))
        or [*B.shape[: len(batch)]] != batch
        or B.ndim > A.ndim
    ):
        return None
    columns, k = ([], "") if is_vector else ([B.shape[-1]], "[k]")
    has_residuals, has_rank, has_values = (
        m > n and known == "gels",
        known != "gels",
        known in ("gelsd", "gelss"),
    )
    shapes = [
        ([*batch, n, *columns], f"... n {k}"),
        ([*batch, *columns], f"... {k}") if has_residuals else ([0], "1"),
        (batch, "...") if has_rank else ([0], "1"),
        ([*batch, min(m, n)], "... 1") if has_values else ([0], "1"),
    ]
    dtypes = (B.dtype, B.dtype, torch.int64, B.dtype.to_real())
    made = [
        B.new_empty(shape, dtype=dtype) for (shape, _), dtype in zip(shapes, dtypes, strict=True)
    ]
    pattern = f"... [m] [n], ... [m] {k} -> {', '.join(dims for _, dims in shapes)}"
    return einrule(pattern, A, B, result=torch.return_types.linalg_lstsq(made))  # type: ignore[attr-defined]
