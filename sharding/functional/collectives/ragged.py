"""`ragged_all_to_all`: send any number of rows to each rank, as in routing tokens to experts.

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

from ....mesh.comm.pending import Pending
from ...autograd.engine_hooks import transforming
from ...autograd.named_axes import Axes, AxisName, Groups, current_captures
from ..types.type_checker import untracked
from .apply import TypingRule, current_checker, is_starting, resolve_axes, with_tag
from .linear_maps import LinearMap, apply

_LAW = TypingRule("ragged_all_to_all")
Counts = Sequence[int] | Tensor
Slices = list[tuple[int, int]]  # (first row, number of rows)


def ragged_all_to_all(
    operand: Tensor,
    output: Tensor,
    input_offsets: Counts,
    send_sizes: Counts,
    output_offsets: Counts,
    recv_sizes: Counts,
    *,
    axis_name: AxisName,
    axis_index_groups: Groups = None,
    backward_dtype: torch.dtype | None = None,
) -> Tensor:
    """ragged_all_to_all(operand: S, output: S, ..., axis) -> S: exchange any numbers of rows.

    `output` is updated with the rows that the ranks send here.

    Arguments are JAX's; all counts are rows along dim 0, one for each rank of the axis, lists or
    integer tensors. (Or k for each rank: then k slices go to each, those for rank i starting at
    index i k.)

    Args:
        operand: rows to send.
        output: shape of the result, and its values where nothing arrives.
        input_offsets: the first row for each rank in `operand`.
        send_sizes: the number of rows for each rank.
        output_offsets: the first row of them in the `output` of each rank.
        recv_sizes: the number of rows from each rank.
        axis_name: one axis or a tuple of axes.
        axis_index_groups: lists of places along the axis: the exchange then runs inside each list.
        backward_dtype: the dtype of the gradient during communication.

    Raises: ValueError, on every rank, for counts that are not one for each rank, rows outside of
        `operand` or `output`, or sizes on which sender and receiver disagree.

    Communication: two small all_gathers of the counts and one all_to_all of the rows; backward one
    all_to_all.
    """
    axes, rule = resolve_axes(axis_name, _LAW, axis_index_groups, equal=True)
    checker = current_checker()
    counts = [input_offsets, send_sizes, output_offsets, recv_sizes]
    captures = current_captures()
    if captures is not None:
        operand, output = captures.local(operand), captures.local(output)
    if checker is None:
        return _send_rows(operand, output, counts, axes, backward_dtype)
    operand_tag = checker.join_all(
        iter(x for x in (operand, output, *counts) if isinstance(x, Tensor)), checker.control_tag
    )
    tag = rule(operand_tag, axes)
    with untracked():
        return with_tag(checker, _send_rows(operand, output, counts, axes, backward_dtype), tag)


def _send_rows(
    operand: Tensor,
    output: Tensor,
    counts: Sequence[Counts],
    axes: Axes,
    grad_dtype: torch.dtype | None,
) -> Any:
    routes = _exchange_routes(operand, output, [_as_list(c) for c in counts], axes)
    packed = operand.index_select(0, _rows(routes.sends, operand.device))
    places = _rows(routes.receives, operand.device)
    op = _RaggedMap(axes, _sizes(routes.sends), _sizes(routes.receives))
    if is_starting() and not transforming():
        ready = op.start(packed.detach())
        return Pending(
            lambda: output.index_copy(0, places, apply(packed, op, grad_dtype, ready)), ready
        )
    return output.index_copy(0, places, apply(packed, op, grad_dtype))


def _as_list(counts: Counts) -> list[int]:
    return [int(n) for n in (counts.tolist() if isinstance(counts, Tensor) else counts)]


@dataclass
class _Routes:
    """Slices of `operand` to send and of `output` to receive.

    For every rank in the order of the group.
    """

    sends: list[Slices]
    receives: list[Slices]


class _Table(NamedTuple):
    """The counts of one rank.

    Attributes:
        rows, room: lengths of its operand and of its output.
        lengths: lengths of its four lists of counts.
        counts: these lists, one row for each destination.
    """

    rows: int
    room: int
    lengths: list[int]
    counts: list[list[list[int]]]


def _exchange_routes(
    operand: Tensor, output: Tensor, counts: list[list[int]], axes: Axes
) -> _Routes:
    """Return the slices to send and receive, checked between sender and receiver.

    Raises: ValueError, on every rank, if they disagree.
    """
    tables = _exchange_counts(operand, output, counts, axes)
    for rank in range(axes.size):
        _check(rank, tables, axes)
    by_group, me = sorted(range(axes.size), key=axes.place_in_group), tables[axes.index].counts
    sends = [list(zip(me[0][p], me[1][p], strict=True)) for p in by_group]
    receives = [list(zip(tables[p].counts[2][axes.index], me[3][p], strict=True)) for p in by_group]
    return _Routes(sends, receives)


def _exchange_counts(
    operand: Tensor, output: Tensor, counts: list[list[int]], axes: Axes
) -> list[_Table]:
    """Return the counts of every rank, by place.

    Lists are cut or filled to the length of the first one.
    """
    n, per_rank = axes.size, max(len(counts[0]) // axes.size, 1)
    device = torch.device("cpu") if operand.is_meta else operand.device
    lengths = torch.tensor(
        [per_rank, len(operand), len(output), *map(len, counts)],
        dtype=torch.int64,
        device=device,
    )
    heads = _gather_counts(lengths, axes)
    per_rank = max(head[0] for head in heads)
    rows = [k for c in counts for k in [*c, *[0] * n * per_rank][: n * per_rank]]
    flat = torch.tensor(rows, dtype=torch.int64, device=device)
    bodies = [
        einops.rearrange(np.array(body), "(what to slice) -> what to slice", what=4, to=n).tolist()
        for body in _gather_counts(flat, axes)
    ]
    return [
        _Table(head[1], head[2], head[3:], body) for head, body in zip(heads, bodies, strict=True)
    ]


def _gather_counts(counts: Tensor, axes: Axes) -> list[list[int]]:
    everyone = counts.new_empty(axes.size, len(counts))
    axes.group.all_gather(everyone, counts)
    return [everyone[axes.place_in_group(place)].tolist() for place in range(axes.size)]


def _check(rank: int, tables: list[_Table], axes: Axes) -> None:
    """Raise ValueError for wrong counts of one rank."""
    rows, room, lengths, (starts, sizes, places, _) = tables[rank]
    where = f"ragged_all_to_all over {axes}: rank {rank}"
    if (
        len(set(lengths)) > 1
        or lengths[0] % axes.size
        or lengths != tables[0].lengths
        or not lengths[0]
    ):
        words = "input_offsets, send_sizes, output_offsets and recv_sizes"
        raise ValueError(
            f"{where} gives {lengths} {words}; give {axes.size} of each, or a multiple of that, on "
            "every rank"
        )
    for to in range(axes.size):
        if min(*starts[to], *sizes[to], *places[to]) < 0 or any(
            a + n > rows for a, n in zip(starts[to], sizes[to], strict=True) if n
        ):
            raise ValueError(
                f"{where} sends {sizes[to]} rows from row {starts[to]} to rank {to}, and its "
                f"operand has {rows} rows"
            )
        if sizes[to] != tables[to].counts[3][rank]:
            raise ValueError(
                f"{where} sends {sizes[to]} rows to rank {to}, which expects "
                f"{tables[to].counts[3][rank]} (recv_sizes)"
            )
    for source in range(axes.size):
        first, count = tables[source].counts[2][rank], tables[source].counts[1][rank]
        if any(a + n > room for a, n in zip(first, count, strict=True) if n):
            raise ValueError(
                f"{where}: rank {source} puts {count} rows at row {first} of its output, which has "
                f"{room} rows"
            )


def _rows(slices: Sequence[Slices], device: torch.device) -> Tensor:
    ranges = [torch.arange(start, start + n) for each in slices for start, n in each]
    return torch.cat(ranges).to(device)


def _sizes(slices: Sequence[Slices]) -> list[int]:
    return [sum(n for _, n in each) for each in slices]


class _RaggedMap(LinearMap):
    """Send rows to every rank of the group, in its order."""

    def __init__(self, axes: Axes, sends: list[int], receives: list[int]) -> None:
        super().__init__(axes)
        self.sends, self.receives = sends, receives

    @cached_property
    def transpose(self) -> LinearMap:  # type: ignore[override]
        return _RaggedMap(self.axes, self.receives, self.sends)

    def start(self, x: Tensor) -> Pending[Tensor]:
        out = x.new_empty(sum(self.receives), *x.shape[1:])
        row = x[:1].numel() if len(x) else out[:1].numel()
        splits = [[n * row for n in counts] for counts in (self.receives, self.sends)]
        work = self.axes.group.all_to_all(out, x.contiguous(), *splits, async_op=True)
        return Pending.after(work, lambda: out)
