"""Plans from one mesh to another of the same world: other ranks, or the same ranks arranged in another way.

    source mesh                              both                             destination mesh
    src -- reduce what is pending --> source -- one exchange --> target -- make pending --> dst

The exchange is over the union of the ranks: each rank receives the elements that it lacks, each once, from the nearest
and least loaded rank that holds it. A sum that is reduced may end in shards on the source mesh, and one that becomes
pending may start from shards on the destination mesh; of these ways the one that moves the fewest bytes is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ....kernels.box import Box, box_size, overlap
from ....mesh.abstract_mesh import AbstractMesh
from ....mesh.topology import Topology
from ...layout.layout import Layout, told_apart
from ...layout.spec import Cut, P
from .intermediate_layouts import with_pending
from .planner import plan
from .routes import Transfer, direct
from .steps import Plan

_SPLITTABLE = ("sum", "product")  # pending kinds with a neutral element: an element may lie on one rank alone


@dataclass(frozen=True, eq=False)
class AcrossPlan:
    """What takes a tensor from a layout on one mesh to a layout on another.

    Attributes:
        reduce: on the source mesh, from `src` to a layout without pending values.
        pad: on the destination mesh, from a layout without pending values to `dst`; nothing moves.
        ranks: the global ranks of both meshes, ascending.
        transfers: the boxes of the exchange between them, by index into `ranks`; empty if every rank has what it needs.
    """

    reduce: Plan
    pad: Plan
    ranks: tuple[int, ...]
    transfers: tuple[Transfer, ...]

    @property
    def src(self) -> Layout:
        """The layout before."""
        return self.reduce.src

    @property
    def dst(self) -> Layout:
        """The layout after."""
        return self.pad.dst

    @property
    def source(self) -> Layout:
        """The layout that the exchange starts from."""
        return self.reduce.dst

    @property
    def target(self) -> Layout:
        """The layout that the exchange ends in."""
        return self.pad.src

    @property
    def launches(self) -> int:
        """Number of collectives."""
        return self.reduce.launches + bool(self.transfers) + self.pad.launches

    def bytes_received(self, rank: int) -> int:
        """Bytes that the global rank `rank` receives from others over the whole plan."""
        place = self.src.mesh.coordinate_of(rank)
        reduced = 0 if place is None else self.reduce.bytes_received(place)
        return reduced + _missing(self.source, self.target, rank) * self.dst.dtype.itemsize

    def rank_bound(self, rank: int) -> int:
        """The fewest bytes that the rank can receive: its box under `dst`, less its box under `src`. Met exactly where
        nothing is pending in either."""
        return _missing(self.src, self.dst, rank) * self.dst.dtype.itemsize

    def __repr__(self) -> str:
        steps = [repr(step) for step in self.reduce.steps]
        if self.transfers:
            steps.append(f"exchange among {len(self.ranks)} ranks: {self.source.spec} -> {self.target.spec}")
        steps += [repr(step) for step in self.pad.steps]
        return f"AcrossPlan({'; '.join(steps) or 'nothing to move'})"


def plan_across(src: Layout, dst: Layout, topology: Topology | None = None) -> AcrossPlan:
    """plan_across(src, dst) -> how a tensor goes from layout `src` to layout `dst` on another mesh.

    Every pair of a rank and a box is looked at: milliseconds for 64 ranks, two seconds for 2,000.

    Args:
        src: the layout before.
        dst: the layout after: same global shape and dtype. The ranks of an `AbstractMesh` are 0 to n-1.
        topology: links and nodes of the source mesh; by default its own. Where it tells nodes by axes, ranks outside the
            source mesh are near to none of its nodes.

    Raises:
        ValueError: the layouts are of different shapes or dtypes, on different kinds of devices, or on parts of one mesh,
            such as `mesh` and `mesh["tp"]`, which are other meshes on other ranks; what is pending in `src` is not one
            value.

    Communication: none; nothing is run.

    Example:
        >>> src = Layout.of(AbstractMesh((2,), ("x",)), P("x"), (8, 8))
        >>> dst = Layout.of(AbstractMesh((2, 2), ("a", "b")), P("a", "b"), (8, 8))
        >>> crossing = plan_across(src, dst)
        >>> crossing, [crossing.bytes_received(rank) for rank in range(4)]
        (AcrossPlan(exchange among 4 ranks: P('x', None) -> P('a', 'b')), [0, 64, 64, 64])
    """
    _check_compatible(src, dst)
    topology = src.mesh.topology if topology is None else topology
    ranks = tuple(sorted({*src.mesh.ranks.ravel().tolist(), *dst.mesh.ranks.ravel().tolist()}))
    reduce, target = _cheapest(src, dst, ranks, topology)
    have, want = boxes_on(reduce.dst, ranks), boxes_on(target, ranks)
    transfers = direct(have, want, _nodes(src, ranks, topology))
    return AcrossPlan(reduce, plan(target, dst), ranks, tuple(transfers))


def _check_compatible(src: Layout, dst: Layout) -> None:
    for what, remedy in (("shape", "a layout of the tensor's own shape"), ("dtype", "x.to(dtype) first")):
        ours, theirs = getattr(src, what), getattr(dst, what)
        if ours != theirs:
            raise ValueError(f"cannot redistribute {src} to {dst}: {what} {ours} is not {theirs}; write {remedy}")
    here, there = told_apart(src.mesh, dst.mesh)
    if len({getattr(layout.mesh, "device_type", None) for layout in (src, dst)} - {None}) > 1:
        raise ValueError(
            f"cannot redistribute {src} from {here} to {there}: they are on different kinds of devices; redistribute to a mesh "
            "of the same kind, and move the parts themselves with x.to_local().to(device)"
        )
    if _root(src.mesh) is _root(dst.mesh) and set(src.mesh.ranks.flat) != set(dst.mesh.ranks.flat):
        raise ValueError(
            f"cannot redistribute {src} from {here} to {there}: they are parts of one mesh, and ranks in other parts mean other "
            "meshes by the same words; move between layouts on one mesh, make a mesh that is the same on all ranks with "
            "DeviceMesh(device_type, ranks, axis_names=names of its own), or give every part a copy with "
            "distribute_tensor(x.full_tensor(), mesh, placements)"
        )


def _root(mesh: AbstractMesh) -> AbstractMesh:
    """The mesh that this one is a part of."""
    while mesh._origin is not None:
        mesh = mesh._origin.mesh
    return mesh


# -- boxes by rank -----------------------------------------------------------------------------------------------------


def boxes_on(layout: Layout, ranks: Sequence[int]) -> list[Box]:
    """The box of each of these global ranks; an empty one outside the layout's mesh.

    A 0-d tensor counts as one of a single element, since a 0-d box cannot be empty.
    """
    return [box_on(layout, rank) for rank in ranks]


def box_on(layout: Layout, rank: int) -> Box:
    """The box of one global rank, see `boxes_on`."""
    place = layout.mesh.coordinate_of(rank)
    if place is None:
        return ((0, 0),) * max(1, len(layout.shape))
    return layout.box_at(place) or ((0, 1),)


def _missing(src: Layout, dst: Layout, rank: int) -> int:
    """Elements of the rank's box under `dst` that are not in its box under `src`."""
    return _lacking(box_on(src, rank), box_on(dst, rank))


