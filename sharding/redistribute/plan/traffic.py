"""What a step moves: bytes per rank and per node.

Collectives over a whole group are counted as rings, as NCCL and gloo run them: of n ranks each receives and sends
(n-1)/n of the result of an all_gather or of the input of a reduce_scatter, and twice that in an all_reduce; what a node
lacks passes its border once. Exchanges are counted box by box.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product, repeat
from typing import Any

import numpy as np

from ....kernels.box import Box, box_size, overlap
from ....mesh.abstract_mesh import AbstractMesh
from ....mesh.topology import Topology
from ...layout.layout import Layout
from .bounds import numels
from .nodes import EXACT_RANKS, across_nodes
from .overlap import Coordinate
from .routes import routes
from .steps import RING_OPS, Step

_SAMPLE = 16  # ranks, about, on a mesh of more than `EXACT_RANKS`


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step moves.

    Attributes:
        received: into the busiest rank, from others.
        sent: out of the busiest rank.
        network: into or out of the busiest rank, from or to other nodes, whichever is more; for rings, per rail.
        into_node: into the busiest node.
    """

    received: int
    sent: int
    network: int
    into_node: int


def bytes_received(step: Step, coordinate: Coordinate) -> int:
    """Bytes that the rank at `coordinate` receives from others in this step."""
    return _received(step, step.src.box_at(coordinate), step.dst.box_at(coordinate))


def bytes_sent(step: Step, coordinate: Coordinate) -> int:
    """Bytes that the rank at `coordinate` sends to others in this step."""
    return _sent(step, coordinate, step.src.box_at(coordinate), step.dst.box_at(coordinate))


def _received(step: Step, before: Box, after: Box) -> int:
    if step.is_local:
        return 0
    if step.op in RING_OPS:
        return _ring(step, box_size(before), box_size(after))
    return step.wire_bytes(_lacking(step, before, after))


def elements_received(step: Step, coordinate: Coordinate) -> int:
    """Elements that arrive at the rank in an exchange."""
    return _lacking(step, step.src.box_at(coordinate), step.dst.box_at(coordinate))


def _lacking(step: Step, before: Box, after: Box) -> int:
    return _contributions(step) * box_size(after) - overlap(before, after)


def _contributions(step: Step) -> int:
    """How many values arrive for each element: one from every place along the axes that are reduced."""
    reduced = step.reduced_axes if step.op == "exchange_reduce" else ()
    return step.src.mesh.size(reduced) if reduced else 1


def _sent(step: Step, coordinate: Coordinate, before: Box, after: Box) -> int:
    if step.is_local:
        return 0
    if step.op in RING_OPS:
        return _ring(step, box_size(before), box_size(after))
    return step.wire_bytes(elements_sent(step, coordinate, before, after))


def elements_sent(step: Step, coordinate: Coordinate, before: Box, after: Box) -> int:
    """Elements that leave the rank in an exchange."""
    if step.topology is None and step.wants_all:  # each element goes to all ranks of the group that will hold it
        copies = [a for a in step.axes if a not in step.dst.dim_of]
        sent = box_size(before) * (step.src.mesh.size(tuple(copies)) if copies else 1)
        return sent - overlap(before, after)
    return sum(_numel(route.sends) for route in routes(step, coordinate))


def _ring(step: Step, before: Any, after: Any) -> Any:
    """Bytes into (and out of) a rank in an all_gather, reduce_scatter or all_reduce, from elements before and after: of one
    rank, or of all as arrays."""
    n = step.group_size
    if step.op == "all_reduce":
        return 2 * (n - 1) * step.wire_bytes(after) // n
    return (n - 1) * step.wire_bytes(before if step.op == "all_gather" else after)


def _numel(peers: Iterable[tuple[Coordinate, Box]]) -> int:
    return sum(box_size(box) for _, box in peers)


# -- the busiest -------------------------------------------------------------------------------------------------------


def traffic(step: Step, topology: Topology) -> Traffic:
    """What the step moves, on the busiest rank and node (of a sample, on a mesh of more than `EXACT_RANKS` ranks)."""
    if step.is_local:
        return Traffic(0, 0, 0, 0)
    mesh = step.src.mesh
    if step.op in RING_OPS:  # the rank with the largest box is the busiest
        received = sent = _ring(step, step.src.largest_local_numel, step.dst.largest_local_numel)
    else:
        before, after = sampled_boxes(step.src), sampled_boxes(step.dst)
        received = max(map(_received, repeat(step), before, after))
        sent = max(_sent(step, c, b, a) for c, b, a in zip(sampled(mesh), before, after, strict=True) if _counts(step, c))
    if not set(step.axes) & set(topology.crossing_axes(mesh)):
        return Traffic(received, sent, 0, 0)
    return Traffic(received, sent, *across_nodes(step, topology))


def _counts(step: Step, coordinate: Coordinate) -> bool:
    """Whether a rank's sends are looked at: where senders are searched rank by rank on a large mesh, those of the first
    group and of the last."""
    mesh = step.src.mesh
    if step.topology is None or mesh.size() <= EXACT_RANKS:
        return True
    others = [(k, n) for k, n, a in zip(coordinate, mesh.shape, mesh.axis_names, strict=True) if a not in step.axes]
    return all(k == 0 for k, _ in others) or all(k == n - 1 for k, n in others)


def most_received(steps: Sequence[Step]) -> int:
    """Bytes into the rank that receives most over all steps; exact on any mesh."""
    total = np.zeros((), dtype=np.int64)
    for step in steps:
        total = total + _received_everywhere(step)
    return int(total.max())


def _received_everywhere(step: Step) -> np.ndarray:
    """`bytes_received` of all ranks, as an array that broadcasts to the mesh's shape."""
    if step.is_local:
        return np.zeros((), dtype=np.int64)
    before, after, own = numels(step.src, step.dst)
    if step.op in RING_OPS:
        return _ring(step, before, after)
    return step.wire_bytes(_contributions(step) * after - own)


@lru_cache(maxsize=64)
def sampled(mesh: AbstractMesh) -> tuple[Coordinate, ...]:
    """All ranks of a small mesh; of a large one the corners, the middle and ranks between, always the same."""
    if mesh.size() <= EXACT_RANKS:
        return tuple(product(*map(range, mesh.shape)))
    marks = [sorted({0, n - 1, n // 2, n // 3}) for n in mesh.shape]
    total = math.prod(map(len, marks))
    every = max(1, total // _SAMPLE)
    return tuple(c for i, c in enumerate(product(*marks)) if i % every == 0 or i == total - 1)


@lru_cache(maxsize=256)
def sampled_boxes(layout: Layout) -> tuple[Box, ...]:
    """The boxes of those ranks."""
    return tuple(layout.box_at(c) for c in sampled(layout.mesh))
