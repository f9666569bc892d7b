"""Collectives in which each rank sends boxes of any size to any other.

all_to_all_v, all_to_all_reduce, permute, and rounds of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain

import torch
from torch import Tensor

from ...kernels.box import Box, box_origin, box_shape, box_size, shift, slices
from ...kernels.copy import Pack, Unpack, compile_pack, compile_unpack, unpack_many
from ...kernels.reduce import combine_many, compile_combine
from ...mesh.comm.group import Group
from ...mesh.comm.pending import Pending
from ...mesh.comm.recording.recorder import CommTag
from ...mesh.comm.work import DONE
from .packed_collectives import Collective, PackT, concatenate, pack_buffer, results


@dataclass
class TensorShare:
    """What one rank sends and receives of one tensor; boxes are of the global tensor.

    Attributes:
        have: the rank's box before.
        want: the rank's box after.
        sends: by group index, the boxes sent there.
        recvs: by group index, the boxes received from there.
        keep: the box that the rank has before and after, if it is not among `sends` and `recvs`.
    """

    have: Box
    want: Box
    sends: Sequence[Sequence[Box]]
    recvs: Sequence[Sequence[Box]]
    keep: Box | None


def sent_to_self(share: TensorShare, me: int) -> TensorShare:
    """Return the share with the boxes that the rank keeps sent to itself."""
    kept_boxes = [share.keep] if share.keep is not None else []
    sends = [kept_boxes if p == me else boxes for p, boxes in enumerate(share.sends)]
    recvs = [kept_boxes if p == me else boxes for p, boxes in enumerate(share.recvs)]
    return TensorShare(share.have, share.want, sends, recvs, None)


def _numel(boxes: Sequence[Box]) -> int:
    return sum(map(box_size, boxes))


def _packs(shares: Sequence[TensorShare]) -> tuple[list[Pack], list[int]]:
    """Return packings of the send buffer, and how many elements go to each rank."""
    return _packings([(share.have, share.sends) for share in shares], compile_pack)


def _unpacks(shares: Sequence[TensorShare]) -> tuple[list[Unpack], list[int]]:
    """Return packings of the receive buffer, and how many elements come from each rank."""
    return _packings([(share.want, share.recvs) for share in shares], compile_unpack)


def _packings(
    tensors: Sequence[tuple[Box, Sequence[Sequence[Box]]]], make: Callable[..., PackT]
) -> tuple[list[PackT], list[int]]:
    """Return packings of a buffer with each rank's boxes in a row, and their length by rank.

    Args:
        tensors: the rank's own box of each tensor, and by group index the boxes to pack.
    """
    by_peer = [[boxes[p] for _, boxes in tensors] for p in range(len(tensors[0][1]))]
    splits = [sum(map(_numel, boxes)) for boxes in by_peer]
    in_order = chain.from_iterable(chain.from_iterable(by_peer))
    starts = iter(accumulate(map(box_size, in_order), initial=0))
    packings: list[tuple[list[Box], list[int]]] = [([], []) for _ in tensors]
    for peer in by_peer:
        for (boxes, offsets), peer_boxes, (local, _) in zip(packings, peer, tensors, strict=True):
            for box in peer_boxes:
                boxes.append(shift(box, box_origin(local)))
                offsets.append(next(starts))
    if len(tensors) == 1:  # one after the other, which is the default
        return [make(box_shape(tensors[0][0]), packings[0][0])], splits
    return [
        make(box_shape(local), *packing)
        for (local, _), packing in zip(tensors, packings, strict=True)
    ], splits


class AllToAllV(Collective):
    """all_to_all_v: every rank receives the boxes that it lacks.

    What a rank has already is copied past the buffers. If with it the send or the receive buffer of
    a single tensor is the tensor itself, everything goes through the buffers instead, which saves
    one of the two copies.
    """

    def __init__(self, group: Group, dtype: torch.dtype, shares: Sequence[TensorShare]) -> None:
        self.group, self.dtype = group, dtype
        if len(shares) == 1 and (through := _through_buffers(group.rank, shares[0])) is not None:
            shares = [through]
        self.keeps = [keep_local(share) for share in shares]
        self.packs, self.in_splits = _packs(shares)
        self.unpacks, self.out_splits = _unpacks(shares)
        self.shapes, self.total = [box_shape(share.want) for share in shares], sum(self.out_splits)
        self.receives_in_place = (
            len(shares) == 1 and shares[0].keep is None and self.unpacks[0].zero_copy
        )

    def start(
        self,
        tensors: list[Tensor],
        async_op: bool = False,
        *,
        donate: bool = False,
        outs: list[Tensor] | None = None,
        tag: CommTag | None = None,
    ) -> Pending[list[Tensor]] | list[Tensor]:
        if outs is None and not self.receives_in_place:
            # naming the dtype takes torch longer
            outs = [
                x.new_empty(shape)
                if x.dtype is self.dtype
                else x.new_empty(shape, dtype=self.dtype)
                for x, shape in zip(tensors, self.shapes, strict=True)
            ]
        for keep, x, out in zip(self.keeps, tensors, outs or (), strict=False):
            keep(x, out, None)
        sent = pack_buffer(self.packs, tensors, sum(self.in_splits), self.dtype)
        received = sent.new_empty(self.total)
        tensors.clear()
        work = self.group.all_to_all(
            received, sent, self.out_splits, self.in_splits, async_op, tag=tag
        )
        return results(work, partial(unpack_many, self.unpacks, received, outs))


def _through_buffers(me: int, share: TensorShare) -> TensorShare | None:
    """Return the share with the boxes that the rank keeps sent to itself, if that saves a copy."""
    through = sent_to_self(share, me)
    (pack,), (unpack,) = _packs([through])[0], _unpacks([through])[0]
    covers = sum(map(_numel, through.recvs)) == box_size(share.want)
    return through if covers and (pack.zero_copy or unpack.zero_copy) else None


class AllToAllReduce(Collective):
    """all_to_all_reduce: a rank receives all contributions, and combines them in group order.

    Sums and products of 16-bit floats are accumulated in fp32 and rounded once. A rank's own
    contribution is among `sends` and `recvs` at its own index, see `sent_to_self`.
    """

    def __init__(
        self,
        group: Group,
        kind: str,
        dtype: torch.dtype,
        shares: Sequence[TensorShare],
        scale: float | None = None,
    ) -> None:
        self.group, self.dtype, self.scale = group, dtype, scale
        self.packs, self.in_splits = _packs(shares)
        stacks, self.out_splits = _stacks(shares)
        self.combines = [
            compile_combine(box_shape(share.want), starts, kind)
            for share, starts in zip(shares, stacks, strict=True)
        ]
        self.total = sum(self.out_splits)

    def start(
        self,
        tensors: list[Tensor],
        async_op: bool = False,
        *,
        donate: bool = False,
        outs: list[Tensor] | None = None,
        tag: CommTag | None = None,
    ) -> Pending[list[Tensor]] | list[Tensor]:
        sent = pack_buffer(self.packs, tensors, sum(self.in_splits), self.dtype, self.scale)
        received = sent.new_empty(self.total)
        tensors.clear()
        work = self.group.all_to_all(
            received, sent, self.out_splits, self.in_splits, async_op, tag=tag
        )
        return results(work, partial(combine_many, self.combines, received, outs))


def _stacks(shares: Sequence[TensorShare]) -> tuple[list[dict[Box, list[int]]], list[int]]:
    """Return where the contributions to each box start in the buffer, and the splits.

    For each tensor a dict from a box of its result to those positions, in group order.
    """
    per_tensor: list[dict[Box, list[int]]] = [{} for _ in shares]
    start, splits = 0, []
    for peer in range(len(shares[0].recvs)):
        begin = start
        for stacks, share in zip(per_tensor, shares, strict=True):
            for box in share.recvs[peer]:
                stacks.setdefault(shift(box, box_origin(share.want)), []).append(start)
                start += box_size(box)
        splits.append(start - begin)
    return per_tensor, splits


@dataclass(eq=False)
class CollectivePermute(Collective):
    """permute: one box to one rank, one from one rank.

    Attributes:
        dst, src: the other ranks, by their place in the group.
        shape: that of the box that arrives.
    """

    group: Group
    dtype: torch.dtype
    dst: int
    src: int
    shape: Sequence[int]

    def start(
        self,
        tensors: list[Tensor],
        async_op: bool = False,
        *,
        donate: bool = False,
        outs: list[Tensor] | None = None,
        tag: CommTag | None = None,
    ) -> Pending[list[Tensor]] | list[Tensor]:
        x = concatenate(tensors, self.dtype)
        tensors.clear()
        out = x.new_empty(self.shape) if outs is None else outs[0]
        work = self.group.permute(out, x, dst=self.dst, src=self.src, async_op=async_op, tag=tag)
        return results(work, lambda: [out])


# -- several collectives for one result ------------------------------------------------------------

# (this rank's tensor, the result, tag): writes a part of the result
FillResult = Callable[[Tensor, Tensor, CommTag | None], None]


@dataclass(eq=False)
class CollectiveSequence(Collective):
    """Several collectives, one after the other, that fill one result.

    Attributes:
        shape: that of the result.
        fills: each runs a collective and puts what it returns into the result.
    """

    dtype: torch.dtype
    shape: Sequence[int]
    fills: Sequence[FillResult]

    def start(
        self,
        tensors: list[Tensor],
        async_op: bool = False,
        *,
        donate: bool = False,
        outs: list[Tensor] | None = None,
        tag: CommTag | None = None,
    ) -> Pending[list[Tensor]] | list[Tensor]:
        """Run the collectives; each is waited for, also with `async_op`."""
        (x,) = tensors
        tensors.clear()
        out = x.new_empty(self.shape, dtype=self.dtype) if outs is None else outs[0]
        for fill in self.fills:
            fill(x, out, tag)
        return Pending(lambda: [out], DONE) if async_op else [out]


def keep_local(share: TensorShare) -> FillResult:
    """Return a function that copies the elements that the rank already holds into the result."""
    if share.keep is None:
        return lambda x, out, tag: None
    before = slices(share.keep, box_origin(share.have))
    after = slices(share.keep, box_origin(share.want))
    return lambda x, out, tag: out.__setitem__(after, x[before])


def all_to_all_in_node(group: Group, share: TensorShare) -> FillResult:
    """Return an all_to_all_v inside a node.

    A rank sends boxes that it had, or that it received between nodes before.
    """
    fill = _pack_from_both(share)
    (unpack,), out_splits = _unpacks([share])
    in_splits = [_numel(boxes) for boxes in share.sends]
    total = sum(out_splits)

    def run(x: Tensor, out: Tensor, tag: CommTag | None) -> None:
        sent, received = out.new_empty(sum(in_splits)), out.new_empty(total)
        fill(x, out, sent)
        group.all_to_all(received, sent, out_splits, in_splits, tag=tag)
        unpack(received, out)

    return run


def _pack_from_both(share: TensorShare) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return a function that packs boxes of the tensor and of the result into one send buffer."""
    held: tuple[list[Box], list[int]] = ([], [])
    received: tuple[list[Box], list[int]] = ([], [])
    start = 0
    for box in chain.from_iterable(share.sends):
        is_held = all(o <= a and b <= p for (a, b), (o, p) in zip(box, share.have, strict=True))
        (boxes, offsets), local = (held, share.have) if is_held else (received, share.want)
        boxes.append(shift(box, box_origin(local)))
        offsets.append(start)
        start += box_size(box)
    from_x = compile_pack(box_shape(share.have), *held)
    from_out = compile_pack(box_shape(share.want), *received)

    def fill(x: Tensor, out: Tensor, sent: Tensor) -> None:
        from_x(x, sent)
        from_out(out, sent)

    return fill
