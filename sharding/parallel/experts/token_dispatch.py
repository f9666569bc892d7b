"""Token dispatch: send rows to the experts that tokens choose, and combine their results, with one all_to_all each way.

    rank 0   tokens   a b c d     by expert  [ b | a d |   | c ]     arrived  [b e | a d f]  for the experts 0 and 1
             choose   1 0 3 1     of expert    0    1    2   3
    rank 1   tokens   e f g       by expert  [ e |  f  | g |   ]     arrived  [g | c]        for the experts 2 and 3
             choose   0 1 2

Ranks exchange how many of their tokens chose each expert; all sizes follow from these counts, the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...layout.layout import Layout
from ...ops.lineage import backward_comm_context
from ...ops.rules.decomposition_utils import splitting_axes
from ...tensor.autograd.engine_hooks import with_memory


@dataclass(frozen=True)
class ExpertGroup:
    """The ranks that exchange rows, in group order.

    Attributes:
        mesh: the mesh of the tokens.
        axes: the axes over which experts are split.
        experts: for each rank of the group, its range [start, stop) of experts.
    """

    mesh: Any
    axes: tuple[str, ...]
    experts: tuple[tuple[int, int], ...]

    @property
    def group(self) -> Any:
        return self.mesh.group(self.axes)

    @property
    def me(self) -> int:
        return self.group.rank

    @property
    def count(self) -> int:
        """The number of experts."""
        return max(stop for _, stop in self.experts)

    @property
    def order(self) -> list[int]:
        """The order in which rows are sorted by expert: the experts of the group's first rank first."""
        return [e for start, stop in self.experts for e in range(start, stop)]


@dataclass(frozen=True)
class TokenDispatch:
    """Which rows this rank sends and receives.

    Attributes:
        peers: the ranks that exchange rows.
        slots: the flat index of (token, choice) for each row that is sent, in sending order.
        counts: [source, expert]: the number of rows that each rank of the group sends to each expert, on all ranks.
    """

    peers: ExpertGroup
    slots: Tensor
    counts: list[list[int]]

    def dispatch(self, rows: Tensor) -> Tensor:
        """Send rows, in the order of `slots`; return the rows for this rank's experts, sorted by expert. Communication: one all_to_all."""
        arrived = all_to_all_v(rows, self.peers, self._recv_sizes, self._send_sizes)
        return arrived.index_select(0, self._by_expert(rows.device))

    def combine(self, rows: Tensor) -> Tensor:
        """Send the experts' results back; return them in the order of `slots`. Communication: one all_to_all."""
        by_source = rows.index_select(0, self._by_expert(rows.device).argsort())
        return all_to_all_v(by_source, self.peers, self._send_sizes, self._recv_sizes)

    @property
    def rows_per_expert(self) -> list[int]:
        """The number of rows received for each of this rank's experts."""
        start, stop = self.peers.experts[self.peers.me]
        return [sum(row[e] for row in self.counts) for e in range(start, stop)]

    @property
    def _send_sizes(self) -> list[int]:
        mine = self.counts[self.peers.me]
        return [sum(mine[start:stop]) for start, stop in self.peers.experts]

    @property
    def _recv_sizes(self) -> list[int]:
        start, stop = self.peers.experts[self.peers.me]
        return [sum(row[start:stop]) for row in self.counts]

    def _by_expert(self, device: torch.device) -> Tensor:
        """Return the permutation from received order (by source, then expert) to expert order."""
        start, stop = self.peers.experts[self.peers.me]
        lengths = torch.tensor([n for row in self.counts for n in row[start:stop]], dtype=torch.int64, device=device)
        experts = torch.arange(stop - start, device=device).repeat(len(self.counts))
        return experts.repeat_interleave(lengths).argsort(stable=True)


