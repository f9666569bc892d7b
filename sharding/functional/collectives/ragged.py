"""`ragged_all_to_all`: rows to every rank, as many as one likes: what routes tokens to experts.

    rank 0  operand [a a b]   send_sizes [2 1]        output [a a c . .]
    rank 1  operand [c d d]   send_sizes [1 2]   ->   output [b d d . .]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import einops
import numpy as np
import torch
from torch import Tensor

from ...tensor.autograd.engine_hooks import transforming
from ..named_axes import Axes, AxisName, Groups, captures_here
from ..types.type_checker import unfollowed
from .apply import Later, Law, checker_here, is_starting, noted, over
from .linear_maps import Finish, LinearMap, apply
from .linear_maps import finish as finish_work

_LAW = Law("ragged_all_to_all")
Counts = Sequence[int] | Tensor
Slices = list[tuple[int, int]]  # (first row, number of rows)


def ragged_all_to_all(
    operand: Tensor, output: Tensor, input_offsets: Counts, send_sizes: Counts, output_offsets: Counts, recv_sizes: Counts, *,
    axis_name: AxisName, axis_index_groups: Groups = None, backward_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """ragged_all_to_all(operand: S, output: S, ..., axis) -> S: `output` with the rows that the ranks send here.

    JAX's arguments; all counts are rows along dim 0, one for each rank of the axis, lists or integer tensors. (Or k for each rank:
    then k slices go to each, those for rank i from place i k on.)

    Args:
        operand: rows to send.
        output: what is returned where nothing arrives: shape and values.
        input_offsets: where the rows for each rank begin in `operand`.
        send_sizes: how many go to each rank.
        output_offsets: where they are put in the `output` of each rank.
        recv_sizes: how many come from each rank.
        axis_name: one axis or a tuple of axes.
        axis_index_groups: lists of places along the axis: the exchange then is one inside each list.
        backward_dtype: dtype in which the gradient travels.

    Raises: ValueError, on every rank, for counts that are not one for each rank, rows outside of `operand` or `output`, or sizes on
        which sender and receiver do not agree.

    Communication: two small all_gathers of the counts and one all_to_all of the rows; backward one all_to_all.
    """
    (axes, law), checker = over(axis_name, _LAW, axis_index_groups, equal=True), checker_here()
    counts = [input_offsets, send_sizes, output_offsets, recv_sizes]
    captures = captures_here()
    if captures is not None:
        operand, output = captures.of(operand), captures.of(output)
    if checker is None:
        return _sent(operand, output, counts, axes, backward_dtype)
    given = checker.joined(iter(x for x in (operand, output, *counts) if isinstance(x, Tensor)), checker.looked)
    tag = law(given, axes)
    with unfollowed():
        return noted(checker, _sent(operand, output, counts, axes, backward_dtype), tag)


def _sent(operand: Tensor, output: Tensor, counts: Sequence[Counts], axes: Axes, travel: torch.dtype | None) -> Any:
    routes = _agreed(operand, output, [_listed(c) for c in counts], axes)
    packed = operand.index_select(0, _rows(routes.sends, operand.device))
    places = _rows(routes.receives, operand.device)
    op = _Rows(axes, _sizes(routes.sends), _sizes(routes.receives))
    if is_starting() and not transforming():
        ready = op.start(packed.detach())
        return Later(lambda: output.index_copy(0, places, apply(packed, op, travel, ready)))
    return output.index_copy(0, places, apply(packed, op, travel))


def _listed(counts: Counts) -> list[int]:
    return [int(n) for n in (counts.tolist() if isinstance(counts, Tensor) else counts)]


@dataclass
class _Routes:
    """What goes to and comes from every rank, in the order of the group: slices of `operand` to send, of `output` to receive."""

    sends: list[Slices]
    receives: list[Slices]


class _Table(NamedTuple):
    """What one rank gave.

    Attributes:
        rows, room: length of its operand and of its output.
        lengths: of its four lists of counts.
        counts: these lists, one row for each rank that they are for.
    """

    rows: int
    room: int
    lengths: list[int]
    counts: list[list[list[int]]]


def _agreed(operand: Tensor, output: Tensor, counts: list[list[int]], axes: Axes) -> _Routes:
    """What goes where, known to be the same to sender and receiver.

    Raises: ValueError, on every rank, where it is not.
    """
    tables = _told(operand, output, counts, axes)
    for rank in range(axes.size):
        _check(rank, tables, axes)
    by_group, me = sorted(range(axes.size), key=axes.place_in_group), tables[axes.index].counts
    sends = [list(zip(me[0][p], me[1][p], strict=True)) for p in by_group]
    receives = [list(zip(tables[p].counts[2][axes.index], me[3][p], strict=True)) for p in by_group]
    return _Routes(sends, receives)


def _told(operand: Tensor, output: Tensor, counts: list[list[int]], axes: Axes) -> list[_Table]:
    """What every rank gave, by place. Lists that are not as long as the first one of place 0 come cut or filled."""
    n, each = axes.size, max(len(counts[0]) // axes.size, 1)
    lengths = torch.tensor([each, len(operand), len(output), *map(len, counts)], dtype=torch.int64, device=_where(operand))
    heads = _gathered(lengths, axes)
    each = max(head[0] for head in heads)
    flat = torch.tensor([k for c in counts for k in [*c, *[0] * n * each][: n * each]], dtype=torch.int64, device=_where(operand))
    bodies = [einops.rearrange(np.array(body), "(what to slice) -> what to slice", what=4, to=n).tolist() for body in _gathered(flat, axes)]
    return [_Table(head[1], head[2], head[3:], body) for head, body in zip(heads, bodies, strict=True)]


def _where(x: Tensor) -> torch.device:
    return torch.device("cpu") if x.is_meta else x.device


def _gathered(mine: Tensor, axes: Axes) -> list[list[int]]:
    everyone = mine.new_empty(axes.size, len(mine))
    axes.group.all_gather(everyone, mine)
    return [everyone[axes.place_in_group(place)].tolist() for place in range(axes.size)]


def _check(rank: int, tables: list[_Table], axes: Axes) -> None:
    """Raises: ValueError for what one rank gave."""
    rows, room, lengths, (starts, sizes, places, _) = tables[rank]
    where = f"ragged_all_to_all over {axes}: rank {rank}"
    if len(set(lengths)) > 1 or lengths[0] % axes.size or lengths != tables[0].lengths or not lengths[0]:
        words = "input_offsets, send_sizes, output_offsets and recv_sizes"
        raise ValueError(f"{where} gives {lengths} {words}; give {axes.size} of each, or a multiple of that, on every rank")
    for to in range(axes.size):
        if min(*starts[to], *sizes[to], *places[to]) < 0 or any(a + n > rows for a, n in zip(starts[to], sizes[to], strict=True) if n):
            raise ValueError(f"{where} sends {sizes[to]} rows from row {starts[to]} to rank {to}, and its operand has {rows} rows")
        if sizes[to] != tables[to].counts[3][rank]:
            raise ValueError(f"{where} sends {sizes[to]} rows to rank {to}, which expects {tables[to].counts[3][rank]} (recv_sizes)")
    for source in range(axes.size):
        first, count = tables[source].counts[2][rank], tables[source].counts[1][rank]
        if any(a + n > room for a, n in zip(first, count, strict=True) if n):
            raise ValueError(f"{where}: rank {source} puts {count} rows at row {first} of its output, which has {room} rows")


def _rows(slices: Sequence[Slices], device: torch.device) -> Tensor:
    found = [torch.arange(start, start + n) for each in slices for start, n in each]
    return torch.cat(found).to(device)


def _sizes(slices: Sequence[Slices]) -> list[int]:
    return [sum(n for _, n in each) for each in slices]


class _Rows(LinearMap):
    """Rows to every rank of the group, in its order."""

    def __init__(self, axes: Axes, sends: list[int], receives: list[int]) -> None:
        super().__init__(axes)
        self.sends, self.receives = sends, receives

    @cached_property
    def transpose(self) -> LinearMap:  # type: ignore[override]
        return _Rows(self.axes, self.receives, self.sends)

    def start(self, x: Tensor) -> Finish:
        out = x.new_empty(sum(self.receives), *x.shape[1:])
        row = x[:1].numel() if len(x) else out[:1].numel()
        splits = [[n * row for n in counts] for counts in (self.receives, self.sends)]
        return finish_work(self.axes.group.all_to_all(out, x.contiguous(), *splits, async_op=True), out)
