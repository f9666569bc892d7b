"""Remove nodes that do nothing."""

from __future__ import annotations

import torch
from torch import fx

from ..collectives import WAIT
from ..program import changes_metadata, is_pure
from .alias import writes

aten = torch.ops.aten
_RESHAPING = (  # operators that return all elements of their operand, in its memory
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
    for node in reversed(list(graph.nodes)):
        if not node.users and is_pure(node):
            graph.erase_node(node)


def _alias_of(node: fx.Node) -> fx.Node | None:
    """Return the node whose result is the same tensor, as `t(t(x))` is x; None if there is none."""
    x, found, only_aliases = node, None, True
    while x.target in _RESHAPING and isinstance(x.args[0], fx.Node):
        only_aliases = only_aliases and x.target in (aten.detach.default, aten.alias.default)
        x = x.args[0]
        if x.target is WAIT:  # of what shape it is depends on the collective
            return x if only_aliases else found
        if only_aliases or ("val" in node.meta and node.meta["val"] == x.meta.get("val")):
            found = x
    return found


def _may_be_returned(x: fx.Node, output: fx.Node) -> bool:
    """Return whether a node can be returned in place of an alias of it: it is a new tensor and not
    returned already.
    """
    return (
        x.op == "call_function"
        and x.target not in _RESHAPING
        and x.target is not WAIT
        and output not in x.users
    )
