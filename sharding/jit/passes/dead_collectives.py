"""Remove collectives whose results are not used, with the nodes that only they use."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..collectives import OPERATORS, WAIT
from ..program import is_pure
from .alias import MemoryUse


def remove_dead_collectives(graph: fx.Graph) -> int:
    """Remove what neither an output nor a write to an input depends on, if it is a collective or
    has no other effect.

    A write to memory that is not an input is needed if anything needed reads that memory. A
    `permute` stays, since it also sends, and so does its wait, until which its buffers are in use.

    Returns: how many collectives were removed.
    """
    use = MemoryUse(graph)
    writers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for c in use.writes[node]:
            writers.setdefault(c, []).append(node)
    needed: set[fx.Node] = set()
    work: list[Any] = [node for node in graph.nodes if _is_root(node, use)]
    while work:
        node = work.pop()
        if node not in needed:
            needed.add(node)
            work += node.all_input_nodes
            work += [writer for c in use.reads[node] for writer in writers.get(c, ())]
    removed = 0
    for node in reversed(list(graph.nodes)):
        if node not in needed and node.op == "call_function":
            removed += node.target in OPERATORS
            graph.erase_node(node)
    return removed


def _is_root(node: fx.Node, use: MemoryUse) -> bool:
    """Return whether a node has side effects."""
    if node.op != "call_function" or use.writes[node] & use.inputs:
        return True
    start = node.args[0] if node.target is WAIT else node
    if isinstance(start, fx.Node) and start.target in OPERATORS:
        return OPERATORS[start.target] == "permute"  # type: ignore[index]
    # A write that is declared is needed if its memory is; random operators advance a generator.
    return not (is_pure(node) or (bool(use.writes[node]) and _only_writes(node)))


def _only_writes(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )
