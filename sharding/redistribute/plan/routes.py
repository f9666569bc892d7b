"""Who sends which box to whom: the routes of the exchanges.

    direct      every element that a rank lacks comes once, from the nearest and least loaded rank that holds it
    two-phase   every element that a node lacks comes to it once; then the ranks of the node share

All of it is worked out from boxes alone, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from ....kernels.box import Box, box_size, intersect
from ...layout.layout import Layout, chunk
from .overlap import Coordinate, meeting
from .steps import Step

Peers = list[tuple[Coordinate, Box]]


@dataclass(frozen=True)
class Route:
    """What one rank sends to others and receives from others, in mesh order of the others.

    Attributes:
        sends: (to whom, the box), of the global tensor.
        recvs: (from whom, the box).
    """

    sends: Peers
    recvs: Peers


class Transfer(NamedTuple):
    """One box on its way; ranks are indices into the group's members."""

    sender: int
    receiver: int
    box: Box


def routes(step: Step, coordinate: Coordinate) -> tuple[Route, ...]:
    """What the rank at `coordinate` sends and receives in each collective of an exchange (one; two in two phases)."""
    if step.topology is None:
        return (_column_route(step, coordinate),)
    if step.op == "two_phase" and shares_evenly(step):
        return _shared_routes(step, coordinate)
    people = members(step, coordinate)
    me = people.index(coordinate)
    return tuple(_route_of(me, people, transfers) for transfers in group_transfers(step, people[0]))


def members(step: Step, coordinate: Coordinate) -> list[Coordinate]:
    """Coordinates of the ranks of a step's group, in mesh order."""
    return members_along(step.src, step.axes, coordinate)


def members_along(layout: Layout, axes: Sequence[str], coordinate: Coordinate) -> list[Coordinate]:
    """Coordinates of the ranks that differ from one only along these axes, in mesh order."""
    mesh = layout.mesh
    spans = [range(n) if a in axes else (k,) for a, n, k in zip(mesh.axis_names, mesh.shape, coordinate, strict=True)]
    return list(product(*spans))


def _column_route(step: Step, coordinate: Coordinate) -> Route:
    """Where the group holds every part once (every contribution, for a reduction): simply all boxes that meet."""
    have, want = step.src.box_at(coordinate), step.dst.box_at(coordinate)
    sends = meeting(step.dst, have, coordinate, step.axes)
    recvs = meeting(step.src, want, coordinate, step.axes)
    return Route([s for s in sends if s[0] != coordinate], [r for r in recvs if r[0] != coordinate])


def _route_of(me: int, people: Sequence[Coordinate], transfers: Sequence[Transfer]) -> Route:
    return Route(
        [(people[t.receiver], t.box) for t in transfers if t.sender == me],
        [(people[t.sender], t.box) for t in transfers if t.receiver == me],
    )


@lru_cache(maxsize=64)
def group_transfers(step: Step, first: Coordinate) -> tuple[list[Transfer], ...]:
    """The transfers of the group whose first member is at `first`, by collective."""
    people = members(step, first)
    have, want = [step.src.box_at(c) for c in people], [step.dst.box_at(c) for c in people]
    nodes = _nodes(step, people)
    return two_phase(have, want, nodes) if step.op == "two_phase" else (direct(have, want, nodes),)


def _nodes(step: Step, people: Sequence[Coordinate]) -> list[int]:
    ids = step.topology.node_ids(step.src.mesh) if step.topology else None
    return [0 if ids is None else int(ids[c]) for c in people]


def direct(have: Sequence[Box], want: Sequence[Box], nodes: Sequence[int]) -> list[Transfer]:
    """Each rank's missing elements, each once: from a holder in its own node if there is one, the least loaded so far.

    Args:
        have: the box of each rank before; two are equal or disjoint.
        want: the box of each rank after.
        nodes: the node of each rank.
    """
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(have):
        if box_size(box):
            holders.setdefault(box, []).append(rank)
    found = []
    for box, owners in holders.items():
        load = dict.fromkeys(owners, 0)
        for rank, wanted in enumerate(want):
            common = None if rank in load else intersect(box, wanted)
            if common is not None:
                sender = min(owners, key=_nearest(rank, nodes, load, len(have)))
                load[sender] += box_size(common)
                found.append(Transfer(sender, rank, common))
    return sorted(found, key=lambda t: (t.sender, t.receiver))


def _nearest(rank: int, nodes: Sequence[int], load: dict[int, int], n: int) -> Callable[[int], tuple[bool, int, int]]:
    return lambda owner: (nodes[owner] != nodes[rank], load[owner], (owner - rank) % n)


# -- two phases -------------------------------------------------------------------------------------------------------

def shares_evenly(step: Step) -> bool:
    """Whether every node of the group is a set of replicas that want the same: then each fetches one piece of everything,
    and routes follow by arithmetic, on any mesh."""
    if step.topology is None:
        return False
    mesh, inner, leaving = step.src.mesh, _inner(step), _outer(step)
    if not inner or any(a in step.dst.dim_of for a in inner) or set(inner) & set(step.topology.crossing_axes(mesh)):
        return False
    nodes = step.topology.node_ids(mesh)
    corners = [tuple(0 for _ in mesh.shape), tuple(n - 1 for n in mesh.shape)]
    groups = [[int(nodes[c]) for c in members_along(step.src, leaving, corner)] for corner in corners]
    return all(len(set(found)) == len(found) for found in groups)


