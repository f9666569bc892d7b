"""What a step moves and holds: bytes per rank, per node and in memory.

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

import numpy as np

from ...kernels.box import Box, box_size, intersect
from ...mesh.abstract_mesh import AbstractMesh
from ...mesh.topology import Topology
from ..layout import Layout
from .meeting import Coordinate
from .route import Peers, routes
from .steps import RING_OPS, Step

EXACT_RANKS = 64  # up to so many ranks a step is measured on each; beyond, on a sample of as many


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
    whole, own = box_size(after), intersect(before, after)
    if step.op == "exchange_reduce":  # one contribution from every place along the axes that are reduced
        whole *= step.src.mesh.size(reduced) if (reduced := step.reduced_axes) else 1
    return (whole - (box_size(own) if own is not None else 0)) * step.src.dtype.itemsize


def _sent(step: Step, coordinate: Coordinate, before: Box, after: Box) -> int:
    if step.is_local:
        return 0
    if step.op in RING_OPS:
        return _ring(step, box_size(before), box_size(after))
    if step.topology is None and step.wants_all:  # each element goes to all ranks of the group that will hold it
        copies = [a for a in step.axes if a not in step.dst.dim_of]
        own = intersect(before, after)
        sent = box_size(before) * (step.src.mesh.size(tuple(copies)) if copies else 1)
        return (sent - (box_size(own) if own is not None else 0)) * step.src.dtype.itemsize
    return sum(_numel(route.sends) for route in routes(step, coordinate)) * step.src.dtype.itemsize


def missing(src: Layout, dst: Layout, coordinate: Coordinate) -> int:
    """Bytes of a rank's box under `dst` that it does not hold under `src`."""
    after = dst.box_at(coordinate)
    own = intersect(src.box_at(coordinate), after)
    return (box_size(after) - (box_size(own) if own is not None else 0)) * dst.dtype.itemsize


def _ring(step: Step, before: int, after: int) -> int:
    """Bytes into (and out of) a rank in an all_gather, reduce_scatter or all_reduce, from elements before and after."""
    n, itemsize = step.group_size, step.src.dtype.itemsize
    if step.op == "all_reduce":
        return 2 * (n - 1) * after * itemsize // n
    return (n - 1) * (before if step.op == "all_gather" else after) * itemsize


def _numel(peers: Iterable[tuple[Coordinate, Box]]) -> int:
    return sum(box_size(box) for _, box in peers)


# -- the busiest -------------------------------------------------------------------------------------------------------


def traffic(step: Step, topology: Topology) -> Traffic:
    """What the step moves, on the busiest rank and node (of a sample, on a mesh of more than `EXACT_RANKS` ranks)."""
    if step.is_local:
        return Traffic(0, 0, 0, 0)
    mesh, crosses = step.src.mesh, set(step.axes) & set(topology.crossing_axes(step.src.mesh))
    if step.op in RING_OPS:  # the rank with the largest box is the busiest
        received = sent = _ring(step, step.src.largest_local_numel, step.dst.largest_local_numel)
    else:
        ranks, before, after = sampled(mesh), sampled_boxes(step.src), sampled_boxes(step.dst)
        received = max(map(_received, repeat(step), before, after))
        sent = max(map(_sent, repeat(step), ranks, before, after))
    if not crosses:
        return Traffic(received, sent, 0, 0)
    count = _ring_across if step.op in RING_OPS else _boxes_across
    return Traffic(received, sent, *count(step, topology, sampled(mesh)))


def most_received(steps: Sequence[Step], mesh: AbstractMesh) -> int:
    """Bytes into the rank that receives most over all steps (of a sample, on a large mesh)."""
    return max(sum(bytes_received(step, c) for step in steps) for c in sampled(mesh))


