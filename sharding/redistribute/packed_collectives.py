"""Collectives over boxes: pack, call the group, unpack.

This file has the ring collectives; `all_to_all.py` has the others.

Each class is a step of a plan compiled for one rank: groups, boxes and packing are looked up once,
and `start` only handles data. It takes one tensor, or a bucket: several tensors of one dtype whose
parts are sent in one collective.

    pack        boxes of the tensors -> one flat buffer, those for the same rank next to each other
    collective
    unpack      flat buffer -> the results; nothing is copied if the results are views of the buffer

Each has the dtype in which its tensors are sent; tensors of other dtypes are cast as they are
packed. A reduction may scale them, too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ...kernels.box import Box, box_size
from ...kernels.copy import Pack, Unpack, compile_pack, compile_unpack, pack_many, unpack_many
from ...mesh.comm.group import Group
from ...mesh.comm.pending import Pending
from ...mesh.comm.recording.recorder import CommTag
from ...mesh.comm.work import DONE, Work

PackT = TypeVar("PackT", Pack, Unpack)


class Collective(ABC):
    """A collective compiled for this rank.

    Attributes:
        dtype: the dtype in which tensors are sent and returned; they may be given in another one.
    """

    dtype: torch.dtype

    @abstractmethod
    def start(
        self,
        tensors: list[Tensor],
        async_op: bool = False,
        *,
        donate: bool = False,
        outs: list[Tensor] | None = None,
        tag: CommTag | None = None,
    ) -> Pending[list[Tensor]] | list[Tensor]:
        """Pack and launch. Return the results, or with `async_op` as `Pending`.

        Args:
            tensors: this rank's parts. The list is emptied, so that their memory can be freed as
                soon as they are packed.
            donate: the tensors may be overwritten, and results may share their memory.
            outs: contiguous tensors to put the results into.
            tag: what the collective is for.
        """

    def launch(
        self, tensors: list[Tensor], *, donate: bool, outs: list[Tensor] | None, tag: CommTag
    ) -> Pending[list[Tensor]]:
        """Call `start` without waiting."""
        results = self.start(tensors, True, donate=donate, outs=outs, tag=tag)
        return results if isinstance(results, Pending) else Pending(lambda: results, DONE)


def results(
    work: Work | None, finish: Callable[[], list[Tensor]]
) -> Pending[list[Tensor]] | list[Tensor]:
    """Return what `start` returns: the results now, or those of the work when it is done."""
    return finish() if work is None else Pending.after(work, finish)


# -- rings -----------------------------------------------------------------------------------------


class AllReduce(Collective):
    """all_reduce: the tensors of all ranks combined, on every rank."""

    def __init__(
        self, group: Group, kind: str, dtype: torch.dtype, shapes: Sequence[Sequence[int]]
    ) -> None:
        self.group, self.kind, self.dtype, self.shapes = group, kind, dtype, shapes
        self.sizes = list(map(math.prod, shapes))

    def start(
        self,
        tensors: list[Tensor],
        async_op: bool = False,
        *,
        donate: bool = False,
        outs: list[Tensor] | None = None,
        tag: CommTag | None = None,
    ) -> Pending[list[Tensor]] | list[Tensor]:
        """Pack and launch.

        Donated tensors that are consecutive in memory are overwritten instead of copied.
        """
        if (
            donate
            and len(tensors) > 1
            and (piece := contiguous_memory(tensors, self.dtype)) is not None
        ):
            pieces = list(tensors)
            return results(
                self.group.all_reduce(piece, self.kind, async_op, tag=tag),
                lambda: copy_to(pieces, outs),
            )
        flat = self._flat(tensors, donate, outs)
        tensors.clear()
        work = self.group.all_reduce(flat, self.kind, async_op, tag=tag)
        return results(
            work,
            lambda: (
                [flat] if len(self.shapes) == 1 else split_flat(flat, self.sizes, self.shapes, outs)
            ),
        )

    def _flat(self, tensors: Sequence[Tensor], donate: bool, outs: list[Tensor] | None) -> Tensor:
        if len(tensors) > 1:
            return concatenate(tensors, self.dtype)
        (x,) = tensors
        if outs is not None:
            return x if x is outs[0] else outs[0].copy_(x)
        if donate and x.is_contiguous() and x.dtype == self.dtype:
            return x
        return x.to(self.dtype, copy=True, memory_format=torch.contiguous_format)


def concatenate(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the tensors concatenated in one dtype; a single contiguous one without a copy."""
    if len(tensors) == 1:
        return tensors[0].to(dtype).contiguous()
    flat = [x.reshape(-1) for x in tensors]
    if all(x.dtype == dtype for x in tensors):
        return torch.cat(flat)
    return torch.cat(flat, out=flat[0].new_empty(sum(x.numel() for x in flat), dtype=dtype))


