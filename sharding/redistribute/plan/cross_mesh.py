"""Plans from one mesh to another of the same world: to other ranks, or to another order.

    source mesh                              both                             destination mesh
    src -- reduce pending values --> source -- all_to_all_v --> target -- make pending --> dst

The all_to_all_v is over the union of the ranks: each rank receives each element that it lacks once,
from the nearest and least loaded rank that holds it. A reduced sum may end in shards on the source
mesh, and one that becomes pending may start from shards on the destination mesh; of these
alternatives the one that moves the fewest bytes is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ....kernels.box import Box, box_size, overlap
from ....mesh.abstract_mesh import AbstractMesh
from ....mesh.topology import Topology
from ...layout.layout import Layout, distinct_mesh_names
from ...layout.spec import Cut, P
from .intermediate_layouts import with_pending
from .planner import plan
from .routes import Transfer, direct
from .steps import Plan
from .traffic import plan_bytes_received

# pending kinds of which an element may be on one rank alone
_WITH_NEUTRAL_ELEMENT = "sum", "product"


@dataclass(frozen=True, eq=False)
class CrossMeshPlan:
    """How a tensor goes from a layout on one mesh to a layout on another.

    Attributes:
        reduce: on the source mesh, from `src` to a layout without pending values.
        pad: on the destination mesh, from a layout without pending values to `dst`; without
            communication.
        ranks: the global ranks of both meshes, ascending.
        transfers: the boxes of the all_to_all_v between them, by index into `ranks`; empty if every
            rank has what it needs.
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
        """The layout before the all_to_all_v."""
        return self.reduce.dst

    @property
    def target(self) -> Layout:
        """The layout after the all_to_all_v."""
        return self.pad.src

    @property
    def launches(self) -> int:
        """Number of collectives."""
        return self.reduce.launches + bool(self.transfers) + self.pad.launches

    def bytes_received(self, rank: int) -> int:
        """Return the bytes that a global rank receives from others over the whole plan."""
        coordinate = self.src.mesh.coordinate_of(rank)
        reduced = 0 if coordinate is None else plan_bytes_received(self.reduce, coordinate)
        return (
            reduced
            + _missing(box_on(self.source, rank), box_on(self.target, rank))
            * self.dst.dtype.itemsize
        )

    def rank_bound(self, rank: int) -> int:
        """Return the fewest bytes that a global rank can receive: its box after less that before.

        The plan receives exactly that if nothing is pending in either layout.
        """
        return _missing(box_on(self.src, rank), box_on(self.dst, rank)) * self.dst.dtype.itemsize

    def __repr__(self) -> str:
        steps = [repr(step) for step in self.reduce.steps]
        if self.transfers:
            steps.append(
                f"all_to_all_v among {len(self.ranks)} ranks: {self.source.spec} -> "
                f"{self.target.spec}"
            )
        steps += [repr(step) for step in self.pad.steps]
        return f"CrossMeshPlan({'; '.join(steps) or 'nothing to move'})"


def plan_cross_mesh(src: Layout, dst: Layout, topology: Topology | None = None) -> CrossMeshPlan:
    """plan_cross_mesh(src, dst) -> how a tensor goes from layout `src` to `dst` on another mesh.

    Every pair of a rank and a box is compared: milliseconds for 64 ranks, two seconds for 2,000.

    Args:
        src: the layout before.
        dst: the layout after: same global shape and dtype. The ranks of an `AbstractMesh` are 0 to
            n-1.
        topology: links and nodes of the source mesh; by default its own. If it gives nodes by axes,
            ranks outside the source mesh count as being in none of its nodes.

    Raises:
        ValueError: the layouts have different shapes or dtypes, or are on different kinds of
            devices; they are on parts of one mesh, such as `mesh` and `mesh["tp"]`, which mean
            different meshes on different ranks; `src` is pending in a way that is not one value.

    Communication: none; nothing is run.

    Example:
        >>> src = Layout.of(AbstractMesh((2,), ("x",)), P("x"), (8, 8))
        >>> dst = Layout.of(AbstractMesh((2, 2), ("a", "b")), P("a", "b"), (8, 8))
        >>> found = plan_cross_mesh(src, dst)
        >>> found, [found.bytes_received(rank) for rank in range(4)]
        (CrossMeshPlan(all_to_all_v among 4 ranks: P('x', None) -> P('a', 'b')), [0, 64, 64, 64])
    """
    _check_compatible(src, dst)
    topology = src.mesh.topology if topology is None else topology
    ranks = tuple(sorted({*src.mesh.ranks.ravel().tolist(), *dst.mesh.ranks.ravel().tolist()}))
    reduce, target = _cheapest(src, dst, ranks, topology)
    transfers = direct(
        _boxes_on(reduce.dst, ranks), _boxes_on(target, ranks), nodes_of(src, ranks, topology)
    )
    return CrossMeshPlan(reduce, plan(target, dst), ranks, tuple(transfers))


