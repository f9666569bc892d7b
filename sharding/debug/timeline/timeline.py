"""`timeline`: when each operator and each collective of a graph runs, and what waits for what.

compute   mm     gelu   wait   mm        add
dp               all_gather    reduce_scatter
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ....mesh.comm.report import save_events, trace_event
from ....mesh.figure import MOST_BARS, Pictured
from ....mesh.topology import Topology, seconds_text
from ...jit.collectives import OPERATORS, WAIT, site_of
from ...jit.inspection.flops import flops_of
from ...jit.inspection.step_graph import StepGraph
from ...jit.jit import JitFunction
from .drawing import timeline_picture
from .durations import Durations, measured_times, moved_bytes
from .event import COMPUTE, TimelineEvent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Times = Callable[[fx.Node], float]


@dataclass(frozen=True, eq=False)
class Timeline(Pictured):
    """The result of `timeline`. `print` shows it as a table.

    Attributes:
        events: what takes time, in the order of the graph.
        measured: whether durations were measured; else they are predicted.
        rank: the global rank.
    """

    events: tuple[TimelineEvent, ...] = field(repr=False)
    measured: bool
    rank: int

    @property
    def lanes(self) -> tuple[str, ...]:
        """ "compute", then the axes of collectives in the order of their first one."""
        return tuple(dict.fromkeys([COMPUTE, *(event.lane for event in self.events)]))

    @property
    def seconds(self) -> float:
        """How long the step takes: the end of the last event."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def exposed_seconds(self) -> float:
        """How long operators wait for collectives, and collectives go on after the last of them."""
        return self.seconds - self.seconds_of("operator")

    def seconds_of(self, kind: str, lane: str | None = None) -> float:
        """Return the sum of the durations of one kind of event, in one lane if one is given."""
        return sum(
            event.duration
            for event in self.events
            if event.kind == kind and lane in (None, event.lane)
        )

    def trace(self) -> list[dict[str, Any]]:
        """Return the events in Chrome's trace format.

        A thread for each lane, and arrows from collectives to what waits for them.
        """
        threads = {lane: i for i, lane in enumerate(self.lanes)}
        how = "measured" if self.measured else "predicted"
        entries = [_name_event("process_name", self.rank, 0, f"rank {self.rank} ({how})")]
        entries += [
            _name_event("thread_name", self.rank, thread, lane) for lane, thread in threads.items()
        ]
        launched: dict[Any, TimelineEvent] = {}
        for number, event in enumerate(self.events):
            details = {"node": event.node, **event.details}
            entries.append(
                trace_event(
                    event.name,
                    event.kind,
                    self.rank,
                    threads[event.lane],
                    event.start * 1e6,
                    details,
                )
            )
            entries[-1]["dur"] = event.duration * 1e6
            if event.kind == "collective":
                launched[event.node] = event
            elif event.kind == "wait":
                source = launched[event.details["for"]]
                arrow = {"name": "waited for", "cat": "wait", "id": number, "pid": self.rank}
                entries.append(
                    arrow | {"ph": "s", "tid": threads[source.lane], "ts": source.start * 1e6}
                )
                entries.append(
                    arrow | {"ph": "f", "bp": "e", "tid": threads[COMPUTE], "ts": event.start * 1e6}
                )
        return entries

    def save(self, path: str | PathLike[str]) -> None:
        """Write the trace as JSON if the path ends in .json, else a picture: .png, .svg, .pdf.

        ui.perfetto.dev and chrome://tracing show the JSON.

        Raises: ImportError, ValueError as `picture`.
        """
        if Path(path).suffix.lower() == ".json":
            save_events(self.trace(), Path(path))
        else:
            self.picture(path)

    def picture(self, path: str | PathLike[str] | None = None) -> Figure:
        """Return a matplotlib figure with a row per lane, and write it to a file if path is given.

        Raises: ImportError without matplotlib; ValueError for a file format that matplotlib does
        not know.
        """
        heading = str(self).splitlines()[0]
        return timeline_picture(self.events, self.lanes, self.seconds, heading, path)

    def _notebook_text(self) -> str | None:
        return str(self) if len(self.events) <= MOST_BARS else None

    def __str__(self) -> str:
        how = "measured" if self.measured else "predicted"
        share = f"{self.exposed_seconds / self.seconds:.0%}" if self.seconds else "0%"
        exposed = f"{seconds_text(self.exposed_seconds)} ({share})"
        head = (
            f"rank {self.rank}, {how}: {seconds_text(self.seconds)}, of which {exposed} without "
            "operators"
        )
        return "\n".join([head, *map(self._lane_text, self.lanes)])

    def _lane_text(self, lane: str) -> str:
        """Return the time in one lane, and what takes most of it."""
        kind = "operator" if lane == COMPUTE else "collective"
        by_name: dict[str, float] = {}
        events = [event for event in self.events if event.lane == lane and event.kind == kind]
        for event in events:
            by_name[event.name] = by_name.get(event.name, 0.0) + event.duration
        most = sorted(by_name.items(), key=lambda item: -item[1])[:3]
        names = "".join(f"; {name} {seconds_text(seconds)}" for name, seconds in most)
        return (
            f"{lane}: {seconds_text(sum(by_name.values()))} in {len(events)} "
            f"{kind}{'s' * (len(events) != 1)}{names}"
        )


