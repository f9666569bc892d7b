"""Find nodes that only bring values to other places.

What they make can be made again, and what is done to each element can be done before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..collectives import OPERATORS
from .alias import MemoryUse

aten = torch.ops.aten
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_COPIES = (
    aten.copy_.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.cat.default,
    aten.contiguous.default,
)
_MOVING = ("all_gather", "all_to_all")


def is_empty(node: fx.Node) -> bool:
    """Return whether a node makes a tensor without values."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.name.partition("::")[2] in _EMPTY
    )


def is_copy(node: fx.Node) -> bool:
    """Return whether a node makes memory or copies values, and does nothing else.

    A copy may have another dtype.
    """
    return node.target in _COPIES or is_empty(node)


def is_moving(node: fx.Node) -> bool:
    """Return whether a node starts a collective that brings values to other ranks.

    The values are those of its operand, and all ranks do it alike.
    """
    return OPERATORS.get(node.target) in _MOVING  # type: ignore[arg-type]


class Movement:
    """Which memory of a graph is filled by which nodes, and who reads it.

    Attributes:
        use: the memory that each node uses.
        nodes: the nodes in order.
        at: the place of each.
        fillers: for each class of memory the nodes that make or write it, in order.
        readers: for each class the nodes that read it and are no views of it.
        holders: for each class the nodes whose results are in it.
        mixed: classes of results that may be in more than one, or of nodes that may do anything.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.use = MemoryUse(graph)
        self.nodes = list(graph.nodes)
        self.at = {node: i for i, node in enumerate(self.nodes)}
        self.fillers: dict[int, list[fx.Node]] = {c: [node] for c, node in self.use.made_by.items()}
        self.readers: dict[int, list[fx.Node]] = {}
        self.holders: dict[int, list[fx.Node]] = {}
        self.mixed: set[int] = set()
        for node in self.nodes:
            for c in self.use.of[node]:
                self.holders.setdefault(c, []).append(node)
            for c in self.use.writes[node]:
                self.fillers.setdefault(c, []).append(node)
            for c in self.use.reads[node]:
                self.readers.setdefault(c, []).append(node)
            if len(self.use.of[node]) > 1 or (node in self.use.fences):
                self.mixed |= self.use.of[node]

    def is_private(self, node: fx.Node) -> bool:
        """Return whether only this node fills the memory of its result.

        Nothing outside of the graph may see that memory.
        """
        classes = self.use.of[node]
        is_seen = classes & (self.use.outputs | self.mixed)
        return not is_seen and all(self.fillers[c] == [node] for c in classes)

    def is_written(self, x: fx.Node, between: range) -> bool:
        """Return whether the memory of a value is written at one of these places."""
        fillers = (node for c in self.use.of[x] for node in self.fillers.get(c, ()))
        return any(self.at[node] in between for node in fillers)

    def own(self, start: fx.Node) -> int:
        """Return the class of the result of a collective."""
        return next(c for c in self.use.of[start] if self.use.made_by.get(c) is start)

    def classes_derived_from(self, start: fx.Node) -> list[int]:
        """Return the classes that have values of a collective's result, moved by copies only.

        Each class comes after those that it is copied from.
        """
        classes = dict.fromkeys([self.own(start)])
        work: list[Any] = list(classes)
        while work:
            for node in self.readers.get(work.pop(), ()):
                outputs = self.use.writes[node] | {
                    c for c in self.use.of[node] if self.use.made_by.get(c) is node
                }
                for c in outputs - classes.keys():
                    if c in self.use.made_by and all(map(is_copy, self.fillers[c])):
                        classes[c] = None
                        work.append(c)
        return list(classes)
