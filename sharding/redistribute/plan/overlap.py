"""Which ranks hold a part of a box: found by arithmetic, in time proportional to their number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, product
from typing import Any

from ....kernels.box import Box
from ....mesh.abstract_mesh import unravel
from ...layout.layout import Layout, chunk
from ...layout.spec import Cut

Coordinate = tuple[int, ...]
# index by axis position, and the interval common with the wanted one
_DimPart = tuple[dict[int, int], tuple[int, int]]


def ranks_overlapping(
    layout: Layout, box: Box, coordinate: Coordinate, axes: Collection[str]
) -> list[tuple[Coordinate, Box]]:
    """Return the ranks along `axes` from `coordinate` whose box in `layout` overlaps `box`.

    Returns:
        (coordinate, intersection) pairs in mesh order. Ranks along axes that split nothing are
        listed one by one.
    """
    mesh = layout.mesh
    free = [mesh.axis_index(a) for a in axes if a not in layout.dim_of]
    choices: list[Any] = [
        _dim_parts(layout, dim, interval, coordinate, axes) for dim, interval in enumerate(box)
    ]
    choices += [[({i: k}, None) for k in range(mesh.shape[i])] for i in free]
    overlapping = []
    for parts in product(*choices):
        at = list(coordinate)
        for index, _ in parts:
            for i, k in index.items():
                at[i] = k
        overlapping.append((tuple(at), tuple([common for _, common in parts[: len(box)]])))
    overlapping.sort()
    return overlapping


def _dim_parts(
    layout: Layout, dim: int, target: tuple[int, int], coordinate: Coordinate, axes: Collection[str]
) -> list[_DimPart]:
    """Return the indices on the axes that cut one dim whose interval overlaps `target`."""
    parts: list[_DimPart] = [({}, (0, layout.shape[dim]))]
    for cut in layout.spec.cuts[dim]:
        positions = [layout.mesh.axis_index(a) for a in cut.axes]
        fixed = {
            i: coordinate[i] for i, a in zip(positions, cut.axes, strict=True) if a not in axes
        }
        sizes = [layout.mesh.axis_sizes[i] for i in positions]
        finer: list[_DimPart] = []
        for index, interval in parts:
            for indices, part in _cut_parts(cut, interval, target, sizes):
                along = dict(zip(positions, indices, strict=True))
                if all(along[i] == k for i, k in fixed.items()):
                    free = {i: k for i, k in along.items() if i not in fixed}
                    finer.append(({**index, **free}, part))
        parts = finer
    common = [(index, (max(lo, target[0]), min(hi, target[1]))) for index, (lo, hi) in parts]
    return [(index, (lo, hi)) for index, (lo, hi) in common if lo < hi]


def _cut_parts(
    cut: Cut, interval: tuple[int, int], target: tuple[int, int], sizes: Sequence[int]
) -> Iterator[tuple[Coordinate, tuple[int, int]]]:
    """Yield the parts of `interval` under `cut` that overlap `target`, with their indices."""
    (start, stop), (low, high) = interval, target
    low, high = max(low, start), min(high, stop)
    if low >= high:
        return
    if cut.sizes is None:
        step = -(-(stop - start) // sizes[0])
        for k in range((low - start) // step, (high - 1 - start) // step + 1):
            yield (k,), chunk(start, stop, sizes[0], k)
        return
    ends = list(accumulate(cut.sizes))
    for k in range(bisect_right(ends, low), len(ends)):
        begin = ends[k] - cut.sizes[k]
        if begin >= high:
            return
        if begin < ends[k]:
            yield unravel(k, sizes), (begin, ends[k])
