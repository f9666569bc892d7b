"""Which rank sends which box to which rank in an all_to_all_v.

    direct          every element that a rank lacks is received once, from the nearest and least
                    loaded rank that holds it
    hierarchical    every element that a node lacks is received once; then the ranks of the node
                    exchange them

All of it is computed from boxes alone, with the same result on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from operator import attrgetter
from typing import NamedTuple

from ....kernels.box import Box, box_size, intersect, overlap
from ...layout.layout import Layout, chunk
from ...layout.mesh_answers import cached_on_mesh
from .overlap import Coordinate, ranks_overlapping
from .steps import Step

RankBoxes = list[tuple[Coordinate, Box]]


@dataclass(frozen=True)
class Route:
    """What one rank sends to others and receives from others, in mesh order of the others.

    Attributes:
        sends: (to whom, the box), of the global tensor.
        recvs: (from whom, the box).
    """

    sends: RankBoxes
    recvs: RankBoxes


class Transfer(NamedTuple):
    """One box from one rank to another; ranks are indices into the group's members."""

    sender: int
    receiver: int
    box: Box


def routes(step: Step, coordinate: Coordinate) -> tuple[Route, ...]:
    """Return the boxes that a rank sends and receives, for each collective of the step.

    `coordinate` is that of the rank. A hierarchical step has two collectives.
    """
    if step.topology is None:
        # The group holds every part once (every contribution, for a reduction), so all boxes that
        # overlap are exchanged.
        sends = ranks_overlapping(step.dst, step.src.box_at(coordinate), coordinate, step.axes)
        recvs = ranks_overlapping(step.src, step.dst.box_at(coordinate), coordinate, step.axes)
        return (
            Route(
                [s for s in sends if s[0] != coordinate], [r for r in recvs if r[0] != coordinate]
            ),
        )
    if step.op == "hierarchical_all_to_all_v" and is_node_replicated(step):
        return _node_replicated_routes(step, coordinate)
    group = members(step, coordinate)
    own_index = group.index(coordinate)
    return tuple(
        Route(
            [(group[t.receiver], t.box) for t in transfers if t.sender == own_index],
            [(group[t.sender], t.box) for t in transfers if t.receiver == own_index],
        )
        for transfers in group_transfers(step, group[0])
    )


def members(step: Step, coordinate: Coordinate) -> list[Coordinate]:
    """Return the coordinates of the ranks of a step's group, in mesh order."""
    return members_along(step.src, step.axes, coordinate)


def members_along(layout: Layout, axes: Sequence[str], coordinate: Coordinate) -> list[Coordinate]:
    """Return the coordinates that differ from one only along these axes, in mesh order."""
    mesh = layout.mesh
    spans = [
        range(n) if a in axes else (k,)
        for a, n, k in zip(mesh.axis_names, mesh.shape, coordinate, strict=True)
    ]
    return list(product(*spans))


def elements_received(step: Step, before: Box, after: Box) -> int:
    """Return how many elements a rank with these boxes receives from others."""
    return contributions(step) * box_size(after) - overlap(before, after)


def elements_sent(step: Step, coordinate: Coordinate, before: Box, after: Box) -> int:
    """Return how many elements the rank at `coordinate`, with these boxes, sends to others."""
    # each element goes to all ranks of the group that will hold it
    if step.topology is None and step.keeps_all_elements:
        copies = [a for a in step.axes if a not in step.dst.dim_of]
        sent = box_size(before) * (step.src.mesh.size(tuple(copies)) if copies else 1)
        return sent - overlap(before, after)
    return sum(box_size(box) for route in routes(step, coordinate) for _, box in route.sends)


def contributions(step: Step) -> int:
    """Return how many values are received for each element: one per rank along reduced axes."""
    reduced = step.reduced_axes if step.op == "all_to_all_reduce" else ()
    return step.src.mesh.size(reduced) if reduced else 1


# -- direct ----------------------------------------------------------------------------------------


@cached_on_mesh(attrgetter("src.mesh"), 64)
def group_transfers(step: Step, first: Coordinate) -> tuple[list[Transfer], ...]:
    """Return the transfers of the group whose first member is at `first`, for each collective."""
    group = members(step, first)
    have, want = [step.src.box_at(c) for c in group], [step.dst.box_at(c) for c in group]
    ids = step.topology.node_ids(step.src.mesh) if step.topology else None
    nodes = [0 if ids is None else int(ids[c]) for c in group]
    return (
        hierarchical(have, want, nodes)
        if step.op == "hierarchical_all_to_all_v"
        else (direct(have, want, nodes),)
    )


