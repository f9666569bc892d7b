"""What a step holds in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ....kernels.box import Box, box_size, intersect, overlap
from ....mesh.abstract_mesh import AbstractMesh
from ...layout.layout import Layout
from .overlap import Coordinate
from .routes import routes
from .steps import RING_OPS, Step
from .traffic import bytes_received, bytes_sent, sampled, sampled_boxes


def held_bytes(steps: Sequence[Step], src: Layout) -> list[int]:
    """The most that a rank holds during each step: its part of the source, which its owner keeps, the input and the
    result of the step, and buffers. For contiguous parts; of the rank with the largest boxes."""
    source = part_bytes(src)
    held, between, sliced = [], 0, False
    for step in steps:
        after = part_bytes(step.dst)
        if step.op == "slice":  # a view
            held.append(source + between)
        else:
            copied = part_bytes(step.src) if sliced and step.op in RING_OPS else 0  # to make the view contiguous
            held.append(source + between + copied + buffer_bytes(step) + after)
            between = after
        sliced = step.op == "slice"
    if steps and not between:  # the result of a slice alone is copied, so that it does not share memory with the source
        held[-1] += part_bytes(steps[-1].dst)
    return held


def peak_bytes(steps: Sequence[Step], src: Layout) -> int:
    """The most that a rank holds at a time, see `held_bytes`."""
    return max(held_bytes(steps, src), default=part_bytes(src))


def buffer_bytes(step: Step) -> int:
    """Bytes, beside input and result, of what is sent from and received into and of sums on the way."""
    return _BUFFERS.get(step.op, lambda step: 0)(step)


def part_bytes(layout: Layout) -> int:
    """Bytes of the largest part that a rank holds."""
    return layout.largest_local_numel * layout.dtype.itemsize


def _gather_buffers(step: Step) -> int:
    """The parts as they arrive, unless they arrive in their places."""
    if step.transport is not None:
        return step.wire_bytes(step.dst.largest_local_numel) + step.wire_bytes(step.src.largest_local_numel)
    return 0 if arrives_in_place(step.src, step.dst, step.axes) else part_bytes(step.dst)


def _scatter_buffers(step: Step) -> int:
    return 0 if arrives_in_place(step.dst, step.src, step.axes) else part_bytes(step.src)


def _exchange_buffers(step: Step) -> int:
    """What one rank sends and receives in one round, in elements of whole boxes."""
    mesh = step.src.mesh
    if step.rounds == 1 and step.op != "two_phase":
        own = map(overlap, sampled_boxes(step.src), sampled_boxes(step.dst))
        moved = (bytes_sent(step, c) + bytes_received(step, c) for c in sampled(mesh))
        # What stays on a rank may travel through the buffers all the same, see `collectives.Exchange`.
        return max(there + 2 * here * step.src.dtype.itemsize for there, here in zip(moved, own, strict=True))
    return max(_round_numel(step, c) for c in sampled(mesh)) * step.src.dtype.itemsize


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
