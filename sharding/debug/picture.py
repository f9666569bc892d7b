"""Pictures of layouts and plans by matplotlib: the tensor, and in it the box of every rank.

A plan has a panel for the layout before, after each step and at the end. A layout has one panel, or
one for each page of its table. Dim 0 goes downwards, dim 1 to the right. A box is drawn once, in
the colour of the first rank that holds it, with the coordinates of its holders: `0,*` means all
ranks whose first coordinate is 0. Pending boxes are hatched.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING

from ...kernels.box import Box, box_size
from ...mesh.abstract_mesh import AbstractMesh, axes_text
from ...mesh.figure import drawn
from ..layout.layout import Layout, dtype_name
from ..layout.shard_holders import page_title, pages, shown_dims, title
from ..parallel.rank_table import colour
from ..redistribute.plan import Plan, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_RANKS = 64  # with more, boxes cannot be distinguished
PANELS_IN_A_ROW = 4
PANEL, GAP, EDGE, TOP, BOTTOM = 2.4, 1.6, 0.5, 0.9, 0.7  # inches
_INCHES_PER_BOX = 0.16  # so that labels of many boxes can be read


@dataclass(frozen=True)
class DrawnBox:
    """One box of a panel, with the ranks that hold it.

    Attributes:
        box: in the global tensor.
        label: coordinates of the holders: `*` for an axis all of whose ranks hold the same values,
            `+` for one all of whose ranks hold a contribution.
        first: the lowest global rank among them.
    """

    box: Box
    label: str
    first: int


@dataclass(frozen=True, eq=False)
class Panel:
    """A layout seen in two dims (one, or none, if the tensor has no more).

    Attributes:
        layout: the layout to draw.
        dims: the dims that are drawn.
        index: for each dim the index at which the tensor is shown, if the dim is not drawn; 0 by
            default.
    """

    layout: Layout
    dims: tuple[int, ...]
    index: tuple[int, ...] = ()

    @cached_property
    def parts(self) -> tuple[DrawnBox, ...]:
        """The boxes that can be seen, each once, in mesh order of their first holders.

        Empty ones are left out.
        """
        by_box: dict[Box, DrawnBox] = {}
        for coordinate, box in self.layout.boxes():
            if box_size(box) and self._is_visible(box):
                rank = int(self.layout.mesh.ranks[coordinate])
                known = by_box.get(box)
                by_box[box] = DrawnBox(
                    box, self._label(coordinate), min(rank, known.first) if known else rank
                )
        return tuple(by_box.values())

    @cached_property
    def empty(self) -> int:
        """Number of ranks that hold nothing."""
        return sum(not box_size(box) for _, box in self.layout.boxes())

    def _is_visible(self, box: Box) -> bool:
        index = self.index or (0,) * len(box)
        return all(
            start <= index[dim] < stop
            for dim, (start, stop) in enumerate(box)
            if dim not in self.dims
        )

    def _label(self, coordinate: Sequence[int]) -> str:
        """Return the coordinates of the holders of a box.

        Ranks hold the same box if they differ only along axes that split nothing.
        """
        mesh, split, pending = self.layout.mesh, self.layout.dim_of, self.layout.pending
        return ",".join(
            str(k) if axis in split or size == 1 else "+" if axis in pending else "*"
            for axis, size, k in zip(mesh.axis_names, mesh.shape, coordinate, strict=True)
        )


def _check_few_ranks(mesh: AbstractMesh, instead: str) -> None:
    if mesh.size() > MAX_RANKS:
        raise ValueError(
            f"a picture shows up to {MAX_RANKS} ranks and "
            f"({axes_text(mesh.shape, mesh.axis_names)}) has {mesh.size()}; {instead}"
        )


# -- plans -----------------------------------------------------------------------------------------


def plan_panels(plan: Plan) -> list[Panel]:
    """Return panels of the layouts before, after each step and at the end.

    In two dims that are split in one of them.

    Raises:
        ValueError: a mesh of more than `MAX_RANKS` ranks.
    """
    layouts = [plan.src, *[step.dst for step in plan.steps[:-1]], *[plan.dst] * bool(plan.steps)]
    for mesh in (plan.src.mesh, plan.dst.mesh):
        _check_few_ranks(
            mesh, "explain the same specs on a mesh with shorter axes, or print the explanation"
        )
    split = sorted({dim for layout in layouts for dim in layout.dim_of.values()})
    others = [dim for dim in range(len(plan.src.shape)) if dim not in split]
    dims = tuple(sorted([*split, *others][:2]))
    return [Panel(layout, dims) for layout in layouts]


def plan_picture(
    plan: Plan, received: Sequence[int], path: str | PathLike[str] | None = None
) -> Figure:
    """Return a figure of the boxes of every rank before, after each step and at the end.

    Pending values are hatched. Of a tensor with more than two dims, two that are split are shown,
    at index 0 of the others; the title says which. The same plan gives the same file.

    Args:
        received: bytes that the busiest rank receives in each step.
        path: a file to write as well: .png, .svg, .pdf or another format of matplotlib.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a mesh of more than 64 ranks, or a file format that matplotlib does not know.

    Communication: none. No display is needed.

    Example:
        >>> layout = Layout.of(AbstractMesh((2, 4), ("dp", "tp")), P("dp", "tp"), (8, 8))
        >>> figure = explain(layout, P("tp", "dp")).picture()  # or .picture("plan.png")
        >>> len(figure.axes)  # before and after one step
        2
    """
    panels = plan_panels(plan)
    return drawn(lambda figure_type: _draw_plan(figure_type, plan, received, panels), path)


def _draw_plan(
    figure_type: type[Figure], plan: Plan, received: Sequence[int], panels: Sequence[Panel]
) -> Figure:
    side = _panel_side(panels)
    width = 2 * EDGE + len(panels) * side + (len(panels) - 1) * GAP
    height = TOP + side + BOTTOM
    layout, dims = panels[0].layout, panels[0].dims
    heading = (
        f"{dtype_name(layout.dtype)}{list(layout.shape)} on "
        f"({axes_text(layout.mesh.shape, layout.mesh.axis_names)})"
    )
    if len(layout.shape) > 2:
        heading += (
            f": dims {dims[0]} and {dims[1]} of {len(layout.shape)}, at index 0 of the others"
        )
    figure = _figure_with_heading(figure_type, width, height, heading, panels, len(panels))
    for i, panel in enumerate(panels):
        left = EDGE + i * (side + GAP)
        axes = figure.add_axes((left / width, BOTTOM / height, side / width, side / height))
        _draw_panel(axes, panel, side, str(panel.layout.spec))
        if i:
            _draw_step(
                figure,
                plan.steps[i - 1],
                received[i - 1],
                (left - GAP / 2 - 0.1) / width,
                (BOTTOM + side / 2) / height,
            )
    return figure


def _draw_step(figure: Figure, step: Step, received: int, x: float, y: float) -> None:
    """Draw an arrow between two panels, with collective, axes and bytes received by a rank."""
    rounds = f" x{step.launches}" if step.launches > 2 else ""
    # on two lines, since the gap is narrow
    name = step.op.replace("hierarchical_", "hierarchical_\n") + rounds
    lines = [name, *[f"over {', '.join(step.axes)}"] * bool(step.axes)]
    figure.text(x, y, "\n".join([*lines, ""]), ha="center", va="bottom", fontsize=8)
    figure.text(x, y, "\N{RIGHTWARDS ARROW}", ha="center", va="center", fontsize=16)
    figure.text(x, y, f"\n{received:,} bytes\ninto a rank", ha="center", va="top", fontsize=7)


# -- layouts ---------------------------------------------------------------------------------------


def page_panels(layout: Layout) -> list[Panel]:
    """Return a panel for each page of the layout's table; one if the tensor has no elements.

    Raises:
        ValueError: a mesh of more than `MAX_RANKS` ranks.
    """
    _check_few_ranks(
        layout.mesh, "draw the same spec on a mesh with shorter axes, or use style='text'"
    )
    dims = shown_dims(layout)
    indices = [[part.start if part else 0 for part in page] for page in pages(layout, dims)]
    return [Panel(layout, dims, tuple(index)) for index in indices] or [Panel(layout, dims)]


def layout_picture(layout: Layout, path: str | PathLike[str] | None = None) -> Figure:
    """layout_picture(layout, path) -> Figure: every rank's boxes, page by page; see `visualize`."""
    panels = page_panels(layout)
    titles = [page_title(layout, page) for page in pages(layout, shown_dims(layout))]
    return drawn(
        lambda figure_type: _draw_layout(figure_type, panels, titles if len(panels) > 1 else [""]),
        path,
    )


