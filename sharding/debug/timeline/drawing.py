"""A picture of a timeline, drawn with matplotlib: a row for each lane, time to the right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from ....mesh.figure import drawn
from .event import TimelineEvent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, ROW, EDGES = 11.0, 0.55, 1.35  # inches
COLOURS = {"operator": "#4878a8", "collective": "#e1812c", "wait": "#d0d0d0"}
_LEAST_SHARE = 0.004  # of the width per letter: a label that does not fit is left out


def timeline_picture(
    events: Sequence[TimelineEvent],
    lanes: Sequence[str],
    seconds: float,
    heading: str,
    path: str | PathLike[str] | None = None,
) -> Figure:
    """Return a figure with a row for each lane, bars for events, and labels where they fit.

    Args:
        seconds: the length of the step.
        path: a file to write as well.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a file format that matplotlib does not know.
    """
    return drawn(lambda figure_type: _draw(figure_type, events, lanes, seconds, heading), path)


def _draw(
    figure_type: type[Figure],
    events: Sequence[TimelineEvent],
    lanes: Sequence[str],
    seconds: float,
    heading: str,
) -> Figure:
    figure = figure_type(figsize=(WIDTH, EDGES + ROW * len(lanes)))
    axes = figure.add_subplot()
    unit, scale = _unit(seconds)
    for row, lane in enumerate(lanes):
        for kind, colour in COLOURS.items():
            shown = [event for event in events if event.lane == lane and event.kind == kind]
            bars = [(event.start * scale, event.duration * scale) for event in shown]
            axes.broken_barh(
                bars, (row - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3
            )
            for event in shown:
                _label(axes, event, row, scale, seconds)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, seconds * scale or 1)
    axes.set_xlabel(unit)
    axes.set_title(heading, fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    return figure


def _label(axes: Axes, event: TimelineEvent, row: int, scale: float, seconds: float) -> None:
    if seconds and event.duration / seconds > _LEAST_SHARE * 2 * len(event.name):
        axes.text(
            (event.start + event.duration / 2) * scale,
            row,
            event.name,
            ha="center",
            va="center",
            fontsize=6,
            clip_on=True,
        )


def _unit(seconds: float) -> tuple[str, float]:
    """Return a unit of time in which the numbers are short, and how many of it a second has."""
    exponent = math.log10(seconds) if seconds > 0 else 0
    return next(
        (
            (unit, scale)
            for unit, scale, least in (("s", 1.0, 0), ("ms", 1e3, -3))
            if exponent >= least
        ),
        ("us", 1e6),
    )