def direct(
    have: Sequence[Box],
    want: Sequence[Box],
    nodes: Sequence[int],
    load: list[int] | None = None,
    weight: int = 1,
) -> list[Transfer]:
    """Return transfers in which each rank receives the elements that it lacks, each once.

    Elements that no rank has are in none. The sender is a holder in the receiver's own node if
    there is one, and among those the least loaded so far.

    Args:
        have: the box of each rank before; two are equal or disjoint.
        want: the box of each rank after.
        nodes: the node of each rank.
        load: how much each rank sends already; these transfers are added. By default the holders of
            each box are balanced by themselves.
        weight: what an element adds to the load.
    """
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(have):
        if box_size(box):
            holders.setdefault(box, []).append(rank)
    transfers = []
    for box, owners in holders.items():
        sent = [0] * len(have) if load is None else load
        holding = set(owners)
        for rank, target in enumerate(want):
            common = None if rank in holding else intersect(box, target)
            if common is not None:
                sender = min(owners, key=_distance(rank, nodes, sent, len(have)))
                sent[sender] += box_size(common) * weight
                transfers.append(Transfer(sender, rank, common))
    return _in_order(transfers)


def _distance(
    rank: int, nodes: Sequence[int], load: Sequence[int], n: int
) -> Callable[[int], tuple[bool, int, int]]:
    return lambda owner: (nodes[owner] != nodes[rank], load[owner], (owner - rank) % n)


# -- hierarchical ----------------------------------------------------------------------------------


def is_node_replicated(step: Step) -> bool:
    """Return whether in every node the ranks of a group are replicas that want the same box.

    Then each of them receives one piece of every box from other nodes, and routes follow by
    arithmetic, on any mesh.
    """
    if step.topology is None:
        return False
    mesh = step.src.mesh
    replica_axes, split_axes = _replica_axes(step), _split_axes(step)
    if (
        not replica_axes
        or any(a in step.dst.dim_of for a in replica_axes)
        or set(replica_axes) & set(step.topology.crossing_axes(mesh))
    ):
        return False
    # Whether ranks along the split axes are in nodes of their own is asked at two corners of the
    # mesh.
    nodes = step.topology.node_ids(mesh)
    corners = [tuple(0 for _ in mesh.shape), tuple(n - 1 for n in mesh.shape)]
    groups = [
        [int(nodes[c]) for c in members_along(step.src, split_axes, corner)] for corner in corners
    ]
    return all(len(set(group_nodes)) == len(group_nodes) for group_nodes in groups)


def _replica_axes(step: Step) -> tuple[str, ...]:
    """Return the axes of the step along which the source is replicated."""
    return tuple(a for a in step.axes if a not in step.src.dim_of)


def _split_axes(step: Step) -> tuple[str, ...]:
    """Return the axes of the step that split the source."""
    return tuple(a for a in step.axes if a in step.src.dim_of)


def _node_replicated_routes(step: Step, coordinate: Coordinate) -> tuple[Route, Route]:
    """Return the routes between nodes and inside the node.

    Each box that crosses to another node is cut into one piece for each replica of the receiving
    node: replica i of the sending node sends piece i to replica i there, and then each passes its
    piece on to the others.
    """
    replicas = members_along(step.src, _replica_axes(step), coordinate)
    own_index = replicas.index(coordinate)
    split_axes = _split_axes(step)
    wanted = ranks_overlapping(step.src, step.dst.box_at(coordinate), coordinate, split_axes)
    held = ranks_overlapping(step.dst, step.src.box_at(coordinate), coordinate, split_axes)
    recvs = [(c, box) for c, box in wanted if c != coordinate]
    sends = [(c, box) for c, box in held if c != coordinate]

    def pieces(boxes: RankBoxes, index: int) -> RankBoxes:
        cut = [(c, _piece(box, len(replicas), index)) for c, box in boxes]
        return [(c, box) for c, box in cut if box_size(box)]

    own_pieces = [box for _, box in pieces(recvs, own_index)]
    sends_inside: RankBoxes = []
    recvs_inside: RankBoxes = []
    for i, replica in enumerate(replicas):
        if replica != coordinate:
            sends_inside += [(replica, box) for box in own_pieces]
            recvs_inside += [(replica, box) for _, box in pieces(recvs, i)]
    between_nodes = Route(pieces(sends, own_index), pieces(recvs, own_index))
    return between_nodes, Route(sends_inside, recvs_inside)


