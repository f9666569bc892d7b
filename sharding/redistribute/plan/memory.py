"""How much memory a step needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....kernels.box import Box, box_size, intersect, overlap
from ....mesh.abstract_mesh import AbstractMesh
from ...layout.layout import Layout
from ...layout.mesh_answers import cached_on_mesh
from .overlap import Coordinate
from .routes import routes
from .steps import RING_OPS, Step
from .traffic import bytes_received, bytes_sent, sample_of_ranks, sampled_boxes


def held_bytes(steps: Sequence[Step], src: Layout) -> list[int]:
    """Return the most bytes that a rank holds during each step.

    That is its part of the source, which the caller keeps, the input and the result of the step,
    and buffers. For contiguous parts; of the rank with the largest boxes.
    """
    source = part_bytes(src)
    held, between, sliced = [], 0, False
    for step in steps:
        after = part_bytes(step.dst)
        if step.op == "slice":  # a view
            held.append(source + between)
        else:
            # a copy, to make the view contiguous
            copied = part_bytes(step.src) if sliced and step.op in RING_OPS else 0
            held.append(source + between + copied + buffer_bytes(step) + after)
            between = after
        sliced = step.op == "slice"
    # the result of a slice alone is copied, to share no memory with the source
    if steps and not between:
        held[-1] += part_bytes(steps[-1].dst)
    return held


def peak_bytes(steps: Sequence[Step], src: Layout) -> int:
    """Return the most bytes that a rank holds at one time, see `held_bytes`."""
    return max(held_bytes(steps, src), default=part_bytes(src))


def buffer_bytes(step: Step) -> int:
    """Return the bytes of buffers and partial sums, in addition to input and result."""
    if step.op == "all_gather":
        if step.transport is not None:
            return step.wire_bytes(step.dst.largest_local_numel) + step.wire_bytes(
                step.src.largest_local_numel
            )
        return 0 if is_contiguous_gather(step.src, step.dst) else part_bytes(step.dst)
    if step.op == "reduce_scatter":
        return 0 if is_contiguous_gather(step.dst, step.src) else part_bytes(step.src)
    if step.op in ("all_to_all_v", "permute", "hierarchical_all_to_all_v"):
        return _all_to_all_buffers(step)
    # the buffers, and of contributions to several boxes, which are combined, a stack
    if step.op == "all_to_all_reduce":
        return 2 * _all_to_all_buffers(step)
    return 0


def part_bytes(layout: Layout) -> int:
    """Return the bytes of the largest part that a rank holds."""
    return layout.largest_local_numel * layout.dtype.itemsize


def _all_to_all_buffers(step: Step) -> int:
    """Return the bytes of a rank's send and receive buffers in one round, by whole boxes."""
    mesh = step.src.mesh
    if step.rounds == 1 and step.op != "hierarchical_all_to_all_v":
        common = map(overlap, sampled_boxes(step.src), sampled_boxes(step.dst))
        moved = (bytes_sent(step, c) + bytes_received(step, c) for c in sample_of_ranks(mesh))
        # What stays on a rank may go through the buffers as well, see `AllToAllV`.
        return max(
            exchanged + 2 * staying * step.src.dtype.itemsize
            for exchanged, staying in zip(moved, common, strict=True)
        )
    return max(_round_numel(step, c) for c in sample_of_ranks(mesh)) * step.src.dtype.itemsize


def _round_numel(step: Step, coordinate: Coordinate) -> int:
    common = intersect(step.src.box_at(coordinate), step.dst.box_at(coordinate))
    own_boxes = [common, common] if common is not None and step.op == "all_to_all_reduce" else []
    return max(
        sum(
            _largest_piece(box, step.rounds)
            for box in (*[b for _, b in route.sends], *[b for _, b in route.recvs], *own_boxes)
        )
        for route in routes(step, coordinate)
    )


def _largest_piece(box: Box, rounds: int) -> int:
    longest = max((stop - start for start, stop in box), default=1)
    return box_size(box) if not longest else box_size(box) // longest * -(-longest // rounds)


def is_contiguous_gather(parts: Layout, whole: Layout) -> bool:
    """Return whether the parts of the group, concatenated, are the whole in memory.

    They are if it is cut along the outermost dim that is longer than one, by axes in the order of
    the group.
    """
    cut = [
        dim
        for dim, (a, b) in enumerate(zip(parts.spec.cuts, whole.spec.cuts, strict=True))
        if a != b
    ]
    if not cut:
        return True
    extra = [a for c in parts.spec.cuts[cut[0]][len(whole.spec.cuts[cut[0]]) :] for a in c.axes]
    in_order = extra == sorted(extra, key=parts.mesh.axis_index) and _ranks_ascend(parts.mesh)
    box = whole.box_at((0,) * parts.mesh.ndim)
    return len(cut) == 1 and in_order and all(stop - start == 1 for start, stop in box[: cut[0]])


@cached_on_mesh(lambda mesh: mesh, 1)
def _ranks_ascend(mesh: AbstractMesh) -> bool:
    """Return whether groups, which list their ranks in ascending order, list them in mesh order."""
    return bool((np.diff(mesh.ranks.ravel()) > 0).all())