def timeline(
    compiled: Any,
    *,
    flops: float | Mapping[torch.dtype, float] | None = None,
    topology: Topology | None = None,
    measure: Callable[[], Any] | None = None,
    path: str | PathLike[str] | None = None,
) -> Timeline:
    """timeline(compiled) -> Timeline: when a graph's operators and collectives run on this rank.

    Operators run one after the other, collectives over the same axes too; collectives over other
    axes run next to them, and a wait lasts until its collective has completed. Durations are
    predicted from flops, bytes and the topology of the mesh, which `sm.topology.calibrate(mesh)`
    measures; kernels launched by the host, and links shared by two collectives, are not modelled.

    Args:
        compiled: what `f.lower(...)`, `.compile()` or `f.recorded[i]` returns, or a jitted
            function, of which it is the newest graph.
        flops: operations per second of matrix products, one number or one for each dtype. By
            default those of an H100 (data sheet) for "cuda" and abstract meshes, and of one core
            for "cpu".
        topology: links and memory, by default those of `mesh.topology`.
        measure: a function without arguments that calls the jitted function so that this graph
            runs. Its nodes are timed: this is a call like any other, on generated Python
            (`backend="eager"`). A collective lasts until it was waited for.
        path: a file to write: .json for a trace (ui.perfetto.dev), .png, .svg or .pdf for a
            picture.

    Raises:
        TypeError: `compiled` is something else.
        ValueError: a function that has no graph yet, a rate that is not positive, or `measure` has
            not run this graph.
        ImportError: a picture without matplotlib.

    Communication: none; with `measure` that of the call.

    Example:
        >>> mesh = sm.AbstractMesh((8,), ("tp",))
        >>> x, w = (sm.Layout.of(mesh, spec, (4096, 4096)) for spec in (P(None, "tp"), P("tp")))
        >>> result = sm.debug.timeline(sm.jit(lambda x, w: (x @ w).redistribute(P())).lower(x, w))
        >>> result.lanes
        ('compute', 'tp')
    """
    graph = _graph_of(compiled)
    _check_rates(flops)
    if measure is None:
        durations = Durations(graph, flops, topology)
        events = _events(graph, durations.operator, durations.collective)
    else:
        events = _measured_events(graph, measured_times(graph, measure))
    result = Timeline(tuple(events), measure is not None, graph._program.rank)
    if path is not None:
        result.save(path)
    return result


