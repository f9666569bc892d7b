"""A timeline as a chart: a row for each rank, time to the right; as text and as a picture."""

from __future__ import annotations

import math
from fractions import Fraction
from os import PathLike
from typing import TYPE_CHECKING

from ....mesh.figure import drawn
from ....mesh.text import table_lines
from .actions import Action, Overlap
from .event import Event, Events, ShardCommunication

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_DENOMINATOR = 1000  # of times that are fractions of the unit
WIDTH, ROW, EDGES = 11.0, 0.4, 1.3  # inches
OPTIMIZER = "optimizer"
COLOURS = {
    "F": "#4878a8",
    "B": "#6aa56e",
    "I": "#58b0a7",
    "W": "#a8c66c",
    "FB": "#8f7fb8",
    "G": "#d0a54a",
    "R": "#c67c5c",
    OPTIMIZER: "#707070",
}
LEGEND = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
    "FB": "forward and backward together",
    "G": "gather parameters",
    "R": "reduce gradients",
}


def chart_text(events: Events, with_stage: bool) -> str:
    """Return the chart as text; see `Timeline.chart`.

    Args:
        with_stage: label actions with their stages.
    """
    unit = _column_length(events)
    labels = {event: _label(event, with_stage) for row in events for event in row}
    width = 1
    for event, label in labels.items():
        columns = _column(event.end, unit) - _column(event.start, unit)
        if columns:
            # n columns and the n - 1 blanks between them hold the label
            width = max(width, -(-(len(label) + 1) // columns) - 1)
    last = max(_column(row[-1].end, unit) for row in events)
    lines = []
    for row in events:
        parts: list[str] = []
        column = 0
        for event in row:
            start, end = _column(event.start, unit), _column(event.end, unit)
            parts += [".".ljust(width)] * (start - column)
            if end > start:
                room = (end - start) * (width + 1) - 1
                parts.append(labels[event].ljust(width).ljust(room, "-"))
            column = end
        parts += [".".ljust(width)] * (last - column)
        lines.append(" ".join(parts).rstrip())
    names = [f"rank {rank}" for rank in range(len(lines))]
    return "\n".join(table_lines([list(pair) for pair in zip(names, lines, strict=True)], right=()))


def _column_length(events: Events) -> float:
    """Return the longest time of which all starts and ends are multiples.

    If the shortest action would have more than ten columns, half of its duration: times are rounded
    to it.
    """
    durations = [event.end - event.start for row in events for event in row]
    shortest = min((duration for duration in durations if duration > 0), default=1)
    times = {time for row in events for event in row for time in (event.start, event.end)}
    fractions = [Fraction(time).limit_denominator(MAX_DENOMINATOR) for time in times]
    denominator = math.lcm(*[time.denominator for time in fractions])
    common = math.gcd(*[int(time * denominator) for time in fractions]) / denominator
    return common if 10 * common >= shortest else shortest / 2


def _column(time: float, unit: float) -> int:
    return round(time / unit)


def _label(event: Event, with_stage: bool) -> str:
    cell = event.cell
    if cell is None:
        return "step"
    if isinstance(cell, ShardCommunication):
        return str(cell) if with_stage else cell.kind
    if isinstance(cell, Overlap):
        return (
            f"{_action_label(cell.forward, with_stage)}&{_action_label(cell.backward, with_stage)}"
        )
    return _action_label(cell, with_stage)


def _action_label(action: Action, with_stage: bool) -> str:
    return str(action) if with_stage else f"{action.kind}{action.microbatch}"


def chart_picture(events: Events, heading: str, path: str | PathLike[str] | None = None) -> Figure:
    """Return the chart as a figure: a bar for each action, in the colour of its kind.

    Bars of a rank's later stages are paler than those of its first one.

    Args:
        heading: the text above.
        path: a file to write as well: .png, .svg, .pdf or another format of matplotlib.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a file format that matplotlib does not know.
    """
    return drawn(lambda figure_type: _draw(figure_type, events, heading), path)


def _draw(figure_type: type[Figure], events: Events, heading: str) -> Figure:
    figure = figure_type(figsize=(WIDTH, EDGES + ROW * len(events)))
    axes = figure.add_subplot()
    makespan = max(row[-1].end for row in events) or 1
    used: set[str] = set()
    for rank, row in enumerate(events):
        stages = [event.cell.stage for event in row if isinstance(event.cell, Action)]
        first_stage = min(stages, default=0)
        for event in row:
            _draw_event(axes, event, rank, first_stage, makespan)
            used.add(_kind(event))
    axes.set_yticks(range(len(events)), [f"rank {rank}" for rank in range(len(events))])
    axes.tick_params(labelsize=7)
    axes.set_ylim(len(events) - 0.5, -0.5)
    axes.set_xlim(0, makespan)
    axes.set_title(heading, fontsize=9)
    legend = [f"{kind}: {text}" for kind, text in LEGEND.items() if kind in used]
    if OPTIMIZER in used:
        legend.append("grey: optimizer")
    axes.set_xlabel(", ".join(legend), fontsize=7)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    return figure


def _kind(event: Event) -> str:
    if event.cell is None:
        return OPTIMIZER
    return "FB" if isinstance(event.cell, Overlap) else event.cell.kind


def _draw_event(axes: Axes, event: Event, rank: int, first_stage: int, makespan: float) -> None:
    later = isinstance(event.cell, Action | ShardCommunication) and event.cell.stage != first_stage
    duration = event.end - event.start
    axes.broken_barh(
        [(event.start, duration)],
        (rank - 0.4, 0.8),
        facecolors=COLOURS[_kind(event)],
        alpha=0.6 if later else 1.0,
        edgecolor="white",
        linewidth=0.3,
    )
    label = _label(event, with_stage=False)
    if duration * WIDTH / makespan > 0.07 * len(label):  # inches of text
        axes.text(event.start + duration / 2, rank, label, ha="center", va="center", fontsize=6)
