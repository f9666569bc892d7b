"""How many bytes a step moves between nodes.

On a mesh of more than `EXACT_RANKS` ranks only a few nodes are counted: the first, the middle and
the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....kernels.box import box_size, overlap
from ....mesh.abstract_mesh import AbstractMesh
from ....mesh.topology import Topology
from ...layout.mesh_answers import cached_on_mesh
from .overlap import Coordinate
from .routes import (
    elements_received,
    elements_sent,
    group_transfers,
    is_node_replicated,
    members,
    routes,
)
from .steps import RING_OPS, Step

# up to this size of the mesh, steps are measured on every rank and node; above it, on a sample
EXACT_RANKS = 64


def across_nodes(step: Step, topology: Topology) -> tuple[int, int]:
    """Return the network bytes of the busiest rank, and those that the busiest node receives.

    Of a rank the bytes sent or received, for rings per rail.
    """
    count = _ring if step.op in RING_OPS else _uniform if step.topology is None else _transfers
    if step.op == "hierarchical_all_to_all_v" and is_node_replicated(step):
        count = _hierarchical
    busiest, received = zip(
        *[count(step, topology, ranks) for ranks in counted_nodes(step.src.mesh, topology)],
        strict=True,
    )
    return step.wire_bytes(max(busiest)), step.wire_bytes(max(received))


@cached_on_mesh(lambda mesh: mesh, 8)
def counted_nodes(mesh: AbstractMesh, topology: Topology) -> list[list[Coordinate]]:
    """Return the ranks of each node; on a large mesh of a few nodes only."""
    ids = topology.node_ids(mesh)
    names = np.unique(ids)
    if mesh.size() > EXACT_RANKS:
        names = names[sorted({0, len(names) // 2, len(names) - 1})]
    return [[tuple(map(int, c)) for c in np.argwhere(ids == name)] for name in names]


def _ring(step: Step, topology: Topology, ranks: Sequence[Coordinate]) -> tuple[int, int]:
    """Count the transfers of a ring.

    The node receives each element that it lacks once, over the rails of the group's ranks in the
    node.
    """
    groups: dict[Coordinate, int] = {}
    for rank in ranks:
        first = _first_member(step, rank)
        groups[first] = groups.get(first, 0) + 1
    most = total = 0
    for first, in_node in groups.items():
        n = step.group_size
        part = step.src if step.op == "all_gather" else step.dst
        size = box_size(part.box_at(first))  # of equal parts
        entering = (n - in_node) * (2 * size // n if step.op == "all_reduce" else size)
        rails = in_node if topology.rails is None else min(in_node, topology.rails)
        most, total = max(most, entering // rails), total + entering
    return most, total


def _first_member(step: Step, rank: Coordinate) -> Coordinate:
    """Return the first rank of the group that `rank` is in."""
    names = step.src.mesh.axis_names
    return tuple(0 if name in step.axes else k for name, k in zip(names, rank, strict=True))


def _uniform(step: Step, topology: Topology, ranks: Sequence[Coordinate]) -> tuple[int, int]:
    """Count the elements that a rank receives and sends, less those that stay in the node."""
    most = total = 0
    for me in ranks:
        node_peers = [
            r for r in ranks if r != me and _first_member(step, r) == _first_member(step, me)
        ]
        have, want = step.src.box_at(me), step.dst.box_at(me)
        near_in = sum(overlap(step.src.box_at(r), want) for r in node_peers)
        near_out = sum(overlap(have, step.dst.box_at(r)) for r in node_peers)
        entering = elements_received(step, have, want) - near_in
        most = max(most, entering, elements_sent(step, me, have, want) - near_out)
        total += entering
    return most, total


def _hierarchical(step: Step, topology: Topology, ranks: Sequence[Coordinate]) -> tuple[int, int]:
    """Count the elements of the first collective; in the second nothing leaves the node."""
    first = [routes(step, me)[0] for me in ranks]
    received = [sum(box_size(box) for _, box in route.recvs) for route in first]
    sent = [sum(box_size(box) for _, box in route.sends) for route in first]
    return max(received + sent, default=0), sum(received)


def _transfers(step: Step, topology: Topology, ranks: Sequence[Coordinate]) -> tuple[int, int]:
    """Count the elements of each box, for each group with ranks in the node.

    On a large mesh for one group, multiplied by their number.
    """
    nodes = topology.node_ids(step.src.mesh)
    node_ranks = set(ranks)
    firsts = list(dict.fromkeys(_first_member(step, rank) for rank in ranks))
    counted = firsts if step.src.mesh.size() <= EXACT_RANKS else firsts[:1]
    sent: dict[Coordinate, int] = {}
    received: dict[Coordinate, int] = {}
    for first in counted:
        group = members(step, first)
        for transfers in group_transfers(step, first):
            for sender, receiver, box in transfers:
                a, b = group[sender], group[receiver]
                if nodes[a] != nodes[b] and (a in node_ranks or b in node_ranks):
                    sent[a] = sent.get(a, 0) + box_size(box)
                    received[b] = received.get(b, 0) + box_size(box)
    busiest = max([load.get(rank, 0) for load in (sent, received) for rank in ranks], default=0)
    return busiest, sum(received.get(rank, 0) for rank in ranks) * len(firsts) // len(counted)