# above this, hierarchical routes are not considered: computing them would take seconds
MAX_CELLS = 1 << 16


def count_cells(have: Sequence[Box], want: Sequence[Box]) -> int:
    """Return how many cells `hierarchical` would go through."""
    return prod(max(len(borders) - 1, 0) for borders in _borders(have, want))


def hierarchical(
    have: Sequence[Box], want: Sequence[Box], nodes: Sequence[int]
) -> tuple[list[Transfer], list[Transfer]]:
    """Return transfers between nodes, and inside the nodes.

    Between nodes each node receives each element that it lacks once.

    The tensor is cut into cells by the borders of all boxes, so that each rank holds or wants a
    cell entirely or not at all. A cell that enters a node is divided among the ranks that want it,
    and each sends its piece on to the others.

    The arguments are those of `direct`.
    """
    between_nodes: list[Transfer] = []
    inside_nodes: list[Transfer] = []
    # elements of each rank so far, to balance the load
    sent, received, sent_inside = [0] * len(have), [0] * len(have), [0] * len(have)
    for cell, holders, wanters in _cells(have, want):
        for node in dict.fromkeys(nodes[r] for r in wanters):
            receivers = [r for r in wanters if nodes[r] == node and r not in holders]
            local_holders = [r for r in holders if nodes[r] == node]
            if local_holders:
                for receiver in receivers:
                    sender = _take(local_holders, sent_inside, cell)
                    inside_nodes.append(Transfer(sender, receiver, cell))
                continue
            receivers.sort(key=lambda r: received[r])
            for i, receiver in enumerate(receivers):
                piece = _piece(cell, len(receivers), i)
                if box_size(piece) == 0:  # and so are all after it
                    break
                sender = _take(sorted(holders), sent, piece)
                between_nodes.append(Transfer(sender, receiver, piece))
                received[receiver] += box_size(piece)
                inside_nodes += [
                    Transfer(receiver, other, piece) for other in receivers if other != receiver
                ]
    return _in_order(between_nodes), _in_order(inside_nodes)


def _in_order(transfers: list[Transfer]) -> list[Transfer]:
    """Return the transfers in the order of their ranks."""
    return sorted(transfers, key=lambda t: (t.sender, t.receiver))


def _take(owners: Sequence[int], load: list[int], box: Box) -> int:
    """Return the least loaded of the owners, and add the box to its load."""
    chosen = min(owners, key=load.__getitem__)
    load[chosen] += box_size(box)
    return chosen


def _piece(cell: Box, n: int, index: int) -> Box:
    """Return one of n parts of the cell, cut along its longest dim; the last ones may be empty."""
    if not cell:
        return cell if index == 0 else ((0, 0),)
    dim = max(range(len(cell)), key=lambda d: cell[d][1] - cell[d][0])
    return (*cell[:dim], chunk(*cell[dim], n, index), *cell[dim + 1 :])


def _borders(have: Sequence[Box], want: Sequence[Box]) -> list[list[int]]:
    return [
        sorted({border for box in (*have, *want) if box_size(box) for border in box[dim]})
        for dim in range(len(have[0]))
    ]


def _cells(have: Sequence[Box], want: Sequence[Box]) -> Iterator[tuple[Box, set[int], list[int]]]:
    """Yield the cells that some rank lacks, with the ranks that hold and that want them."""
    grid = [list(pairwise(borders)) for borders in _borders(have, want)]
    holding = [_ranks_over(have, dim, parts) for dim, parts in enumerate(grid)]
    wanting = [_ranks_over(want, dim, parts) for dim, parts in enumerate(grid)]
    everyone = set(range(len(have)))
    for index in product(*[range(len(parts)) for parts in grid]):
        wanters = everyone.intersection(*[wanting[dim][i] for dim, i in enumerate(index)])
        holders = everyone.intersection(*[holding[dim][i] for dim, i in enumerate(index)])
        if wanters - holders:
            yield tuple(grid[dim][i] for dim, i in enumerate(index)), holders, sorted(wanters)


def _ranks_over(boxes: Sequence[Box], dim: int, parts: Sequence[tuple[int, int]]) -> list[set[int]]:
    """Return for each part of a dim the ranks whose box covers it."""
    return [
        {
            rank
            for rank, box in enumerate(boxes)
            if box_size(box) and box[dim][0] <= low and high <= box[dim][1]
        }
        for low, high in parts
    ]
