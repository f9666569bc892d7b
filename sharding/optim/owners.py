"""Matrices that one rank each works on whole: all travel to their owners in one all_to_all, and what becomes of them back in one.

    rows split              by owner                 back, rows split
    rank 0   [A0] [B0]      rank 0   [A]             rank 0   [A0] [B0]
    rank 1   [A1] [B1]  ->  rank 1       [B]     ->  rank 1   [A1] [B1]

Owners are chosen so that all ranks of the mesh have about equally much to do. What a rank has whole already stays with it (or with one
of those that have it), so it costs nothing on the way there; where that is so of all, there is no collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.box import Box, box_origin, box_shape, box_size, intersect, slices
from ...mesh.comm.group import Group
from ...mesh.device_mesh import DeviceMesh
from ...mesh.monitor.recording.recorder import CommTag
from ...mesh.monitor.recording.trace_buffer import stable_hash
from ..layout.bounded_cache import keep
from ..layout.layout import Layout
from ..layout.spec import P
from ..redistribute.all_to_all import AllToAllV, TensorShare
from ..redistribute.plan.routes import Transfer

_NOTHING: Box = ((0, 0), (0, 0))


class Unit(NamedTuple):
    """What one rank works on whole.

    Attributes:
        tensor: the number of the tensor it is of.
        box: what part of it, as a rule all.
        work: how much there is to do, in any measure.
    """

    tensor: int
    box: Box
    work: int


class Owners:
    """Units of matrices on one mesh with an owner each, made ready on this rank, which is in the mesh.

    Attributes:
        owner: by unit, the index in the mesh's group of the rank that works on it.
        mine: the numbers of the units that this rank owns.
    """

    def __init__(self, layouts: Sequence[Layout], units: Sequence[Unit], dtype: torch.dtype) -> None:
        """The tensors' layouts, on one mesh and with nothing pending; the dtype in which they travel, both ways."""
        mesh: Any = layouts[0].mesh
        self.group: Group = mesh.group()
        self._units, self._name = units, f"{len(layouts)} matrices, {stable_hash(str([str(x) for x in layouts])):x}"
        places, me = [mesh.coordinate_of(rank) for rank in self.group.ranks], self.group.rank
        held = _held(layouts, units, places)
        self.owner = assign(units, held)
        self.mine = tuple(i for i, owner in enumerate(self.owner) if owner == me)
        nodes, loads = [int(mesh.topology.node_ids(mesh)[place]) for place in places], [0] * len(places)
        there, back, self._pieces = [], [], []
        for unit, owner, pieces in zip(units, self.owner, held, strict=True):
            have, piece, whole = layouts[unit.tensor].box, pieces[me] or _NOTHING, unit.box if owner == me else _NOTHING
            there.append((_fetched(owner, pieces, nodes, loads), have, whole))
            back.append((_returned(owner, pieces), whole, piece))
            self._pieces.append(slices(piece, box_origin(have)))
        self._there, self._back = self._exchange(there, dtype), self._exchange(back, dtype)

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """By tensor this rank's part -> by unit the whole, no elements where another rank owns it. Communication: one all_to_all."""
        return self._run(self._there, [parts[unit.tensor] for unit in self._units], "to their owners")

    def scatter(self, done: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """What `gather` gave, after the work -> by tensor, this rank's part, in place. Communication: one all_to_all."""
        pieces = self._run(self._back, list(done), "back from their owners")
        for unit, index, piece in zip(self._units, self._pieces, pieces, strict=True):
            if piece.numel():
                into[unit.tensor][index].copy_(piece)

    def _run(self, run: Callable[[list[Tensor]], Any], tensors: list[Tensor], way: str) -> list[Tensor]:
        context = self.group.world.comm_context
        context.tag = CommTag(f"{self._name} {way}")
        try:
            return run(tensors)
        finally:
            context.tag = None

    def _exchange(self, moves: Sequence[tuple[list[Transfer], Box, Box]], dtype: torch.dtype) -> Callable[[list[Tensor]], Any]:
        """One for all units, of which each has the transfers of all ranks, and this rank's box before and after."""
        shares = [_share(transfers, have, want, self.group) for transfers, have, want in moves]
        return AllToAllV(self.group, dtype, shares).start if any(transfers for transfers, *_ in moves) else _staying(shares, dtype)


def owners_of(layouts: tuple[Layout, ...], units: tuple[Unit, ...], dtype: torch.dtype) -> Owners:
    """The same each time, for the same arguments. Communication: none."""
    key = "owners", layouts, units, dtype
    return layouts[0].runners.get(key) or keep(layouts[0].runners, key, Owners(layouts, units, dtype))


Pieces = Sequence[Box | None]  # by rank


def _held(layouts: Sequence[Layout], units: Sequence[Unit], places: Sequence[Sequence[int]]) -> list[Pieces]:
    """By unit, what each rank has of it; worked out once where several lie alike, as most do."""
    found: dict[tuple[Layout, Box], Pieces] = {}
    for unit in units:
        layout = layouts[unit.tensor]
        if (layout, unit.box) not in found:
            found[layout, unit.box] = [intersect(layout.box_at(place), unit.box) for place in places]
    return [found[layouts[unit.tensor], unit.box] for unit in units]


def assign(units: Sequence[Unit], held: Sequence[Pieces]) -> tuple[int, ...]:
    """The owner of each unit: the one with the most work goes first, to the rank that has the least to do so far.

    Graham 1969, "Bounds on multiprocessing timing anomalies": the busiest has at most 4/3 of what the best choice would give it.

    Args:
        held: by unit, what each rank has of it; of a unit that some have whole, one of them is the owner.
    """
    loads, owner = [0] * len(held[0]), [0] * len(units)
    for i in sorted(range(len(units)), key=lambda i: -units[i].work):
        ranks = [rank for rank, piece in enumerate(held[i]) if piece == units[i].box] or range(len(loads))
        owner[i] = min(ranks, key=lambda rank: loads[rank])
        loads[owner[i]] += units[i].work
    return tuple(owner)


def layout_at(mesh: DeviceMesh, owner: int, shape: Sequence[int], dtype: torch.dtype) -> Layout:
    """The layout of a tensor that is whole at its owner, an index in the mesh's group: P(axes, sizes=(0, .., rows, .., 0))."""
    ranks = mesh.ranks.ravel().tolist()
    sizes = [0] * len(ranks)
    sizes[ranks.index(mesh.group().ranks[owner])] = shape[0]
    return Layout.of(mesh, P(mesh.axis_names, sizes={mesh.axis_names: sizes}), shape, dtype)


def _fetched(owner: int, pieces: Pieces, nodes: Sequence[int], loads: list[int]) -> list[Transfer]:
    """What an owner lacks, each element once: from a rank of its own node if one has it, the one that has sent the least so far."""
    holders: dict[Box, list[int]] = {}
    for rank, piece in enumerate(pieces):
        if piece is not None:
            holders.setdefault(piece, []).append(rank)
    found = []
    for box, ranks in holders.items():
        if owner not in ranks:
            sender = min(ranks, key=lambda rank: (nodes[rank] != nodes[owner], loads[rank]))
            loads[sender] += box_size(box)
            found.append(Transfer(sender, owner, box))
    return found


def _returned(owner: int, pieces: Pieces) -> list[Transfer]:
    """What the other ranks hold of what the owner has."""
    return [Transfer(owner, rank, piece) for rank, piece in enumerate(pieces) if piece is not None and rank != owner]


def _share(moves: Sequence[Transfer], have: Box, want: Box, group: Group) -> TensorShare:
    """What this rank sends, receives and keeps of one unit."""
    sends, recvs = ([[] for _ in group.ranks] for _ in range(2))
    for sender, receiver, box in moves:
        if sender == group.rank:
            sends[receiver].append(box)
        elif receiver == group.rank:
            recvs[sender].append(box)
    return TensorShare(have, want, sends, recvs, intersect(have, want))


def _staying(shares: Sequence[TensorShare], dtype: torch.dtype) -> Callable[[list[Tensor]], list[Tensor]]:
    """Where every rank has all that it needs."""
    cuts = [None if share.kept is None else slices(share.kept, box_origin(share.have)) for share in shares]
    shapes = [box_shape(share.want) for share in shares]

    def run(tensors: list[Tensor]) -> list[Tensor]:
        return [
            x.new_empty(shape, dtype=dtype) if cut is None else x[cut].to(dtype)
            for x, cut, shape in zip(tensors, cuts, shapes, strict=True)
        ]

    return run


def whole_units(shapes: Sequence[Sequence[int]], work: Callable[[int, int], int]) -> tuple[Unit, ...]:
    """A unit for each matrix that has elements, which is all of it."""
    boxes = [tuple((0, n) for n in shape) for shape in shapes]
    return tuple(Unit(i, box, work(*box_shape(box))) for i, box in enumerate(boxes) if box_size(box))
