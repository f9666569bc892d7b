"""Run a collective once where a graph has it twice, on the same value."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import map_arg

from ..collectives import OPERATORS, WAIT
from ..program import is_pure
from .alias import MemoryUse, live_bytes, nbytes
from .movement import is_empty


def share_common_collectives(graph: fx.Graph, max_live_bytes: int | None = None) -> int:
    """Let later collectives use the result of an earlier one that does the same.

    The two have the same kind, group and operand value. A value is the same if it was computed by
    the same operators from the same values, with no write between. Results that are written in
    place are not shared, nor are two that the graph returns. Keeping the first result until the
    second is needed must not raise the memory of the graph above `max_live_bytes`, by default its
    memory without this pass: FSDP gathers parameters twice to save memory.

    Returns: how many collectives were removed.
    """
    removed = 0
    while pairs := _pairs(graph, max_live_bytes):
        order = {node: i for i, node in enumerate(graph.nodes)}
        replaced: dict[fx.Node, fx.Node] = {}
        for wait, other, other_wait in pairs:
            wait = replaced.get(wait, wait)
            if order[wait] > order[other_wait]:
                other_wait.prepend(wait)
                order[wait] = order[other_wait]
            other_wait.replace_all_uses_with(wait)
            replaced[other_wait] = wait
            graph.erase_node(other_wait)
            graph.erase_node(other)
        removed += len(pairs)
    return removed


def _pairs(graph: fx.Graph, limit: int | None) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """Return collectives that may use the result of an earlier one, with the waits of both.

    Each comes as a triple: the wait of the earlier collective, the later collective, and its wait.
    """
    use = MemoryUse(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    live = live_bytes(graph, use)
    limit = max(live, default=0) if limit is None else max(limit, max(live, default=0))
    last: dict[int, int] = {}
    writers: dict[int, list[fx.Node]] = {}
    for node, i in order.items():
        last |= dict.fromkeys(use.of[node] | use.reads[node], i)
        for c in use.writes[node]:
            writers.setdefault(c, []).append(node)

    def is_written(start: fx.Node, wait: fx.Node) -> bool:
        later = (
            node
            for c in use.of[start]
            for node in writers.get(c, ())
            if node is not start and node is not wait
        )
        return any(order[node] > order[start] for node in later)

    pairs: list[tuple[fx.Node, fx.Node, fx.Node]] = []
    seen: dict[Any, tuple[fx.Node, fx.Node]] = {}
    values = _Values(use)
    for node in graph.nodes:
        key = values.visit(node)
        if (
            node.target not in OPERATORS
            or OPERATORS[node.target] == "permute"
            or len(node.users) != 1
        ):
            continue
        (wait,) = node.users
        if wait.target is not WAIT or is_written(node, wait):
            continue
        start, done = seen.setdefault(key, (node, wait))
        if start is node:
            continue
        last_use = max(last[c] for c in _own(use, start))
        between = range(last_use + 1, order[node])
        if any(live[i] + nbytes(node) > limit for i in between):
            seen[key] = node, wait
        elif not (use.of[node] & use.outputs and use.of[start] & use.outputs):
            for i in between:
                live[i] += nbytes(node)
            last |= dict.fromkeys(
                _own(use, start), max(last_use, *(last[c] for c in _own(use, node)))
            )
            pairs.append((done, node, wait))
            if use.of[node] & use.outputs:
                # The graph returns the result once: a third collective is compared with this one.
                seen[key] = node, wait
                return pairs
    return pairs


def _own(use: MemoryUse, start: fx.Node) -> frozenset[int]:
    """Return the class of the result of a collective, without that of its operand."""
    return frozenset(c for c in use.of[start] if use.made_by.get(c) is start)


class _Values:
    """Numbers for values: two nodes have equal keys if they have computed the same."""

    def __init__(self, use: MemoryUse) -> None:
        self._use = use
        self._made: dict[fx.Node, int] = {}
        self._numbers: dict[Any, int] = {}
        self._version: dict[int, int] = {}
        self._fences = 0

    def visit(self, node: fx.Node) -> Any:
        """Visit the next node of the graph; return the key of the value that it computes."""
        operands = [self._content(x) for x in node.all_input_nodes]
        places: dict[Any, Any] = {x: _Operand(i) for i, x in enumerate(node.all_input_nodes)}
        own_args = node.args[:-1] if node.target in OPERATORS else node.args  # without the line
        args = map_arg((own_args, node.kwargs), places.__getitem__)
        # These write at most their operand, which `is_written` sees.
        communicates = node.target in OPERATORS or node.target is WAIT
        known = communicates or (
            is_pure(node) and not is_empty(node) and not self._use.writes[node]
        )
        key: Any = (node.target, repr(args), tuple(operands)) if known else node
        if isinstance(key, tuple) and "Generator" in key[1]:
            key = node
        self._made[node] = self._numbers.setdefault(key, len(self._numbers))
        for c in self._use.writes[node]:
            self._version[c] = self._version.get(c, 0) + 1
        self._fences += node in self._use.fences
        return key

    def _content(self, x: fx.Node) -> Any:
        versions = tuple(
            sorted((c, self._version[c]) for c in self._use.of[x] if c in self._version)
        )
        return self._made[x], versions, self._fences


class _Operand:
    """The place of an operand, in the text of arguments."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __repr__(self) -> str:
        return f"%{self._number}"
