"""Collectives in which values are sent as 8-bit codes with a scale for each block.

    quantize    boxes of the tensors -> one buffer of bytes, a record for each box
    collective  of bytes
    combine     records -> the results: read as floats, contributions added up in fp32 in group
                order, rounded once

What a rank sends to itself is quantized as well, so that all replicas of an element hold the same
value.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
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
from ...mesh.comm.recording.recorder import CommTag
from ...mesh.comm.work import Work
from .all_to_all import TensorShare
from .packed_collectives import AsyncResults, Collective, TensorParts, results


class Quantized(Collective):
    """A collective that quantizes, sends bytes and combines; subclasses differ in how they send."""

    group: Group
    quantizes: Sequence[Quantize]
    combines: Sequence[Dequantize]
    bytes_sent: int
    bytes_received: int

    @abstractmethod
    def send(
        self, received: Tensor, sent: Tensor, async_op: bool, tag: CommTag | None
    ) -> Work | None:
        """Run the collective of bytes."""

    def start(
        self,
        tensors: list[Tensor],
        async_op: bool = False,
        *,
        donate: bool = False,
        outs: list[Tensor] | None = None,
        tag: CommTag | None = None,
    ) -> AsyncResults | list[Tensor]:
        floats = [x if x.dtype in DTYPES else x.to(self.dtype) for x in tensors]
        tensors.clear()
        sent = quantize_many(
            self.quantizes, floats, floats[0].new_empty(self.bytes_sent, dtype=torch.uint8)
        )
        del floats
        received = sent.new_empty(self.bytes_received)
        work = self.send(received, sent, async_op, tag)
        return results(work, partial(self._combined, received, outs))

    def _combined(self, received: Tensor, outs: list[Tensor] | None) -> list[Tensor]:
        outs = (
            [received.new_empty(c.shape, dtype=self.dtype) for c in self.combines]
            if outs is None
            else outs
        )
        return list(dequantize_many(self.combines, received, outs))


class QuantizedAllGather(Quantized):
    """`AllGather` of quantized parts."""

    def __init__(
        self, group: Group, dtype: torch.dtype, transport: str, tensors: Sequence[TensorParts]
    ) -> None:
        self.group, self.dtype = group, dtype
        sizes = [record_bytes(t.size) for t in tensors]
        starts = list(accumulate(sizes, initial=0))
        self.bytes_sent = starts.pop()
        self.bytes_received = group.size * self.bytes_sent
        self.quantizes = [
            compile_quantize(t.part, [full_box(t.part)], transport, [start])
            for t, start in zip(tensors, starts, strict=True)
        ]
        self.combines = [
            compile_dequantize(
                t.whole,
                {box: [start + i * self.bytes_sent] for i, box in enumerate(t.boxes)},
                transport,
            )
            for t, start in zip(tensors, starts, strict=True)
        ]

    def send(
        self, received: Tensor, sent: Tensor, async_op: bool, tag: CommTag | None
    ) -> Work | None:
        return self.group.all_gather(received, sent, async_op, tag=tag)


class QuantizedAllToAll(Quantized):
    """`AllToAllV` and `AllToAllReduce` of quantized boxes; records of the same box are added up.

    A rank's own boxes are among `sends` and `recvs` at its own index, see `sent_to_self`.
    """

    def __init__(
        self, group: Group, dtype: torch.dtype, transport: str, shares: Sequence[TensorShare]
    ) -> None:
        self.group, self.dtype = group, dtype
        sends, self.in_splits = _records(shares, lambda share: share.sends)
        recvs, self.out_splits = _records(shares, lambda share: share.recvs)
        self.bytes_sent, self.bytes_received = sum(self.in_splits), sum(self.out_splits)
        self.quantizes = [
            _quantize(share, found, transport) for share, found in zip(shares, sends, strict=True)
        ]
        self.combines = [
            _dequantize(share, found, transport) for share, found in zip(shares, recvs, strict=True)
        ]

    def send(
        self, received: Tensor, sent: Tensor, async_op: bool, tag: CommTag | None
    ) -> Work | None:
        return self.group.all_to_all(
            received, sent, self.out_splits, self.in_splits, async_op, tag=tag
        )


_Record = tuple[Box, int]


def _records(
    shares: Sequence[TensorShare], peers: Callable[[TensorShare], Sequence[Sequence[Box]]]
) -> tuple[list[list[_Record]], list[int]]:
    """Return each tensor's boxes and where their records begin, and the bytes of each rank.

    In the buffer the records of one rank are consecutive.
    """
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


def _quantize(share: TensorShare, records: Sequence[_Record], transport: str) -> Quantize:
    boxes = [shift(box, box_origin(share.have)) for box, _ in records]
    return compile_quantize(
        box_shape(share.have), boxes, transport, [start for _, start in records]
    )


def _dequantize(share: TensorShare, records: Sequence[_Record], transport: str) -> Dequantize:
    stacks: dict[Box, list[int]] = {}
    for box, start in records:
        stacks.setdefault(shift(box, box_origin(share.want)), []).append(start)
    return compile_dequantize(box_shape(share.want), stacks, transport)
