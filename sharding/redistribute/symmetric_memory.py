"""Collectives by kernels that read the memory of the group's other ranks, see `kernels/symmetric.py`.

    stage      boxes of the tensors -> this rank's shared memory, each box once however many ranks want it
    pull       boxes of the peers' shared memory -> their places in the results; several for one box are combined in group order

No buffer is unpacked, and no library called. Where each rank has staged what, every rank works out by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.box import Box, box_origin, box_shape, box_size, shift
from ...kernels.copy import Pack, compile_pack
from ...kernels.symmetric import Place, Pull, compile_pull, exchange, one_shot_all_reduce, two_shot_all_reduce
from ...mesh.comm.group import Group
from ...mesh.comm.symmetric_memory import needed_peers
from ...mesh.comm.work import DONE
from ...mesh.topology import Link
from .packed_collectives import Collective, Pending, joined, parted
from .plan.cost import takes_two_shots


@dataclass
class Staged:
    """One tensor of a bucket, seen from this rank; boxes are of the global tensor.

    Attributes:
        have: this rank's box before.
        want: this rank's box after.
        given: by group index, the boxes that the rank stages, in order.
        taken: by group index, those of them that this rank reads.
        sent: elements that others read here, each reader counted.
    """

    have: Box
    want: Box
    given: Sequence[Sequence[Box]]
    taken: Sequence[Sequence[Box]]
    sent: int


_GROUP_OP = {"exchange": "all_to_all", "exchange_reduce": "all_to_all"}  # what observers know it as


class SymmetricPull(Collective):
    """An all_gather, reduce_scatter or exchange."""

    def __init__(self, group: Group, device: torch.device, op: str, kind: str, dtype: torch.dtype, tensors: Sequence[Staged]) -> None:
        self.group, self.device, self.op, self.dtype = group, device, _GROUP_OP.get(op, op), dtype
        starts = _starts(tensors)
        self.packs = [_pack(i, t, group.rank, starts[group.rank]) for i, t in enumerate(tensors)]
        self.pulls = [_pull(i, t, starts, kind) for i, t in enumerate(tensors)]
        self.shapes = [box_shape(t.want) for t in tensors]
        others = [(t, p) for t in tensors for p in range(group.size) if p != group.rank]
        self.received = sum(box_size(box) for t, p in others for box in t.taken[p]) * dtype.itemsize
        self.sent = sum(t.sent for t in tensors) * dtype.itemsize

    def start(
        self, tensors: list[Tensor], async_op: bool = False, *, own: bool = False, outs: list[Tensor] | None = None
    ) -> Pending | list[Tensor]:
        """Done when it returns, for what comes next on the current stream."""
        if outs is None:
            outs = [x.new_empty(shape, dtype=self.dtype) for x, shape in zip(tensors, self.shapes, strict=True)]
        self.group.direct(self.op, self.sent, self.received, self.dtype, lambda: self._move(tensors, outs))
        tensors.clear()
        return Pending(DONE, lambda: outs) if async_op else outs

    def _move(self, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        exchange(needed_peers(self.group, self.device), self.packs, tensors, self.pulls, outs, self.dtype)


Starts = dict[tuple[int, Box], int]  # (number of the tensor, box) -> where it begins


def _starts(tensors: Sequence[Staged]) -> list[Starts]:
    """By group index: where in the rank's staging area each box of each tensor begins."""
    found: list[Starts] = []
    for peer in range(len(tensors[0].given)):
        starts: Starts = {}
        end = 0
        for i, t in enumerate(tensors):
            for box in t.given[peer]:
                starts[i, box] = end
                end += box_size(box)
        found.append(starts)
    return found


def _pack(number: int, tensor: Staged, rank: int, starts: Starts) -> Pack:
    boxes = tensor.given[rank]
    local = [shift(box, box_origin(tensor.have)) for box in boxes]
    return compile_pack(box_shape(tensor.have), local, [starts[number, box] for box in boxes])


def _pull(number: int, tensor: Staged, starts: Sequence[Starts], kind: str) -> Pull:
    sources: dict[Box, list[Place]] = {}
    for peer, boxes in enumerate(tensor.taken):
        for box in boxes:
            sources.setdefault(shift(box, box_origin(tensor.want)), []).append((peer, starts[peer][number, box]))
    return compile_pull(box_shape(tensor.want), sources, kind)


class SymmetricAllReduce(Collective):
    """Every rank's tensor added up, on every rank, bit for bit the same."""

    def __init__(self, group: Group, device: torch.device, link: Link, dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> None:
        self.group, self.device, self.link, self.dtype, self.shapes = group, device, link, dtype, shapes
        self.sizes = list(map(math.prod, shapes))

    def start(
        self, tensors: list[Tensor], async_op: bool = False, *, own: bool = False, outs: list[Tensor] | None = None
    ) -> Pending | list[Tensor]:
        x, given = joined(tensors, self.dtype), tensors[0]
        tensors.clear()
        if outs is not None and len(outs) == 1:
            total = outs[0]
        else:
            total = x if own or x.data_ptr() != given.data_ptr() else torch.empty_like(x)
        two_shots = takes_two_shots(x.nbytes, self.group.size, self.link)
        moved = 2 * (self.group.size - 1) * x.nbytes // self.group.size if two_shots else (self.group.size - 1) * x.nbytes
        self.group.direct("all_reduce", moved, moved, x.dtype, lambda: self._add(x, total, two_shots))
        found = [total] if len(self.shapes) == 1 else parted(total, self.sizes, self.shapes, outs)
        return Pending(DONE, lambda: found) if async_op else found

    def _add(self, x: Tensor, out: Tensor, two_shots: bool) -> None:
        peers = needed_peers(self.group, self.device)
        (two_shot_all_reduce if two_shots else one_shot_all_reduce)(peers, x, out)
