"""Collectives by kernels that read the memory of the group's ranks, see `kernels/symmetric/`.

    stage      boxes of the tensors -> this rank's shared memory, each box once, however many ranks
               want it
    pull       boxes of the peers' shared memory -> boxes of the results; several for one box are
               combined in group order

No buffer is unpacked, and no communication library is called. Every rank computes by itself where
each rank has staged what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.box import Box, box_origin, box_shape, box_size, shift
from ...kernels.copy import Pack, compile_pack
from ...kernels.symmetric import (
    Place,
    Pull,
    compile_pull,
    exchange,
    one_shot_all_reduce,
    two_shot_all_reduce,
)
from ...mesh.comm.group import Group
from ...mesh.comm.pending import Pending
from ...mesh.comm.recording.recorder import CommTag
from ...mesh.comm.symmetric_memory import run_shared
from ...mesh.comm.work import DONE, Work
from ...mesh.topology import Link
from .packed_collectives import Collective, concatenate, results, split_flat
from .plan.cost import takes_two_shots


@dataclass
class StagedTensor:
    """What one rank stages and reads of one tensor; boxes are of the global tensor.

    Attributes:
        have: this rank's box before.
        want: this rank's box after.
        staged: by group index, the boxes that the rank stages, in order.
        read: by group index, those of them that this rank reads.
        sent: elements that other ranks read from this rank; what several read counts several times.
    """

    have: Box
    want: Box
    staged: Sequence[Sequence[Box]]
    read: Sequence[Sequence[Box]]
    sent: int


_GROUP_OP = {"all_to_all_v": "all_to_all", "all_to_all_reduce": "all_to_all"}  # its name in reports


class SymmetricPull(Collective):
    """An all_gather, reduce_scatter, all_to_all_v or all_to_all_reduce."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        op: str,
        kind: str,
        dtype: torch.dtype,
        tensors: Sequence[StagedTensor],
    ) -> None:
        self.group = group
        self.device = device
        self.op = _GROUP_OP.get(op, op)
        self.dtype = dtype
        starts = _starts(tensors)
        self.packs = [_pack(i, t, group.rank, starts[group.rank]) for i, t in enumerate(tensors)]
        self.pulls = [_pull(i, t, starts, kind) for i, t in enumerate(tensors)]
        self.shapes = [box_shape(t.want) for t in tensors]
        others = [(t, p) for t in tensors for p in range(group.size) if p != group.rank]
        self.received = sum(box_size(box) for t, p in others for box in t.read[p]) * dtype.itemsize
        self.sent = sum(t.sent for t in tensors) * dtype.itemsize

    def start(
        self,
        tensors: list[Tensor],
        async_op: bool = False,
        *,
        donate: bool = False,
        outs: list[Tensor] | None = None,
        tag: CommTag | None = None,
    ) -> Pending[list[Tensor]] | list[Tensor]:
        """Run on the current stream, or with `async_op` on that of the group's shared memory."""
        into = (
            [
                x.new_empty(shape, dtype=self.dtype)
                for x, shape in zip(tensors, self.shapes, strict=True)
            ]
            if outs is None
            else outs
        )
        work: Work = DONE

        def move() -> None:
            nonlocal work
            run = lambda peers: exchange(peers, self.packs, tensors, self.pulls, into, self.dtype)  # noqa: E731
            work = run_shared(self.group, self.device, run, (*tensors, *into), async_op, tag)

        self.group.direct(self.op, self.sent, self.received, self.dtype, move, tag=tag)
        tensors.clear()
        return Pending.after(work, lambda: into) if async_op else into


Starts = dict[tuple[int, Box], int]  # (index of the tensor, box) -> where it begins


def _starts(tensors: Sequence[StagedTensor]) -> list[Starts]:
    """Return, by group index, where each box of each tensor begins in the rank's staging area."""
    per_peer: list[Starts] = []
    for peer in range(len(tensors[0].staged)):
        starts: Starts = {}
        end = 0
        for i, t in enumerate(tensors):
            for box in t.staged[peer]:
                starts[i, box] = end
                end += box_size(box)
        per_peer.append(starts)
    return per_peer


def _pack(number: int, tensor: StagedTensor, rank: int, starts: Starts) -> Pack:
    boxes = tensor.staged[rank]
    local = [shift(box, box_origin(tensor.have)) for box in boxes]
    return compile_pack(box_shape(tensor.have), local, [starts[number, box] for box in boxes])


def _pull(number: int, tensor: StagedTensor, starts: Sequence[Starts], kind: str) -> Pull:
    sources: dict[Box, list[Place]] = {}
    for peer, boxes in enumerate(tensor.read):
        for box in boxes:
            sources.setdefault(shift(box, box_origin(tensor.want)), []).append(
                (peer, starts[peer][number, box])
            )
    return compile_pull(box_shape(tensor.want), sources, kind)


class SymmetricAllReduce(Collective):
    """all_reduce: the tensors of all ranks added up, with the same bits on every rank."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        link: Link,
        dtype: torch.dtype,
        shapes: Sequence[Sequence[int]],
    ) -> None:
        self.group = group
        self.device = device
        self.link = link
        self.dtype = dtype
        self.shapes = shapes
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
        first = tensors[0]
        x = concatenate(tensors, self.dtype)
        tensors.clear()
        if outs is not None and len(outs) == 1:
            total = outs[0]
        else:
            total = x if donate or x.data_ptr() != first.data_ptr() else torch.empty_like(x)
        two_shots = takes_two_shots(x.nbytes, self.group.size, self.link)
        moved = (
            2 * (self.group.size - 1) * x.nbytes // self.group.size
            if two_shots
            else (self.group.size - 1) * x.nbytes
        )
        add = two_shot_all_reduce if two_shots else one_shot_all_reduce
        work: Work = DONE

        def reduce() -> None:
            nonlocal work
            work = run_shared(
                self.group,
                self.device,
                lambda peers: add(peers, x, total),
                (x, total),
                async_op,
                tag,
            )

        self.group.direct("all_reduce", moved, moved, x.dtype, reduce, tag=tag)
        return results(
            work if async_op else None,
            lambda: (
                [total]
                if len(self.shapes) == 1
                else split_flat(total, self.sizes, self.shapes, outs)
            ),
        )
