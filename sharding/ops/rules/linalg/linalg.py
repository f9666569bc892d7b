"""Decompositions, solvers and functions of matrices: the batch may be split, each matrix is whole.

Columns of right-hand sides are independent, so they may be split as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..decomposition_utils import layout_of
from ..elementwise.pointwise import is_operand
from ..nn.window import unless_empty
from ..notation import Rule, einrule, whole_dims
from ..registry import rule, rules

# -- of one matrix ---------------------------------------------------------------------------------

# For each matrix of a batch the result is a matrix, `1 1`, a vector, `1`, or a number. A result
# that is not asked for is empty.
rules(
    {
        "cholesky inv inverse matrix_exp cholesky_inverse(A, *_, **__)": "... [m] [n] -> ... 1 1",
        "matrix_power(A, n)": "... [m] [n] -> ... 1 1",
        "det logdet(A, *_, **__)": "... [m] [n] -> ...",
        "cholesky_ex inv_ex(A, *_, **__)": "... [m] [n] -> ... 1 1, ...",
        "slogdet(A, *_, **__)": "... [m] [n] -> ..., ...",
        "eigvals eigvalsh svdvals(A, *_, **__)": "... [m] [n] -> ... 1",
        "eigh(A, *_, **__)": "... [m] [n] -> ... 1, ... 1 1",
        "linalg.eig(A)": "... [m] [n] -> ... 1, ... 1 1",
        "lu_factor ldl_factor(A, *_, **__)": "... [m] [n] -> ... 1 1, ... 1",
        "lu_factor_ex ldl_factor_ex(A, *_, **__)": "... [m] [n] -> ... 1 1, ... 1, ...",
        "svd(A, *_, **__)": "... [m] [n] -> ... 1 1, ... 1, ... 1 1",
        "qr(A, mode='reduced', **_)": lambda a: (
            f"... [m] [n] -> {_matrix_if(a.mode != 'r')}, ... 1 1"
        ),
        "linalg.lu(A, *, pivot=True)": lambda a: (
            f"... [m] [n] -> {_matrix_if(a.pivot)}, ... 1 1, ... 1 1"
        ),
        "torch.lu Tensor.lu(A, pivot=True, get_infos=False, out=None)": lambda a: (
            "... [m] [n] -> ... 1 1, ... 1" + ", ..." * a.get_infos
        ),
        "lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True)": lambda a: (
            "... [m] [n], ... [k] -> "
            + ", ".join(map(_matrix_if, (a.unpack_pivots, a.unpack_data, a.unpack_data)))
        ),
        "householder_product orgqr(A, tau)": "... [m] [n], ... [k] -> ... m n",
        "tensorinv(A, ind=2)": lambda a: f"{whole_dims(a.A)} -> {'1 ' * a.A.ndim}",
        "pinv pinverse(A, *tolerances, **named)": lambda a: _with_tolerances(a, "... 1 1"),
        "linalg.matrix_rank(A, *tolerances, **named)": lambda a: _with_tolerances(a, "..."),
    }
)
# For an empty batch, torch returns a result that is not in the autograd graph.
rules({"linalg.cond(A, p=None)": "... [m] [n] -> ..."}, bind=unless_empty(torch.linalg.cond))


def _matrix_if(is_computed: bool) -> str:
    return "... 1 1" if is_computed else "1"


def _with_tolerances(a: Any, result: str) -> Rule:
    """Return the rule; tolerances may be tensors, with a number for each matrix."""
    tensors = [x for x in (*a.tolerances, *a.named.values()) if is_operand(x)]
    return einrule(f"... [m] [n]{', ...' * len(tensors)} -> {result}", a.A, *tensors)


@rule("geqrf")
def _geqrf(input: Tensor) -> Rule:
    *batch, m, n = input.shape
    tensors = [torch.empty_like(input), input.new_empty(*batch, min(m, n))]
    result = torch.return_types.geqrf(tensors)  # type: ignore[attr-defined]
    return einrule("... [m] [n] -> ... 1 1, ... 1", input, result=result)


# -- systems of equations --------------------------------------------------------------------------

rules(
    {
        "linalg.solve(A, B, *, left=True)": lambda a: _solve(_columns(a.left, _is_vector(a))),
        "solve_triangular(A, B, *, upper, left=True, unitriangular=False)": lambda a: _solve(
            _columns(a.left)
        ),
    },
    linear=((1,),),
)
rules(
    {
        "linalg.lu_solve(LU, pivots, B, *, left=True, adjoint=False)": lambda a: (
            f"... [n] [n], ... [n], ... {_columns(a.left)} -> ... {_columns(a.left)}"
        ),
        "ldl_solve(LD, pivots, B, *, hermitian=False)": (
            "... [n] [n], ... [n], ... [n] k -> ... n k"
        ),
        "ormqr(input, tau, other, left=True, transpose=False)": lambda a: (
            f"... [m] [i], ... [t], ... {_columns(a.left)} -> ... {_columns(a.left)}"
        ),
    },
    linear=((2,),),
)
rules(
    {
        "torch.lu_solve Tensor.lu_solve(b, LU_data, LU_pivots)": (
            "... [n] k, ... [n] [n], ... [n] -> ... n k"
        ),
        "cholesky_solve(B, L, upper=False)": "... [n] k, ... [n] [n] -> ... n k",
    },
    linear=((0,),),
)
rules(
    {
        # the second result has no columns, so columns must not be split
        "solve_ex(A, B, *, left=True, check_errors=False)": lambda a: _solve_ex(a),
        "triangular_solve(b, A, upper=True, transpose=False, unitriangular=False)": (
            "... [n] [k], ... [n] [n] -> ... n k, ... n n"
        ),
        "tensorsolve(A, B, dims=None)": lambda a: (
            f"{whole_dims(a.A, 'a')}, {whole_dims(a.B, 'b')} -> {'1 ' * (a.A.ndim - a.B.ndim)}"
        ),
    }
)


def _solve(columns: str) -> str:
    return f"... [n] [n], ... {columns} -> ... {columns}"


def _columns(left: bool, vector: bool = False) -> str:
    return "[n]" if vector else "[n] k" if left else "k [n]"


def _is_vector(a: Any) -> bool:
    """Return whether the right-hand side is one column, without a dim for it."""
    return a.B.ndim == 1 or (a.A.ndim - 1 == a.B.ndim and a.B.shape == a.A.shape[:-1])


def _solve_ex(a: Any) -> str | None:
    A, B, columns = a.A, a.B, _columns(a.left, _is_vector(a)).replace("k", "[k]")
    fits = B.ndim <= A.ndim and torch.broadcast_shapes(A.shape[:-2], B.shape[:-2]) == A.shape[:-2]
    return f"{_solve(columns)}, ..." if fits or B.ndim == 1 else None


@rule("linalg.lstsq")
def _lstsq(A: Tensor, B: Tensor, rcond: Any = None, *, driver: str | None = None) -> Rule | None:
    """Return the rule; None with drivers whose residuals depend on the values of all matrices."""
    *batch, m, n = A.shape
    mesh: Any = layout_of(A).mesh
    known = driver or ("gelsy" if mesh.device_type == "cpu" else "gels")  # torch's own defaults
    is_vector = A.ndim - 1 == B.ndim
    has_residuals, has_rank = m > n and known == "gels", known != "gels"
    has_values = known in ("gelsd", "gelss")
    if (m > n and has_values) or [*B.shape[: len(batch)]] != batch or B.ndim > A.ndim:
        return None
    columns, k = ([], "") if is_vector else ([B.shape[-1]], "[k]")
    shapes = [
        ([*batch, n, *columns], f"... n {k}"),
        ([*batch, *columns], f"... {k}") if has_residuals else ([0], "1"),
        (batch, "...") if has_rank else ([0], "1"),
        ([*batch, min(m, n)], "... 1") if has_values else ([0], "1"),
    ]
    dtypes = (B.dtype, B.dtype, torch.int64, B.dtype.to_real())
    pairs = zip(shapes, dtypes, strict=True)
    tensors = [B.new_empty(shape, dtype=dtype) for (shape, _), dtype in pairs]
    pattern = f"... [m] [n], ... [m] {k} -> {', '.join(dims for _, dims in shapes)}"
    return einrule(pattern, A, B, result=torch.return_types.linalg_lstsq(tensors))  # type: ignore[attr-defined]