def _name_event(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def _graph_of(x: Any) -> StepGraph:
    if isinstance(x, StepGraph):
        return x
    if not isinstance(x, JitFunction):
        raise TypeError(
            f"timeline({type(x).__name__}): give a function of sm.jit, or what its lower(...) or "
            "recorded[i] returns"
        )
    if not x.recorded:
        raise ValueError(f"timeline({x!r}): it has no graph yet; call it, or give {x!r}.lower(...)")
    return x.recorded[-1]


def _check_rates(flops: Any) -> None:
    for rate in flops.values() if isinstance(flops, Mapping) else () if flops is None else (flops,):
        if not isinstance(rate, int | float) or not 0 < rate < float("inf"):
            raise ValueError(
                f"timeline(flops={rate!r}): must be a positive number of operations per second, "
                "such as 989e12"
            )


# -- predicted -------------------------------------------------------------------------------------


def _events(
    graph: StepGraph, operator_seconds: Times, collective_seconds: Times
) -> Iterator[TimelineEvent]:
    now = 0.0
    free: dict[str, float] = {}
    ends: dict[fx.Node, float] = {}
    for node in graph.graph.nodes:
        if node.target in OPERATORS:
            lane = graph.axes[node]
            start = max(now, free.get(lane, 0.0))
            yield _collective(graph, node, start, seconds := collective_seconds(node))
            free[lane] = ends[node] = start + seconds
        elif node.target is WAIT:
            started = node.args[0]
            if ends[started] > now:
                yield _wait(node, now, ends[started] - now)
                now = ends[started]
        elif (seconds := operator_seconds(node)) > 0:
            yield _operator(node, now, seconds)
            now += seconds


def _collective(graph: StepGraph, node: fx.Node, start: float, seconds: float) -> TimelineEvent:
    site = site_of(node.args[-1])  # type: ignore[arg-type]
    details = {
        "bytes_received": graph.bytes_received(node),
        "ranks": str(node.args[-2]),
        "line": site.place,
        "call": site.name,
    }
    details |= {} if site.tag is None else {"purpose": site.tag.text}
    name = OPERATORS[node.target]  # type: ignore[index]
    return TimelineEvent(name, "collective", graph.axes[node], start, seconds, node.name, details)


def _wait(node: fx.Node, start: float, seconds: float) -> TimelineEvent:
    started: Any = node.args[0]
    return TimelineEvent(
        f"wait for {OPERATORS[started.target]}",
        "wait",
        COMPUTE,
        start,
        seconds,
        node.name,
        {"for": started.name},
    )


def _operator(node: fx.Node, start: float, seconds: float) -> TimelineEvent:
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    name = (
        node.target._schema.name.partition("::")[2]  # type: ignore[union-attr]
        if is_operator
        else getattr(node.target, "__name__", "call")
    )
    details = {"bytes": moved_bytes(node), "flops": (flops_of(node) or 0) if is_operator else 0}
    return TimelineEvent(name, "operator", COMPUTE, start, seconds, node.name, details)


# -- measured --------------------------------------------------------------------------------------


def _measured_events(
    graph: StepGraph, times: Mapping[fx.Node, tuple[float, float]]
) -> Iterator[TimelineEvent]:
    """Yield events from when each node ran.

    A collective from its launch, or from the end of that before in its lane, until its wait.
    """
    free: dict[str, float] = {}
    ends = {
        node.args[0]: times[node][1] for node in reversed(graph.graph.nodes) if node.target is WAIT
    }
    for node in graph.graph.nodes:
        if node not in times:
            continue
        start, end = times[node]
        if node.target in OPERATORS:
            lane = graph.axes[node]
            last = ends.get(node, end)
            begin = min(max(start, free.get(lane, 0.0)), last)
            yield _collective(graph, node, begin, last - begin)
            free[lane] = last
        elif node.target is WAIT:
            yield _wait(node, start, end - start)
        else:
            yield _operator(node, start, end - start)