def _draw_layout(
    figure_type: type[Figure], panels: Sequence[Panel], titles: Sequence[str]
) -> Figure:
    side = _panel_side(panels)
    in_a_row = min(len(panels), PANELS_IN_A_ROW)
    rows = -(-len(panels) // in_a_row)
    width = 2 * EDGE + in_a_row * side + (in_a_row - 1) * EDGE
    height = TOP + rows * side + (rows - 1) * BOTTOM + BOTTOM
    layout, dims = panels[0].layout, panels[0].dims
    directions = (
        f": dim {dims[0]} down, dim {dims[1]} to the right" if len(layout.shape) > 2 else ""
    )
    figure = _figure_with_heading(
        figure_type, width, height, title(layout) + directions, panels, in_a_row
    )
    for i, (panel, name) in enumerate(zip(panels, titles, strict=True)):
        row, col = divmod(i, in_a_row)
        left, bottom = EDGE + col * (side + EDGE), height - TOP - side - row * (side + BOTTOM)
        axes = figure.add_axes((left / width, bottom / height, side / width, side / height))
        _draw_panel(axes, panel, side, name)
    return figure


# -- drawing ---------------------------------------------------------------------------------------


def _panel_side(panels: Sequence[Panel]) -> float:
    """Return the side of each panel in inches: longer if there are many boxes."""
    most = [len({part.box[dim] for part in panel.parts}) for panel in panels for dim in panel.dims]
    return max([PANEL, *[_INCHES_PER_BOX * count for count in most]])


def _figure_with_heading(
    figure_type: type[Figure],
    width: float,
    height: float,
    heading: str,
    panels: Sequence[Panel],
    in_a_row: int,
) -> Figure:
    """Return a figure with a heading, and below the explanation of the labels that it has."""
    labels = "".join(part.label for panel in panels for part in panel.parts)
    notes = [f"labels: the coordinate on ({', '.join(panels[0].layout.mesh.axis_names)})"]
    notes += ["*: all ranks, same values"] * ("*" in labels)
    notes += ["+ and hatched: all ranks, one contribution each"] * ("+" in labels)
    legend = "\n".join(textwrap.wrap("; ".join(notes), 40 * in_a_row))
    figure = figure_type(figsize=(width, height))
    figure.text(
        0.5,
        1 - 0.12 / height,
        textwrap.fill(heading, 52 * in_a_row),
        ha="center",
        va="top",
        fontsize=9,
    )
    figure.text(0.5, 0.1 / height, legend, ha="center", va="bottom", fontsize=7, color="0.35")
    return figure


def _draw_panel(axes: Axes, panel: Panel, side: float, name: str) -> None:
    """Draw one panel of `side` inches."""
    lengths = [panel.layout.shape[dim] for dim in panel.dims]
    rows, cols = [*[1] * (2 - len(lengths)), *lengths]
    empty = f"({panel.empty} ranks hold nothing)" if panel.empty else ""
    axes.set_title("\n".join(filter(None, [textwrap.fill(name, 40), empty])), fontsize=8)
    axes.set_xlim(0, max(cols, 1))
    axes.set_ylim(max(rows, 1), 0)
    axes.tick_params(labelsize=6, length=2)
    for part in panel.parts:
        _draw_box(axes, panel, part, side)
    intervals = [sorted({part.box[dim] for part in panel.parts}) for dim in panel.dims]
    axes.set_xticks(_ticks(intervals[-1]) if intervals else [])
    axes.set_yticks(_ticks(intervals[0]) if len(intervals) == 2 else [])


def _draw_box(axes: Axes, panel: Panel, part: DrawnBox, side: float) -> None:
    from matplotlib.patches import Rectangle

    spans = [part.box[dim] for dim in panel.dims]
    (top, bottom), (left, right) = [*[(0, 1)] * (2 - len(spans)), *spans]
    hatch = "//" if panel.layout.pending else None
    shade = colour(part.first, int(panel.layout.mesh.ranks.max()) + 1)
    axes.add_patch(
        Rectangle(
            (left, top), right - left, bottom - top, facecolor=shade, edgecolor="0.3", hatch=hatch
        )
    )
    inches = [
        side * (right - left) / axes.get_xlim()[1],
        side * (bottom - top) / axes.get_ylim()[0],
    ]
    size = min(9.0, 72 * inches[1] * 0.8, 72 * inches[0] * 1.5 / len(part.label))
    behind = {"facecolor": shade, "edgecolor": "none", "pad": 1} if hatch else None
    axes.text(
        (left + right) / 2,
        (top + bottom) / 2,
        part.label,
        ha="center",
        va="center",
        fontsize=size,
        bbox=behind,
    )


def _ticks(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """Return the borders of boxes, at most nine of them."""
    borders = sorted({border for interval in intervals for border in interval})
    return [] if not borders else sorted({*borders[:: math.ceil(len(borders) / 8)], borders[-1]})
