"""Matrix products: each is a sum over shared factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..notation import Rule, aligned_along, dim_names, einrule
from ..registry import rule, rules

_BILINEAR = ((0,), (1,))

rules(
    {
        "mm(input, mat2)": "m k, k n -> m n",
        "bmm(input, mat2)": "b m k, b k n -> b m n",
        "mv(input, vec)": "m k, k -> m",
        "dot vdot(input, other)": "k, k -> ",
        "outer ger(input, vec2)": "m, n -> m n",
        "inner(input, other)": lambda a: _inner(a.input.ndim, a.other.ndim),
        "matmul __matmul__(input, other)": lambda a: _matmul(a.input.ndim, a.other.ndim),
        "tensordot(a, b, dims=2, out=None)": lambda a: _tensordot(a.a.ndim, a.b.ndim, a.dims),
        "vecdot(x, y, *, dim=-1)": lambda a: aligned_along(a.dim, "k", "", a.x, a.y),
    },
    linear=_BILINEAR,
)
rules(  # with a bias
    {
        "linear(input, weight, bias=None)": lambda a: (
            "... k, n k, n -> ... n" if a.weight.ndim == 2 else "... k, k, -> ..."
        )
    },
    linear=((0, 2), (1, 2)),
    additive=(2,),
)
rules(  # summed dims must not be split, since torch's function refuses empty ones
    {"bilinear(input1, input2, weight, bias=None)": "... [i], ... [j], n [i] [j], n -> ... n"},
    linear=((0, 3), (1, 3), (2, 3)),
    additive=(3,),
)
rules(  # added to `input`
    {
        "addmm addmm_(input, mat1, mat2, *, beta=1, alpha=1)": lambda a: _with_input(
            a.input, "m k, k n -> m n"
        ),
        "addmv addmv_(input, mat, vec, *, beta=1, alpha=1)": lambda a: _with_input(
            a.input, "m k, k -> m"
        ),
        "baddbmm baddbmm_(input, batch1, batch2, *, beta=1, alpha=1)": lambda a: _with_input(
            a.input, "b m k, b k n -> b m n"
        ),
        "addbmm addbmm_(input, batch1, batch2, *, beta=1, alpha=1)": lambda a: _with_input(
            a.input, "b m k, b k n -> m n"
        ),
        "addr addr_(input, vec1, vec2, *, beta=1, alpha=1)": lambda a: _with_input(
            a.input, "m, n -> m n"
        ),
    },
    linear=((1, 0), (2, 0)),
    additive=(0,),
)


def _matmul(left: int, right: int) -> str:
    """Return the pattern for operands of so many dims."""
    m_k = "k" if left == 1 else "... m k"
    k_n = "k" if right == 1 else "k n" if left == 1 and right == 2 else "... k n"
    batch = "..." if max(left, right) > 2 or left == right == 2 else ""
    return f"{m_k}, {k_n} -> {batch} {'m' if left > 1 else ''} {'n' if right > 1 else ''}"


@rule("__rmatmul__")
def _rmatmul(input: Tensor, other: Tensor) -> Rule:
    return einrule(_matmul(other.ndim, input.ndim), other, input, linear=_BILINEAR)


def _inner(left: int, right: int) -> str:
    if not left or not right:
        return "..., ... -> ..."
    m, n = dim_names(left - 1, prefix="m"), dim_names(right - 1, prefix="n")
    return f"{m} k, {n} k -> {m} {n}"


def _tensordot(ndim: int, other_ndim: int, dims: Any) -> str:
    last, first = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
    left, right = [f"m{i}" for i in range(ndim)], [f"n{i}" for i in range(other_ndim)]
    for i, (d, e) in enumerate(zip(last, first, strict=True)):
        left[d] = right[e] = f"k{i}"
    rest = [name for name in (*left, *right) if name[0] != "k"]
    return f"{' '.join(left)}, {' '.join(right)} -> {' '.join(rest)}"


def _with_input(input: Tensor, pattern: str) -> str:
    """Return the pattern with `input` in front, which is broadcast to the dims of the result."""
    dims = pattern.partition("->")[2].split()
    return f"{' '.join(dims[len(dims) - input.ndim :])}, {pattern}"


@rule("multi_dot")
def _multi_dot(tensors: Sequence[Tensor], *, out: None = None) -> Rule:
    """Return the rule of a chain of matrices; the first may be a row and the last a column."""
    names = [f"k{i} k{i + 1}" for i in range(len(tensors))]
    if tensors[0].ndim == 1:
        names[0] = "k1"
    if tensors[-1].ndim == 1:
        names[-1] = f"k{len(tensors) - 1}"
    outer = ["k0"] * (tensors[0].ndim == 2) + [f"k{len(tensors)}"] * (tensors[-1].ndim == 2)
    linear = [(i,) for i in range(len(tensors))]
    return einrule(f"{', '.join(names)} -> {' '.join(outer)}", *tensors, linear=linear)


@rule("chain_matmul")
def _chain_matmul(*matrices: Any, out: None = None) -> Rule:
    return _multi_dot(matrices)


@rule("linalg.cross")
def _cross(input: Tensor, other: Tensor, *, dim: int = -1) -> Rule:
    pattern = aligned_along(dim, "[k]", "[k]", input, other)
    local = lambda x, y, *_, **__: torch.linalg.cross(x, y, dim=dim)  # noqa: E731
    return einrule(pattern, input, other, linear=_BILINEAR, local=local)


@rule("torch.cross", "Tensor.cross")
def _cross_of_threes(input: Tensor, other: Tensor, dim: int | None = None) -> Rule:
    """Return the rule; without a dim, along the first dim of size 3 of the global tensors."""
    shape = torch.broadcast_shapes(input.shape, other.shape)
    return _cross(input, other, dim=shape.index(3) - len(shape) if dim is None else dim)


@rule("einsum")
def _einsum(equation: str, *operands: Any) -> Rule:
    """Return the rule, which is the equation; letters that an operand repeats must not be split."""
    several = len(operands) == 1 and isinstance(operands[0], (list, tuple))
    tensors = list(operands[0] if several else operands)
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        single = sorted(c for c in set(letters) if letters.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(single)
    repeated = {c for part in parts for c in part if c.isalpha() and part.count(c) > 1}
    extra = [t.ndim - len(part.replace("...", "")) for part, t in zip(parts, tensors, strict=True)]
    longest = max((n for n, part in zip(extra, parts, strict=True) if "..." in part), default=0)
    spelled = [_spell_ellipsis(part, n, repeated) for part, n in zip(parts, extra, strict=True)]
    pattern = f"{', '.join(spelled)} -> {_spell_ellipsis(right, longest, repeated)}"
    return einrule(pattern, *tensors, linear=tuple((i,) for i in range(len(tensors))))


def _spell_ellipsis(part: str, extra: int, whole: set[str]) -> str:
    """Return `...ij` as `e1 e0 i j`: an ellipsis is `extra` dims, those in `whole` in brackets."""
    before, ellipsis, after = part.partition("...")
    dims = [f"e{i}" for i in reversed(range(extra))] if ellipsis else []
    return " ".join(f"[{c}]" if c in whole else c for c in (*before, *dims, *after))