def _ring_across(step: Step, topology: Topology, ranks: Sequence[Coordinate]) -> tuple[int, int]:
    """Network bytes per rail, and into a node: what the node does not hold comes in once."""
    nodes = topology.node_ids(step.src.mesh)
    per_rail = into_node = 0
    for coordinate in ranks:
        index = _group_index(step, coordinate)
        together = int((nodes[index] == nodes[coordinate]).sum())
        entering = bytes_received(step, coordinate) * (step.group_size - together) // max(1, step.group_size - 1)
        groups = int((nodes == nodes[coordinate]).sum()) // together
        rails = together if topology.rails is None else min(together, topology.rails)
        per_rail, into_node = max(per_rail, entering // rails), max(into_node, entering * groups)
    return per_rail, into_node


def _group_index(step: Step, coordinate: Coordinate) -> tuple[int | slice, ...]:
    names = step.src.mesh.axis_names
    return tuple(slice(None) if name in step.axes else k for name, k in zip(names, coordinate, strict=True))


def _boxes_across(step: Step, topology: Topology, ranks: Sequence[Coordinate]) -> tuple[int, int]:
    """Network bytes of the busiest rank, and into the busiest node, box by box."""
    nodes, itemsize = topology.node_ids(step.src.mesh), step.src.dtype.itemsize
    busiest, into = 0, {}
    for me in ranks:
        across = [_crossing(nodes, me, route.recvs) for route in routes(step, me)]
        away = [_crossing(nodes, me, route.sends) for route in routes(step, me)]
        busiest = max(busiest, sum(across), sum(away))
        into[int(nodes[me])] = into.get(int(nodes[me]), 0) + sum(across)
    return busiest * itemsize, max(into.values(), default=0) * itemsize


def _crossing(nodes, me: Coordinate, peers: Peers) -> int:
    return sum(box_size(box) for other, box in peers if nodes[other] != nodes[me])


@lru_cache(maxsize=64)
def sampled(mesh: AbstractMesh) -> tuple[Coordinate, ...]:
    """All ranks of a small mesh; of a large one the corners, the middle and ranks between, always the same."""
    if mesh.size() <= EXACT_RANKS:
        return tuple(product(*map(range, mesh.shape)))
    marks = [sorted({0, n - 1, n // 2, n // 3}) for n in mesh.shape]
    total = math.prod(map(len, marks))
    every = max(1, total // EXACT_RANKS)
    return tuple(c for i, c in enumerate(product(*marks)) if i % every == 0 or i == total - 1)


@lru_cache(maxsize=256)
def sampled_boxes(layout: Layout) -> tuple[Box, ...]:
    """The boxes of those ranks."""
    return tuple(layout.box_at(c) for c in sampled(layout.mesh))


# -- memory ------------------------------------------------------------------------------------------------------------


def held_bytes(steps: Sequence[Step], src: Layout) -> list[int]:
    """The most that a rank holds during each step: its part of the source, which its owner keeps, the input and the
    result of the step, and buffers. For contiguous parts; of the rank with the largest boxes."""
    source = src.largest_local_numel * src.dtype.itemsize
    held, between, sliced = [], 0, False
    for step in steps:
        after = _bytes(step.dst)
        if step.op == "slice":  # a view
            held.append(source + between)
        else:
            copied = _bytes(step.src) if sliced and step.op in RING_OPS else 0  # to make the view contiguous
            held.append(source + between + copied + buffer_bytes(step) + after)
            between = after
        sliced = step.op == "slice"
    if steps and not between:  # the result of a slice alone is copied, so that it does not share memory with the source
        held[-1] += _bytes(steps[-1].dst)
    return held


def peak_bytes(steps: Sequence[Step], src: Layout) -> int:
    """The most that a rank holds at a time, see `held_bytes`."""
    return max(held_bytes(steps, src), default=src.largest_local_numel * src.dtype.itemsize)


def buffer_bytes(step: Step) -> int:
    """Bytes, beside input and result, of what is sent from and received into and of sums on the way."""
    return _BUFFERS.get(step.op, lambda step: 0)(step)


def _bytes(layout: Layout) -> int:
    return layout.largest_local_numel * layout.dtype.itemsize


def _gather_buffers(step: Step) -> int:
    """The parts as they arrive, unless they arrive in their places."""
    return 0 if arrives_in_place(step.src, step.dst, step.axes) else _bytes(step.dst)


def _scatter_buffers(step: Step) -> int:
    return 0 if arrives_in_place(step.dst, step.src, step.axes) else _bytes(step.src)


def _exchange_buffers(step: Step) -> int:
    """What one rank sends and receives in one round, in elements of whole boxes."""
    mesh = step.src.mesh
    if step.rounds == 1 and step.op != "two_phase":
        boxes = list(zip(sampled(mesh), sampled_boxes(step.src), sampled_boxes(step.dst), strict=True))
        return max(_sent(step, c, b, a) + _received(step, b, a) + 2 * _common(b, a) * step.src.dtype.itemsize for c, b, a in boxes)
    return max(_round_numel(step, c) for c in sampled(mesh)) * step.src.dtype.itemsize


def _common(before: Box, after: Box) -> int:
    """Elements that stay on the rank; they may travel through the buffers all the same, see `collectives.Exchange`."""
    own = intersect(before, after)
    return 0 if own is None else box_size(own)


def _round_numel(step: Step, coordinate: Coordinate) -> int:
    own = intersect(step.src.box_at(coordinate), step.dst.box_at(coordinate))
    kept = [own, own] if own is not None and step.op == "exchange_reduce" else []
    return max(
        sum(_largest_piece(box, step.rounds) for box in (*[b for _, b in route.sends], *[b for _, b in route.recvs], *kept))
        for route in routes(step, coordinate)
    )


def _largest_piece(box: Box, rounds: int) -> int:
    longest = max((stop - start for start, stop in box), default=1)
    return box_size(box) if not longest else box_size(box) // longest * -(-longest // rounds)


def _reduce_buffers(step: Step) -> int:
    """As an exchange; and, where contributions to several boxes are combined, one stack of them."""
    return 2 * _exchange_buffers(step)


def arrives_in_place(parts: Layout, whole: Layout, axes: Sequence[str]) -> bool:
    """Whether the parts of the group, one after the other, are the whole in memory: cut along the outermost dim that is
    longer than one, by axes in the order of the group."""
    cut = [dim for dim, (a, b) in enumerate(zip(parts.spec.cuts, whole.spec.cuts, strict=True)) if a != b]
    if not cut:
        return True
    extra = [a for c in parts.spec.cuts[cut[0]][len(whole.spec.cuts[cut[0]]) :] for a in c.axes]
    in_order = extra == sorted(extra, key=parts.mesh.axis_index) and _ranks_ascend(parts.mesh)
    box = whole.box_at((0,) * parts.mesh.ndim)
    return len(cut) == 1 and in_order and all(stop - start == 1 for start, stop in box[: cut[0]])


@lru_cache(maxsize=64)
def _ranks_ascend(mesh: AbstractMesh) -> bool:
    """Whether groups, which list their ranks in ascending order, list them in mesh order."""
    return bool((np.diff(mesh.ranks.ravel()) > 0).all())


_BUFFERS = {
    "all_gather": _gather_buffers,
    "reduce_scatter": _scatter_buffers,
    "exchange": _exchange_buffers,
    "permute": _exchange_buffers,
    "two_phase": _exchange_buffers,
    "exchange_reduce": _reduce_buffers,
}
