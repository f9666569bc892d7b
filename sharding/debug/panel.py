"""One panel of a picture: the tensor, and in it every box, drawn with matplotlib.

Dim 0 goes downwards, dim 1 to the right. A box is drawn once, in the colour of the first rank that holds it, with the
coordinates of its holders: `0,*` for all ranks whose first coordinate is 0. Pending boxes are hatched.
"""

from __future__ import annotations

import colorsys
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

from ...kernels.box import Box, box_size
from ...mesh.abstract_mesh import AbstractMesh, axes_text
from ..layout.layout import Layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_RANKS = 64  # more boxes than this cannot be told apart
PANEL, GAP, EDGE, TOP, BOTTOM = 2.4, 1.6, 0.5, 0.9, 0.7  # inches
_INCHES_PER_BOX = 0.16  # so that labels of many boxes can be read
_STYLE = {"svg.hashsalt": "shardmesh", "svg.fonttype": "none", "hatch.linewidth": 0.4}  # the same file each time


@dataclass(frozen=True)
class Part:
    """One box of a state, with the ranks that hold it.

    Attributes:
        box: in the global tensor.
        label: coordinates of the holders: `*` for an axis all of whose ranks hold the same values, `+` for one all of
            whose ranks hold a contribution.
        first: the lowest global rank among them.
    """

    box: Box
    label: str
    first: int