def _lacking(have: Box, want: Box) -> int:
    return box_size(want) - overlap(have, want)


def _nodes(src: Layout, ranks: Sequence[int], topology: Topology) -> list[int]:
    """The node of each rank."""
    mesh = src.mesh
    known = dict(zip(mesh.ranks.ravel().tolist(), topology.node_ids(mesh).ravel().tolist(), strict=True))
    if topology.node_size is not None:
        return [known.get(rank, rank // topology.node_size) for rank in ranks]
    return [known.get(rank, -1 if topology.crossing else 0) for rank in ranks]


# -- what is pending ---------------------------------------------------------------------------------------------------


class _Way(NamedTuple):
    """One way through the meshes, and what it costs; the first in order is the best."""

    total_bytes: int
    launches: int
    reduce: Plan
    target: Layout


def _cheapest(src: Layout, dst: Layout, ranks: Sequence[int], topology: Topology) -> tuple[Plan, Layout]:
    """How to reduce what is pending, and what to exchange for: together the fewest bytes into all ranks, then the
    fewest launches."""
    reductions = [plan(src, source, topology) for source in _unpended(src, [a for a, _ in src.spec.unreduced])]
    targets = _unpended(dst, [a for a, kind in dst.spec.unreduced if kind in _SPLITTABLE])
    if len(reductions) == len(targets) == 1:
        return reductions[0], targets[0]
    ways = [_way(reduce, target, ranks) for reduce, target in product(reductions, targets)]
    best = min(ways, key=lambda way: (way.total_bytes, way.launches))
    return best.reduce, best.target


def _way(reduce: Plan, target: Layout, ranks: Sequence[int]) -> _Way:
    moved = sum(map(_lacking, boxes_on(reduce.dst, ranks), boxes_on(target, ranks))) * target.dtype.itemsize
    reduced = sum(reduce.bytes_received(place) for place, _ in reduce.src.boxes()) if reduce.launches else 0
    return _Way(moved + reduced, bool(moved) + reduce.launches, reduce, target)


def _unpended(layout: Layout, axes: Sequence[str]) -> list[Layout]:
    """The layout with nothing pending: `axes` and all others replicated, or `axes` cutting one of the dims further."""
    replicated = with_pending(layout, dict.fromkeys(layout.pending))
    axes = [a for a in axes if layout.mesh.size(a) > 1]
    dims = range(len(layout.shape)) if axes else ()
    return [replicated, *(_cut_further(replicated, dim, axes) for dim in dims)]


def _cut_further(layout: Layout, dim: int, axes: Sequence[str]) -> Layout:
    cuts = list(layout.spec.cuts)
    cuts[dim] = (*cuts[dim], *[Cut((axis,)) for axis in axes])
    return layout.replace(P.of_cuts(cuts, {}))
