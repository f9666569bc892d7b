"""Pictures of layouts and of plans: the boxes that the ranks hold, drawn with matplotlib.

A plan has a panel for each state before, between and after its steps; a layout has one, or one for each page of its table.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from ...mesh.abstract_mesh import axes_text
from ..layout.layout import Layout, dtype_name
from ..layout.shard_holders import page_title, pages, shown_dims, title
from .panel import BOTTOM, EDGE, GAP, TOP, State, check_few_ranks, draw_state, drawn, legend, panel_side

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .explain import Explanation, StepCost

PANELS_IN_A_ROW = 4


# -- plans ------------------------------------------------------------------------------------------------------------


def states(explanation: Explanation) -> list[State]:
    """The layouts before, after each step and at the end, in the dims that are split in one of them, two at most.

    Raises:
        ValueError: a mesh of more than `MOST_RANKS` ranks.
    """
    plan = explanation.plan
    layouts = [plan.src, *[step.dst for step in plan.steps[:-1]], *[plan.dst] * bool(plan.steps)]
    for mesh in (plan.src.mesh, plan.dst.mesh):
        check_few_ranks(mesh, "explain the same specs on a mesh with shorter axes, or print the explanation")
    dims = _shown_dims(layouts)
    return [State(layout, dims) for layout in layouts]


def _shown_dims(layouts: Sequence[Layout]) -> tuple[int, ...]:
    """The first two dims that are split in one of the layouts, in order; others where fewer are."""
    split = sorted({dim for layout in layouts for dim in layout.dim_of.values()})
    others = [dim for dim in range(len(layouts[0].shape)) if dim not in split]
    return tuple(sorted([*split, *others][:2]))


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
    return drawn(lambda figure_type: _drawn_plan(figure_type, explanation, panels), path)


def _drawn_plan(figure_type: type[Figure], explanation: Explanation, panels: Sequence[State]) -> Figure:
    side = panel_side(panels)
    width = 2 * EDGE + len(panels) * side + (len(panels) - 1) * GAP
    height = TOP + side + BOTTOM
    figure = figure_type(figsize=(width, height))
    figure.text(0.5, 1 - 0.12 / height, _plan_title(panels), ha="center", va="top", fontsize=9)
    figure.text(0.5, 0.1 / height, legend(panels, 40 * len(panels)), ha="center", va="bottom", fontsize=7, color="0.35")
    for i, panel in enumerate(panels):
        left = EDGE + i * (side + GAP)
        axes = figure.add_axes((left / width, BOTTOM / height, side / width, side / height))
        draw_state(axes, panel, side, str(panel.layout.spec))
        if i:
            _draw_step(figure, explanation.costs[i - 1], (left - GAP / 2 - 0.1) / width, (BOTTOM + side / 2) / height)
    return figure


def _plan_title(panels: Sequence[State]) -> str:
    layout, dims = panels[0].layout, panels[0].dims
    text = f"{dtype_name(layout.dtype)}{list(layout.shape)} on ({axes_text(layout.mesh.shape, layout.mesh.axis_names)})"
    if len(layout.shape) > 2:
        text += f": dims {dims[0]} and {dims[1]} of {len(layout.shape)}, at index 0 of the others"
    return textwrap.fill(text, 52 * len(panels))


def _draw_step(figure: Figure, cost: StepCost, x: float, y: float) -> None:
    """An arrow between two panels, named with the collective, its axes and the bytes into a rank."""
    rounds = f" x{cost.launches}" if cost.launches > 2 else ""
    lines = [cost.op + rounds, *[f"over {', '.join(cost.axes)}"] * bool(cost.axes)]
    figure.text(x, y, "\n".join([*lines, ""]), ha="center", va="bottom", fontsize=8)
    figure.text(x, y, "\N{RIGHTWARDS ARROW}", ha="center", va="center", fontsize=16)
    figure.text(x, y, f"\n{cost.bytes_received:,} bytes\ninto a rank", ha="center", va="top", fontsize=7)


# -- layouts ----------------------------------------------------------------------------------------------------------


def page_states(layout: Layout) -> list[State]:
    """A state for each page of the layout's table; one where the tensor has no elements.

    Raises:
        ValueError: a mesh of more than `MOST_RANKS` ranks.
    """
    check_few_ranks(layout.mesh, "draw the same spec on a mesh with shorter axes, or use style='text'")
    dims = shown_dims(layout)
    found = [[part.start if part else 0 for part in page] for page in pages(layout, dims)]
    return [State(layout, dims, tuple(index)) for index in found] or [State(layout, dims)]


def layout_picture(layout: Layout, path: str | PathLike[str] | None = None) -> Figure:
    """layout_picture(layout, path) -> Figure: draws the boxes of every rank, page by page; see `visualize`."""
    panels = page_states(layout)
    titles = [page_title(layout, page) for page in pages(layout, shown_dims(layout))]
    return drawn(lambda figure_type: _drawn_layout(figure_type, panels, titles if len(panels) > 1 else [""]), path)


def _directions(panel: State) -> str:
    """Which dims are drawn, where that is not plain."""
    return f": dim {panel.dims[0]} down, dim {panel.dims[1]} to the right" if len(panel.layout.shape) > 2 else ""


def _drawn_layout(figure_type: type[Figure], panels: Sequence[State], titles: Sequence[str]) -> Figure:
    side, in_a_row = panel_side(panels), min(len(panels), PANELS_IN_A_ROW)
    rows = -(-len(panels) // in_a_row)
    width = 2 * EDGE + in_a_row * side + (in_a_row - 1) * EDGE
    height = TOP + rows * side + (rows - 1) * BOTTOM + BOTTOM
    figure = figure_type(figsize=(width, height))
    heading = textwrap.fill(title(panels[0].layout) + _directions(panels[0]), 52 * in_a_row)
    figure.text(0.5, 1 - 0.12 / height, heading, ha="center", va="top", fontsize=9)
    figure.text(0.5, 0.1 / height, legend(panels, 40 * in_a_row), ha="center", va="bottom", fontsize=7, color="0.35")
    for i, (panel, name) in enumerate(zip(panels, titles, strict=True)):
        row, col = divmod(i, in_a_row)
        left, bottom = EDGE + col * (side + EDGE), height - TOP - side - row * (side + BOTTOM)
        axes = figure.add_axes((left / width, bottom / height, side / width, side / height))
        draw_state(axes, panel, side, name)
    return figure
