"""Time the nodes of a graph in one call of its function."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ...jit.inspection.lowered import CompiledGraph
from ...jit.inspection.step_graph import StepGraph
from ...jit.program import compile_eagerly


def measured_times(graph: StepGraph, call: Callable[[], Any]) -> dict[fx.Node, tuple[float, float]]:
    """Run a call, and return when each node began and ended, in seconds since the graph's start.

    Raises: ValueError if the graph is not one that the function runs, or the call has not run it.
    """
    entry = graph.entry if isinstance(graph, CompiledGraph) else None
    if entry is None:
        raise ValueError(
            "timeline(measure=...): only a graph that a call has made can run; give the jitted "
            "function, or f.recorded[i]"
        )
    stopwatch = _Stopwatch(graph.graph)
    before, entry.runner = entry.runner, stopwatch
    try:
        call()
    finally:
        entry.runner = before
    if stopwatch.times is None:
        raise ValueError(
            "timeline(measure=...): the call has not run this graph; call the function with "
            "arguments like those that made it"
        )
    return stopwatch.times


class _Stopwatch:
    """Runs a graph as generated Python, and notes the time after each node.

    Attributes:
        times: when the nodes of the last run began and ended; None before.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.times: dict[fx.Node, tuple[float, float]] | None = None
        self._nodes = list(graph.nodes)
        self._is_cuda = any(
            "val" in node.meta and node.meta["val"][3].type == "cuda" for node in self._nodes
        )
        self._marks: list[tuple[int, float]] = []
        self._run = compile_eagerly(graph, self._mark)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        self._marks.clear()
        self._mark(-1)
        found = self._run(*inputs)
        first = self._marks[0][1]
        ends = [(i, moment - first) for i, moment in self._marks]
        self.times = {
            self._nodes[i]: (start, end) for (_, start), (i, end) in itertools.pairwise(ends)
        }
        return found

    def _mark(self, number: int) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()
        self._marks.append((number, time.perf_counter()))
