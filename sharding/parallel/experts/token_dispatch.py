"""Which rows travel to which expert, and back: from the experts that tokens choose to one exchange each way.

    rank 0   tokens   a b c d     by expert  [ b | a d |   | c ]     arrived  [b e | a d f]  for the experts 0 and 1
             choose   1 0 3 1     of expert    0    1    2   3
    rank 1   tokens   e f g       by expert  [ e |  f  | g |   ]     arrived  [g | c]        for the experts 2 and 3
             choose   0 1 2

Ranks tell each other how many of their tokens chose each expert; everything else follows from these numbers, on every rank alike.
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
class Peers:
    """The ranks that exchange rows, in the order of their group.

    Attributes:
        mesh: where the tokens lie.
        axes: over which experts are split.
        experts: by rank of the group, the first expert that it has, and the one after its last.
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
        """Number of experts."""
        return max(stop for _, stop in self.experts)

    @property
    def order(self) -> list[int]:
        """The experts as rows lie by them: those of the first rank of the group first."""
        return [e for start, stop in self.experts for e in range(start, stop)]


@dataclass(frozen=True)
class Journey:
    """Where this rank's rows go, and those of others that come.

    Attributes:
        peers: who exchanges.
        slots: (token, choice) of each row that leaves, as one number, in the order in which rows leave.
        counts: [source, expert]: how many rows come from each rank of the group for each expert, those of other ranks included.
    """

    peers: Peers
    slots: Tensor
    counts: list[list[int]]

    def there(self, rows: Tensor) -> Tensor:
        """Rows, in the order of `slots`, to their experts: here those of this rank's experts arrive, expert by expert."""
        arrived = exchange(rows, self.peers, self._arriving, self._leaving)
        return arrived.index_select(0, self._by_expert(rows.device))

    def back(self, rows: Tensor) -> Tensor:
        """What the experts made of them, in the order of `slots` again."""
        by_source = rows.index_select(0, self._by_expert(rows.device).argsort())
        return exchange(by_source, self.peers, self._leaving, self._arriving)

    @property
    def for_mine(self) -> list[int]:
        """How many rows come for each of this rank's experts."""
        start, stop = self.peers.experts[self.peers.me]
        return [sum(row[e] for row in self.counts) for e in range(start, stop)]

    @property
    def _leaving(self) -> list[int]:
        mine = self.counts[self.peers.me]
        return [sum(mine[start:stop]) for start, stop in self.peers.experts]

    @property
    def _arriving(self) -> list[int]:
        start, stop = self.peers.experts[self.peers.me]
        return [sum(row[start:stop]) for row in self.counts]

    def _by_expert(self, device: torch.device) -> Tensor:
        """Rows come source by source, and for each source expert by expert: where those of the first expert are, and so on."""
        start, stop = self.peers.experts[self.peers.me]
        lengths = torch.tensor([n for row in self.counts for n in row[start:stop]], dtype=torch.int64, device=device)
        experts = torch.arange(stop - start, device=device).repeat(len(self.counts))
        return experts.repeat_interleave(lengths).argsort(stable=True)