def make_dispatch(chosen: Tensor, layout: Layout, peers: ExpertGroup, capacity: int | None) -> TokenDispatch:
    """Compute the dispatch of this rank's tokens.

    Args:
        chosen: this rank's part of the chosen experts [... k].
        layout: the layout of the choices.
        capacity: the maximum number of rows per expert; None for all. First choices come before second ones, and so on; equal choices
            are in the order of the global batch, so the result is the same on every mesh.

    Raises:
        ValueError: on every rank of the all_gather: a choice is not the index of an expert.

    Communication: one all_gather of counts over the axes of the experts, one number per expert; with a capacity also over the axes of
        the tokens, one per expert, choice and run of consecutive tokens of the batch.
    """
    if capacity is None:
        table = _all_counts(_counted(chosen.reshape(1, -1, 1), peers.count), peers.mesh, peers.axes)
        kept = torch.ones(chosen.numel(), dtype=torch.bool, device=chosen.device)
        return TokenDispatch(peers, _slots(chosen, kept, peers), table[:, 0, 0].tolist())
    runs = _Runs(layout, peers)
    count, choices = runs.count_here, chosen.shape[-1]
    mine = chosen.reshape(count, chosen.numel() // max(1, count * choices), choices)
    counts = _counted(mine, peers.count)
    padded = counts.new_zeros(runs.most, *counts.shape[1:])
    padded[: len(counts)] = counts
    table = _all_counts(padded, peers.mesh, runs.axes)
    before = _before(table, runs)
    kept = _position(mine, counts, before[runs.me, : len(counts)].to(chosen.device)) < capacity
    taken = (capacity - before).clamp(min=0).minimum(table).sum((1, 2))
    return TokenDispatch(peers, _slots(chosen, kept.flatten(), peers), [taken[i].tolist() for i in runs.peers])


def _counted(chosen: Tensor, experts: int) -> Tensor:
    """Count the choices [run token choice] of each expert: [run choice expert+1], the last entry for invalid choices."""
    runs, _, choices = chosen.shape
    valid = torch.where((chosen < 0) | (chosen >= experts), experts, chosen)
    row = torch.arange(runs, device=chosen.device)[:, None, None] * choices + torch.arange(choices, device=chosen.device)
    flat = (row * (experts + 1) + valid).flatten()
    return flat.bincount(minlength=runs * choices * (experts + 1)).view(runs, choices, experts + 1)


def _all_counts(counts: Tensor, mesh: Any, axes: tuple[str, ...]) -> Tensor:
    """Return the counts of all ranks in group order, on the CPU, since message sizes depend on them.

    Raises:
        ValueError: see `make_dispatch`.
    """
    group = mesh.group(axes)
    gathered = counts.new_empty(group.size, *counts.shape)
    group.all_gather(gathered, counts)
    counts_by_rank = gathered.cpu()
    wrong = counts_by_rank[..., -1].sum(tuple(range(1, counts_by_rank.ndim - 1)))
    if wrong.any():
        by_rank = {group.ranks[i]: n for i, n in enumerate(wrong.tolist()) if n}
        last = counts_by_rank.shape[-1] - 2
        raise ValueError(f"moe: tokens choose experts that do not exist (by rank: {by_rank}); choices are from 0 to {last}")
    return counts_by_rank[..., :-1]


def _slots(chosen: Tensor, kept: Tensor, peers: ExpertGroup) -> Tensor:
    """Return the slots that are kept, sorted by expert, then by token."""
    order = torch.tensor(peers.order, device=chosen.device).argsort()  # expert -> its position in the sending order
    slots = kept.nonzero()[:, 0]
    return slots[order[chosen.flatten()[slots]].argsort(stable=True)]


# -- with a capacity --------------------------------------------------------------------------------------------------


class _Runs:
    """The runs of consecutive tokens that each rank holds of the batch, taken as one sequence.

        tokens [b s], both split in two      rank 0 has of each of its rows a run of s/2 tokens

    Attributes:
        axes: the axes that split the tokens or the experts.
        starts: for each rank of their group, the first token of each run.
        me, peers: indices in that group of this rank and of the ranks that exchange rows with it.
    """

    def __init__(self, layout: Layout, peers: ExpertGroup) -> None:
        mesh, tokens = peers.mesh, range(len(layout.shape) - 1)
        split = [dim for dim in tokens if splitting_axes(layout, dim)]
        self.axes = tuple(dict.fromkeys([*(a for dim in split for a in splitting_axes(layout, dim)), *peers.axes]))
        self._inner, self._shape = max(split, default=0), layout.shape[:-1]
        group = mesh.group(self.axes)
        self.starts = [self._starts(layout.box_at(mesh.coordinate_of(rank))) for rank in group.ranks]
        self.me, self.peers = group.rank, [group.ranks.index(rank) for rank in peers.group.ranks]

    def _starts(self, box: Sequence[tuple[int, int]]) -> list[int]:
        strides = [math.prod(self._shape[dim + 1 :]) for dim in range(len(self._shape))]
        outer = [range(*box[dim]) for dim in range(self._inner)]
        return [sum(map(math.prod, zip((*place, box[self._inner][0]), strides, strict=False))) for place in product(*outer)]

    @property
    def count_here(self) -> int:
        return len(self.starts[self.me])

    @property
    def most(self) -> int:
        return max(map(len, self.starts))


def _before(table: Tensor, runs: _Runs) -> Tensor:
    """Return how many rows of each expert precede each run and choice: [rank run choice expert], as `table`."""
    order = sorted((start, rank, run) for rank, starts in enumerate(runs.starts) for run, start in enumerate(starts))
    ranks, numbers = torch.tensor([[rank for _, rank, _ in order], [run for *_, run in order]])
    in_order = table[ranks, numbers]
    of_choice = in_order.sum(0)
    before = torch.zeros_like(table)
    before[ranks, numbers] = in_order.cumsum(0) - in_order + (of_choice.cumsum(0) - of_choice)
    return before


def _position(chosen: Tensor, counts: Tensor, before: Tensor) -> Tensor:
    """Return each token's position [run token choice] among all that choose its expert, in the order of admission."""
    runs, _, choices = chosen.shape
    row = torch.arange(runs, device=chosen.device)[:, None, None] * choices + torch.arange(choices, device=chosen.device)
    key = (row * before.shape[-1] + chosen).flatten()
    order = key.argsort(stable=True)
    many = counts[..., :-1].flatten()
    shift = before.flatten() - (many.cumsum(0) - many)
    place = torch.empty_like(key)
    place[order] = torch.arange(len(key), device=key.device) + shift[key[order]]
    return place.view_as(chosen)


# -- communication ----------------------------------------------------------------------------------------------------


def all_to_all_v(rows: Tensor, peers: ExpertGroup, recv_sizes: Sequence[int], send_sizes: Sequence[int]) -> Tensor:
    """Send rows to every rank of the group, in its order; differentiable any number of times. Communication: one all_to_all."""
    return _AllToAllRows.apply(rows, peers, recv_sizes, send_sizes)  # type: ignore[return-value]


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, peers: ExpertGroup, recv_sizes: Sequence[int], send_sizes: Sequence[int]) -> Tensor:
        ctx.reverse, ctx.lineage = (peers, send_sizes, recv_sizes), peers.mesh.world.comm_context.lineage
        out = rows.new_empty(sum(recv_sizes), *rows.shape[1:])
        width = math.prod(rows.shape[1:])
        peers.group.all_to_all(out, rows.contiguous(), [n * width for n in recv_sizes], [n * width for n in send_sizes])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with backward_comm_context(ctx.reverse[0].mesh.world, ctx.lineage):
            return all_to_all_v(with_memory(grads[0]), *ctx.reverse), None, None, None
