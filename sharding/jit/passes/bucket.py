"""Pack small collectives that do not depend on each other into one.

    all_reduce(a)  all_reduce(b)      ->   all_reduce([a b])                         and views of its parts
    reduce_scatter(a0 a1)  (b0 b1)    ->   reduce_scatter([a0 b0 | a1 b1])           and views of its parts
    all_gather(a)  all_gather(b)      ->   all_gather([a b]) = [a b | a b]           and copies of its parts

The bytes that are sent are the same, the launches fewer. Sums of float numbers keep their bits where the order in which ranks are added
does not depend on the place in a buffer: always of two ranks, and in the simulated world; a ring may round differently.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..collectives import OPERATORS, WAIT
from .alias import MemoryUse, live_bytes, nbytes
from .order import Appender, Places, group_size, needs_own_memory, set_order
from .overlap import wait_late

aten = torch.ops.aten
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def bucket_collectives(graph: fx.Graph, limit: int, max_live_bytes: int | None = None) -> int:
    """Pack collectives of one kind, group, dtype and reduction whose buffers have at most `limit` bytes together.

    A bucket starts where the last of its operands is there, which must be before the first use of any of its results; nothing that is
    written in between may be touched. The memory that the graph takes does not become more than `max_live_bytes`, by default than it takes
    without.

    Returns: how many collectives fewer there are.
    """
    before = list(graph.nodes)
    peak = max(max_live_bytes or 0, *live_bytes(graph, MemoryUse(graph)))
    at_once = [node for node in before if node.target is WAIT and node.prev is node.args[0]]
    wait_late(graph)
    removed = 0
    done: set[fx.Node] = set()
    while found := _bucket(graph, limit, done, peak):
        removed += len(found) - 1
        done.add(_pack(graph, found))
    if not removed:
        set_order(graph, before)
        return 0
    for wait in at_once:
        if wait._erased is False:
            wait.args[0].append(wait)  # type: ignore[union-attr]
    return removed


def _bucket(graph: fx.Graph, limit: int, done: set[fx.Node], peak: int) -> list[fx.Node]:
    """Return starts that can be one, in order; none if there are no such."""
    places = Places(graph)
    memory = _PackedMemory(places, peak)
    by_key: dict[Any, list[fx.Node]] = {}
    for node in places.nodes:
        if node.target in OPERATORS and OPERATORS[node.target] in _KINDS and node not in done and nbytes(node) < limit:  # type: ignore[index]
            x: Any = node.args[0]
            only = len(node.users) == 1 and next(iter(node.users)).target is WAIT
            if only and math.prod(x.meta["val"][0]):
                by_key.setdefault((node.target, node.args[1:-1], x.meta["val"][2:]), []).append(node)
    found = []
    for nodes in by_key.values():
        while len(nodes) > 1 and not found:
            found = _grow(memory, nodes, limit)
            nodes = nodes[1:]
        if found:
            break
    return found


def _grow(memory: _PackedMemory, nodes: list[fx.Node], limit: int) -> list[fx.Node]:
    """Return the first start and those that can be packed with it; none if there are no such."""
    taken, size = nodes[:1], _buffer(nodes[0])
    for node in nodes[1:]:
        if size + _buffer(node) <= limit and _fits(memory.places, [*taken, node]) and memory.fits([*taken, node]):
            taken.append(node)
            size += _buffer(node)
    return taken if len(taken) > 1 else []


def _fits(places: Places, starts: list[fx.Node]) -> bool:
    """Return whether one collective can replace these: after all operands, before all uses."""
    place, at, use = _place(places, starts), places.at, places.use
    if place >= min(at[next(iter(node.users))] for node in starts):
        return False
    for node in starts:
        (wait,) = node.users
        between = [x for x in places.nodes[at[node] + 1 : place + 1] if x is not wait]
        if any(x in use.fences or use.writes[x] & (use.reads[node] | use.of[node]) for x in between):
            return False
    return True


def _place(places: Places, starts: list[fx.Node]) -> int:
    """Return the place after which one collective can replace these."""
    return max(places.at[starts[0]] - 1, *(places.early(node) for node in starts))


class _PackedMemory:
    """What a graph takes, and whether it takes more with some collectives packed."""

    def __init__(self, places: Places, peak: int) -> None:
        self.places, self._peak = places, peak
        self._live = live_bytes(places.use.graph, places.use)
        self._last: dict[int, int] = {}
        for i, node in enumerate(places.nodes):
            self._last |= dict.fromkeys(places.use.of[node] | places.use.reads[node] | places.use.writes[node], i)

    def fits(self, starts: list[fx.Node]) -> bool:
        """Return whether the packed buffers, and operands kept until they are packed, do not raise the peak."""
        use, place = self.places.use, _place(self.places, starts)
        into = sum(nbytes(node.args[0]) for node in starts)  # type: ignore[arg-type]
        out = sum(nbytes(node) for node in starts)
        is_gather = OPERATORS[starts[0].target] == "all_gather"  # type: ignore[index]
        results = {node: max(self._last[c] for c in use.of[node]) for node in starts}
        end = max(results.values())
        first = min(self.places.at[node] for node in starts)
        for i in range(first, max(end, place) + 1):
            more = 0
            for node in starts:
                if self.places.at[node] <= i <= results[node] and not node.meta.get("donate"):
                    more -= nbytes(node)
                if self.places.at[node] < i <= place:
                    more += nbytes(node.args[0])  # type: ignore[arg-type]
            if place < i <= end:
                more += out
                more += into + (out if is_gather else 0) if i == place + 1 else 0
            if self._live[i] + more > self._peak:
                return False
        return True


def _buffer(start: fx.Node) -> int:
    """Return the bytes of the larger buffer of a collective."""
    return max(nbytes(start), nbytes(start.args[0]))  # type: ignore[arg-type]


def _pack(graph: fx.Graph, starts: list[fx.Node]) -> fx.Node:
    """Replace collectives by one; return it."""
    places = Places(graph)
    place = _place(places, starts)
    needed = {x for node in starts for x in places.needed(node, place)} - set(starts)
    new = Appender(graph, places.nodes[place])
    for node in sorted(needed, key=places.at.__getitem__):
        new.move(node)
    target: Any = starts[0].target
    kind = OPERATORS[target]
    size = group_size(starts[0])
    sizes = [math.prod(node.args[0].meta["val"][0]) for node in starts]  # type: ignore[union-attr]
    rows = size if kind == "reduce_scatter" else 1
    parts = [new.flat(node.args[0], [rows, n // rows]) for node, n in zip(starts, sizes, strict=True)]
    packed = new.make(aten.cat.default, (parts, 1), [rows, sum(sizes) // rows])
    flat = new.make(aten.view.default, (packed, [sum(sizes)]), [sum(sizes)])
    length = {"all_gather": sum(sizes) * size, "reduce_scatter": sum(sizes) // size}.get(kind, sum(sizes))
    start = new.make(target, (flat, *starts[0].args[1:]), [length])
    start.meta["numbers"] = tuple(number for node in starts for number in node.meta.get("numbers", ()))
    if kind == "all_reduce":
        start.meta["donate"] = True
    wait = new.make(WAIT, (start,), [length])
    table = new.make(aten.view.default, (wait, [size, sum(sizes)]), [size, sum(sizes)]) if kind == "all_gather" else wait
    offset = 0
    for node, n in zip(starts, sizes, strict=True):
        count = n // rows
        if kind == "all_gather":
            part = new.make(aten.slice.Tensor, (table, 1, offset, offset + count), [size, count], [sum(sizes), 1])
            part = new.make(aten.clone.default, (part,), [size, count], kwargs={"memory_format": torch.contiguous_format})
            part = new.make(aten.view.default, (part, [size * count]), [size * count])
        else:
            part = new.make(aten.slice.Tensor, (table, 0, offset, offset + count), [count])
            if needs_own_memory(graph, places.use, node):
                part = new.make(aten.clone.default, (part,), [count])
        offset += count
        (done,) = node.users
        done.replace_all_uses_with(part)
        graph.erase_node(done)
        graph.erase_node(node)
    return start