@dataclass(frozen=True, eq=False)
class State:
    """Who holds what in a layout, seen in two dims (one, or none, where the tensor has no more).

    Attributes:
        layout: what is drawn.
        dims: the dims that are drawn.
        index: of each dim the index at which the picture is taken, where it is not drawn; 0 by default.
    """

    layout: Layout
    dims: tuple[int, ...]
    index: tuple[int, ...] = ()

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The boxes that can be seen, each once, in mesh order of their first holders; empty ones are not."""
        found: dict[Box, Part] = {}
        for coordinate, box in self.layout.boxes():
            if box_size(box) and self._meets(box):
                rank = int(self.layout.mesh.ranks[coordinate])
                known = found.get(box)
                found[box] = Part(box, self._label(coordinate), min(rank, known.first) if known else rank)
        return tuple(found.values())

    @cached_property
    def empty(self) -> int:
        """Number of ranks that hold nothing."""
        return sum(not box_size(box) for _, box in self.layout.boxes())

    @property
    def most_boxes(self) -> int:
        """The most boxes above or beside each other."""
        return max([len({part.box[dim] for part in self.parts}) for dim in self.dims], default=0)

    def _meets(self, box: Box) -> bool:
        index = self.index or (0,) * len(box)
        return all(start <= index[dim] < stop for dim, (start, stop) in enumerate(box) if dim not in self.dims)

    def _label(self, coordinate: Sequence[int]) -> str:
        """Ranks hold the same box exactly if they differ only along axes that split nothing."""
        mesh, split, pending = self.layout.mesh, self.layout.dim_of, self.layout.pending
        return ",".join(
            str(k) if axis in split or size == 1 else "+" if axis in pending else "*"
            for axis, size, k in zip(mesh.axis_names, mesh.shape, coordinate, strict=True)
        )


def check_few_ranks(mesh: AbstractMesh, instead: str) -> None:
    """Raises ValueError for a mesh of more than `MOST_RANKS` ranks."""
    if mesh.size() > MOST_RANKS:
        raise ValueError(
            f"a picture shows up to {MOST_RANKS} ranks and ({axes_text(mesh.shape, mesh.axis_names)}) has {mesh.size()}; {instead}"
        )


# -- drawing ----------------------------------------------------------------------------------------------------------


def drawn(draw: Callable[[type[Figure]], Figure], path: str | PathLike[str] | None) -> Figure:
    """What `draw(Figure)` returns, in the style of all pictures here, and written to a file as well if a path is given.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a kind of file that matplotlib does not know.
    """
    style, figure_type = _matplotlib()
    with style.context(["default", _STYLE]):
        figure = draw(figure_type)
        if path is not None:
            figure.savefig(path, dpi=120, metadata=_metadata(str(path)))
    return figure


def _matplotlib() -> tuple[Any, type[Figure]]:
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures are drawn with matplotlib, which is not here: pip install shardmesh[viz]") from error
    return style, Figure


def _metadata(path: str) -> dict[str, str | None]:
    """Without what says when the file was made, and by which matplotlib."""
    svg, pdf = {"Date": None, "Creator": "shardmesh"}, {"CreationDate": None}
    return {".svg": svg, ".pdf": pdf}.get(path[-4:].lower(), {})


def panel_side(panels: Sequence[State]) -> float:
    """Inches of the side of each panel: more where there are many boxes."""
    return max([PANEL, *[_INCHES_PER_BOX * panel.most_boxes for panel in panels]])


def legend(panels: Sequence[State], width: int) -> str:
    """What the labels mean, as far as the picture has them, in lines of `width` characters."""
    labels = "".join(part.label for panel in panels for part in panel.parts)
    notes = [f"labels: the coordinate on ({', '.join(panels[0].layout.mesh.axis_names)})"]
    notes += ["*: every one, all hold the same"] * ("*" in labels)
    notes += ["+ and hatched: every one, each holds a contribution"] * ("+" in labels)
    return "\n".join(textwrap.wrap("; ".join(notes), width))


def draw_state(axes: Axes, state: State, side: float, title: str) -> None:
    """One panel of `side` inches."""
    lengths = [state.layout.shape[dim] for dim in state.dims]
    rows, cols = [*[1] * (2 - len(lengths)), *lengths]
    title = textwrap.fill(title, 40)
    empty = f"({state.empty} ranks hold nothing)" if state.empty else ""
    axes.set_title("\n".join(filter(None, [title, empty])), fontsize=8)
    axes.set_xlim(0, max(cols, 1))
    axes.set_ylim(max(rows, 1), 0)
    axes.tick_params(labelsize=6, length=2)
    for part in state.parts:
        _draw_part(axes, state, part, side)
    intervals = [sorted({part.box[dim] for part in state.parts}) for dim in state.dims]
    axes.set_xticks(_ticks(intervals[-1]) if intervals else [])
    axes.set_yticks(_ticks(intervals[0]) if len(intervals) == 2 else [])


def _draw_part(axes: Axes, state: State, part: Part, side: float) -> None:
    from matplotlib.patches import Rectangle

    spans = [part.box[dim] for dim in state.dims]
    (top, bottom), (left, right) = [*[(0, 1)] * (2 - len(spans)), *spans]
    hatch = "//" if state.layout.pending else None
    shade = colour(part.first, int(state.layout.mesh.ranks.max()) + 1)
    axes.add_patch(Rectangle((left, top), right - left, bottom - top, facecolor=shade, edgecolor="0.3", hatch=hatch))
    inches = [side * (right - left) / axes.get_xlim()[1], side * (bottom - top) / axes.get_ylim()[0]]
    size = min(9.0, 72 * inches[1] * 0.8, 72 * inches[0] * 1.5 / len(part.label))
    behind = {"facecolor": shade, "edgecolor": "none", "pad": 1} if hatch else None
    axes.text((left + right) / 2, (top + bottom) / 2, part.label, ha="center", va="center", fontsize=size, bbox=behind)


def _ticks(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """The borders of boxes, at most nine of them."""
    borders = sorted({border for interval in intervals for border in interval})
    return [] if not borders else sorted({*borders[:: math.ceil(len(borders) / 8)], borders[-1]})


def colour(rank: int, ranks: int) -> tuple[float, float, float]:
    """Light enough for black text; neighbouring ranks differ in shade, distant ones in hue."""
    return colorsys.hsv_to_rgb(rank / ranks, 0.5 if rank % 2 else 0.35, 0.95)
