"""Remove nodes that do nothing.

They are aliases and unused values of a recorded graph, and collectives whose results are not used.

`fx.Graph.eliminate_dead_code` removes unused nodes; it knows neither which memory a needed node
reads nor that a `permute` also sends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..collectives import OPERATORS, WAIT
from ..program import changes_metadata, is_pure
from .alias import MemoryUse, writes

aten = torch.ops.aten
# Operators that return all elements of their operand, in its memory.
_RESHAPING = (
    aten.detach.default,
    aten.alias.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
)


def clean(graph: fx.Graph) -> None:
    """Remove aliases, which mean nothing below autograd, and nodes that nobody uses."""
    output = next(node for node in graph.nodes if node.op == "output")
    if not changes_metadata(graph):
        for node in list(graph.nodes):
            same = _alias_of(node) if node.op == "call_function" else None
            if same is None or any(node in writes(user) for user in node.users):
                continue
            if output not in node.users or _may_be_returned(same, output):
                node.replace_all_uses_with(same)
                graph.erase_node(node)
    for node in list(graph.nodes):
        if node.target is aten.cat.default:
            _leave_out_empty(graph, node)
    for node in reversed(list(graph.nodes)):
        if not node.users and is_pure(node):
            graph.erase_node(node)


def _leave_out_empty(graph: fx.Graph, node: fx.Node) -> None:
    """Make a copy of the one tensor that is concatenated with empty ones of shape [0].

    A cache of transformers begins as an empty tensor. The result is contiguous; in the
    decomposition of torch 2.13 it has the strides of the tensor, which later views do not fit.
    """
    operands: Any = node.args[0]
    parts = [x for x in operands if x.meta.get("val", ((),))[0] != (0,)]
    if len(parts) != 1 or len(operands) == 1:
        return
    shape, strides, dtype, _ = node.meta["val"]
    is_contiguous = torch.empty(shape, device="meta").stride() == strides
    if is_contiguous and parts[0].meta["val"][2] is dtype:
        node.target, node.args = aten.clone.default, (parts[0],)
        node.kwargs = {"memory_format": torch.contiguous_format}


def _alias_of(node: fx.Node) -> fx.Node | None:
    """Return the node whose result is the same tensor, as `t(t(x))` is x; None if there is none."""
    x, same, only_aliases = node, None, True
    while x.target in _RESHAPING and isinstance(x.args[0], fx.Node):
        only_aliases = only_aliases and x.target in (aten.detach.default, aten.alias.default)
        x = x.args[0]
        if x.target is WAIT:  # of what shape it is depends on the collective
            return x if only_aliases else same
        if only_aliases or ("val" in node.meta and node.meta["val"] == x.meta.get("val")):
            same = x
    return same


def _may_be_returned(x: fx.Node, output: fx.Node) -> bool:
    """Return whether a node can be returned in place of an alias of it.

    It can if it is a new tensor and not returned already.
    """
    return (
        x.op == "call_function"
        and x.target not in _RESHAPING
        and x.target is not WAIT
        and output not in x.users
    )


# -- collectives -----------------------------------------------------------------------------------


def remove_dead_collectives(graph: fx.Graph) -> int:
    """Remove what neither an output nor a write to an input depends on.

    Only collectives and nodes without other effects are removed. A write to memory that is not an
    input is needed if anything needed reads that memory. A `permute` stays, since it also sends,
    and so does its wait, until which its buffers are in use.

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
    is_declared = (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )
    return not (is_pure(node) or (bool(use.writes[node]) and is_declared))