def _check_compatible(src: Layout, dst: Layout) -> None:
    for name, remedy in (
        ("shape", "pass a layout of the tensor's own shape"),
        ("dtype", "write x.to(dtype) first"),
    ):
        src_value, dst_value = getattr(src, name), getattr(dst, name)
        if src_value != dst_value:
            raise ValueError(
                f"cannot redistribute {src} to {dst}: the {name} must be the same, got {src_value} "
                f"and {dst_value}; {remedy}"
            )
    src_mesh, dst_mesh = distinct_mesh_names(src.mesh, dst.mesh)
    if len({getattr(layout.mesh, "device_type", None) for layout in (src, dst)} - {None}) > 1:
        raise ValueError(
            f"cannot redistribute {src} from {src_mesh} to {dst_mesh}: they are on different kinds "
            "of devices; redistribute to a mesh of the same kind, and move the parts themselves "
            "with x.to_local().to(device)"
        )
    if _root(src.mesh) is _root(dst.mesh) and set(src.mesh.ranks.flat) != set(dst.mesh.ranks.flat):
        raise ValueError(
            f"cannot redistribute {src} from {src_mesh} to {dst_mesh}: they are parts of one mesh, "
            "and the same words mean another mesh on ranks in other parts; move between layouts on "
            "one mesh, make a mesh that is the same on all ranks with DeviceMesh(device_type, "
            "ranks, axis_names=names of its own), or give every part a copy with "
            "distribute_tensor(x.full_tensor(), mesh, placements)"
        )


def _root(mesh: AbstractMesh) -> AbstractMesh:
    """Return the mesh that this one is a part of, directly or not."""
    while mesh._origin is not None:
        mesh = mesh._origin.mesh
    return mesh


# -- boxes by rank ---------------------------------------------------------------------------------


def _boxes_on(layout: Layout, ranks: Sequence[int]) -> list[Box]:
    return [box_on(layout, rank) for rank in ranks]


def box_on(layout: Layout, rank: int) -> Box:
    """Return the box of a global rank; an empty one outside the layout's mesh.

    A 0-d tensor counts as one of a single element, since a 0-d box cannot be empty.
    """
    coordinate = layout.mesh.coordinate_of(rank)
    if coordinate is None:
        return ((0, 0),) * max(1, len(layout.shape))
    return layout.box_at(coordinate) or ((0, 1),)


def _missing(have: Box, want: Box) -> int:
    """Return the elements of a box after that are not in the box before."""
    return box_size(want) - overlap(have, want)


def nodes_of(src: Layout, ranks: Sequence[int], topology: Topology) -> list[int]:
    """Return the node of each global rank."""
    mesh = src.mesh
    known = dict(
        zip(mesh.ranks.ravel().tolist(), topology.node_ids(mesh).ravel().tolist(), strict=True)
    )
    if topology.node_size is not None:
        return [known.get(rank, rank // topology.node_size) for rank in ranks]
    return [known.get(rank, -1 if topology.crossing else 0) for rank in ranks]


# -- pending values --------------------------------------------------------------------------------


class _Candidate(NamedTuple):
    """One way through the meshes and its cost; the first in order is the best."""

    total_bytes: int
    launches: int
    reduce: Plan
    target: Layout


def _cheapest(
    src: Layout, dst: Layout, ranks: Sequence[int], topology: Topology
) -> tuple[Plan, Layout]:
    """Return how to reduce pending values, and the layout to move to.

    Together they take the fewest bytes received by all ranks, then the fewest launches.
    """
    reductions = [
        plan(src, source, topology)
        for source in _without_pending(src, [a for a, _ in src.spec.unreduced])
    ]
    targets = _without_pending(
        dst, [a for a, kind in dst.spec.unreduced if kind in _WITH_NEUTRAL_ELEMENT]
    )
    if len(reductions) == len(targets) == 1:
        return reductions[0], targets[0]
    best = min(
        (_candidate(*pair, ranks) for pair in product(reductions, targets)),
        key=lambda c: (c.total_bytes, c.launches),
    )
    return best.reduce, best.target


def _candidate(reduce: Plan, target: Layout, ranks: Sequence[int]) -> _Candidate:
    moved = (
        sum(map(_missing, _boxes_on(reduce.dst, ranks), _boxes_on(target, ranks)))
        * target.dtype.itemsize
    )
    reduced = (
        sum(plan_bytes_received(reduce, c) for c, _ in reduce.src.boxes()) if reduce.launches else 0
    )
    return _Candidate(moved + reduced, bool(moved) + reduce.launches, reduce, target)


def _without_pending(layout: Layout, axes: Sequence[str]) -> list[Layout]:
    """Return layouts with nothing pending: the axes replicated, or `axes` cutting a dim further."""
    replicated = with_pending(layout, dict.fromkeys(layout.pending))
    extra = tuple(Cut((a,)) for a in axes if layout.mesh.size(a) > 1)
    layouts = [replicated]
    for dim in range(len(layout.shape)) if extra else ():
        cuts = list(replicated.spec.cuts)
        cuts[dim] = (*cuts[dim], *extra)
        layouts.append(replicated.replace(P.of_cuts(cuts, {})))
    return layouts
