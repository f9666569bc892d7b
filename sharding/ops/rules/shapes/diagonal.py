"""Diagonals and triangles: a part of a matrix has the matrix's diagonal too, moved by where the part begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....layout.layout import Layout
from ....layout.spec import P
from ....redistribute.autograd import redistribute_local
from ...dispatch import marked_as_copy
from ..decomposition_utils import evenly, from_parts, interval_of, layout_of, splits, whole
from ..notation import Rule, einrule
from ..registry import form, rule

Form = Callable[..., Any]

# -- triangles and traces ---------------------------------------------------------------------------------------------


def _triangle(func: Callable[..., Tensor], input: Tensor, diagonal: int = 0) -> Rule:
    """A part's diagonal is the tensor's, moved by where the part begins."""
    return einrule("... m n -> ... m n", input, linear=((0,),), transparent=True, bind=partial(_part_of_triangle, func))


def _part_of_triangle(func: Callable[..., Tensor], layouts: Sequence[Layout], _: Any) -> Callable[..., Tensor]:
    (row, _), (column, _) = layouts[0].box[-2:]
    return lambda local, diagonal=0: func(local, diagonal + row - column)


for _name in ("tril", "triu", "tril_", "triu_"):
    rule(_name)(partial(_triangle, getattr(Tensor, _name)))


@rule("trace")
def _trace(input: Tensor) -> Rule:
    """The sum of what each part has of the diagonal."""
    return einrule("m n ->", input, linear=((0,),), bind=_part_of_trace)


def _part_of_trace(layouts: Sequence[Layout], _: Any) -> Callable[..., Tensor]:
    (row, _), (column, _) = layouts[0].box
    return lambda local: local.diagonal(row - column).sum()


# -- diagonals --------------------------------------------------------------------------------------------------------


@rule(also=(torch.diagonal, torch.Tensor.diagonal), view=True)
def _diagonal_whole(input: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Rule:
    chosen = {dim1 % input.ndim, dim2 % input.ndim}
    left = " ".join(f"[d{i}]" if i in chosen else f"d{i}" for i in range(input.ndim))
    right = " ".join([f"d{i}" for i in range(input.ndim) if i not in chosen] + ["1"])
    return einrule(f"{left} -> {right}", input, linear=((0,),), transparent=True)


@rule(also=(torch.linalg.diagonal,), view=True)
def _linalg_diagonal_whole(A: Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Rule:
    return _diagonal_whole(A, offset, dim1, dim2)


@rule("diag_embed")
def _diag_embed_whole(input: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Rule | None:
    if (dim1, dim2) != (-2, -1):
        return None
    rest = " ".join(f"d{i}" for i in range(input.ndim - 1))
    return einrule(f"{rest} [n] -> {rest} 1 1", input, linear=((0,),), transparent=True)


@form(also=(torch.diagonal, torch.Tensor.diagonal))
def _diagonal(input: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Form | None:
    """Of a matrix split in one dim every rank has a piece of the diagonal; split in both, the columns are gathered first."""
    size = input.diagonal(offset, dim1, dim2).shape[-1]
    row, column = dim1 % input.ndim, dim2 % input.ndim
    if not splits(input, [row, column]):
        return None
    if splits(input, [row]) and splits(input, [column]):
        return lambda input, *_, **__: whole(input, column).diagonal(offset, row, column)
    dim, first = (row, max(0, -offset)) if splits(input, [row]) else (column, max(0, offset))
    layout = layout_of(input)
    cut = _diagonal_of(interval_of(layout, dim, first, first + size), dim, row + column - dim)
    moved = evenly(cut, input.ndim - 2, size)
    start = layout.box[dim][0] * (1 if dim == row else -1)

    def local(part: Tensor) -> Tensor:
        taken = part.diagonal(offset + start, row, column)
        return taken if cut is moved else marked_as_copy(redistribute_local(taken, cut, moved), part)

    return lambda input, *_, **__: from_parts(moved, local, input)


def _diagonal_of(layout: Layout, dim: int, dropped: int) -> Layout:
    """The layout with one dim last and another one gone."""
    order = [d for d in range(len(layout.shape)) if d not in (dim, dropped)] + [dim]
    cuts, shape = [layout.spec.cuts[d] for d in order], [layout.shape[d] for d in order]
    return Layout.of(layout.mesh, P.of_cuts(cuts, layout.pending), shape, layout.dtype)


@form(also=(torch.linalg.diagonal,))
def _linalg_diagonal(A: Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Form | None:
    found = _diagonal(A, offset, dim1, dim2)
    return found and (lambda A, **_: found(A))


# -- matrices with a given diagonal -----------------------------------------------------------------------------------


@form("diag_embed")
def _diag_embed(input: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Form | None:
    """Of a split dim: every rank's elements repeated over their rows, of which all but the diagonal is cleared."""
    torch.diag_embed(input, offset, dim1, dim2)
    if not splits(input, [-1]) and (dim1, dim2) == (-2, -1):
        return None
    sides = (max(offset, 0), max(-offset, 0), max(-offset, 0), max(offset, 0))

    def run(input: Any, *_: Any, **__: Any) -> Any:
        square = input.unsqueeze(-1).expand(*input.shape, input.shape[-1]).tril().triu()
        made = F.pad(square, sides) if offset else square
        return made if (dim1, dim2) == (-2, -1) else made.movedim((-2, -1), (dim1, dim2))

    return run


@form("diag")
def _diag(input: Tensor, diagonal: int = 0) -> Form:
    torch.diag(input, diagonal)
    if input.ndim == 1:
        return lambda input, *_, **__: torch.diag_embed(input, diagonal)
    return lambda input, *_, **__: input.diagonal(diagonal).clone()


@form("diagflat")
def _diagflat(input: Tensor, offset: int = 0) -> Form:
    return lambda input, *_, **__: torch.diag_embed(input.flatten(), offset)