def contiguous_memory(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return the memory of consecutive tensors as one flat tensor; None if they are not."""
    first, end = tensors[0], tensors[0].data_ptr()
    for x in tensors:
        if x.dtype != dtype or not x.is_contiguous() or (x.data_ptr() != end and x.numel()):
            return None
        end += x.nbytes
    size = sum(x.numel() for x in tensors)
    room = first.untyped_storage().nbytes() // first.element_size()
    if first.storage_offset() + size > room or not first.numel():
        return None
    return first.as_strided((size,), (1,))


def split_flat(
    flat: Tensor, sizes: Sequence[int], shapes: Sequence[Sequence[int]], outs: list[Tensor] | None
) -> list[Tensor]:
    """Return a bucket's tensors: views, but not for autograd, so they may be written in place."""
    views = [
        x.view(shape)
        for x, shape in zip(torch.unsafe_split_with_sizes(flat, sizes), shapes, strict=True)
    ]
    return copy_to(views, outs)


def copy_to(tensors: list[Tensor], outs: list[Tensor] | None) -> list[Tensor]:
    return tensors if outs is None else [out.copy_(x) for out, x in zip(outs, tensors, strict=True)]


@dataclass
class TensorParts:
    """One tensor of an all_gather or, in the other direction, of a reduce_scatter.

    Attributes:
        whole: the shape of the tensor that consists of all parts.
        boxes: the box of each rank's part in it, in group order; of equal sizes.
        part: the shape of this rank's part.
    """

    whole: Sequence[int]
    boxes: Sequence[Box]
    part: Sequence[int]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = box_size(self.boxes[0])


def _interleave_packs(tensors: Sequence[TensorParts], make: Callable[..., PackT]) -> list[PackT]:
    """Return packings of a buffer in which each rank's parts of all tensors are consecutive."""
    if len(tensors) == 1:
        return [make(tensors[0].whole, tensors[0].boxes)]
    total, packings, start = sum(t.size for t in tensors), [], 0
    for t in tensors:
        packings.append(make(t.whole, t.boxes, [start + i * total for i in range(len(t.boxes))]))
        start += t.size
    return packings


class AllGather(Collective):
    """all_gather: the parts of all ranks, on every rank, each in its box of the whole."""

    def __init__(self, group: Group, dtype: torch.dtype, tensors: Sequence[TensorParts]) -> None:
        self.group, self.dtype, self.total = group, dtype, group.size * sum(t.size for t in tensors)
        self.unpacks: list[Unpack] = _interleave_packs(tensors, compile_unpack)

    def start(
        self,
        tensors: list[Tensor],
        async_op: bool = False,
        *,
        donate: bool = False,
        outs: list[Tensor] | None = None,
        tag: CommTag | None = None,
    ) -> Pending[list[Tensor]] | list[Tensor]:
        """Launch.

        If the result is the parts concatenated, they are received in `outs`, and a part that is its
        view is not copied.
        """
        x = concatenate(tensors, self.dtype)
        tensors.clear()
        if outs is not None and len(outs) == 1 and self.unpacks[0].zero_copy:
            flat, outs = outs[0].view(-1), None
        else:
            flat = x.new_empty(self.total)
        work = self.group.all_gather(flat, x, async_op, tag=tag)
        return results(work, partial(unpack_many, self.unpacks, flat, outs))


class ReduceScatter(Collective):
    """reduce_scatter: all ranks' tensors combined; each rank receives its part of the result."""

    def __init__(
        self,
        group: Group,
        kind: str,
        dtype: torch.dtype,
        tensors: Sequence[TensorParts],
        scale: float | None = None,
    ) -> None:
        self.group, self.kind, self.dtype, self.scale = group, kind, dtype, scale
        self.packs: list[Pack] = _interleave_packs(tensors, compile_pack)
        self.parts = [t.part for t in tensors]
        self.sizes = [t.size for t in tensors]
        self.size = sum(t.size for t in tensors)

    def start(
        self,
        tensors: list[Tensor],
        async_op: bool = False,
        *,
        donate: bool = False,
        outs: list[Tensor] | None = None,
        tag: CommTag | None = None,
    ) -> Pending[list[Tensor]] | list[Tensor]:
        """Pack and launch.

        With `donate`, the result of one tensor is a view of the send buffer (which may be the
        tensor itself).
        """
        flat = pack_buffer(self.packs, tensors, self.group.size * self.size, self.dtype, self.scale)
        size = self.size
        tensors.clear()
        if outs is not None and len(outs) == 1:
            out, outs = outs[0].view(-1), None
        else:
            out = (
                flat.view(-1)[self.group.rank * size :][:size]
                if donate and len(self.parts) == 1
                else flat.new_empty(size)
            )
        work = self.group.reduce_scatter(out, flat, self.kind, async_op, tag=tag)
        if len(self.parts) == 1:
            return results(work, lambda: [out.view(self.parts[0])])
        return results(work, partial(split_flat, out, self.sizes, self.parts, outs))


def pack_buffer(
    packs: Sequence[Pack],
    tensors: Sequence[Tensor],
    size: int,
    dtype: torch.dtype,
    scale: float | None = None,
) -> Tensor:
    """Return the tensors' send buffer: boxes, cast and scaled; no copy if that is a tensor."""
    if len(packs) == 1 and tensors[0].dtype == dtype and scale is None:
        return packs[0](tensors[0])
    return pack_many(packs, tensors, tensors[0].new_empty(size, dtype=dtype), scale)
