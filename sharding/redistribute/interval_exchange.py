"""`IntervalExchange`: get intervals of a split dim from the ranks that hold them.

For operators along a split dim.

    x over 3 ranks   [0 1 2 | 3 4 5 | 6 7]
    wanted           (7, 8), (0, 2) on rank 0; (2, 5) on rank 1; (5, 7) on rank 2
    result           [7 0 1 | 2 3 4 | 5 6], x rolled by one

One all_to_all with uneven splits, or no communication if every rank holds the intervals that it
wants. An element may be wanted by several ranks, or twice by one. Backward sends the gradient of
every element back to the rank that holds it, and adds up there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.box import Box, box_shape, box_size, slices
from ...kernels.copy import compile_pack, compile_unpack
from ..autograd.engine_hooks import transforming, with_memory
from ..autograd.transforms import Linear, batched_layout, under_transforms
from ..layout.bounded_cache import HEAVY_LIMIT, keep
from ..layout.layout import Layout

Interval = tuple[int, int]
Wanted = Callable[[int, int], Iterable[Interval]]


class SourceInterval(NamedTuple):
    """Part of a wanted interval that one rank holds.

    Attributes:
        owner: the rank that sends it, by its index in the group.
        start, stop: the interval of the dim.
        offset: where it begins along the dim of the result.
    """

    owner: int
    start: int
    stop: int
    offset: int


class IntervalExchange:
    """`exchange(local)`: the wanted intervals of a dim, as this rank's tensor; differentiable.

    Args:
        src: the layout of which `local` is this rank's part.
        dst: the layout of the operator's result, on the same mesh; it determines which ranks want
            the same.
        dim: the dim of `src` that the intervals are of. The other dims of a part do not change.
        intervals_of: `(start, stop)` of a rank's part of the result along its dim `dst_dim` -> the
            intervals of `dim` that the rank needs, in order. A function of these numbers alone, so
            that all ranks agree.
        dst_dim: the dim of `dst` that determines the intervals; by default `dim`. None if the
            result has no such dim: `intervals_of` is then called with (0, 0).

    Raises:
        ValueError: an axis that splits the dim in `dst` splits another dim in `src`.

    Communication: one all_to_all over the axes that split the dim before or after, if any of their
    ranks wants what another one holds; the same backward.
    """

    def __init__(
        self,
        src: Layout,
        dst: Layout,
        dim: int,
        intervals_of: Wanted,
        dst_dim: int | None = -1,
    ) -> None:
        self.src, self.dst, self.dim = src, dst, dim
        self.intervals_of = intervals_of
        self.dst_dim = dim if dst_dim == -1 else dst_dim
        self._batched: dict[int, IntervalExchange] = {}
        mesh: Any = src.mesh
        axes = dict.fromkeys(
            (*src.spec.dims[dim], *(() if self.dst_dim is None else dst.spec.dims[self.dst_dim]))
        )
        self.axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
        if elsewhere := [axis for axis in self.axes if src.dim_of.get(axis, dim) != dim]:
            raise ValueError(
                f"axis {elsewhere[0]!r} splits dim {src.dim_of[elsewhere[0]]} of {src}, so ranks "
                f"along it hold other parts of it, and intervals of dim {dim} for {dst} cannot be "
                "exchanged between them; redistribute first"
            )

    def __call__(self, local: Tensor) -> Tensor:
        if not self.moves:
            parts = [
                local.narrow(self.dim, p.start - self._start, p.stop - p.start)
                for p in self._own_sources
            ]
            if not parts:
                return local.narrow(self.dim, 0, 0)
            return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)
        if transforming():
            return under_transforms(local, _ExchangeMap(self))
        if local.requires_grad and torch.is_grad_enabled():
            return _ExchangeNode.apply(local, _ExchangeMap(self))  # type: ignore[return-value]
        return self.forward(local)

    def batched(self, count: int) -> IntervalExchange:
        """Return the same exchange for parts with a batch dim of this length at the end."""
        exchange = self._batched.get(count)
        if exchange is None:
            layouts = batched_layout(self.src, count), batched_layout(self.dst, count)
            exchange = keep(
                self._batched,
                count,
                IntervalExchange(*layouts, self.dim, self.intervals_of, self.dst_dim),
                HEAVY_LIMIT,
            )
        return exchange

    # -- which rank sends what to which ------------------------------------------------------------

    @cached_property
    def _peers(self) -> list[tuple[int, ...]]:
        """Coordinates of the ranks of the group, in its order."""
        mesh: Any = self.src.mesh
        ranks = mesh.group(self.axes).ranks if self.axes else [mesh.world.rank]
        return [mesh.coordinate_of(rank) for rank in ranks]

    @cached_property
    def _held_intervals(self) -> list[Interval]:
        return [self.src.box_at(c)[self.dim] for c in self._peers]

    @cached_property
    def _me(self) -> int:
        mesh: Any = self.src.mesh
        return self._peers.index(mesh.coordinate)

    @cached_property
    def _start(self) -> int:
        return self._held_intervals[self._me][0]

    @cached_property
    def _sources(self) -> list[list[SourceInterval]]:
        """For each rank of the group the intervals that it wants, in order."""
        return [self._sources_of(number) for number in range(len(self._peers))]

    def _sources_of(self, number: int) -> list[SourceInterval]:
        box = self.dst.box_at(self._peers[number])
        interval = (0, 0) if self.dst_dim is None else box[self.dst_dim]
        sources: list[SourceInterval] = []
        offset = 0
        for start, stop in self.intervals_of(*interval):
            while start < stop:
                owner = self._owner(start, number)
                end = min(stop, self._held_intervals[owner][1])
                sources.append(SourceInterval(owner, start, end, offset))
                start, offset = end, offset + end - start
        return sources

    def _owner(self, index: int, wanter: int) -> int:
        """Return the rank that sends an element: the receiver itself, or the first holder."""
        start, stop = self._held_intervals[wanter]
        if start <= index < stop:
            return wanter
        starts, owners = self._first_owners
        return owners[bisect_right(starts, index) - 1]

    @cached_property
    def _first_owners(self) -> tuple[list[int], list[int]]:
        """Where each part of the dim starts, and the first rank that holds it."""
        first: dict[int, int] = {}
        for owner, (start, stop) in enumerate(self._held_intervals):
            if start < stop:
                first.setdefault(start, owner)
        return sorted(first), [first[start] for start in sorted(first)]

    @cached_property
    def moves(self) -> bool:
        """Whether any rank wants what another one holds."""
        return any(p.owner != number for number, pieces in enumerate(self._sources) for p in pieces)

    @cached_property
    def _own_sources(self) -> list[SourceInterval]:
        return self._sources[self._me]

    # -- moving ------------------------------------------------------------------------------------

    @cached_property
    def _boxes_and_splits(
        self,
    ) -> tuple[list[Box], list[int], list[Box], list[int], tuple[int, ...]]:
        """Return the boxes that are sent and received, with the elements for each rank.

        (boxes of the part that are sent, elements for each rank, boxes of the result that are
        received, elements from each, shape of the result).
        """
        shape = self.src.local_shape
        count = len(self._peers)
        outgoing = [
            [(p.start - self._start, p.stop - self._start) for p in ps if p.owner == self._me]
            for ps in self._sources
        ]
        incoming = [
            [(p.offset, p.offset + p.stop - p.start) for p in self._own_sources if p.owner == i]
            for i in range(count)
        ]
        sends, in_splits = self._boxes(outgoing, shape)
        recvs, out_splits = self._boxes(incoming, shape)
        length = sum(p.stop - p.start for p in self._own_sources)
        return (
            sends,
            in_splits,
            recvs,
            out_splits,
            (*shape[: self.dim], length, *shape[self.dim + 1 :]),
        )

    def _boxes(
        self, intervals: Sequence[Sequence[Interval]], shape: Sequence[int]
    ) -> tuple[list[Box], list[int]]:
        whole = [(0, n) for n in shape]
        boxes = [
            [(*whole[: self.dim], i, *whole[self.dim + 1 :]) for i in peer] for peer in intervals
        ]
        return [box for peer in boxes for box in peer], [sum(map(box_size, peer)) for peer in boxes]

    @cached_property
    def _copies(self) -> tuple[Any, Any, Any]:
        sends, _, recvs, _, shape = self._boxes_and_splits
        return (
            compile_pack(self.src.local_shape, sends),
            compile_unpack(shape, recvs),
            compile_pack(shape, recvs),
        )

    def forward(self, local: Tensor) -> Tensor:
        """Return the wanted intervals, without gradient."""
        _, in_splits, _, out_splits, _ = self._boxes_and_splits
        pack, unpack, _ = self._copies
        return unpack(self._all_to_all(pack(local), out_splits, in_splits))

    def transpose(self, grad: Tensor) -> Tensor:
        """Apply `forward`'s transpose: send every element back to its holder, and sum there."""
        sends, in_splits, _, out_splits, _ = self._boxes_and_splits
        flat = self._all_to_all(self._copies[2](grad), in_splits, out_splits)
        total = grad.new_zeros(
            self.src.local_shape, dtype=torch.promote_types(grad.dtype, torch.float32)
        )
        for box, start in zip(sends, accumulate(map(box_size, sends), initial=0), strict=False):
            total[slices(box)] += flat[start : start + box_size(box)].view(box_shape(box))
        return total.to(grad.dtype)

    def _all_to_all(
        self, sent: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Tensor:
        mesh: Any = self.src.mesh
        received = sent.new_empty(sum(out_splits))
        mesh.group(self.axes).all_to_all(received, sent, out_splits, in_splits)
        return received


@dataclass(eq=False)
class _ExchangeMap(Linear):
    """`forward`, or `transpose`, of an exchange as a linear map, for transforms of torch.func."""

    exchange: IntervalExchange
    back: bool = False

    @property
    def transpose(self) -> _ExchangeMap:
        return _ExchangeMap(self.exchange, not self.back)

    def batched(self, count: int) -> _ExchangeMap:
        return _ExchangeMap(self.exchange.batched(count), self.back)

    def __call__(self, x: Tensor) -> Tensor:
        return self.exchange.transpose(x) if self.back else self.exchange.forward(x)


class _ExchangeNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: _ExchangeMap) -> Tensor:
        ctx.op = op
        return op(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad = with_memory(grads[0])
        op = ctx.op.transpose
        return under_transforms(grad, op) if transforming() else _ExchangeNode.apply(grad, op), None
