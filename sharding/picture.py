"""Pictures of a plan: the boxes that the ranks hold before, between and after its steps, drawn with matplotlib.

One panel a state. A panel is the tensor: dim 0 downwards, dim 1 to the right. In it every box is drawn once, in the colour
of the first rank that holds it, with the coordinates of its holders: `0,*` for all ranks whose first coordinate is 0.
"""

from __future__ import annotations

import colorsys
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

from ..kernels.box import Box, box_size
from ..mesh.abstract_mesh import axes_text
from .layout import Layout, dtype_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .explain import Explanation, StepCost

MOST_RANKS = 64  # more boxes than this cannot be told apart
_PANEL, _GAP, _EDGE, _TOP, _BOTTOM = 2.4, 1.6, 0.5, 0.9, 0.7  # inches
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
        dims: the dims that are drawn; of the others, index 0 is.
    """

    layout: Layout
    dims: tuple[int, ...]

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The boxes that can be seen, each once, in mesh order of their first holders; empty ones are not."""
        found: dict[Box, Part] = {}
        for coordinate, box in self.layout.boxes():
            if box_size(box) and all(start == 0 for dim, (start, _) in enumerate(box) if dim not in self.dims):
                rank = int(self.layout.mesh.ranks[coordinate])
                known = found.get(box)
                found[box] = Part(box, self._label(coordinate), min(rank, known.first) if known else rank)
        return tuple(found.values())

    @cached_property
    def empty(self) -> int:
        """Number of ranks that hold nothing."""
        return sum(not box_size(box) for _, box in self.layout.boxes())

    def _label(self, coordinate: Sequence[int]) -> str:
        """Ranks hold the same box exactly if they differ only along axes that split nothing."""
        mesh, split, pending = self.layout.mesh, self.layout.dim_of, self.layout.pending
        return ",".join(
            str(k) if axis in split or size == 1 else "+" if axis in pending else "*"
            for axis, size, k in zip(mesh.axis_names, mesh.shape, coordinate, strict=True)
        )


def states(explanation: Explanation) -> list[State]:
    """The layouts before, after each step and at the end, in the dims that are split in one of them, two at most.

    Raises:
        ValueError: a mesh of more than `MOST_RANKS` ranks.
    """
    plan = explanation.plan
    layouts = [plan.src, *[step.dst for step in plan.steps[:-1]], *[plan.dst] * bool(plan.steps)]
    for mesh in (plan.src.mesh, plan.dst.mesh):
        if mesh.size() > MOST_RANKS:
            raise ValueError(
                f"a picture shows up to {MOST_RANKS} ranks and ({axes_text(mesh.shape, mesh.axis_names)}) has {mesh.size()}; "
                "explain the same specs on a mesh with shorter axes, or print the explanation"
            )
    dims = _shown_dims(layouts)
    return [State(layout, dims) for layout in layouts]


def _shown_dims(layouts: Sequence[Layout]) -> tuple[int, ...]:
    """The first two dims that are split in one of the layouts, in order; others where fewer are."""
    split = sorted({dim for layout in layouts for dim in layout.dim_of.values()})
    others = [dim for dim in range(len(layouts[0].shape)) if dim not in split]
    return tuple(sorted([*split, *others][:2]))


# -- drawing ----------------------------------------------------------------------------------------------------------


def picture(explanation: Explanation, path: str | PathLike[str] | None = None) -> Figure:
    """picture(explanation, path) -> Figure: draws the boxes of every rank before, after each step and at the end.

    Pending values are hatched. Of tensors with more than two dims, two that are split are shown, at index 0 of the
    others, and the title says so. The same plan gives the same file.

    Args:
        path: a file to write as well: .png, .svg, .pdf or what else matplotlib knows.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a mesh of more than 64 ranks, or a kind of file that matplotlib does not know.

    Communication: none. No display is needed.

    Example:
        >>> layout = Layout.of(AbstractMesh((2, 4), ("dp", "tp")), P("dp", "tp"), (8, 8))
        >>> figure = explain(layout, P("tp", "dp")).picture()  # or .picture("plan.png")
        >>> len(figure.axes)  # before and after one step
        2
    """
    panels = states(explanation)
    style, figure_type = _matplotlib()
    with style.context(["default", _STYLE]):
        figure = _drawn(figure_type, explanation, panels)
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


