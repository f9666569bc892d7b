"""How long the nodes of a graph take, predicted from flops and bytes.

    operator     max(flops / rate, bytes read and written / memory)       views and numbers: nothing
    collective   latency + max(bytes / local, network bytes / network) x factor

Latencies and bandwidths are those of the mesh's `Topology`. The time that the host takes to launch
a node is not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ....mesh.topology import Topology
from ...jit.collectives import OPERATORS, WAIT
from ...jit.inspection.step_graph import StepGraph, bytes_of, flops_of, ranks_of
from ...jit.passes.alias import is_view, owner_of, writes

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
        """Return the seconds of a node that computes; 0 for one that only makes a view or a
        number.
        """
        if (
            node.op != "call_function"
            or node.target is WAIT
            or is_view(node)
            or not (bytes_of(node) or writes(node))
        ):
            return 0.0
        flops = flops_of(node) if isinstance(node.target, torch._ops.OpOverload) else 0
        return max(flops / self._rate(node), self._of_bytes(moved_bytes(node)))

    def _of_bytes(self, count: int) -> float:
        return count / 2 / self._memory.memory  # a copied byte is read and written

    def _rate(self, node: fx.Node) -> float:
        if not isinstance(self._flops, Mapping):
            return float(self._flops)
        found = next(
            (x.meta["val"][2] for x in (node, *node.all_input_nodes) if "val" in x.meta),
            torch.float32,
        )
        return float(
            self._flops.get(found, self._flops.get(torch.float32, min(self._flops.values())))
        )

    def collective(self, start: fx.Node) -> float:
        """Return the seconds of a collective."""
        topology, nodes = self._place(start)
        name = OPERATORS[start.target]  # type: ignore[index]
        received, own = self._graph.received(start), max(nodes.values())
        factor = topology.factor({"permute": "all_to_all"}.get(name, name))
        if len(nodes) == 1:
            return topology.local.latency + received / topology.local.bandwidth * factor
        outside = received * (sum(nodes.values()) - own) / max(sum(nodes.values()) - 1, 1)
        # What a node lacks enters it once, over its rails.
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
    written, inputs = writes(node), list(node.all_input_nodes)
    made = 0 if written or owner_of(node) is not None else bytes_of(node)
    if "empty" in name:
        return 0
    if name.startswith(_READ_PARTS):
        return 2 * made
    if name.startswith("new_") or name.endswith("_like"):
        inputs = []
    elif name in _OVERWRITE:
        inputs = [x for x in inputs if x not in written]
    return made + sum(map(_touched, written)) + sum(map(_touched, inputs))


def _touched(node: fx.Node) -> int:
    """Return the bytes of memory behind a value: of an expanded one those of one copy."""
    if "val" not in node.meta:
        return bytes_of(node)
    shape, strides, dtype, _ = node.meta["val"]
    return (
        math.prod(n for n, stride in zip(shape, strides, strict=True) if stride) * dtype.itemsize
        if math.prod(shape)
        else 0
    )
