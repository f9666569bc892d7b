"""`Timeline`: when each action of a schedule starts and ends; bubbles and live activations.

Two bubbles are in use, and a schedule may be free of one and not of the other:

* the makespan minus the time in which a rank is busy: the whole time of the step counts;
* the span of a rank, from the start of its first action to the end of its last one, minus the time
  in which it is busy. If ranks may start the next step as soon as they have finished this one, this
  is what repeats with every step. "Zero bubble" is meant in this sense.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING

from ....mesh.figure import MOST_BARS, Pictured
from .chart import chart_picture, chart_text
from .event import Events, ShardCommunication

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Timeline(Pictured):
    """The result of a simulation.

    Attributes:
        events: for each rank what it does, in order.
        live: for each rank the largest number of activations that it holds at one time. One
            activation is what one stage holds for one microbatch, from the start of its forward to
            the end of its backward: a backward for the weights needs the stage's inputs, so a
            backward for the inputs frees nothing.
        stages_per_rank: for each rank the number of its stages.
        gathered: for each rank the largest number of stages whose parameters are gathered at one
            time, if `fully_shard` shards them: a stage during an action of it, or from its first to
            its last action (`gather_per="step"`). Whole gradients are as many.
    """

    events: Events = field(repr=False)
    live: tuple[int, ...]
    stages_per_rank: tuple[int, ...]
    gathered: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """From the start of the first action to the end of the last one."""
        return max(row[-1].end for row in self.events)

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank the sum of its durations, with those of the optimizer and of gathers."""
        return tuple(sum(event.end - event.start for event in row) for row in self.events)

    @property
    def spans(self) -> tuple[float, ...]:
        """For each rank the time from the start of its first action to the end of its last one."""
        return tuple(row[-1].end - row[0].start for row in self.events)

    @property
    def bubble(self) -> float:
        """The makespan minus the time in which the busiest rank is busy."""
        return self.makespan - max(self.busy)

    @property
    def span_bubble(self) -> float:
        """The longest span of a rank minus the time in which it is busy."""
        return max(span - busy for span, busy in zip(self.spans, self.busy, strict=True))

    @property
    def live_microbatches(self) -> tuple[float, ...]:
        """For each rank the activations that it holds, in units of all its stages.

        1 is what a microbatch needs in all stages of the rank.
        """
        return tuple(
            live / stages for live, stages in zip(self.live, self.stages_per_rank, strict=True)
        )

    def chart(self) -> str:
        """Return the chart as text: a row for each rank, time to the right.

        A column is the longest time of which all starts and ends are multiples. An action is named
        in its first column, hyphens fill the others, and a dot is an idle column. If every rank has
        one stage, its number is left out: `F5`, else `2F5`. `step` is a step of the optimizer, and
        `2G` and `2R` gather the parameters of stage 2 and reduce its gradients.
        """
        return chart_text(self.events, with_stage=max(self.stages_per_rank) > 1)

    def picture(self, path: str | PathLike[str] | None = None, *, title: str = "") -> Figure:
        """Return the chart as a `matplotlib.figure.Figure`, a bar for each action.

        Args:
            path: a file to write as well: .png, .svg, .pdf or another format of matplotlib.
            title: a line above bubble and live activations.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: a file format that matplotlib does not know.
        """
        heading = f"{title}\n{self.summary()}" if title else self.summary()
        return chart_picture(self.events, heading, path)

    def _notebook_text(self) -> str | None:
        """Return no text, since the picture has the same rows."""
        return "" if sum(map(len, self.events)) <= MOST_BARS else None

    def summary(self) -> str:
        """Return makespan, bubbles and live activations in one line."""
        share = self.bubble / self.makespan if self.makespan else 0
        live = ", ".join(f"{number:g}" for number in self.live_microbatches)
        gathered = ""
        if any(isinstance(event.cell, ShardCommunication) for row in self.events for event in row):
            gathered = f"; gathered stages: {', '.join(map(str, self.gathered))}"
        return (
            f"makespan {self.makespan:g}, bubble {self.bubble:g} ({share:.1%}), "
            f"{self.span_bubble:g} by span; live microbatches: {live}{gathered}"
        )

    def __str__(self) -> str:
        return f"{self.summary()}\n{self.chart()}"
