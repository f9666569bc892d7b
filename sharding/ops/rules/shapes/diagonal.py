"""Diagonals and triangles, of a part with an offset that depends on where the part begins."""

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
from ...sliced_from import marked_as_copy
from ..decomposition_utils import (
    evenly_split,
    from_parts,
    interval_of,
    is_split,
    layout_of,
    unshard,
)
from ..notation import Rule, along_dims, dim_names, einrule
from ..registry import decomposition, decomposition_maker, rules

Decomposition = Callable[..., Any]
_MOVES: dict[str, Any] = {"linear": ((0,),), "transparent": True}

# -- triangles and traces --------------------------------------------------------------------------


# The offset of the diagonal in a part depends on where the part begins.
rules(
    {
        "tril triu tril_ triu_(input, diagonal=0)": lambda a: einrule(
            "... m n -> ... m n", a.input, **_MOVES, bind=partial(_part_of_triangle, a.func)
        ),
        "fill_diagonal_(input, fill_value, wrap=False)": lambda a: along_dims(
            a.input, (), **_MOVES, bind=partial(_part_with_diagonal, a.wrap)
        ),
        "trace(input)": lambda a: einrule("m n ->", a.input, linear=((0,),), bind=_part_of_trace),
    },
    with_func=True,
)


def _part_of_triangle(
    func: Callable[..., Tensor], layouts: Sequence[Layout], _: Any
) -> Callable[..., Tensor]:
    (row, _), (column, _) = layouts[0].box[-2:]
    return lambda local, diagonal=0: func(local, diagonal + row - column)


def _part_with_diagonal(wrap: bool, layouts: Sequence[Layout], _: Any) -> Callable[..., Tensor]:
    layout = layouts[0]
    positions = _diagonal_positions(layout.shape, wrap)
    inside = torch.ones_like(positions[0], dtype=torch.bool)
    for position, (start, stop) in zip(positions, layout.box, strict=True):
        inside &= (position >= start) & (position < stop)
    index = [
        position[inside] - start for position, (start, _) in zip(positions, layout.box, strict=True)
    ]
    neutral = _neutral_on_this_rank(layout)

    def fill(local: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
        value = local.new_full((), fill_value if neutral is None else neutral)
        return local.index_put_(tuple(i.to(local.device) for i in index), value)

    return fill


def _diagonal_positions(shape: Sequence[int], wrap: bool) -> list[Tensor]:
    """Return the positions of the diagonal's elements, one tensor for each dim.

    With `wrap` the diagonal of a tall matrix starts again after one empty row.
    """
    if len(shape) == 2 and wrap and 0 < shape[1] < shape[0]:
        numbers = torch.arange(0, shape[0] * shape[1], shape[1] + 1)
        return [numbers // shape[1], numbers % shape[1]]
    return [torch.arange(min(shape))] * len(shape)


def _neutral_on_this_rank(layout: Layout) -> float | None:
    """Return what ranks but the first of a pending sum or product write; None for the value."""
    mesh: Any = layout.mesh
    for axis, kind in layout.spec.unreduced:
        if (
            kind in ("sum", "product")
            and mesh.coordinate is not None
            and mesh.coordinate[mesh.axis_index(axis)]
        ):
            return float(kind == "product")
    return None


def _part_of_trace(layouts: Sequence[Layout], _: Any) -> Callable[..., Tensor]:
    (row, _), (column, _) = layouts[0].box
    return lambda local: local.diagonal(row - column).sum()


# -- diagonals -------------------------------------------------------------------------------------


def _diagonal_rule(input: Tensor, dim1: int, dim2: int) -> Rule:
    chosen = {dim1 % input.ndim, dim2 % input.ndim}
    right = " ".join([f"d{i}" for i in range(input.ndim) if i not in chosen] + ["1"])
    return einrule(f"{dim_names(input.ndim, chosen)} -> {right}", input, **_MOVES)


@decomposition_maker(
    "torch.diagonal",
    "Tensor.diagonal",
    rule=lambda a: _diagonal_rule(a.input, a.dim1, a.dim2),
    view=True,
)
def _diagonal(input: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Decomposition | None:
    """Take each rank's piece of the diagonal; if both dims are split, gather the columns first."""
    size = input.diagonal(offset, dim1, dim2).shape[-1]
    row, column = dim1 % input.ndim, dim2 % input.ndim
    if not is_split(input, [row, column]):
        return None
    if is_split(input, [row]) and is_split(input, [column]):
        return lambda input, *_, **__: unshard(input, column).diagonal(offset, row, column)
    dim, first = (row, max(0, -offset)) if is_split(input, [row]) else (column, max(0, offset))
    layout = layout_of(input)
    square = interval_of(layout, dim, first, first + size)
    # The split dim moves to the end, and the other one is dropped.
    order = [d for d in range(input.ndim) if d not in (row, column)] + [dim]
    cuts, shape = [square.spec.cuts[d] for d in order], [square.shape[d] for d in order]
    cut = Layout.of(square.mesh, P.of_cuts(cuts, square.pending), shape, square.dtype)
    moved = evenly_split(cut, input.ndim - 2, size)
    start = layout.box[dim][0] * (1 if dim == row else -1)

    def local(part: Tensor) -> Tensor:
        taken = part.diagonal(offset + start, row, column)
        return (
            taken if cut is moved else marked_as_copy(redistribute_local(taken, cut, moved), part)
        )

    return lambda input, *_, **__: from_parts(moved, local, input)


@decomposition_maker(
    "linalg.diagonal", rule=lambda a: _diagonal_rule(a.A, a.dim1, a.dim2), view=True
)
def _linalg_diagonal(
    A: Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> Decomposition | None:
    diagonal = _diagonal(A, offset, dim1, dim2)
    return diagonal and (lambda A, **_: diagonal(A))


# -- matrices with a given diagonal ----------------------------------------------------------------


def _diag_embed_rule(a: Any) -> Rule | None:
    if (a.dim1, a.dim2) != (-2, -1):
        return None
    rest = dim_names(a.input.ndim - 1)
    return einrule(f"{rest} [n] -> {rest} 1 1", a.input, **_MOVES)


@decomposition(
    "diag_embed",
    check=torch.diag_embed,
    when=lambda a: is_split(a.input, [-1]) or (a.dim1, a.dim2) != (-2, -1),
    rule=_diag_embed_rule,
)
def _diag_embed(input: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """Repeat every rank's elements over their rows and clear all but the diagonal."""
    square = input.unsqueeze(-1).expand(*input.shape, input.shape[-1]).tril().triu()
    above, below = max(offset, 0), max(-offset, 0)
    square = F.pad(square, (above, below, below, above)) if offset else square
    return square if (dim1, dim2) == (-2, -1) else square.movedim((-2, -1), (dim1, dim2))


@decomposition("diag", check=torch.diag)
def _diag(input: Any, diagonal: int = 0) -> Any:
    return (
        torch.diag_embed(input, diagonal) if input.ndim == 1 else input.diagonal(diagonal).clone()
    )


decomposition("diagflat")(lambda input, offset=0: torch.diag_embed(input.flatten(), offset))
