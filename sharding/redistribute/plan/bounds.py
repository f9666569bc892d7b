"""How few bytes any plan must move: what a rank, or a node, lacks before and must hold after."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....kernels.box import Box, box_size
from ....mesh.topology import Topology
from ...layout.layout import Layout
from .intermediate_layouts import without_trivial_axes
from .nodes import counted_nodes
from .overlap import Coordinate


def is_reduction(src: Layout, dst: Layout) -> bool:
    """Return whether pending values must be combined.

    Then every element depends on values of other ranks, and the bounds of this file do not apply.
    """
    size = src.mesh.size
    return any(size(a) > 1 and dst.pending.get(a) != kind for a, kind in src.spec.unreduced)


def rank_bound(src: Layout, dst: Layout) -> int:
    """Return the fewest bytes that the busiest rank must receive: its box after less that before.

    Exact on any mesh: computed for all ranks, as arrays over the axes that the layouts name.
    """
    _, after, common = numels(src, dst)
    return int((after - common).max()) * dst.dtype.itemsize


def numels(src: Layout, dst: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the elements of every rank's box before, after, and in both.

    int64 arrays that broadcast to the mesh's shape.
    """
    before = after = common = np.ones((), dtype=np.int64)
    for dim in range(len(src.shape)):
        have, want = intervals(src, dim), intervals(dst, dim)
        before, after = before * (have[1] - have[0]), after * (want[1] - want[0])
        common = common * np.maximum(np.minimum(have[1], want[1]) - np.maximum(have[0], want[0]), 0)
    return before, after, common


def intervals(layout: Layout, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where the interval of every rank starts and stops along a dim.

    int64 arrays that broadcast to the mesh's shape.
    """
    mesh, ndim = layout.mesh, layout.mesh.ndim
    start = np.zeros((1,) * ndim, dtype=np.int64)
    stop = np.full((1,) * ndim, layout.shape[dim], dtype=np.int64)
    for cut in layout.spec.cuts[dim]:
        index = np.zeros((1,) * ndim, dtype=np.int64)
        parts = 1
        for axis in cut.axes:
            position, n = mesh.axis_index(axis), mesh.size(axis)
            along = np.arange(n).reshape([n if i == position else 1 for i in range(ndim)])
            index, parts = index * n + along, parts * n
        if cut.sizes is None:
            step = -((start - stop) // parts)
            start = np.minimum(start + index * step, stop)
            stop = np.minimum(start + step, stop)
        else:
            ends = np.cumsum(cut.sizes)
            start, stop = (ends - cut.sizes)[index], ends[index]
    return start, stop


def node_bound(src: Layout, dst: Layout, topology: Topology) -> int:
    """Return the fewest bytes that the busiest node must receive.

    What its ranks hold after and none of them holds before.

    Ranks that differ along a pending axis hold different values, so each such group counts by
    itself. On a large mesh only a few nodes are counted (see `nodes.counted_nodes`).
    """
    src, dst = without_trivial_axes(src), without_trivial_axes(dst)
    pending = [i for i, axis in enumerate(src.mesh.axis_names) if axis in src.pending]
    most = 0
    for ranks in counted_nodes(src.mesh, topology):
        by_contribution: dict[tuple[int, ...], list[Coordinate]] = {}
        for c in ranks:
            by_contribution.setdefault(tuple(c[i] for i in pending), []).append(c)
        most = max(most, sum(_missing(src, dst, group) for group in by_contribution.values()))
    return most * src.dtype.itemsize


def _missing(src: Layout, dst: Layout, ranks: Sequence[Coordinate]) -> int:
    """Return how many elements the ranks' boxes have after, together, and did not have before."""
    have, want = {src.box_at(c) for c in ranks}, {dst.box_at(c) for c in ranks}
    have, want = {b for b in have if box_size(b)}, {b for b in want if box_size(b)}
    if not src.shape:
        return 0
    grids = [
        sorted({border for box in have | want for border in box[dim]})
        for dim in range(len(src.shape))
    ]
    covered = _cover(want, grids) & ~_cover(have, grids)
    lengths = np.ones((), dtype=np.int64)
    for borders in grids:
        lengths = np.multiply.outer(lengths, np.diff(borders))
    return int((covered * lengths).sum())


def _cover(boxes: set[Box], grids: Sequence[Sequence[int]]) -> np.ndarray:
    """Return which cells of the grid are inside one of the boxes."""
    covered = np.zeros([max(len(borders) - 1, 0) for borders in grids], dtype=bool)
    for box in boxes:
        covered[
            tuple(
                slice(np.searchsorted(g, lo), np.searchsorted(g, hi))
                for g, (lo, hi) in zip(grids, box, strict=True)
            )
        ] = True
    return covered
