"""comm_report and comm_budget: count a block's communication by line and operator, with limits."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CommBudgetError
from ..figure import HATCHES, SERIES, Pictured, drawn, in_bytes
from ..text import table_lines
from .call_site import UserCall, user_call
from .current_world import current_world
from .group import CollectiveRecord
from .world import World

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EVENTS = 100_000  # a trace has the last so many collectives
_OPERATORS = 7  # in a picture; the others are one part


class CollectiveSource(NamedTuple):
    """The operator, op, mesh axes and line that `CommReport` counts a collective under.

    Attributes:
        operator: what the program called: an operator, `redistribute`, "backward" ...
        op: the collective.
        axis: mesh axes that it runs over, "dp" or "dp,tp"; the ranks if they are not the group of
            any axes.
        line: file:line in the user's program.
    """

    operator: str
    op: str
    axis: str
    line: str


@dataclass(slots=True)
class _Usage:
    launches: int = 0
    sent: int = 0
    received: int = 0

    def add(self, launches: int, sent: int, received: int) -> None:
        self.launches += launches
        self.sent += sent
        self.received += received


class CommReport(Pictured):
    """Number and size of the collectives in a `comm_report` or `comm_budget`, on this rank.

    Attributes:
        bytes_received, bytes_sent, launches: totals, as `CollectiveRecord` counts them.
        by_operator, by_op, by_axis, by_line: name -> (launches, bytes received). `by_operator` has
            the names of what the program called (linear, redistribute, backward), `by_op` those of
            collectives.
    """

    def __init__(self, max_bytes: int | None = None, max_launches: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.max_launches = max_launches
        self._usage: dict[CollectiveSource, _Usage] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)

    @property
    def launches(self) -> int:
        return sum(use.launches for use in self._usage.values())

    @property
    def bytes_sent(self) -> int:
        return sum(use.sent for use in self._usage.values())

    @property
    def bytes_received(self) -> int:
        return sum(use.received for use in self._usage.values())

    @property
    def by_source(self) -> dict[CollectiveSource, tuple[int, int]]:
        """Operator, collective, axes and line together -> (launches, bytes received)."""
        return {source: (use.launches, use.received) for source, use in self._usage.items()}

    @property
    def by_operator(self) -> dict[str, tuple[int, int]]:
        return self._by("operator")

    @property
    def by_op(self) -> dict[str, tuple[int, int]]:
        return self._by("op")

    @property
    def by_axis(self) -> dict[str, tuple[int, int]]:
        return self._by("axis")

    @property
    def by_line(self) -> dict[str, tuple[int, int]]:
        return self._by("line")

    def _by(self, field: str) -> dict[str, tuple[int, int]]:
        usage: dict[str, _Usage] = {}
        for source, use in self._usage.items():
            usage.setdefault(getattr(source, field), _Usage()).add(
                use.launches, use.sent, use.received
            )
        return {name: (use.launches, use.received) for name, use in usage.items()}

    def observe(self, record: CollectiveRecord) -> Callable[[], None]:
        """Count one collective before it sends anything.

        Raises: CommBudgetError when it would exceed a limit.
        """
        call = user_call()
        world = current_world()
        self._check(
            record, call, "bytes", self.bytes_received, record.bytes_received, self.max_bytes
        )
        self._check(record, call, "launches", self.launches, 1, self.max_launches)
        source = CollectiveSource(call.name, record.op, world.axes_of(record.ranks), call.place)
        self._usage.setdefault(source, _Usage()).add(1, record.bytes_sent, record.bytes_received)
        event = _event(source, record, world)
        self._events.append(event)
        return lambda: event.update(dur=time.time_ns() / 1000 - event["ts"])

    def _check(
        self,
        record: CollectiveRecord,
        call: UserCall,
        unit: str,
        used: int,
        more: int,
        limit: int | None,
    ) -> None:
        if limit is not None and used + more > limit:
            operator = call.operator
            advice = "Choose shardings that need less" if operator is None else operator.advice
            raise CommBudgetError(
                f"{call.place}: {describe(call, record)} exceeds comm_budget({unit}={limit}), of "
                f"which {used} are used. Nothing was sent. {advice}, or allow {unit}={used + more}."
            )

    def report(self) -> str:
        """Return a table of launches and bytes per call, axes and line of the program."""
        rows = [("operator", "collective", "axis", "launches", "received", "sent", "line")]
        rows += [
            (*s[:3], str(u.launches), str(u.received), str(u.sent), s.line)
            for s, u in self._usage.items()
        ]
        rows.append(
            (
                "total",
                "",
                "",
                str(self.launches),
                str(self.bytes_received),
                str(self.bytes_sent),
                "",
            )
        )
        return "\n".join(table_lines(rows, right=(3, 4, 5)))

    def _notebook_text(self) -> str:
        return self.report()

    def picture(self, path: str | PathLike[str] | None = None) -> Figure:
        """Return a figure of the bytes received: a bar for each axis, a part for each operator.

        Args:
            path: a file to write as well, .png, .svg or .pdf.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: nothing was communicated; a file format that matplotlib does not know.
        """
        if not self._usage:
            raise ValueError("a picture of a report without communication would be empty")
        return drawn(self._draw, path)

    def _draw(self, figure_type: type[Figure]) -> Figure:
        received: dict[str, dict[str, int]] = {}
        for source, use in self._usage.items():
            by_axis = received.setdefault(source.operator, {})
            by_axis[source.axis] = by_axis.get(source.axis, 0) + use.received
        largest_first = sorted(received, key=lambda operator: -sum(received[operator].values()))
        shown, others = largest_first[:_OPERATORS], largest_first[_OPERATORS:]
        rows = {operator: received[operator] for operator in shown}
        if others:
            rows[f"{len(others)} others"] = {
                axis: sum(received[operator].get(axis, 0) for operator in others)
                for axis in self.by_axis
            }
        axes_names = sorted(self.by_axis, key=lambda axis: -self.by_axis[axis][1])
        figure = figure_type(figsize=(9.0, 1.4 + 0.5 * len(axes_names)))
        axes = figure.add_subplot()
        unit, scale = in_bytes(max(received for _, received in self.by_axis.values()))
        left = dict.fromkeys(axes_names, 0.0)
        for number, (operator, by_axis) in enumerate(rows.items()):
            widths = [by_axis.get(axis, 0) * scale for axis in axes_names]
            axes.barh(
                range(len(axes_names)),
                widths,
                left=list(left.values()),
                color=SERIES[number % len(SERIES)],
                hatch=HATCHES[number % len(HATCHES)],
                edgecolor="white",
                label=operator,
            )
            for axis, width in zip(axes_names, widths, strict=True):
                left[axis] += width
        axes.set_yticks(range(len(axes_names)), axes_names)
        axes.invert_yaxis()
        axes.set_xlabel(f"{unit} received by this rank")
        axes.set_title(f"{self.launches:,} collectives", fontsize=9)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.tight_layout()
        return figure

    def trace(self) -> list[dict[str, Any]]:
        """Return the collectives as complete events of Chrome's trace format.

        In microseconds since 1970; on CUDA the host's time.
        """
        return list(self._events)

    def save_trace(self, path: str | Path) -> None:
        """Write this rank's trace for chrome://tracing or ui.perfetto.dev.

        Several ranks' files open side by side.
        """
        save_events(self.trace(), path)

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        return f"CommReport(bytes_received={self.bytes_received}, launches={self.launches})"


def describe(call: UserCall, record: CollectiveRecord) -> str:
    """Return a collective and the call that it is part of, as text."""
    by = "" if call.name == record.op else f" by {call.name}"
    of = "" if call.operator is None else f" of {call.operator.operands}"
    return (
        f"{record.op} over {current_world().axes_of(record.ranks)} ({len(record.ranks)} ranks, "
        f"receiving {record.bytes_received} bytes of "
        f"{str(record.dtype).removeprefix('torch.')}){by}{of}"
    )


def _advice(call: UserCall) -> str:
    return (
        "Choose shardings that need less," if call.operator is None else f"{call.operator.advice},"
    )


def trace_event(
    name: str, op: str, rank: int, thread: str | int, start: float, details: dict[str, Any]
) -> dict[str, Any]:
    """Return a complete event of Chrome's trace format, with a duration of 0.

    Args:
        start: microseconds since 1970.
    """
    return {
        "name": name,
        "cat": op,
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "ts": start,
        "dur": 0.0,
        "args": details,
    }


def save_events(events: list[dict[str, Any]], path: str | Path) -> None:
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _event(source: CollectiveSource, record: CollectiveRecord, world: World) -> dict[str, Any]:
    details = {
        "line": source.line,
        "axis": source.axis,
        "ranks": list(record.ranks),
        "dtype": str(record.dtype),
    }
    moved = {"bytes_received": record.bytes_received, "bytes_sent": record.bytes_sent}
    name = f"{source.op} ({source.operator})"
    return trace_event(
        name, source.op, world.rank, source.axis, time.time_ns() / 1000, details | moved
    )


@contextmanager
def comm_budget(bytes: int | None = None, launches: int | None = None) -> Iterator[CommReport]:
    """with comm_budget(bytes=..., launches=...) as used: limit this rank's collectives.

    They are counted, and one that would exceed a limit raises before it starts.

    Yields a `CommReport`, which can be read during the block and after it. Around a whole
    `simulate` call it counts all ranks together.

    Args:
        bytes: how many may be received; no limit by default.
        launches: how many collectives may be called; no limit by default.

    Raises: CommBudgetError inside the block, before the collective that would exceed a limit sends
        anything; it names the operator, the layouts, the bytes and the line. If ranks communicate
        different amounts (an uneven all_to_all), only those over the limit raise, so leave some
        room.

    Communication: none.

    >>> import torch
    >>> from shardmesh.mesh import comm_budget, current_world, simulate
    >>> def fn():
    ...     with comm_budget(bytes=100) as used:
    ...         current_world().group([0, 1]).all_reduce(torch.ones(10))
    ...     return used.by_op
    >>> simulate(2)(fn)()
    [{'all_reduce': (1, 40)}, {'all_reduce': (1, 40)}]
    """
    counted = CommReport(bytes, launches)
    observers = current_world().observers
    observers.append(counted.observe)
    try:
        yield counted
    finally:
        observers.remove(counted.observe)


def comm_report() -> Any:
    """with comm_report() as report: count this rank's collectives, by operator, axis and line.

    Returns: a context manager that yields a `CommReport`: `print(report)` prints a table,
        `report.by_operator`, `by_axis` and `by_line` are dicts, and `report.save_trace(path)`
        writes a trace for Perfetto. It is a `comm_budget` without limits.

    Communication: none.
    """
    return comm_budget()
