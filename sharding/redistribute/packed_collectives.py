"""Collectives over boxes: pack, call the group, unpack; for one tensor, or for several in one bucket.

Each class is a step of a plan made ready on one rank: groups, boxes and packing are looked up once, and `start` only
handles data. A bucket is several tensors that take part in the same collective of the same group with the same dtype:
their parts travel together, so that it is one launch.

    pack        boxes of the tensors -> one flat buffer, what goes to the same rank next to each other
    collective
    place       flat buffer -> the results; nothing is copied where it arrives in place

Each has the dtype in which its tensors travel; tensors of other dtypes are cast as they are packed. A reduction may scale
them, too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TypeVar

import torch
from torch import Tensor

from ...kernels.box import Box, box_origin, box_shape, box_size, shift, slices
from ...kernels.copy import Pack, Unpack, compile_pack, compile_unpack, pack_many, unpack_many
from ...kernels.reduce import combine_many, compile_combine
from ...mesh.comm.group import Group
from ...mesh.comm.work import DONE, Work

PackT = TypeVar("PackT", Pack, Unpack)


class Pending:
    """A collective under way: `wait()` gives the results."""

    __slots__ = ("_finish", "work")

    def __init__(self, work: Work, finish: Callable[[], list[Tensor]]) -> None:
        self.work, self._finish = work, finish

    def wait(self) -> list[Tensor]:
        self.work.wait()
        return self._finish()


class Collective(ABC):
    """A collective that is ready to run on this rank.

    Attributes:
        dtype: in which tensors travel and arrive; they may be given in another one.
    """

    dtype: torch.dtype

    @abstractmethod
    def start(
        self, tensors: list[Tensor], async_op: bool = False, *, own: bool = False, outs: list[Tensor] | None = None
    ) -> Pending | list[Tensor]:
        """Pack and launch; the results, or with `async_op` what gives them later.

        Args:
            tensors: this rank's parts. The list is emptied, so that their memory can go as soon as they are packed.
            own: the tensors may be overwritten, and results may share their memory.
            outs: contiguous tensors to put the results into.
        """

    def begin(self, tensors: list[Tensor], *, own: bool = False, outs: list[Tensor] | None = None) -> Pending:
        """`start` without waiting."""
        pending = self.start(tensors, True, own=own, outs=outs)
        return pending if isinstance(pending, Pending) else Pending(DONE, lambda: pending)

    def run(self, tensor: Tensor) -> Tensor:
        """On one tensor, waited for."""
        return self.start([tensor])[0]  # type: ignore[index]

    def run_own(self, tensor: Tensor) -> Tensor:
        """The same on a tensor that may be overwritten."""
        return self.start([tensor], own=True)[0]  # type: ignore[index]


def done(work: Work | None, finish: Callable[[], list[Tensor]]) -> Pending | list[Tensor]:
    """What `start` returns: the results now, or what gives them when the work is done."""
    return finish() if work is None else Pending(work, finish)


# -- rings -------------------------------------------------------------------------------------------------------------


class AllReduce(Collective):
    """Every rank's tensor combined, on every rank."""

    def __init__(self, group: Group, kind: str, dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> None:
        self.group, self.kind, self.dtype, self.shapes = group, kind, dtype, shapes
        self.sizes = list(map(math.prod, shapes))

    def start(
        self, tensors: list[Tensor], async_op: bool = False, *, own: bool = False, outs: list[Tensor] | None = None
    ) -> Pending | list[Tensor]:
        """With `own`, tensors that lie one after the other in memory are overwritten instead of copied."""
        if own and len(tensors) > 1 and (piece := in_one_piece(tensors, self.dtype)) is not None:
            given = list(tensors)
            return done(self.group.all_reduce(piece, self.kind, async_op), lambda: _moved(given, outs))
        flat = self._flat(tensors, own, outs)
        tensors.clear()
        work = self.group.all_reduce(flat, self.kind, async_op)
        return done(work, lambda: [flat] if len(self.shapes) == 1 else parted(flat, self.sizes, self.shapes, outs))

    def _flat(self, tensors: Sequence[Tensor], own: bool, outs: list[Tensor] | None) -> Tensor:
        if len(tensors) > 1:
            return joined(tensors, self.dtype)
        (x,) = tensors
        if outs is not None:
            return x if x is outs[0] else outs[0].copy_(x)
        if own and x.is_contiguous() and x.dtype == self.dtype:
            return x
        return x.to(self.dtype, copy=True, memory_format=torch.contiguous_format)


def joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The tensors one after the other; a single one that lies so already as it is."""
    if len(tensors) == 1:
        return tensors[0].to(dtype).contiguous()
    flat = [x.reshape(-1) for x in tensors]
    if all(x.dtype == dtype for x in tensors):
        return torch.cat(flat)
    return torch.cat(flat, out=flat[0].new_empty(sum(x.numel() for x in flat), dtype=dtype))


def in_one_piece(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The memory of tensors that lie one after the other as one flat tensor; None if they do not."""
    first, end = tensors[0], tensors[0].data_ptr()
    for x in tensors:
        if x.dtype != dtype or not x.is_contiguous() or (x.data_ptr() != end and x.numel()):
            return None
        end += x.nbytes
    size, room = sum(x.numel() for x in tensors), first.untyped_storage().nbytes() // first.element_size()
    if first.storage_offset() + size > room or not first.numel():
        return None
    return first.as_strided((size,), (1,))


def parted(
    flat: Tensor, sizes: Sequence[int], shapes: Sequence[Sequence[int]], outs: list[Tensor] | None
) -> list[Tensor]:
    """The tensors of a bucket; views of it, but for autograd tensors of their own, that may be written in place."""
    found = [x.view(shape) for x, shape in zip(torch.unsafe_split_with_sizes(flat, sizes), shapes, strict=True)]
    return _moved(found, outs)


def _moved(found: list[Tensor], outs: list[Tensor] | None) -> list[Tensor]:
    return found if outs is None else [out.copy_(x) for out, x in zip(outs, found, strict=True)]


@dataclass
class Gathered:
    """One tensor of an all_gather or, the other way round, of a reduce_scatter.

    Attributes:
        whole: the shape of the tensor that all parts make up.
        boxes: where each rank's part lies in it, in group order; equal sizes.
        part: the shape of this rank's part.
    """

    whole: Sequence[int]
    boxes: Sequence[Box]
    part: Sequence[int]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = box_size(self.boxes[0])


def _interleaved(tensors: Sequence[Gathered], make: Callable[..., PackT]) -> list[PackT]:
    """Packings of buffers in which each rank's parts of all tensors lie together."""
    if len(tensors) == 1:
        return [make(tensors[0].whole, tensors[0].boxes)]
    total, found, start = sum(t.size for t in tensors), [], 0
    for t in tensors:
        found.append(make(t.whole, t.boxes, [start + i * total for i in range(len(t.boxes))]))
        start += t.size
    return found


class AllGather(Collective):
    """Every rank's part, on every rank, in the places where they belong."""

    def __init__(self, group: Group, dtype: torch.dtype, tensors: Sequence[Gathered]) -> None:
        self.group, self.dtype, self.total = group, dtype, group.size * sum(t.size for t in tensors)
        self.places: list[Unpack] = _interleaved(tensors, compile_unpack)

    def start(
        self, tensors: list[Tensor], async_op: bool = False, *, own: bool = False, outs: list[Tensor] | None = None
    ) -> Pending | list[Tensor]:
        """Where the result is the parts one after the other, they arrive in `outs` itself, and a part that lies in its
        place there already is not copied."""
        x = joined(tensors, self.dtype)
        tensors.clear()
        if outs is not None and len(outs) == 1 and self.places[0].zero_copy:
            flat, outs = outs[0].view(-1), None
        else:
            flat = x.new_empty(self.total)
        work = self.group.all_gather(flat, x, async_op)
        return done(work, lambda: unpack_many(self.places, flat, outs))


class ReduceScatter(Collective):
    """Every rank's tensor combined, each rank its part of it."""

    def __init__(
        self, group: Group, kind: str, dtype: torch.dtype, tensors: Sequence[Gathered], scale: float | None = None
    ) -> None:
        self.group, self.kind, self.dtype, self.scale = group, kind, dtype, scale
        self.packs: list[Pack] = _interleaved(tensors, compile_pack)
        self.parts, self.sizes, self.size = [t.part for t in tensors], [t.size for t in tensors], sum(t.size for t in tensors)

    def start(
        self, tensors: list[Tensor], async_op: bool = False, *, own: bool = False, outs: list[Tensor] | None = None
    ) -> Pending | list[Tensor]:
        """With `own`, the result of one tensor is a view of the packed input (which is the input where that lies in order)."""
        flat, size = _packed(self.packs, tensors, self.group.size * self.size, self.dtype, self.scale), self.size
        tensors.clear()
        if outs is not None and len(outs) == 1:
            out, outs = outs[0].view(-1), None
        else:
            out = flat.view(-1)[self.group.rank * size :][:size] if own and len(self.parts) == 1 else flat.new_empty(size)
        work = self.group.reduce_scatter(out, flat, self.kind, async_op)
        if len(self.parts) == 1:
            return done(work, lambda: [out.view(self.parts[0])])
        return done(work, lambda: parted(out, self.sizes, self.parts, outs))


# -- exchanges ---------------------------------------------------------------------------------------------------------


@dataclass
class Share:
    """What one tensor contributes to an exchange, seen from this rank; boxes are of the global tensor.

    Attributes:
        have: this rank's box before.
        want: this rank's box after.
        sends: by group index, what goes there.
        recvs: by group index, what comes from there.
        own: what stays here.
    """

    have: Box
    want: Box
    sends: Sequence[Sequence[Box]]
    recvs: Sequence[Sequence[Box]]
    own: Box | None


def _numel(boxes: Sequence[Box]) -> int:
    return sum(map(box_size, boxes))


def _packings(
    shares: Sequence[Share], peers: Callable[[Share], Sequence[Sequence[Box]]], side: Callable[[Share], Box],
    make: Callable[..., PackT],
) -> tuple[list[PackT], list[int]]:  # fmt: skip
    """Packings of a buffer in which what goes to (comes from) one rank lies together, and its length by rank."""
    by_peer = [[peers(share)[p] for share in shares] for p in range(len(peers(shares[0])))]
    splits = [sum(map(_numel, boxes)) for boxes in by_peer]
    starts = iter(accumulate((box_size(box) for tensors in by_peer for boxes in tensors for box in boxes), initial=0))
    found: list[tuple[list[Box], list[int]]] = [([], []) for _ in shares]
    for tensors in by_peer:
        for (boxes, offsets), mine, share in zip(found, tensors, shares, strict=True):
            for box in mine:
                boxes.append(shift(box, box_origin(side(share))))
                offsets.append(next(starts))
    if len(shares) == 1:  # one after the other, as is the default
        return [make(box_shape(side(shares[0])), found[0][0])], splits
    return [make(box_shape(side(s)), *where) for s, where in zip(shares, found, strict=True)], splits


class Exchange(Collective):
    """An all_to_all with exact splits. What a rank holds already is copied past the buffers, unless a buffer with it in
    its place is the tensor itself: then everything goes through the buffers, and one of the two copies is none."""

    def __init__(self, group: Group, dtype: torch.dtype, shares: Sequence[Share]) -> None:
        self.group, self.dtype = group, dtype
        if len(shares) == 1 and (through := _through_buffers(group.rank, shares[0])) is not None:
            shares = [through]
        self.keeps = [keeping(share) for share in shares]
        self.packs, self.in_splits = _packings(shares, lambda s: s.sends, lambda s: s.have, compile_pack)
        self.places, self.out_splits = _packings(shares, lambda s: s.recvs, lambda s: s.want, compile_unpack)
        self.shapes, self.total = [box_shape(share.want) for share in shares], sum(self.out_splits)
        self.arrives_whole = len(shares) == 1 and shares[0].own is None and self.places[0].zero_copy

    def start(
        self, tensors: list[Tensor], async_op: bool = False, *, own: bool = False, outs: list[Tensor] | None = None
    ) -> Pending | list[Tensor]:
        if outs is None and not self.arrives_whole:
            outs = [_empty(x, shape, self.dtype) for x, shape in zip(tensors, self.shapes, strict=True)]
        for keep, x, out in zip(self.keeps, tensors, outs or (), strict=False):
            keep(x, out)
        packed = _packed(self.packs, tensors, sum(self.in_splits), self.dtype)
        arrived = packed.new_empty(self.total)
        tensors.clear()
        work = self.group.all_to_all(arrived, packed, self.out_splits, self.in_splits, async_op)
        return done(work, lambda: self._placed(arrived, outs))

    def _placed(self, arrived: Tensor, outs: list[Tensor] | None) -> list[Tensor]:
        return unpack_many(self.places, arrived, outs)


def _empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return like.new_empty(shape) if like.dtype is dtype else like.new_empty(shape, dtype=dtype)  # naming it takes torch longer


def _packed(
    packs: Sequence[Pack], tensors: Sequence[Tensor], size: int, dtype: torch.dtype, scale: float | None = None
) -> Tensor:
    if len(packs) == 1 and tensors[0].dtype == dtype and scale is None:
        return packs[0](tensors[0])
    return pack_many(packs, tensors, tensors[0].new_empty(size, dtype=dtype), scale)


def with_own(share: Share, me: int) -> Share:
    """The share with what stays on this rank sent to itself."""
    own = [share.own] if share.own is not None else []
    sends = [own if p == me else boxes for p, boxes in enumerate(share.sends)]
    recvs = [own if p == me else boxes for p, boxes in enumerate(share.recvs)]
    return Share(share.have, share.want, sends, recvs, None)


def _through_buffers(me: int, share: Share) -> Share | None:
    """The share with this rank's own part sent to itself, if that saves a copy."""
    through = with_own(share, me)
    pack, _ = _packings([through], lambda s: s.sends, lambda s: s.have, compile_pack)
    place, _ = _packings([through], lambda s: s.recvs, lambda s: s.want, compile_unpack)
    covers = sum(map(_numel, through.recvs)) == box_size(share.want)
    return through if covers and (pack[0].zero_copy or place[0].zero_copy) else None


class ExchangeReduce(Collective):
    """An exchange in which every rank receives all contributions to its boxes and combines them in group order.

    Sums and products of 16-bit floats are accumulated in fp32 and rounded once.
    """

    def __init__(self, group: Group, kind: str, dtype: torch.dtype, shares: Sequence[Share], scale: float | None = None) -> None:
        """The own contribution is among `sends` and `recvs` at this rank's index."""
        self.group, self.dtype, self.scale = group, dtype, scale
        self.packs, self.in_splits = _packings(shares, lambda s: s.sends, lambda s: s.have, compile_pack)
        stacks, self.out_splits = _stacks(shares)
        self.combines = [compile_combine(box_shape(share.want), found, kind) for share, found in zip(shares, stacks, strict=True)]
        self.total = sum(self.out_splits)

    def start(
        self, tensors: list[Tensor], async_op: bool = False, *, own: bool = False, outs: list[Tensor] | None = None
    ) -> Pending | list[Tensor]:
        packed = _packed(self.packs, tensors, sum(self.in_splits), self.dtype, self.scale)
        arrived = packed.new_empty(self.total)
        tensors.clear()
        work = self.group.all_to_all(arrived, packed, self.out_splits, self.in_splits, async_op)
        return done(work, lambda: combine_many(self.combines, arrived, outs))


def _stacks(shares: Sequence[Share]) -> tuple[list[dict[Box, list[int]]], list[int]]:
    """Per tensor, box of its result -> where in the buffer the contributions to it start, in group order; and the splits."""
    found: list[dict[Box, list[int]]] = [{} for _ in shares]
    start, splits = 0, []
    for peer in range(len(shares[0].recvs)):
        begin = start
        for stacks, share in zip(found, shares, strict=True):
            for box in share.recvs[peer]:
                stacks.setdefault(shift(box, box_origin(share.want)), []).append(start)
                start += box_size(box)
        splits.append(start - begin)
    return found, splits


class Permute(Collective):
    """One whole box to one rank, one from one rank."""

    def __init__(self, group: Group, dtype: torch.dtype, dst: int, src: int, shape: Sequence[int]) -> None:
        self.group, self.dtype, self.dst, self.src, self.shape = group, dtype, dst, src, shape

    def start(
        self, tensors: list[Tensor], async_op: bool = False, *, own: bool = False, outs: list[Tensor] | None = None
    ) -> Pending | list[Tensor]:
        x = joined(tensors, self.dtype)
        tensors.clear()
        out = x.new_empty(self.shape) if outs is None else outs[0]
        work = self.group.permute(out, x, dst=self.dst, src=self.src, async_op=async_op)
        return done(work, lambda: [out])


Into = Callable[[Tensor, Tensor], None]  # from this rank's tensor into the result


class InTurn(Collective):
    """Several collectives one after the other that fill one result."""

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], turns: Sequence[Into]) -> None:
        self.dtype, self.shape, self.turns = dtype, shape, turns

    def start(
        self, tensors: list[Tensor], async_op: bool = False, *, own: bool = False, outs: list[Tensor] | None = None
    ) -> Pending | list[Tensor]:
        """The collectives are waited for one by one, also with `async_op`."""
        (x,) = tensors
        tensors.clear()
        out = x.new_empty(self.shape, dtype=self.dtype) if outs is None else outs[0]
        for turn in self.turns:
            turn(x, out)
        return Pending(DONE, lambda: [out]) if async_op else [out]


