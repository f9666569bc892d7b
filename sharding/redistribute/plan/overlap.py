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
# Index by axis position, and the interval common with the wanted one.
_DimPart = tuple[dict[int, int], tuple[int, int]]


def ranks_overlapping(
    layout: Layout, box: Box, coordinate: Coordinate, axes: Collection[str]
) -> list[tuple[Coordinate, Box]]:
    """Return the ranks that differ from `coordinate` along `axes`, and whose box overlaps `box`.

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
    found = []
    for parts in product(*choices):
        at = list(coordinate)
        for index, _ in parts:
            for i, k in index.items():
                at[i] = k
        found.append((tuple(at), tuple([common for _, common in parts[: len(box)]])))
    found.sort()
    return found


def _dim_parts(
    layout: Layout, dim: int, wanted: tuple[int, int], coordinate: Coordinate, axes: Collection[str]
) -> list[_DimPart]:
    """Return the indices on the axes that cut one dim whose interval overlaps `wanted`."""
    found: list[_DimPart] = [({}, (0, layout.shape[dim]))]
    for cut in layout.spec.cuts[dim]:
        positions = [layout.mesh.axis_index(a) for a in cut.axes]
        fixed = {
            i: coordinate[i] for i, a in zip(positions, cut.axes, strict=True) if a not in axes
        }
        found = [
            (
                {
                    **index,
                    **{i: k for i, k in zip(positions, indices, strict=True) if i not in fixed},
                },
                part,
            )
            for index, interval in found
            for indices, part in _cut_parts(
                cut, interval, wanted, [layout.mesh.axis_sizes[i] for i in positions]
            )
            if all(k == fixed.get(i, k) for i, k in zip(positions, indices, strict=True))
        ]
    common = [(index, (max(lo, wanted[0]), min(hi, wanted[1]))) for index, (lo, hi) in found]
    return [(index, (lo, hi)) for index, (lo, hi) in common if lo < hi]


def _cut_parts(
    cut: Cut, interval: tuple[int, int], wanted: tuple[int, int], sizes: Sequence[int]
) -> Iterator[tuple[Coordinate, tuple[int, int]]]:
    """Yield the parts of `interval` under `cut` that overlap `wanted`, with indices on its axes."""
    (start, stop), (low, high) = interval, wanted
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
