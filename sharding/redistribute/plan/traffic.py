"""How many bytes a step moves, per rank and per node.

Collectives over a whole group are counted as rings, as NCCL and gloo run them: of n ranks each
receives and sends (n-1)/n of the result of an all_gather or of the input of a reduce_scatter, and
twice that in an all_reduce; what a node lacks enters it once. An all_to_all_v is counted box by
box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, repeat
from operator import attrgetter
from typing import Any

import numpy as np

from ....kernels.box import Box, box_size
from ....mesh.abstract_mesh import AbstractMesh
from ....mesh.topology import Topology
from ...layout.layout import Layout
from ...layout.mesh_answers import cached_on_mesh
from .bounds import numels
from .nodes import EXACT_RANKS, across_nodes
from .overlap import Coordinate
from .routes import contributions, elements_received, elements_sent
from .steps import RING_OPS, Plan, Step

_SAMPLE = 16  # ranks, about, on a mesh of more than `EXACT_RANKS`


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step moves.

    Attributes:
        received: received by the busiest rank from others.
        sent: sent by the busiest rank to others.
        network: received from or sent to other nodes by the busiest rank, whichever is more; for
            rings, per rail.
        into_node: received by the busiest node from others.
    """

    received: int
    sent: int
    network: int
    into_node: int


def bytes_received(step: Step, coordinate: Coordinate) -> int:
    """Return the bytes that the rank at `coordinate` receives from others in a step."""
    return _bytes_received(step, step.src.box_at(coordinate), step.dst.box_at(coordinate))


def plan_bytes_received(plan: Plan, coordinate: Coordinate) -> int:
    """Return the bytes that the rank at `coordinate` receives from others over a whole plan."""
    return sum(bytes_received(step, coordinate) for step in plan.steps)


def bytes_sent(step: Step, coordinate: Coordinate) -> int:
    """Return the bytes that the rank at `coordinate` sends to others in a step."""
    return _bytes_sent(step, coordinate, step.src.box_at(coordinate), step.dst.box_at(coordinate))


def _bytes_received(step: Step, before: Box, after: Box) -> int:
    if step.is_local:
        return 0
    if step.op in RING_OPS:
        return _ring(step, box_size(before), box_size(after))
    return step.wire_bytes(elements_received(step, before, after))


def _bytes_sent(step: Step, coordinate: Coordinate, before: Box, after: Box) -> int:
    if step.is_local:
        return 0
    if step.op in RING_OPS:
        return _ring(step, box_size(before), box_size(after))
    return step.wire_bytes(elements_sent(step, coordinate, before, after))


def _ring(step: Step, before: Any, after: Any) -> Any:
    """Return the bytes that a rank receives (and sends) in a ring collective.

    `before` and `after` are the elements that it holds: numbers for one rank, or arrays for all.
    """
    n = step.group_size
    if step.op == "all_reduce":
        return 2 * (n - 1) * step.wire_bytes(after) // n
    return (n - 1) * step.wire_bytes(before if step.op == "all_gather" else after)


# -- the busiest rank ------------------------------------------------------------------------------


def traffic(step: Step, topology: Topology) -> Traffic:
    """Return the traffic of the step, for the busiest rank and node.

    Of a sample, on a mesh of more than `EXACT_RANKS` ranks.
    """
    if step.is_local:
        return Traffic(0, 0, 0, 0)
    mesh = step.src.mesh
    if step.op in RING_OPS:  # the rank with the largest box is the busiest
        received = sent = _ring(step, step.src.largest_local_numel, step.dst.largest_local_numel)
    else:
        before, after = sampled_boxes(step.src), sampled_boxes(step.dst)
        received = max(map(_bytes_received, repeat(step), before, after))
        sent = max(
            _bytes_sent(step, c, b, a)
            for c, b, a in zip(sample_of_ranks(mesh), before, after, strict=True)
            if _is_counted(step, c)
        )
    if not set(step.axes) & set(topology.crossing_axes(mesh)):
        return Traffic(received, sent, 0, 0)
    return Traffic(received, sent, *across_nodes(step, topology))


def _is_counted(step: Step, coordinate: Coordinate) -> bool:
    """Return whether a rank's sends are counted.

    Where routes are searched rank by rank on a large mesh, only those of the first and the last
    group are.
    """
    mesh = step.src.mesh
    if step.topology is None or mesh.size() <= EXACT_RANKS:
        return True
    others = [
        (k, n)
        for k, n, a in zip(coordinate, mesh.shape, mesh.axis_names, strict=True)
        if a not in step.axes
    ]
    return all(k == 0 for k, _ in others) or all(k == n - 1 for k, n in others)


def most_received(steps: Sequence[Step]) -> int:
    """Return the bytes received in all steps by the rank that receives most; exact on any mesh."""
    total = np.zeros((), dtype=np.int64)
    for step in steps:
        total = total + _received_everywhere(step)
    return int(total.max())


def _received_everywhere(step: Step) -> np.ndarray:
    """Return `bytes_received` for all ranks, as an array that broadcasts to the mesh's shape."""
    if step.is_local:
        return np.zeros((), dtype=np.int64)
    before, after, common = numels(step.src, step.dst)
    if step.op in RING_OPS:
        return _ring(step, before, after)
    return step.wire_bytes(contributions(step) * after - common)


@cached_on_mesh(lambda mesh: mesh, 1)
def sample_of_ranks(mesh: AbstractMesh) -> tuple[Coordinate, ...]:
    """Return all ranks of a small mesh, a sample of those of a large one.

    The sample is the corners, the middle and some ranks between, always the same.
    """
    if mesh.size() <= EXACT_RANKS:
        return tuple(product(*map(range, mesh.shape)))
    marks = [sorted({0, n - 1, n // 2, n // 3}) for n in mesh.shape]
    total = math.prod(map(len, marks))
    every = max(1, total // _SAMPLE)
    return tuple(c for i, c in enumerate(product(*marks)) if i % every == 0 or i == total - 1)


@cached_on_mesh(attrgetter("mesh"), 256)
def sampled_boxes(layout: Layout) -> tuple[Box, ...]:
    """Return the boxes of the ranks of `sample_of_ranks`."""
    return tuple(layout.box_at(c) for c in sample_of_ranks(layout.mesh))
