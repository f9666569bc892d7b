"""Bytes between nodes.

On a mesh of more ranks than `EXACT_RANKS` only a few nodes are looked at: the first, the last and one between.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ....kernels.box import box_size, overlap
from ....mesh.abstract_mesh import AbstractMesh
from ....mesh.topology import Topology
from .overlap import Coordinate
from .routes import group_transfers, members, routes, shares_evenly
from .steps import RING_OPS, Step

EXACT_RANKS = 64  # up to so many ranks a step is measured on every rank and node; beyond, on a sample


def across_nodes(step: Step, topology: Topology) -> tuple[int, int]:
    """Bytes out of or into the busiest rank, from or to other nodes (for rings, per rail), and into the busiest node."""
    count = _ring if step.op in RING_OPS else _column if step.topology is None else _transfers
    if step.op == "two_phase" and shares_evenly(step):
        count = _shared
    busiest, into = zip(*[count(step, topology, ranks) for ranks in looked_at(step.src.mesh, topology)], strict=True)
    return step.wire_bytes(max(busiest)), step.wire_bytes(max(into))


@lru_cache(maxsize=64)
def looked_at(mesh: AbstractMesh, topology: Topology) -> list[list[Coordinate]]:
    """The ranks of each node; of a few nodes on a large mesh."""
    ids = topology.node_ids(mesh)
    names = np.unique(ids)
    if mesh.size() > EXACT_RANKS:
        names = names[sorted({0, len(names) // 2, len(names) - 1})]
    return [[tuple(map(int, c)) for c in np.argwhere(ids == name)] for name in names]


def _ring(step: Step, topology: Topology, ranks: Sequence[Coordinate]) -> tuple[int, int]:
    """What the node does not hold comes in once, over the rails of the group's ranks in the node."""
    groups: dict[Coordinate, int] = {}
    for rank in ranks:
        first = members_key(step, rank)
        groups[first] = groups.get(first, 0) + 1
    most = total = 0
    for first, together in groups.items():
        n = step.group_size
        part = step.src if step.op == "all_gather" else step.dst
        size = box_size(part.box_at(first))  # of equal parts
        entering = (n - together) * (2 * size // n if step.op == "all_reduce" else size)
        rails = together if topology.rails is None else min(together, topology.rails)
        most, total = max(most, entering // rails), total + entering
    return most, total


def members_key(step: Step, rank: Coordinate) -> Coordinate:
    """The same for all ranks of a step's group: its first member."""
    names = step.src.mesh.axis_names
    return tuple(0 if name in step.axes else k for name, k in zip(names, rank, strict=True))


def _column(step: Step, topology: Topology, ranks: Sequence[Coordinate]) -> tuple[int, int]:
    """All that a rank receives and sends, less what stays in the node."""
    from .traffic import elements_received, elements_sent  # traffic adds up what is counted here

    most = total = 0
    for me in ranks:
        here = [r for r in ranks if r != me and members_key(step, r) == members_key(step, me)]
        have, want = step.src.box_at(me), step.dst.box_at(me)
        near_in = sum(overlap(step.src.box_at(r), want) for r in here)
        near_out = sum(overlap(have, step.dst.box_at(r)) for r in here)
        entering = elements_received(step, me) - near_in
        most = max(most, entering, elements_sent(step, me, have, want) - near_out)
        total += entering
    return most, total


def _shared(step: Step, topology: Topology, ranks: Sequence[Coordinate]) -> tuple[int, int]:
    """What comes and goes in the first phase; in the second nothing leaves the node."""
    first = [routes(step, me)[0] for me in ranks]
    came = [sum(box_size(box) for _, box in route.recvs) for route in first]
    left = [sum(box_size(box) for _, box in route.sends) for route in first]
    return max(came + left, default=0), sum(came)


def _transfers(step: Step, topology: Topology, ranks: Sequence[Coordinate]) -> tuple[int, int]:
    """Box by box, of each group that has ranks in the node; on a large mesh of one of them, taken for all."""
    nodes, mine = topology.node_ids(step.src.mesh), set(ranks)
    firsts = list(dict.fromkeys(members_key(step, rank) for rank in ranks))
    looked = firsts if step.src.mesh.size() <= EXACT_RANKS else firsts[:1]
    out: dict[Coordinate, int] = {}
    into: dict[Coordinate, int] = {}
    for first in looked:
        people = members(step, first)
        for transfers in group_transfers(step, first):
            for sender, receiver, box in transfers:
                a, b = people[sender], people[receiver]
                if nodes[a] != nodes[b] and (a in mine or b in mine):
                    out[a] = out.get(a, 0) + box_size(box)
                    into[b] = into.get(b, 0) + box_size(box)
    busiest = max([load.get(rank, 0) for load in (out, into) for rank in ranks], default=0)
    return busiest, sum(into.get(rank, 0) for rank in ranks) * len(firsts) // len(looked)
