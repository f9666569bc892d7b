"""Token dispatch: send rows to the experts chosen, and combine the results, by two all_to_all.

    rank 0  tokens  a b c d    by expert  [ b | a d |   | c ]    arrived  [b e | a d f]  experts 0 1
            choose  1 0 3 1    of expert    0    1    2   3
    rank 1  tokens  e f g      by expert  [ e |  f  | g |   ]    arrived  [g | c]        experts 2 3
            choose  0 1 2

Ranks exchange how many of their tokens chose each expert; all sizes follow from these counts, the
same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ....kernels.transfer.host_copies import start_to_host, to_device
from ....mesh.comm.world import World
from ...autograd.engine_hooks import with_memory
from ...layout.layout import Layout
from ...lineage import backward_comm_context
from ...ops.rules.decomposition_utils import splitting_axes


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
        """The order in which rows are sorted by expert: those of the group's first rank first."""
        return [e for start, stop in self.experts for e in range(start, stop)]


class AssumedRows:
    """How many rows go to experts in a world without values: choices on "meta".

    Attributes:
        imbalance: rows of this rank's experts over the mean; those of other ranks get the rest, and
            the experts of a rank equally many.
    """

    def __init__(self, world: World) -> None:
        self.imbalance = 1.0

    def counts(self, peers: ExpertGroup, rows: int) -> Tensor:
        """Return the counts of `TokenDispatch`.

        Args:
            rows: that each rank sends.
        """
        start, stop = peers.experts[peers.me]
        others = peers.count - (stop - start)
        own = min(rows, round(rows * self.imbalance * (stop - start) / peers.count))
        own = own if others else rows
        to_others = _evenly(rows - own, others)
        row = [*to_others[:start], *_evenly(own, stop - start), *to_others[start:], 0]
        return torch.tensor(row).expand(len(peers.experts), -1)