def journey(chosen: Tensor, layout: Layout, peers: Peers, capacity: int | None) -> Journey:
    """The journey of this rank's tokens.

    Args:
        chosen: this rank's part of the experts that tokens choose [... k].
        layout: how the choices lie.
        capacity: the most rows that an expert takes; None for all. Then first choices come before second ones, and so on, and
            among equal choices tokens in the order of the whole batch: the same ones on every mesh.

    Raises:
        ValueError: on every rank that counts were told to, a number that is no expert.

    Communication: one all_gather of counts: over the axes of the experts one number for each expert; with a capacity over the axes of
        the tokens too, one for each expert, choice and run of tokens that lie one after the other in the batch.
    """
    if capacity is None:
        table = _told(_counted(chosen.reshape(1, -1, 1), peers.count), peers.mesh, peers.axes)
        kept = torch.ones(chosen.numel(), dtype=torch.bool, device=chosen.device)
        return Journey(peers, _slots(chosen, kept, peers), table[:, 0, 0].tolist())
    runs = _Runs(layout, peers)
    count, choices = runs.count_here, chosen.shape[-1]
    mine = chosen.reshape(count, chosen.numel() // max(1, count * choices), choices)
    counts = _counted(mine, peers.count)
    padded = counts.new_zeros(runs.most, *counts.shape[1:])
    padded[: len(counts)] = counts
    table = _told(padded, peers.mesh, runs.axes)
    before = _before(table, runs)
    kept = _place(mine, counts, before[runs.me, : len(counts)].to(chosen.device)) < capacity
    taken = (capacity - before).clamp(min=0).minimum(table).sum((1, 2))
    return Journey(peers, _slots(chosen, kept.flatten(), peers), [taken[i].tolist() for i in runs.peers])


def _counted(chosen: Tensor, experts: int) -> Tensor:
    """How many tokens of each run [run token choice] make this choice of each expert, and of none that there is: [run choice expert+1]."""
    runs, _, choices = chosen.shape
    valid = torch.where((chosen < 0) | (chosen >= experts), experts, chosen)
    row = torch.arange(runs, device=chosen.device)[:, None, None] * choices + torch.arange(choices, device=chosen.device)
    flat = (row * (experts + 1) + valid).flatten()
    return flat.bincount(minlength=runs * choices * (experts + 1)).view(runs, choices, experts + 1)


def _told(counts: Tensor, mesh: Any, axes: tuple[str, ...]) -> Tensor:
    """Everybody's counts, in the order of the group, on the CPU, since the sizes of messages follow from them.

    Raises:
        ValueError: see `journey`.
    """
    group = mesh.group(axes)
    everyone = counts.new_empty(group.size, *counts.shape)
    group.all_gather(everyone, counts)
    told = everyone.cpu()
    wrong = told[..., -1].sum(tuple(range(1, told.ndim - 1)))
    if wrong.any():
        by_rank = {group.ranks[i]: n for i, n in enumerate(wrong.tolist()) if n}
        raise ValueError(f"moe: tokens choose experts that there are not (by rank: {by_rank}); choices are from 0 to {told.shape[-1] - 2}")
    return told[..., :-1]


def _slots(chosen: Tensor, kept: Tensor, peers: Peers) -> Tensor:
    """The rows that are kept, in the order of their experts, and of tokens where these are the same."""
    order = torch.tensor(peers.order, device=chosen.device).argsort()  # by expert, its place among rows
    slots = kept.nonzero()[:, 0]
    return slots[order[chosen.flatten()[slots]].argsort(stable=True)]


# -- with a capacity --------------------------------------------------------------------------------------------------


class _Runs:
    """The pieces of the batch, taken as one sequence of tokens, that ranks hold.

        tokens [b s], both split in two      rank 0 has of each of its rows a run of s/2 tokens

    Attributes:
        axes: that split the tokens or the experts.
        starts: by rank of their group, where each of its runs begins.
        me, peers: indices in that group: of this rank, and of the ranks that exchange rows with it.
    """

    def __init__(self, layout: Layout, peers: Peers) -> None:
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
    """How many rows of each expert come before the first of each run and choice: [rank run choice expert], as `table`."""
    order = sorted((start, rank, run) for rank, starts in enumerate(runs.starts) for run, start in enumerate(starts))
    ranks, numbers = torch.tensor([[rank for _, rank, _ in order], [run for *_, run in order]])
    in_order = table[ranks, numbers]
    of_choice = in_order.sum(0)
    before = torch.zeros_like(table)
    before[ranks, numbers] = in_order.cumsum(0) - in_order + (of_choice.cumsum(0) - of_choice)
    return before


def _place(chosen: Tensor, counts: Tensor, before: Tensor) -> Tensor:
    """The place of each token [run token choice] among all that want its expert, in the order in which experts take them."""
    runs, _, choices = chosen.shape
    row = torch.arange(runs, device=chosen.device)[:, None, None] * choices + torch.arange(choices, device=chosen.device)
    key = (row * before.shape[-1] + chosen).flatten()
    order = key.argsort(stable=True)
    many = counts[..., :-1].flatten()
    shift = before.flatten() - (many.cumsum(0) - many)
    place = torch.empty_like(key)
    place[order] = torch.arange(len(key), device=key.device) + shift[key[order]]
    return place.view_as(chosen)


# -- rows on their way ------------------------------------------------------------------------------------------------


def exchange(rows: Tensor, peers: Peers, arriving: Sequence[int], leaving: Sequence[int]) -> Tensor:
    """Rows to every rank of the group, in its order; differentiable any number of times. Communication: one all_to_all."""
    return _Exchange.apply(rows, peers, arriving, leaving)  # type: ignore[return-value]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, peers: Peers, arriving: Sequence[int], leaving: Sequence[int]) -> Tensor:
        ctx.way, ctx.lineage = (peers, leaving, arriving), peers.mesh.world.comm_context.lineage
        out = rows.new_empty(sum(arriving), *rows.shape[1:])
        width = math.prod(rows.shape[1:])
        peers.group.all_to_all(out, rows.contiguous(), [n * width for n in arriving], [n * width for n in leaving])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with backward_comm_context(ctx.way[0].mesh.world, ctx.lineage):
            return exchange(with_memory(grads[0]), *ctx.way), None, None, None
