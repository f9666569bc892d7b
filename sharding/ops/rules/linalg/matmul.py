"""Matrix products: each is a sum over shared factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..notation import Rule, einrule
from ..registry import rule

_BILINEAR = ((0,), (1,))


@rule("linear")
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Rule:
    pattern = "... k, n k, n -> ... n" if weight.ndim == 2 else "... k, k, -> ..."
    return einrule(pattern, input, weight, bias, linear=((0, 2), (1, 2)), additive=(2,))


@rule("bilinear")
def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Rule:
    """Return the rule; summed dims must not be split, since torch's function refuses empty ones."""
    linear, pattern = ((0, 3), (1, 3), (2, 3)), "... [i], ... [j], n [i] [j], n -> ... n"
    return einrule(pattern, input1, input2, weight, bias, linear=linear, additive=(3,))


@rule("matmul", "__matmul__")
def _matmul(input: Tensor, other: Tensor) -> Rule:
    left = "k" if input.ndim == 1 else "... m k"
    right = "k" if other.ndim == 1 else "k n" if input.ndim == 1 and other.ndim == 2 else "... k n"
    batch = (
        "..." if max(input.ndim, other.ndim) > 2 or (input.ndim == 2 and other.ndim == 2) else ""
    )
    result = f"{batch} {'m' if input.ndim > 1 else ''} {'n' if other.ndim > 1 else ''}"
    return einrule(f"{left}, {right} -> {result}", input, other, linear=_BILINEAR)


@rule("__rmatmul__")
def _rmatmul(input: Tensor, other: Tensor) -> Rule:
    return _matmul(other, input)


@rule("mm")
def _mm(input: Tensor, mat2: Tensor) -> Rule:
    return einrule("m k, k n -> m n", input, mat2, linear=_BILINEAR)


@rule("bmm")
def _bmm(input: Tensor, mat2: Tensor) -> Rule:
    return einrule("b m k, b k n -> b m n", input, mat2, linear=_BILINEAR)


@rule("mv")
def _mv(input: Tensor, vec: Tensor) -> Rule:
    return einrule("m k, k -> m", input, vec, linear=_BILINEAR)


@rule("dot", "vdot")
def _dot(input: Tensor, other: Tensor) -> Rule:
    return einrule("k, k -> ", input, other, linear=_BILINEAR)


@rule("inner")
def _inner(input: Tensor, other: Tensor) -> Rule:
    if not input.ndim or not other.ndim:
        return einrule("..., ... -> ...", input, other, linear=_BILINEAR)
    left, right = _names("m", input.ndim - 1), _names("n", other.ndim - 1)
    return einrule(f"{left} k, {right} k -> {left} {right}", input, other, linear=_BILINEAR)


def _names(prefix: str, count: int) -> str:
    return " ".join(f"{prefix}{i}" for i in range(count))


@rule("tensordot")
def _tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: None = None) -> Rule:
    last, first = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
    left, right = _names("m", a.ndim).split(), _names("n", b.ndim).split()
    for i, (d, e) in enumerate(zip(last, first, strict=True)):
        left[d] = right[e] = f"k{i}"
    kept = [name for name in (*left, *right) if name[0] != "k"]
    return einrule(
        f"{' '.join(left)}, {' '.join(right)} -> {' '.join(kept)}", a, b, linear=_BILINEAR
    )


@rule("outer", "ger")
def _outer(input: Tensor, vec2: Tensor) -> Rule:
    return einrule("m, n -> m n", input, vec2, linear=_BILINEAR)


def _added(input: Tensor, pattern: str, a: Tensor, b: Tensor) -> Rule:
    """Return the rule of a product to which `input` is added, broadcast to the dims of the
    result.
    """
    dims = pattern.partition("->")[2].split()
    added = " ".join(dims[len(dims) - input.ndim :])
    return einrule(f"{added}, {pattern}", input, a, b, linear=((1, 0), (2, 0)), additive=(0,))