def keeping(share: Share) -> Into:
    """Copies what the rank holds already into its place in the result."""
    if share.own is None:
        return lambda x, out: None
    before, after = slices(share.own, box_origin(share.have)), slices(share.own, box_origin(share.want))
    return lambda x, out: out.__setitem__(after, x[before])


def sharing(group: Group, share: Share) -> Into:
    """An exchange inside a node: this rank sends on what it holds, or what has come to it already."""
    fill = _filling(share)
    place, out_splits = _packings([share], lambda s: s.recvs, lambda s: s.want, compile_unpack)
    in_splits, total = [_numel(boxes) for boxes in share.sends], sum(out_splits)

    def run(x: Tensor, out: Tensor) -> None:
        packed, arrived = out.new_empty(sum(in_splits)), out.new_empty(total)
        fill(x, out, packed)
        group.all_to_all(arrived, packed, out_splits, in_splits)
        place[0](arrived, out)

    return run


def _filling(share: Share) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Packs what goes to others into one buffer: boxes of this rank's tensor, and boxes of the result."""
    held: tuple[list[Box], list[int]] = ([], [])
    came: tuple[list[Box], list[int]] = ([], [])
    start = 0
    for box in chain.from_iterable(share.sends):
        (boxes, offsets), side = (held, share.have) if _inside(box, share.have) else (came, share.want)
        boxes.append(shift(box, box_origin(side)))
        offsets.append(start)
        start += box_size(box)
    from_x, from_out = compile_pack(box_shape(share.have), *held), compile_pack(box_shape(share.want), *came)

    def fill(x: Tensor, out: Tensor, packed: Tensor) -> None:
        from_x(x, packed)
        from_out(out, packed)

    return fill


def _inside(box: Box, other: Box) -> bool:
    return all(o <= a and b <= p for (a, b), (o, p) in zip(box, other, strict=True))