def _drawn(figure_type: type[Figure], explanation: Explanation, panels: Sequence[State]) -> Figure:
    side = max([_PANEL, *[_INCHES_PER_BOX * _most_boxes(panel) for panel in panels]])
    width = 2 * _EDGE + len(panels) * side + (len(panels) - 1) * _GAP
    height = _TOP + side + _BOTTOM
    figure = figure_type(figsize=(width, height))
    figure.text(0.5, 1 - 0.12 / height, _title(panels), ha="center", va="top", fontsize=9)
    figure.text(0.5, 0.1 / height, _legend(panels), ha="center", va="bottom", fontsize=7, color="0.35")
    for i, panel in enumerate(panels):
        left = _EDGE + i * (side + _GAP)
        _draw_state(figure.add_axes((left / width, _BOTTOM / height, side / width, side / height)), panel, side)
        if i:
            _draw_step(figure, explanation.costs[i - 1], (left - _GAP / 2 - 0.1) / width, (_BOTTOM + side / 2) / height)
    return figure


def _most_boxes(panel: State) -> int:
    """The most boxes above or beside each other."""
    return max([len({part.box[dim] for part in panel.parts}) for dim in panel.dims], default=0)


def _title(panels: Sequence[State]) -> str:
    layout, dims = panels[0].layout, panels[0].dims
    title = f"{dtype_name(layout.dtype)}{list(layout.shape)} on ({axes_text(layout.mesh.shape, layout.mesh.axis_names)})"
    if len(layout.shape) > 2:
        title += f": dims {dims[0]} and {dims[1]} of {len(layout.shape)}, at index 0 of the others"
    return textwrap.fill(title, 52 * len(panels))


def _legend(panels: Sequence[State]) -> str:
    """What the labels mean, as far as the picture has them."""
    labels = "".join(part.label for panel in panels for part in panel.parts)
    notes = [f"labels: the coordinate on ({', '.join(panels[0].layout.mesh.axis_names)})"]
    notes += ["*: every one, all hold the same"] * ("*" in labels)
    notes += ["+ and hatched: every one, each holds a contribution"] * ("+" in labels)
    return "\n".join(textwrap.wrap("; ".join(notes), 40 * len(panels)))


def _draw_step(figure: Figure, cost: StepCost, x: float, y: float) -> None:
    """An arrow between two panels, named with the collective, its axes and the bytes into a rank."""
    rounds = f" x{cost.launches}" if cost.launches > 2 else ""
    lines = [cost.op + rounds, *[f"over {', '.join(cost.axes)}"] * bool(cost.axes)]
    figure.text(x, y, "\n".join([*lines, ""]), ha="center", va="bottom", fontsize=8)
    figure.text(x, y, "\N{RIGHTWARDS ARROW}", ha="center", va="center", fontsize=16)
    figure.text(x, y, f"\n{cost.bytes_received:,} bytes\ninto a rank", ha="center", va="top", fontsize=7)


def _draw_state(axes: Axes, state: State, side: float) -> None:
    """One panel of `side` inches."""
    lengths = [state.layout.shape[dim] for dim in state.dims]
    rows, cols = [*[1] * (2 - len(lengths)), *lengths]
    title = textwrap.fill(str(state.layout.spec), 40)
    axes.set_title(f"{title}\n({state.empty} ranks hold nothing)" if state.empty else title, fontsize=8)
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
    colour = _colour(part.first, int(state.layout.mesh.ranks.max()) + 1)
    axes.add_patch(Rectangle((left, top), right - left, bottom - top, facecolor=colour, edgecolor="0.3", hatch=hatch))
    inches = [side * (right - left) / axes.get_xlim()[1], side * (bottom - top) / axes.get_ylim()[0]]
    size = min(9.0, 72 * inches[1] * 0.8, 72 * inches[0] * 1.5 / len(part.label))
    behind = {"facecolor": colour, "edgecolor": "none", "pad": 1} if hatch else None
    axes.text((left + right) / 2, (top + bottom) / 2, part.label, ha="center", va="center", fontsize=size, bbox=behind)


def _ticks(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """The borders of boxes, at most nine of them."""
    borders = sorted({border for interval in intervals for border in interval})
    return [] if not borders else sorted({*borders[:: math.ceil(len(borders) / 8)], borders[-1]})


def _colour(rank: int, ranks: int) -> tuple[float, float, float]:
    """Light enough for black text; neighbouring ranks differ in shade, distant ones in hue."""
    return colorsys.hsv_to_rgb(rank / ranks, 0.5 if rank % 2 else 0.35, 0.95)
