"""Where collectives may be moved to, and adding and moving nodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..collectives import OPERATORS
from ..program import is_pure
from .alias import MemoryUse, is_contiguous

aten = torch.ops.aten


class Places:
    """The order of a graph's nodes, and how early each collective could start.

    Attributes:
        nodes: the nodes.
        at: the place of each in `nodes`.
        use: the memory that each uses.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.at = {node: i for i, node in enumerate(self.nodes)}
        self.use = MemoryUse(graph)
        self._early: dict[fx.Node, int] = {}
        self.starts: dict[fx.Node, int] = {}
        written: dict[int, int] = {}
        read: dict[int, int] = {}
        fence = -1
        for i, node in enumerate(self.nodes):
            earliest = fence
            for x in node.all_input_nodes:
                earliest = max(earliest, self._early[x])
            for c in self.use.reads[node]:
                earliest = max(earliest, written.get(c, -1))
            for c in self.use.writes[node]:
                earliest = max(earliest, written.get(c, -1), read.get(c, -1))
            self._early[node] = earliest if is_pure(node) else i
            if node.target in OPERATORS:
                self.starts[node] = earliest
            written |= dict.fromkeys(self.use.writes[node], i)
            read |= dict.fromkeys(self.use.reads[node], i)
            if node in self.use.fences or node.op == "placeholder":
                fence = i

    def early(self, node: fx.Node) -> int:
        """Return the place of the last node that must run before this one.

        `node` is a collective, or a node that only computes.
        """
        return self.starts[node] if node in self.starts else self._early[node]

    def nodes_for(self, node: fx.Node, after: int) -> list[fx.Node]:
        """Return what a node needs that runs after a place, in order, the node last.

        The place is not before `early(node)`.
        """
        nodes: set[fx.Node] = set()
        work = [node]
        while work:
            x = work.pop()
            if x not in nodes and self.at[x] > after:
                nodes.add(x)
                work += x.all_input_nodes
        return sorted(nodes, key=self.at.__getitem__)


class Appender:
    """Adds nodes behind each other, the first behind a given one."""

    def __init__(self, graph: fx.Graph, behind: fx.Node) -> None:
        self._graph, self._last = graph, behind

    def move(self, node: fx.Node) -> None:
        """Move a node here."""
        self._last.append(node)
        self._last = node

    def make(
        self,
        target: Callable[..., Any],
        args: Any,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        kwargs: Any = None,
    ) -> fx.Node:
        """Add a node whose result has this shape.

        Its dtype and device are those of the first operand, and it is contiguous without strides.
        """
        with self._graph.inserting_after(self._last):
            self._last = self._graph.call_function(target, tuple(args), kwargs or {})
        dtype, device = self._last.all_input_nodes[0].meta["val"][2:]
        strides = (
            [math.prod(shape[i + 1 :]) for i in range(len(shape))] if strides is None else strides
        )
        self._last.meta["val"] = tuple(shape), tuple(strides), dtype, device
        return self._last

    def flat(self, x: Any, shape: Sequence[int]) -> fx.Node:
        """Add a view of a node's values in order, in another shape."""
        if not is_contiguous(x):
            x = self.make(
                aten.clone.default,
                (x,),
                x.meta["val"][0],
                kwargs={"memory_format": torch.contiguous_format},
            )
        return self.make(aten.view.default, (x, list(shape)), shape)


def group_size(start: fx.Node) -> int:
    """Return how many ranks a collective has."""
    return str(start.args[-2]).count(",") + 1


def fixed_memory(graph: fx.Graph, use: MemoryUse) -> frozenset[int]:
    """Return the classes of memory that may not become part of a larger buffer.

    The graph returns that memory, or addresses it by offset.
    """
    return use.outputs | use.union(
        node for node in graph.nodes if node.target is aten.as_strided.default
    )


def set_order(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Bring the nodes of a graph into this order."""
    for before, node in itertools.pairwise(nodes):
        if node.prev is not before:
            before.append(node)