def _inner(step: Step) -> tuple[str, ...]:
    return tuple(a for a in step.axes if a not in step.src.dim_of)


def _outer(step: Step) -> tuple[str, ...]:
    return tuple(a for a in step.axes if a in step.src.dim_of)


def _shared_routes(step: Step, me: Coordinate) -> tuple[Route, Route]:
    """First my piece of every box that comes from another node, from my like there; then the others' pieces."""
    peers = members_along(step.src, _inner(step), me)
    mine = peers.index(me)
    wanted = [(c, box) for c, box in meeting(step.src, step.dst.box_at(me), me, _outer(step)) if c != me]
    asked = [(c, box) for c, box in meeting(step.dst, step.src.box_at(me), me, _outer(step)) if c != me]

    def pieces(boxes: Peers, index: int) -> Peers:
        cut = [(c, _piece(box, len(peers), index)) for c, box in boxes]
        return [(c, box) for c, box in cut if box_size(box)]

    passed = [box for _, box in pieces(wanted, mine)]
    sends = [(peer, box) for peer in peers if peer != me for box in passed]
    recvs = [(peer, box) for i, peer in enumerate(peers) if peer != me for _, box in pieces(wanted, i)]
    return Route(pieces(asked, mine), pieces(wanted, mine)), Route(sends, recvs)


MAX_CELLS = 1 << 16  # beyond this, two phases are not considered: planning them would take seconds


def cells(have: Sequence[Box], want: Sequence[Box]) -> int:
    """How many cells the two-phase exchange would look at."""
    return prod(max(len(points) - 1, 0) for points in _cut_points(have, want))


def two_phase(have: Sequence[Box], want: Sequence[Box], nodes: Sequence[int]) -> tuple[list[Transfer], list[Transfer]]:
    """Between nodes, each element that a node lacks once; then inside, what each rank still lacks.

    The tensor is cut into cells by all borders of boxes, so that each rank holds or wants a cell entirely or not at
    all. A cell that enters a node is divided among the ranks that want it, and each passes its piece on to the others.

    Args and result are those of `direct`, for the two collectives.
    """
    first, second = [], []
    sent, entered, shared = [0] * len(have), [0] * len(have), [0] * len(have)
    for cell, holders, wanters in _cells(have, want):
        for node in dict.fromkeys(nodes[r] for r in wanters):
            here = [r for r in wanters if nodes[r] == node and r not in holders]
            inside = [r for r in holders if nodes[r] == node]
            if inside:
                second += [Transfer(_take(inside, shared, cell), rank, cell) for rank in here]
                continue
            here.sort(key=lambda r: entered[r])
            for rank, piece in zip(here, _pieces(cell, len(here)), strict=False):
                first.append(Transfer(_take(sorted(holders), sent, piece), rank, piece))
                entered[rank] += box_size(piece)
                second += [Transfer(rank, other, piece) for other in here if other != rank]
    return _in_order(first), _in_order(second)


def _in_order(transfers: list[Transfer]) -> list[Transfer]:
    return sorted(transfers, key=lambda t: (t.sender, t.receiver))


def _take(owners: Sequence[int], load: list[int], box: Box) -> int:
    """The least loaded of the owners, charged with the box."""
    chosen = min(owners, key=load.__getitem__)
    load[chosen] += box_size(box)
    return chosen


def _pieces(cell: Box, n: int) -> list[Box]:
    """The cell in at most n parts, along its longest dim."""
    return [piece for i in range(n) if box_size(piece := _piece(cell, n, i))]


def _piece(cell: Box, n: int, index: int) -> Box:
    """One of n parts of the cell, along its longest dim; the last ones may be empty."""
    if not cell:
        return cell if index == 0 else ((0, 0),)
    dim = max(range(len(cell)), key=lambda d: cell[d][1] - cell[d][0])
    return (*cell[:dim], chunk(*cell[dim], n, index), *cell[dim + 1 :])


def _cut_points(have: Sequence[Box], want: Sequence[Box]) -> list[list[int]]:
    return [
        sorted({border for box in (*have, *want) if box_size(box) for border in box[dim]}) for dim in range(len(have[0]))
    ]


def _cells(have: Sequence[Box], want: Sequence[Box]) -> Iterator[tuple[Box, set[int], list[int]]]:
    """The cells that somebody lacks, with the ranks that hold them and those that want them."""
    grid = [list(pairwise(points)) for points in _cut_points(have, want)]
    holding = [_ranks_over(have, dim, parts) for dim, parts in enumerate(grid)]
    wanting = [_ranks_over(want, dim, parts) for dim, parts in enumerate(grid)]
    everyone = set(range(len(have)))
    for index in product(*[range(len(parts)) for parts in grid]):
        wanters = everyone.intersection(*[wanting[dim][i] for dim, i in enumerate(index)])
        holders = everyone.intersection(*[holding[dim][i] for dim, i in enumerate(index)])
        if wanters - holders:
            yield tuple(grid[dim][i] for dim, i in enumerate(index)), holders, sorted(wanters)


def _ranks_over(boxes: Sequence[Box], dim: int, parts: Sequence[tuple[int, int]]) -> list[set[int]]:
    """For each part of a dim, the ranks whose box spans it."""
    return [
        {rank for rank, box in enumerate(boxes) if box_size(box) and box[dim][0] <= low and high <= box[dim][1]}
        for low, high in parts
    ]
