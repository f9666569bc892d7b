"""Which ranks hold which part in a layout: the data behind tables, pictures and `inspect`.

An axis splits one dim at most, so a box is one interval of each dim, chosen by that dim's axes
alone:

    f32[5, 8] @ P('dp', 'tp') on (dp=2, tp=2, cp=2)     intervals of dim 0: 0:3 at dp=0, 3:5 at dp=1
                                                        holders of 0:3, 4:8: dp=0, tp=1, any cp
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .layout import Layout


class Interval(NamedTuple):
    """A part of one dim.

    Attributes:
        start, stop: half-open, in the global tensor.
        coordinates: `(axis, index)` for each axis that splits the dim: the ranks that hold the
            part.
    """

    start: int
    stop: int
    coordinates: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


def intervals(layout: Layout, dim: int) -> list[Interval]:
    """Return the parts of one dim, ascending, including empty ones."""
    axes, mesh, origin = layout.spec.dims[dim], layout.mesh, [0] * layout.mesh.ndim
    numbers = [mesh.axis_index(axis) for axis in axes]
    parts = []
    for indices in itertools.product(*[range(mesh.size(axis)) for axis in axes]):
        for number, index in zip(numbers, indices, strict=True):
            origin[number] = index
        parts.append(Interval(*layout.box_at(origin)[dim], tuple(zip(axes, indices, strict=True))))
    return parts


def parts(layout: Layout, dim: int) -> list[Interval]:
    """Return the parts of one dim that have elements, ascending."""
    return [part for part in intervals(layout, dim) if part.start < part.stop]


def holders(layout: Layout, box: Sequence[Interval]) -> list[int]:
    """Return the global ranks that hold a box, ascending; dims not in `box` restrict nothing."""
    at = {axis: index for part in box for axis, index in part.coordinates}
    return sorted(
        layout.mesh.ranks[tuple(at.get(axis, slice(None)) for axis in layout.mesh.axis_names)]
        .reshape(-1)
        .tolist()
    )


def elements(layout: Layout) -> np.ndarray:
    """Return how many elements each rank holds, in the shape of the mesh."""
    mesh = layout.mesh
    counts = np.ones(mesh.shape, dtype=np.int64)
    for dim, axes in enumerate(layout.spec.dims):
        lengths = np.array([part.stop - part.start for part in intervals(layout, dim)])
        in_spec_order = lengths.reshape([mesh.size(axis) for axis in axes])
        numbers = [mesh.axis_index(axis) for axis in axes]
        in_mesh_order = in_spec_order.transpose(np.argsort(numbers)) if axes else in_spec_order
        counts *= in_mesh_order.reshape(
            [n if i in numbers else 1 for i, n in enumerate(mesh.shape)]
        )
    return counts


# -- pages: a table or picture shows two dims ------------------------------------------------------


def shown_dims(layout: Layout) -> tuple[int, ...]:
    """Return the two dims shown as rows and columns: the last two that are split, else others.

    One dim, or none, if the tensor has no more.
    """
    split = [dim for dim in range(len(layout.shape)) if len(parts(layout, dim)) > 1]
    whole = [dim for dim in range(len(layout.shape)) if dim not in split]
    return tuple(sorted([*whole, *split][-2:]))


def pages(layout: Layout, dims: Sequence[int]) -> list[tuple[Interval | None, ...]]:
    """Return the pages of a table of `dims`: an interval per dim, None for dims that are shown.

    A page shows the part of the tensor at these intervals. Dims that are not split make no further
    pages.
    """
    hidden = [[None] if dim in dims else parts(layout, dim) for dim in range(len(layout.shape))]
    return list(itertools.product(*hidden))


def page_title(layout: Layout, page: Sequence[Interval | None]) -> str:
    """Return which part of the tensor a page shows: `[0:2, :, :]`."""
    whole = [
        part is None or (part.start, part.stop) == (0, n)
        for part, n in zip(page, layout.shape, strict=True)
    ]
    dims = (":" if is_whole else str(part) for is_whole, part in zip(whole, page, strict=True))
    return f"[{', '.join(dims)}]"


def title(layout: Layout, max_chars: int = 160) -> str:
    """Return the layout in one line; of many sizes only the first and the last are shown."""
    text = str(layout)
    for _, sizes in layout.spec.sizes if len(text) > max_chars else ():
        text = text.replace(str(sizes), f"({sizes[0]}, ..., {sizes[-1]})")
    return text


def pending_mark(layout: Layout) -> str:
    """Return the mark after ranks that hold contributions.

    `+` for a sum, ` max` and so on for other kinds, else nothing.
    """
    kinds = sorted(set(layout.pending.values()))
    return "".join("+" if kind == "sum" else f" {kind}" for kind in kinds)