def _evenly(rows: int, experts: int) -> list[int]:
    """Return how many rows each of some experts gets."""
    return [rows * (i + 1) // experts - rows * i // experts for i in range(experts)]


class TokenDispatch:
    """Which rows this rank sends and receives.

    Sizes of messages must be known on the host, to which they are copied once; it waits for them
    when they are first used.

    Args:
        peers: the ranks that exchange rows.
        order: the flat indices of all (token, choice), those that are sent first, in sending order.
        counts: waits for [rank, expert+1], on the host: the number of rows that each rank sends to
            each expert, and that of its choices that are not the index of an expert.
        ranks: the ranks of `counts`.
        places: the index in `ranks` of each peer.
        drops: whether some (token, choice) may not be sent.
    """

    def __init__(
        self,
        peers: ExpertGroup,
        order: Tensor,
        counts: Callable[[], Tensor],
        ranks: Sequence[int],
        places: Sequence[int],
        drops: bool,
    ) -> None:
        self.peers = peers
        self._order = order
        self._wait = counts
        self._ranks = ranks
        self._places = places
        self._drops = drops
        self._counts: list[list[int]] | None = None

    # No cached property waits for other ranks: in Python 3.11 all instances share its lock, which a
    # rank in a thread would hold meanwhile.
    @property
    def counts(self) -> list[list[int]]:
        """[source, expert]: the number of rows that each rank sends to each expert, on all ranks.

        Raises:
            ValueError: see `make_dispatch`.
        """
        if self._counts is not None:
            return self._counts
        counts = self._wait()
        wrong = counts[:, -1].tolist()
        if any(wrong):
            by_rank = {rank: n for rank, n in zip(self._ranks, wrong, strict=True) if n}
            last = counts.shape[1] - 2
            raise ValueError(
                f"moe: tokens choose experts that do not exist (by rank: {by_rank}); choices are "
                f"from 0 to {last}"
            )
        self._counts = [counts[i, :-1].tolist() for i in self._places]
        return self._counts

    @property
    def slots(self) -> Tensor:
        """The flat index of (token, choice) for each row that is sent, in sending order."""
        return self._order[: sum(self._send_sizes)] if self._drops else self._order

    def dispatch(self, rows: Tensor) -> Tensor:
        """Send rows, in the order of `slots`, and return those for this rank's experts.

        They are sorted by expert. Communication: one all_to_all.
        """
        arrived = all_to_all_v(rows, self.peers, self._recv_sizes, self._send_sizes)
        return arrived.index_select(0, self._by_expert)

    def combine(self, rows: Tensor) -> Tensor:
        """Send experts' results back, in the order of `slots`. Communication: one all_to_all."""
        by_source = rows.index_select(0, self._by_expert.argsort())
        return all_to_all_v(by_source, self.peers, self._send_sizes, self._recv_sizes)

    @property
    def rows_per_expert(self) -> list[int]:
        """The number of rows received for each of this rank's experts."""
        start, stop = self.peers.experts[self.peers.me]
        return [sum(row[e] for row in self.counts) for e in range(start, stop)]

    @property
    def _send_sizes(self) -> list[int]:
        own_counts = self.counts[self.peers.me]
        return [sum(own_counts[start:stop]) for start, stop in self.peers.experts]

    @property
    def _recv_sizes(self) -> list[int]:
        start, stop = self.peers.experts[self.peers.me]
        return [sum(row[start:stop]) for row in self.counts]

    @cached_property
    def _by_expert(self) -> Tensor:
        """The permutation from received order (by source, then expert) to expert order."""
        start, stop = self.peers.experts[self.peers.me]
        device = self._order.device
        sizes = [n for row in self.counts for n in row[start:stop]]
        experts = torch.arange(stop - start, device=device).repeat(len(self.counts))
        lengths = to_device(sizes, torch.int64, device)
        return experts.repeat_interleave(lengths, output_size=sum(sizes)).argsort(stable=True)


def make_dispatch(
    chosen: Tensor, layout: Layout, peers: ExpertGroup, capacity: int | None
) -> TokenDispatch:
    """Compute the dispatch of this rank's tokens.

    Args:
        chosen: this rank's part of the chosen experts [... k].
        layout: the layout of the choices.
        capacity: the maximum number of rows per expert; None for all. First choices come before
            second ones, and so on; equal choices are in the order of the global batch, so the
            result is the same on every mesh.

    Raises:
        ValueError: on every rank of the all_gather, when the counts are first used: a choice is not
            the index of an expert.

    Communication: one all_gather of counts over the axes of the experts, one number per expert;
        with a capacity also over the axes of the tokens, one per expert, choice and run of
        consecutive tokens of the batch.
    """
    if capacity is None:
        valid = _valid_choices(chosen.reshape(1, -1, 1), peers.count)
        table = _all_counts(_count_choices(valid, peers.count), peers.mesh, peers.axes)
        counts = start_to_host(table[:, 0, 0])
        if table.is_meta:
            assumed = peers.mesh.world.state(AssumedRows)
            counts = partial(assumed.counts, peers, chosen.numel())
        ranks = peers.group.ranks
        return TokenDispatch(
            peers,
            _sorted_slots(valid.flatten(), peers),
            counts,
            ranks,
            range(len(ranks)),
            drops=False,
        )
    runs = _Runs(layout, peers)
    count, choices = runs.local_count, chosen.shape[-1]
    valid = _valid_choices(
        chosen.reshape(count, chosen.numel() // max(1, count * choices), choices), peers.count
    )
    counts = _count_choices(valid, peers.count)
    padded = counts.new_zeros(runs.most, *counts.shape[1:])
    padded[: len(counts)] = counts
    table = _all_counts(padded, peers.mesh, runs.axes)
    wrong, table = table[..., -1].sum((1, 2)), table[..., :-1]
    before = _before(table, runs)
    taken = (capacity - before).clamp(min=0).minimum(table).sum((1, 2))
    wait = start_to_host(torch.cat([taken, wrong[:, None]], 1))
    fits = _position(valid, counts, before[runs.me, : len(counts)]) < capacity
    sent = torch.where(fits, valid, peers.count).flatten()  # others are sorted to the end
    return TokenDispatch(
        peers, _sorted_slots(sent, peers), wait, runs.ranks, runs.peers, drops=True
    )


def dispatch_axes(layout: Layout, peers: ExpertGroup, has_capacity: bool) -> tuple[str, ...]:
    """Return the axes over which the ranks of a dispatch communicate.

    Args:
        layout: that of the choices.
    """
    if not has_capacity:
        return peers.axes
    of_tokens = [a for dim in _split_dims(layout) for a in splitting_axes(layout, dim)]
    return tuple(dict.fromkeys([*of_tokens, *peers.axes]))


def _split_dims(layout: Layout) -> list[int]:
    return [dim for dim in range(len(layout.shape) - 1) if splitting_axes(layout, dim)]


def _valid_choices(chosen: Tensor, experts: int) -> Tensor:
    """Return the choices, `experts` for invalid ones."""
    return torch.where((chosen < 0) | (chosen >= experts), experts, chosen)


def _count_choices(valid: Tensor, experts: int) -> Tensor:
    """Count the choices [run token choice] of each expert: [run choice expert+1].

    The last entry is for invalid choices.
    """
    runs, _, choices = valid.shape
    row = torch.arange(runs, device=valid.device)[:, None, None] * choices + torch.arange(
        choices, device=valid.device
    )
    flat = (row * (experts + 1) + valid).flatten()
    # not a bincount, for which the host waits
    counts = flat.new_zeros(runs * choices * (experts + 1)).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
    return counts.view(runs, choices, experts + 1)


def _all_counts(counts: Tensor, mesh: Any, axes: tuple[str, ...]) -> Tensor:
    """Return the counts of all ranks in group order."""
    group = mesh.group(axes)
    gathered = counts.new_empty(group.size, *counts.shape)
    group.all_gather(gathered, counts)
    return gathered


def _sorted_slots(valid: Tensor, peers: ExpertGroup) -> Tensor:
    """Return the slots, sorted by expert, then by token; those of invalid choices last."""
    # expert -> its position in the sending order
    position = sorted(range(peers.count), key=peers.order.__getitem__)
    position = to_device([*position, peers.count], torch.int64, valid.device)
    return position[valid].argsort(stable=True)


# -- with a capacity -------------------------------------------------------------------------------


class _Runs:
    """The runs of consecutive tokens that each rank holds of the batch, taken as one sequence.

        tokens [b s], both split in two      rank 0 has of each of its rows a run of s/2 tokens

    Attributes:
        axes: the axes that split the tokens or the experts.
        ranks: the ranks of their group.
        starts: for each of them, the first token of each run.
        me, peers: indices in that group of this rank and of the ranks that exchange rows with it.
    """

    def __init__(self, layout: Layout, peers: ExpertGroup) -> None:
        mesh = peers.mesh
        self.axes = dispatch_axes(layout, peers, True)
        self._inner = max(_split_dims(layout), default=0)
        self._shape = layout.shape[:-1]
        group = mesh.group(self.axes)
        self.ranks = group.ranks
        self.starts = [
            self._starts(layout.box_at(mesh.coordinate_of(rank))) for rank in group.ranks
        ]
        self.me = group.rank
        self.peers = [group.ranks.index(rank) for rank in peers.group.ranks]

    def _starts(self, box: Sequence[tuple[int, int]]) -> list[int]:
        strides = [math.prod(self._shape[dim + 1 :]) for dim in range(len(self._shape))]
        outer = [range(*box[dim]) for dim in range(self._inner)]
        return [
            sum(map(math.prod, zip((*place, box[self._inner][0]), strides, strict=False)))
            for place in product(*outer)
        ]

    @property
    def local_count(self) -> int:
        return len(self.starts[self.me])

    @property
    def most(self) -> int:
        return max(map(len, self.starts))


def _before(table: Tensor, runs: _Runs) -> Tensor:
    """Return how many rows of an expert precede each [rank run choice expert], as `table`."""
    starts = sorted(
        (start, rank, run)
        for rank, starts in enumerate(runs.starts)
        for run, start in enumerate(starts)
    )
    order = to_device(
        [rank * runs.most + run for _, rank, run in starts], torch.int64, table.device
    )
    in_order = table.flatten(0, 1).index_select(0, order)
    of_choice = in_order.sum(0)
    before = in_order.cumsum(0) - in_order + (of_choice.cumsum(0) - of_choice)
    return torch.zeros_like(table).flatten(0, 1).index_copy(0, order, before).view_as(table)


def _position(valid: Tensor, counts: Tensor, before: Tensor) -> Tensor:
    """Return each token's place [run token choice] in its expert's order of admission."""
    runs, _, choices = valid.shape
    row = torch.arange(runs, device=valid.device)[:, None, None] * choices + torch.arange(
        choices, device=valid.device
    )
    key = (row * counts.shape[-1] + valid).flatten()
    order = key.argsort(stable=True)
    many = counts.flatten()
    shift = torch.nn.functional.pad(before, (0, 1)).flatten() - (many.cumsum(0) - many)
    place = torch.empty_like(key)
    place[order] = torch.arange(len(key), device=key.device) + shift[key[order]]
    return place.view_as(valid)


# -- communication ---------------------------------------------------------------------------------


def all_to_all_v(
    rows: Tensor, peers: ExpertGroup, recv_sizes: Sequence[int], send_sizes: Sequence[int]
) -> Tensor:
    """Send rows to every rank of the group, in its order; differentiable any number of times.

    Communication: one all_to_all.
    """
    return _AllToAllRows.apply(rows, peers, recv_sizes, send_sizes)  # type: ignore[return-value]


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        peers: ExpertGroup,
        recv_sizes: Sequence[int],
        send_sizes: Sequence[int],
    ) -> Tensor:
        ctx.reverse = (peers, send_sizes, recv_sizes)
        ctx.lineage = peers.mesh.world.comm_context.lineage
        out = rows.new_empty(sum(recv_sizes), *rows.shape[1:])
        width = math.prod(rows.shape[1:])
        peers.group.all_to_all(
            out, rows.contiguous(), [n * width for n in recv_sizes], [n * width for n in send_sizes]
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with backward_comm_context(ctx.lineage, ctx.reverse[0].mesh):
            return all_to_all_v(with_memory(grads[0]), *ctx.reverse), None, None, None
