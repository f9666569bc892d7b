"""Passes that move nodes."""

from __future__ import annotations

from torch import fx

from ..draws import Draw


def draw_first(graph: fx.Graph) -> int:
    """Draw random tensors that depend on nothing at the start, so that what uses them can be compiled together."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    moved = [node for node in graph.nodes if isinstance(node.target, Draw) and all(x.op == "placeholder" for x in node.all_input_nodes)]
    place = inputs[-1] if inputs else None
    for node in moved:
        if place is not None:
            place.append(node)
            place = node
    return len(moved)
