"""Quantised transport: collectives in which values travel as 8-bit codes with a scale for each block.

    quantise    boxes of the tensors -> one buffer of bytes, a record for each box
    collective  of bytes
    combine     records -> the results: read as floats, contributions added up in fp32 in group order, rounded once

What a rank sends to itself is quantised, too, so that all replicas of an element hold the same value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ...kernels.box import Box, box_origin, box_shape, box_size, full_box, shift
from ...kernels.quantize import (
    DTYPES,
    Dequantize,
    Quantize,
    compile_dequantize,
    compile_quantize,
    dequantize_many,
    quantize_many,
    record_bytes,
)
from ...mesh.comm.group import Group
from ...mesh.comm.work import Work
from .packed_collectives import Collective, Gathered, Pending, Share, done


class Quantized(Collective):
    """What all of them do: quantise, launch, combine; they differ in what they launch."""

    group: Group
    quantizes: Sequence[Quantize]
    combines: Sequence[Dequantize]
    sent: int
    arriving: int

    def launch(self, arrived: Tensor, packed: Tensor, async_op: bool) -> Work | None:
        """The collective of bytes."""
        raise NotImplementedError

    def start(
        self, tensors: list[Tensor], async_op: bool = False, *, own: bool = False, outs: list[Tensor] | None = None
    ) -> Pending | list[Tensor]:
        floats = [x if x.dtype in DTYPES else x.to(self.dtype) for x in tensors]
        tensors.clear()
        packed = quantize_many(self.quantizes, floats, floats[0].new_empty(self.sent, dtype=torch.uint8))
        del floats
        arrived = packed.new_empty(self.arriving)
        work = self.launch(arrived, packed, async_op)
        return done(work, lambda: self._combined(arrived, outs))

    def _combined(self, arrived: Tensor, outs: list[Tensor] | None) -> list[Tensor]:
        outs = [arrived.new_empty(c.shape, dtype=self.dtype) for c in self.combines] if outs is None else outs
        return list(dequantize_many(self.combines, arrived, outs))


class QuantizedAllGather(Quantized):
    """`AllGather` with its parts quantised."""

    def __init__(self, group: Group, dtype: torch.dtype, transport: str, tensors: Sequence[Gathered]) -> None:
        self.group, self.dtype = group, dtype
        sizes = [record_bytes(t.size) for t in tensors]
        starts = list(accumulate(sizes, initial=0))
        self.sent = starts.pop()
        self.arriving = group.size * self.sent
        self.quantizes = [
            compile_quantize(t.part, [full_box(t.part)], transport, [start]) for t, start in zip(tensors, starts, strict=True)
        ]
        self.combines = [
            compile_dequantize(t.whole, {box: [start + i * self.sent] for i, box in enumerate(t.boxes)}, transport)
            for t, start in zip(tensors, starts, strict=True)
        ]

    def launch(self, arrived: Tensor, packed: Tensor, async_op: bool) -> Work | None:
        return self.group.all_gather(arrived, packed, async_op)


class QuantizedExchange(Quantized):
    """`Exchange` and `ExchangeReduce` with what is sent quantised; several records for one box are added up."""

    def __init__(self, group: Group, dtype: torch.dtype, transport: str, shares: Sequence[Share]) -> None:
        """The own boxes are among `sends` and `recvs` at this rank's index."""
        self.group, self.dtype = group, dtype
        sends, self.in_splits = _records(shares, lambda share: share.sends)
        recvs, self.out_splits = _records(shares, lambda share: share.recvs)
        self.sent, self.arriving = sum(self.in_splits), sum(self.out_splits)
        self.quantizes = [_quantize(share, found, transport) for share, found in zip(shares, sends, strict=True)]
        self.combines = [_dequantize(share, found, transport) for share, found in zip(shares, recvs, strict=True)]

    def launch(self, arrived: Tensor, packed: Tensor, async_op: bool) -> Work | None:
        return self.group.all_to_all(arrived, packed, self.out_splits, self.in_splits, async_op)


_Record = tuple[Box, int]


def _records(
    shares: Sequence[Share], peers: Callable[[Share], Sequence[Sequence[Box]]]
) -> tuple[list[list[_Record]], list[int]]:
    """Of each tensor its boxes and where their records begin in a buffer in which those of one rank lie together; and how
    many bytes each rank has there."""
    found: list[list[_Record]] = [[] for _ in shares]
    start, splits = 0, []
    for peer in range(len(peers(shares[0]))):
        begin = start
        for records, share in zip(found, shares, strict=True):
            for box in peers(share)[peer]:
                records.append((box, start))
                start += record_bytes(box_size(box))
        splits.append(start - begin)
    return found, splits


def _quantize(share: Share, records: Sequence[_Record], transport: str) -> Quantize:
    boxes = [shift(box, box_origin(share.have)) for box, _ in records]
    return compile_quantize(box_shape(share.have), boxes, transport, [start for _, start in records])


def _dequantize(share: Share, records: Sequence[_Record], transport: str) -> Dequantize:
    stacks: dict[Box, list[int]] = {}
    for box, start in records:
        stacks.setdefault(shift(box, box_origin(share.want)), []).append(start)
    return compile_dequantize(box_shape(share.want), stacks, transport)
