"""Who holds what in a layout, on meshes of any size: what tables, pictures and `inspect` are made of.

An axis splits one dim at most, so a box is one interval of each dim, chosen by that dim's axes alone:

    f32[5, 8] @ P('dp', 'tp') on (dp=2, tp=2, cp=2)     intervals of dim 0: 0:3 at dp=0, 3:5 at dp=1
                                                        holders of 0:3, 4:8: dp=0, tp=1, any cp
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .layout import Layout


class Interval(NamedTuple):
    """A part of one dim.

    Attributes:
        start, stop: half-open, in the global tensor.
        where: `(axis, index)` for each axis that splits the dim: the ranks that hold it.
    """

    start: int
    stop: int
    where: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


def intervals(layout: Layout, dim: int) -> list[Interval]:
    """The parts of one dim, ascending; empty ones too."""
    axes, mesh, origin = layout.spec.dims[dim], layout.mesh, [0] * layout.mesh.ndim
    numbers = [mesh.axis_index(axis) for axis in axes]
    found = []
    for indices in itertools.product(*[range(mesh.size(axis)) for axis in axes]):
        for number, index in zip(numbers, indices, strict=True):
            origin[number] = index
        found.append(Interval(*layout.box_at(origin)[dim], tuple(zip(axes, indices, strict=True))))
    return found


def parts(layout: Layout, dim: int) -> list[Interval]:
    """The parts of one dim that have elements, ascending."""
    return [part for part in intervals(layout, dim) if part.start < part.stop]


def holders(layout: Layout, box: Sequence[Interval]) -> list[int]:
    """The global ranks that hold a box, ascending; dims that are left out do not restrict them."""
    return sorted(_ranks_at(layout, dict(pair for part in box for pair in part.where)).reshape(-1).tolist())


def _ranks_at(layout: Layout, where: Mapping[str, int]) -> np.ndarray:
    return layout.mesh.ranks[tuple(where.get(axis, slice(None)) for axis in layout.mesh.axis_names)]


def elements(layout: Layout) -> np.ndarray:
    """How many elements each rank holds, in the shape of the mesh."""
    mesh = layout.mesh
    counts = np.ones(mesh.shape, dtype=np.int64)
    for dim, axes in enumerate(layout.spec.dims):
        lengths = np.array([part.stop - part.start for part in intervals(layout, dim)])
        in_spec_order = lengths.reshape([mesh.size(axis) for axis in axes])
        numbers = [mesh.axis_index(axis) for axis in axes]
        in_mesh_order = in_spec_order.transpose(np.argsort(numbers)) if axes else in_spec_order
        counts *= in_mesh_order.reshape([n if i in numbers else 1 for i, n in enumerate(mesh.shape)])
    return counts


def split_dims(layout: Layout) -> list[int]:
    """The dims of which no rank holds all."""
    return [dim for dim in range(len(layout.shape)) if len(parts(layout, dim)) > 1]


def shown_dims(layout: Layout) -> tuple[int, ...]:
    """The two dims that a table shows downwards and to the right: the last two that are split, others where fewer are.

    Of tensors with one dim that one, and none of those with none.
    """
    split = split_dims(layout)
    whole = [dim for dim in range(len(layout.shape)) if dim not in split]
    return tuple(sorted([*whole, *split][-2:]))


def pages(layout: Layout, dims: Sequence[int]) -> list[tuple[Interval | None, ...]]:
    """The boxes of the dims that a table does not show, a page each: per dim an interval, None for those that are shown.

    A page has what is in the tensor at these intervals; dims that are whole make no further pages.
    """
    hidden = [[None] if dim in dims else parts(layout, dim) for dim in range(len(layout.shape))]
    return list(itertools.product(*hidden))


def page_title(layout: Layout, page: Sequence[Interval | None]) -> str:
    """`[0:2, :, :]`: which part of the tensor a page shows."""
    whole = [part is None or (part.start, part.stop) == (0, n) for part, n in zip(page, layout.shape, strict=True)]
    return f"[{', '.join(':' if is_whole else str(part) for is_whole, part in zip(whole, page, strict=True))}]"


def title(layout: Layout, most: int = 160) -> str:
    """The layout in a line of bounded length: many sizes are shortened to the first and the last."""
    text = str(layout)
    for _, sizes in layout.spec.sizes if len(text) > most else ():
        text = text.replace(str(sizes), f"({sizes[0]}, ..., {sizes[-1]})")
    return text


def pending_mark(layout: Layout) -> str:
    """`+` behind ranks that hold contributions to a sum, ` max` and so on for the other kinds, nothing where none is pending."""
    kinds: Any = sorted(set(layout.pending.values()))
    return "".join("+" if kind == "sum" else f" {kind}" for kind in kinds)