@rule("addmm", "addmm_")
def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Rule:
    return _added(input, "m k, k n -> m n", mat1, mat2)


@rule("addmv", "addmv_")
def _addmv(input: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Rule:
    return _added(input, "m k, k -> m", mat, vec)


@rule("baddbmm", "baddbmm_")
def _baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Rule:
    return _added(input, "b m k, b k n -> b m n", batch1, batch2)


@rule("addbmm", "addbmm_")
def _addbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Rule:
    return _added(input, "b m k, b k n -> m n", batch1, batch2)


@rule("addr", "addr_")
def _addr(input: Tensor, vec1: Tensor, vec2: Tensor, *, beta: float = 1, alpha: float = 1) -> Rule:
    return _added(input, "m, n -> m n", vec1, vec2)


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


@rule("vecdot")
def _vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Rule:
    names = [f"d{i}" for i in range(max(x.ndim, y.ndim))]
    left = [" ".join(names[len(names) - t.ndim :]) for t in (x, y)]
    del names[dim]
    return einrule(f"{', '.join(left)} -> {' '.join(names)}", x, y, linear=_BILINEAR)


@rule(also=(torch.linalg.cross,))
def _cross(input: Tensor, other: Tensor, *, dim: int = -1) -> Rule:
    return _cross_along(input, other, dim)


@rule(also=(torch.cross, torch.Tensor.cross))
def _cross_of_threes(input: Tensor, other: Tensor, dim: int | None = None) -> Rule:
    """Return the rule of a cross product without a dim: along the first dim of size 3 of the global
    tensors.
    """
    shape = torch.broadcast_shapes(input.shape, other.shape)
    return _cross_along(input, other, shape.index(3) - len(shape) if dim is None else dim)


def _cross_along(input: Tensor, other: Tensor, dim: int) -> Rule:
    names = [f"d{i}" for i in range(max(input.ndim, other.ndim))]
    names[dim] = f"[{names[dim]}]"
    left = [" ".join(names[len(names) - t.ndim :]) for t in (input, other)]
    local = lambda x, y, *_, **__: torch.linalg.cross(x, y, dim=dim)  # noqa: E731
    return einrule(
        f"{', '.join(left)} -> {' '.join(names)}", input, other, linear=_BILINEAR, local=local
    )


@rule("einsum")
def _einsum(equation: str, *operands: Any) -> Rule:
    """Return the rule, which is the equation; a letter that an operand repeats (a diagonal) must
    not be split.
    """
    tensors = (
        list(operands[0])
        if len(operands) == 1 and isinstance(operands[0], (list, tuple))
        else list(operands)
    )
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        right = ("..." if "..." in left else "") + "".join(
            sorted(c for c in set(letters) if letters.count(c) == 1)
        )
    repeated = {c for part in parts for c in part if c.isalpha() and part.count(c) > 1}
    extra = [t.ndim - len(part.replace("...", "")) for part, t in zip(parts, tensors, strict=True)]
    longest = max((n for n, part in zip(extra, parts, strict=True) if "..." in part), default=0)
    spelled = [_spelled(part, n, repeated) for part, n in zip(parts, extra, strict=True)]
    pattern = f"{', '.join(spelled)} -> {_spelled(right, longest, repeated)}"
    return einrule(pattern, *tensors, linear=tuple((i,) for i in range(len(tensors))))


def _spelled(part: str, extra: int, whole: set[str]) -> str:
    """Return `...ij` as `e1 e0 i j`, with the letters that must be whole in brackets; an ellipsis
    stands for `extra` dims.
    """
    dims = [f"e{i}" for i in reversed(range(extra))]
    letters = [
        *part.partition("...")[0],
        *(dims if "..." in part else ()),
        *part.partition("...")[2],
    ]
    return " ".join(f"[{c}]" if c in whole else c for c in letters)
