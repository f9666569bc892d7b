"""all_reduce, of which a rank uses only its own part -> reduce_scatter: half the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..collectives import OPERATORS, WAIT
from .alias import MemoryUse
from .order import Appender, fixed_memory, group_size

aten = torch.ops.aten


def scatter_reductions(graph: fx.Graph, rank_in: Callable[[tuple[int, ...]], int]) -> int:
    """Replace each all_reduce of which this rank uses only its own part by a reduce_scatter.

    The result of such an all_reduce is only sliced along its first dim, to the part of this rank.

    Args:
        rank_in: returns the index of this rank in a group.

    Returns: how many.
    """
    use, changed = MemoryUse(graph), 0
    fixed = fixed_memory(graph, use)
    for start in [node for node in graph.nodes if OPERATORS.get(node.target) == "all_reduce"]:
        sliced = _slice_of(start)
        ranks = tuple(map(int, str(start.args[-2]).split(",")))
        if sliced is None or use.of[start] & fixed:
            continue
        wait, view, part = sliced
        rows, (_, _, low, high) = view.meta["val"][0][0], _bounds(part, view)
        count, i = rows // group_size(start), rank_in(ranks)
        if rows % group_size(start) or (low, high) != (i * count, (i + 1) * count):
            continue
        shape = part.meta["val"][0]
        flat = [part.meta["val"][0][0] * _row(view)]
        new = Appender(graph, start)
        operand = new.flat(start.args[0], [flat[0] * group_size(start)])
        scattered = new.make(
            torch.ops.shardmesh.reduce_scatter.default, (operand, *start.args[1:]), flat
        )
        scattered.meta["numbers"] = start.meta.get("numbers", ())
        new = Appender(graph, wait)
        done = new.make(WAIT, (scattered,), flat)
        part.replace_all_uses_with(new.make(aten.view.default, (done, list(shape)), shape))
        for node in dict.fromkeys((part, view, wait, start)):
            graph.erase_node(node)
        changed += 1
    return changed


def _slice_of(start: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Return the wait, the view of its result, and the slice that is its only use.

    The result is None if the all_reduce has other uses.
    """
    chain: list[Any] = [start]
    while len(chain[-1].users) == 1 and len(chain) < 4:
        (user,) = chain[-1].users
        if user.target is aten.slice.Tensor:
            return (
                (chain[1], chain[-1], user)
                if len(chain) > 1 and _bounds(user, chain[-1])[:2] == (0, 1)
                else None
            )
        if user.target is not (WAIT if len(chain) == 1 else aten.view.default):
            return None
        chain.append(user)
    return None


def _bounds(part: fx.Node, view: fx.Node) -> tuple[int, int, int, int]:
    """Return dim, step, begin and end of a slice."""
    args: list[Any] = [*part.args[1:], *[None] * (5 - len(part.args))]
    dim, low, high, step = args[0] or 0, args[1] or 0, args[2], args[3] or 1
    shape = view.meta["val"][0]
    size = shape[dim] if shape else 0
    high = size if high is None else high
    clamp = [min(max(x + size if x < 0 else x, 0), size) for x in (low, high)]
    return dim, step, clamp[0], clamp[1]


def _row(view: fx.Node) -> int:
    count = 1
    for n in view.meta["val"][0][1:]:
        count *= n
    return count
