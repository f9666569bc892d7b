"""How long the nodes of a graph take: predicted from flops and bytes, or measured in a call.

    operator     max(flops / rate, bytes read and written / memory)       views and numbers: nothing
    collective   latency + max(bytes / local, network bytes / network) x factor

Latencies and bandwidths are those of the mesh's `Topology`. The time that the host takes to launch
a node is not counted.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ....mesh.topology import Topology
from ...jit.collectives import OPERATORS, WAIT
from ...jit.inspection.flops import flops_of
from ...jit.inspection.lowered import CompiledGraph
from ...jit.inspection.step_graph import StepGraph, bytes_of, ranks_of
from ...jit.passes.alias import is_view, owner_of, writes
from ...jit.program import compile_eagerly

# NVIDIA H100 SXM (data sheet, without sparsity); float32 as torch multiplies it by default, without
# TF32.
_H100 = {torch.float16: 989e12, torch.bfloat16: 989e12, torch.float32: 67e12, torch.float64: 67e12}
# torch.mm of 1024 x 1024 on one core of a server (AMD EPYC): 100 in float32, 55 in float64, 470 in
# bfloat16.
_CORE = {torch.float16: 1e11, torch.bfloat16: 4.7e11, torch.float32: 1e11, torch.float64: 5.5e10}
_READ_PARTS = ("embedding", "index", "gather")  # of the first operand as much as they return
_OVERWRITE = ("copy_", "fill_", "zero_")
_RINGS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


class Durations:
    """What each node of a graph takes.

    Attributes:
        topology: that of all collectives; None for that of the mesh of each.
    """

    def __init__(
        self,
        graph: StepGraph,
        flops: float | Mapping[torch.dtype, float] | None,
        topology: Topology | None,
    ) -> None:
        self._graph, self.topology = graph, topology
        self._meshes: list[Any] = list(graph.world.meshes.values())
        self._memory = topology or next(
            (m.topology for m in self._meshes), Topology.default(graph.device_type)
        )
        self._flops: Any = (
            (_H100 if graph.device_type == "cuda" else _CORE) if flops is None else flops
        )

    def operator(self, node: fx.Node) -> float:
        """Return the seconds of a node that computes; 0 for one that makes a view or a number."""
        if (
            node.op != "call_function"
            or node.target is WAIT
            or is_view(node)
            or not (bytes_of(node) or writes(node))
        ):
            return 0.0
        is_operator = isinstance(node.target, torch._ops.OpOverload)
        flops = (flops_of(node) or 0) if is_operator else 0
        copied_bytes = moved_bytes(node) / 2  # each is read and written
        return max(flops / self._rate(node), copied_bytes / self._memory.memory)

    def _rate(self, node: fx.Node) -> float:
        if not isinstance(self._flops, Mapping):
            return float(self._flops)
        dtype = next(
            (x.meta["val"][2] for x in (node, *node.all_input_nodes) if "val" in x.meta),
            torch.float32,
        )
        return float(
            self._flops.get(dtype, self._flops.get(torch.float32, min(self._flops.values())))
        )

    def collective(self, start: fx.Node) -> float:
        """Return the seconds of a collective."""
        topology, nodes = self._place(start)
        name = OPERATORS[start.target]  # type: ignore[index]
        received = self._graph.bytes_received(start)
        own = max(nodes.values())
        factor = topology.factor({"permute": "all_to_all"}.get(name, name))
        if len(nodes) == 1:
            return topology.local.latency + received / topology.local.bandwidth * factor
        outside = received * (sum(nodes.values()) - own) / max(sum(nodes.values()) - 1, 1)
        # what a node lacks enters it once, over its rails
        rails = min(own, topology.rails or own) if name in _RINGS else 1
        network = outside / rails / topology.network.bandwidth
        return topology.network.latency + max(received / topology.local.bandwidth, network) * factor

    def _place(self, start: fx.Node) -> tuple[Topology, Counter[int]]:
        """Return the topology of a collective's mesh, and how many of its ranks each node has."""
        ranks = ranks_of(start)
        mesh = next(
            (m for m in self._meshes if set(ranks) <= set(m.ranks.flatten().tolist())), None
        )
        if mesh is None:
            return self._memory, Counter({0: len(ranks)})
        topology = self.topology or mesh.topology
        node_of = dict(
            zip(
                mesh.ranks.flatten().tolist(),
                topology.node_ids(mesh).flatten().tolist(),
                strict=True,
            )
        )
        return topology, Counter(node_of[rank] for rank in ranks)


def moved_bytes(node: fx.Node) -> int:
    """Return the bytes that a node reads and writes."""
    name = (
        node.target._schema.name.partition("::")[2]
        if isinstance(node.target, torch._ops.OpOverload)
        else ""
    )
    written = writes(node)
    inputs = list(node.all_input_nodes)
    result_bytes = 0 if written or owner_of(node) is not None else bytes_of(node)
    if "empty" in name:
        return 0
    if name.startswith(_READ_PARTS):
        return 2 * result_bytes
    if name.startswith("new_") or name.endswith("_like"):
        inputs = []
    elif name in _OVERWRITE:
        inputs = [x for x in inputs if x not in written]
    return result_bytes + sum(map(_memory_bytes, written)) + sum(map(_memory_bytes, inputs))


def _memory_bytes(node: fx.Node) -> int:
    """Return the bytes of memory behind a value: of an expanded one those of one copy."""
    if "val" not in node.meta:
        return bytes_of(node)
    shape, strides, dtype, _ = node.meta["val"]
    return (
        math.prod(n for n, stride in zip(shape, strides, strict=True) if stride) * dtype.itemsize
        if math.prod(shape)
        else 0
    )


# -- measured --------------------------------------------------------------------------------------


def measured_times(graph: StepGraph, call: Callable[[], Any]) -> dict[fx.Node, tuple[float, float]]:
    """Run a call; return when each node began and ended, in seconds from the graph's start.

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
        results = self._run(*inputs)
        first = self._marks[0][1]
        ends = [(i, moment - first) for i, moment in self._marks]
        self.times = {
            self._nodes[i]: (start, end) for (_, start), (i, end) in itertools.pairwise(ends)
        }
        return results

    def _mark(self, number: int) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()
        self._marks.append((number, time.perf_counter()))
