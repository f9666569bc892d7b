"""Owners of matrices: gather each at one rank with one all_to_all, scatter results with another.

    rows split              at the owners            rows split again
    rank 0   [A0] [B0]      rank 0   [A]             rank 0   [A0] [B0]
    rank 1   [A1] [B1]  ->  rank 1       [B]     ->  rank 1   [A1] [B1]

Owners are chosen to balance the work over all ranks of the mesh. The owner of a matrix that some
ranks have whole is one of these, so it is not gathered; if that holds for all matrices, there is no
collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.box import Box, box_origin, box_shape, box_size, intersect, slices
from ...mesh.comm.group import Group
from ...mesh.comm.recording.recorder import CommTag
from ...mesh.comm.recording.trace_buffer import stable_hash
from ...mesh.device_mesh import DeviceMesh
from ..layout.bounded_cache import HEAVY_LIMIT, LayoutCache
from ..layout.layout import Layout
from ..layout.spec import P
from ..redistribute.all_to_all import AllToAllV, TensorShare
from ..redistribute.plan.routes import Transfer


class MatrixUnit(NamedTuple):
    """A matrix, or a block of one, that one rank processes.

    Attributes:
        tensor: the index of its tensor.
        box: its part of the tensor, usually all of it.
        work: its cost, in any measure.
    """

    tensor: int
    box: Box
    work: int


class Owners:
    """The owners of units on one mesh, and the exchanges with them, prepared on this rank.

    The rank must be in the mesh.

    Attributes:
        units: the units.
        owner: for each unit, the index of its owner in the mesh's group.
        own_units: the indices of the units that this rank owns.
    """

    def __init__(
        self, layouts: Sequence[Layout], units: Sequence[MatrixUnit], dtype: torch.dtype
    ) -> None:
        """`layouts`: of tensors on one mesh, nothing pending; `dtype`: that of communication."""
        mesh: Any = layouts[0].mesh
        self.group: Group = mesh.group()
        name = f"{len(layouts)} matrices, {stable_hash(str([str(x) for x in layouts])):x}"
        self.units = units
        self._to_tag = CommTag(f"{name} to their owners")
        self._from_tag = CommTag(f"{name} back from their owners")
        places = [mesh.coordinate_of(rank) for rank in self.group.ranks]
        me = self.group.rank
        held = _held_parts(layouts, units, places)
        self.owner = assign(units, held)
        self.own_units = tuple(i for i, owner in enumerate(self.owner) if owner == me)
        nodes = [int(mesh.topology.node_ids(mesh)[place]) for place in places]
        loads = [0] * len(places)
        to_owners, from_owners, self._pieces = [], [], []
        for unit, owner, pieces in zip(units, self.owner, held, strict=True):
            nothing: Box = ((0, 0),) * len(unit.box)
            have = layouts[unit.tensor].box
            piece = pieces[me] or nothing
            whole = unit.box if owner == me else nothing
            to_owners.append((_transfers_to_owner(owner, pieces, nodes, loads), have, whole))
            from_owners.append((_transfers_from_owner(owner, pieces), whole, piece))
            self._pieces.append(slices(piece, box_origin(have)))
        self._to_owners = self._exchange(to_owners, dtype)
        self._from_owners = self._exchange(from_owners, dtype)

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole unit for each owned one, an empty tensor for others, from local parts.

        Communication: one all_to_all.
        """
        return self._to_owners([parts[unit.tensor] for unit in self.units], tag=self._to_tag)

    def scatter(self, done: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Write the owners' units into local parts, in place. Communication: one all_to_all."""
        pieces = self._from_owners(list(done), tag=self._from_tag)
        for unit, index, piece in zip(self.units, self._pieces, pieces, strict=True):
            if piece.numel():
                into[unit.tensor][index].copy_(piece)

    def _exchange(
        self, moves: Sequence[tuple[list[Transfer], Box, Box]], dtype: torch.dtype
    ) -> Callable[..., Any]:
        """Return one exchange for all units.

        Each has the transfers of all ranks, and this rank's box before and after.
        """
        shares = [_share(transfers, have, want, self.group) for transfers, have, want in moves]
        return (
            AllToAllV(self.group, dtype, shares).start
            if any(transfers for transfers, *_ in moves)
            else _local_copy(shares, dtype)
        )


_owners: LayoutCache[tuple[Any, ...], Owners] = LayoutCache(HEAVY_LIMIT)


def owners_of(
    layouts: tuple[Layout, ...], units: tuple[MatrixUnit, ...], dtype: torch.dtype
) -> Owners:
    """Return the cached owners for these arguments. Communication: none."""
    return _cached_owners(layouts, units, dtype, lambda: units)


def owners_of_matrices(
    layouts: tuple[Layout, ...],
    flattened: tuple[bool, ...],
    work: Callable[[int, int], int],
    dtype: torch.dtype,
) -> Owners:
    """Return the cached owners of all matrices of these tensors, see `matrix_units`.

    Communication: none.
    """
    return _cached_owners(
        layouts,
        (flattened, work),
        dtype,
        lambda: matrix_units([layout.shape for layout in layouts], flattened, work),
    )


def _cached_owners(
    layouts: tuple[Layout, ...],
    key: Hashable,
    dtype: torch.dtype,
    make_units: Callable[[], tuple[MatrixUnit, ...]],
) -> Owners:
    """Return the owners of the units that `key` determines together with the layouts."""
    owners = _owners.get(layouts[0], (layouts, key, dtype))
    if owners is None:
        owners = Owners(layouts, make_units(), dtype)
        _owners.keep(layouts[0], (layouts, key, dtype), owners)
    return owners


Pieces = Sequence[Box | None]  # by rank


def _held_parts(
    layouts: Sequence[Layout], units: Sequence[MatrixUnit], places: Sequence[Sequence[int]]
) -> list[Pieces]:
    """Return for each unit the part that each rank has; computed once per layout and box."""
    parts: dict[tuple[Layout, Box], Pieces] = {}
    for unit in units:
        layout = layouts[unit.tensor]
        if (layout, unit.box) not in parts:
            parts[layout, unit.box] = [
                intersect(layout.box_at(place), unit.box) for place in places
            ]
    return [parts[layouts[unit.tensor], unit.box] for unit in units]


def assign(units: Sequence[MatrixUnit], held: Sequence[Pieces]) -> tuple[int, ...]:
    """Return the owner of each unit: the largest first, to the rank with the least work so far.

    Graham 1969, "Bounds on multiprocessing timing anomalies": the maximum load is at most 4/3 of
    the optimum.

    Args:
        held: for each unit, the part that each rank has; a unit that some ranks have whole goes to
            one of them.
    """
    loads = [0] * len(held[0])
    owner = [0] * len(units)
    for i in sorted(range(len(units)), key=lambda i: -units[i].work):
        ranks = [rank for rank, piece in enumerate(held[i]) if piece == units[i].box] or range(
            len(loads)
        )
        owner[i] = min(ranks, key=lambda rank: loads[rank])
        loads[owner[i]] += units[i].work
    return tuple(owner)


def layout_at(mesh: DeviceMesh, owner: int, shape: Sequence[int], dtype: torch.dtype) -> Layout:
    """Return the layout of a tensor that is whole at its owner.

    The owner is an index in the mesh's group: P(axes, sizes=(0, .., rows, .., 0)).
    """
    ranks = mesh.ranks.ravel().tolist()
    sizes = [0] * len(ranks)
    sizes[ranks.index(mesh.group().ranks[owner])] = shape[0]
    return Layout.of(mesh, P(mesh.axis_names, sizes={mesh.axis_names: sizes}), shape, dtype)


def _transfers_to_owner(
    owner: int, pieces: Pieces, nodes: Sequence[int], loads: list[int]
) -> list[Transfer]:
    """Return the transfers of what an owner lacks.

    From its own node if possible, from the rank that sends the least so far.
    """
    holders: dict[Box, list[int]] = {}
    for rank, piece in enumerate(pieces):
        if piece is not None:
            holders.setdefault(piece, []).append(rank)
    transfers = []
    for box, ranks in holders.items():
        if owner not in ranks:
            sender = min(ranks, key=lambda rank: (nodes[rank] != nodes[owner], loads[rank]))
            loads[sender] += box_size(box)
            transfers.append(Transfer(sender, owner, box))
    return transfers


def _transfers_from_owner(owner: int, pieces: Pieces) -> list[Transfer]:
    """Return the transfers from the owner to other ranks that hold parts."""
    return [
        Transfer(owner, rank, piece)
        for rank, piece in enumerate(pieces)
        if piece is not None and rank != owner
    ]


def _share(moves: Sequence[Transfer], have: Box, want: Box, group: Group) -> TensorShare:
    """Return the parts of one unit that this rank sends, receives and keeps."""
    sends, recvs = ([[] for _ in group.ranks] for _ in range(2))
    for sender, receiver, box in moves:
        if sender == group.rank:
            sends[receiver].append(box)
        elif receiver == group.rank:
            recvs[sender].append(box)
    return TensorShare(have, want, sends, recvs, intersect(have, want))


def _local_copy(shares: Sequence[TensorShare], dtype: torch.dtype) -> Callable[..., list[Tensor]]:
    """Return the local copy for units that need no communication."""
    cuts = [
        None if share.keep is None else slices(share.keep, box_origin(share.have))
        for share in shares
    ]
    shapes = [box_shape(share.want) for share in shares]

    def run(tensors: list[Tensor], tag: CommTag) -> list[Tensor]:
        return [
            x.new_empty(shape, dtype=dtype) if cut is None else x[cut].to(dtype)
            for x, cut, shape in zip(tensors, cuts, shapes, strict=True)
        ]

    return run


def matrix_units(
    shapes: Sequence[Sequence[int]], flattened: Sequence[bool], work: Callable[[int, int], int]
) -> tuple[MatrixUnit, ...]:
    """Return a unit for each matrix that has elements.

    Args:
        shapes: of the tensors, each of two dims or more.
        flattened: for each, whether it is one matrix, of its first dim by all others, and not a
            stack of matrices of its last two.
        work: rows, columns -> the cost of a matrix.
    """
    units = []
    for tensor, (shape, is_one) in enumerate(zip(shapes, flattened, strict=True)):
        rows, columns = matrix_shape(shape, is_one)
        if rows * columns:
            cost = work(rows, columns)
            units += [MatrixUnit(tensor, box, cost) for box in _boxes_of_matrices(shape, is_one)]
    return tuple(units)


def matrix_shape(shape: Sequence[int], is_flattened: bool) -> tuple[int, int]:
    """Return the rows and columns of the matrices of a tensor, see `matrix_units`."""
    return (shape[0], math.prod(shape[1:])) if is_flattened else (shape[-2], shape[-1])


def _boxes_of_matrices(shape: Sequence[int], is_flattened: bool) -> Iterator[Box]:
    whole = tuple((0, n) for n in shape)
    leading = () if is_flattened else shape[:-2]
    for place in product(*map(range, leading)):
        yield (*((i, i + 1) for i in place), *whole[len(leading) :])
