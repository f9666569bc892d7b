"""Pack small collectives that do not depend on each other into one.

    all_reduce(a)  all_reduce(b)     ->   all_reduce([a b])                  and views of its parts
    reduce_scatter(a0 a1)  (b0 b1)   ->   reduce_scatter([a0 b0 | a1 b1])    and views of its parts
    all_gather(a)  all_gather(b)     ->   all_gather([a b]) = [a b | a b]    and copies of its parts

The bytes that are sent are the same, the launches fewer. Sums of float numbers keep their bits
where the order in which ranks are added does not depend on the place in a buffer: always of two
ranks, and in the simulated world; a ring may round differently.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import fx

from ..collectives import OPERATORS, WAIT
from .alias import MemoryUse, is_view, live_bytes, nbytes
from .order import Appender, Places, fixed_memory, group_size, set_order
from .overlap import wait_late

aten = torch.ops.aten
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def bucket_collectives(graph: fx.Graph, limit: int, max_live_bytes: int | None = None) -> int:
    """Pack collectives of one kind, group, dtype and reduction into one.

    Their buffers have at most `limit` bytes together. A bucket starts where the last of its
    operands is there, which must be before the first use of any of its results; nothing that is
    written in between may be touched. The memory that the graph takes does not become more than
    `max_live_bytes`, by default than it takes without.

    Returns: how many collectives fewer there are.
    """
    before = list(graph.nodes)
    peak = max(max_live_bytes or 0, *live_bytes(graph, MemoryUse(graph)))
    at_once = [node for node in before if node.target is WAIT and node.prev is node.args[0]]
    wait_late(graph)
    removed = 0
    done: set[fx.Node] = set()
    while count := _walk(graph, limit, peak, done):
        removed += count  # again, since packing frees operands: most often twice
    if not removed:
        set_order(graph, before)
    for wait in at_once if removed else []:
        if wait._erased is False:
            wait.args[0].append(wait)  # type: ignore[union-attr]
    return removed


def _walk(graph: fx.Graph, limit: int, peak: int, done: set[fx.Node]) -> int:
    """Pack what can be packed in one walk over the graph, without the collectives that are done.

    Returns: how many collectives fewer there are.
    """
    places = Places(graph)
    buckets = sorted(_buckets(places, limit, peak, done), key=lambda bucket: bucket[0])
    fixed = fixed_memory(graph, places.use)
    needed = [
        {x for node in starts for x in places.nodes_for(node, place)} - set(starts)
        for place, starts in buckets
    ]
    anchors = []
    # What is at a place may go, what is next to it stays in order.
    for place, _ in reversed(buckets):
        with graph.inserting_after(places.nodes[place]):
            anchors.append(graph.call_function(_anchor))
    moved: set[fx.Node] = set()
    for (_, starts), first, anchor in zip(buckets, needed, reversed(anchors), strict=True):
        new = Appender(graph, anchor)
        for node in sorted(first - moved, key=places.at.__getitem__):
            new.move(node)
        moved |= first
        done.add(_pack(new, starts, [bool(places.use.of[node] & fixed) for node in starts]))
        for node in starts:
            graph.erase_node(node)
    for anchor in anchors:
        graph.erase_node(anchor)
    return sum(len(starts) - 1 for _, starts in buckets)


def _anchor() -> None:
    """The node behind which a bucket is put."""


def _buckets(
    places: Places, limit: int, peak: int, done: set[fx.Node]
) -> Iterator[tuple[int, list[fx.Node]]]:
    """Yield the place of each bucket, and the starts that can be one, in order."""
    memory = _PackedMemory(places, peak)
    by_key: dict[Any, list[fx.Node]] = {}
    for node in places.nodes:
        is_kind = OPERATORS.get(node.target) in _KINDS  # type: ignore[arg-type]
        if is_kind and node not in done and nbytes(node) < limit:
            x: Any = node.args[0]
            only = len(node.users) == 1 and next(iter(node.users)).target is WAIT
            if only and math.prod(x.meta["val"][0]):
                key = node.target, node.args[1:-1], x.meta["val"][2:]
                by_key.setdefault(key, []).append(node)
    for nodes in by_key.values():
        while len(nodes) > 1:
            taken, size = nodes[:1], _buffer(nodes[0])
            for node in nodes[1:]:
                if size + _buffer(node) <= limit and memory.fits([*taken, node]):
                    taken.append(node)
                    size += _buffer(node)
            is_taken = len(taken) > 1 and memory.take(taken)
            if is_taken:
                yield _place(places, taken), taken
            nodes = [node for node in nodes[1:] if not is_taken or node not in taken]


def _place(places: Places, starts: list[fx.Node]) -> int:
    """Return the place after which one collective can replace these."""
    return max(places.at[starts[0]] - 1, *(places.early(node) for node in starts))


class _PackedMemory:
    """What a graph takes, and whether collectives can be packed and it takes no more."""

    def __init__(self, places: Places, peak: int) -> None:
        self.places, self._peak, self._use = places, peak, places.use
        self._live = np.array(live_bytes(places.use.graph, places.use), dtype=np.int64)
        self._last: dict[int, int] = {}
        self._writers: dict[int, list[int]] = {}
        for i, node in enumerate(places.nodes):
            used = self._use.of[node] | self._use.reads[node] | self._use.writes[node]
            self._last |= dict.fromkeys(used, i)
            for c in self._use.writes[node]:
                self._writers.setdefault(c, []).append(i)
        self._fences = [places.at[node] for node in self._use.fences]

    def fits(self, starts: list[fx.Node]) -> bool:
        """Return whether one collective can replace these without more memory.

        It must run after all their operands and before all their uses.
        """
        at, use, place = self.places.at, self._use, _place(self.places, starts)
        for node in starts:
            (wait,) = node.users
            writers = [self._writers.get(c, ()) for c in use.reads[node] | use.of[node]]
            touched = itertools.chain(self._fences, *writers)
            if place >= at[wait] or any(at[node] < i <= place and i != at[wait] for i in touched):
                return False
        first, more = self._more(starts)
        return bool((self._live[first : first + len(more)] + more <= self._peak).all())

    def take(self, starts: list[fx.Node]) -> bool:
        """Note that these are packed, unless that takes too much memory.

        What their operands are made of is computed earlier, which takes memory, too.

        Returns: whether they are packed.
        """
        first, more = self._more(starts)
        place = _place(self.places, starts)
        for x in {x for node in starts for x in self.places.nodes_for(node, place)} - set(starts):
            if not is_view(x):
                more[place + 1 - first : self.places.at[x] + 1 - first] += nbytes(x)
        if (self._live[first : first + len(more)] + more > self._peak).any():
            return False
        self._live[first : first + len(more)] += more
        return True

    def _more(self, starts: list[fx.Node]) -> tuple[int, Any]:
        """Return a place, and how many bytes more the graph takes from there on.

        The bytes are those of packed buffers, and of operands that are kept until they are packed.
        """
        at, place = self.places.at, _place(self.places, starts)
        out = sum(map(nbytes, starts))
        results = {node: max(self._last[c] for c in self._use.of[node]) for node in starts}
        first, end = min(at[node] for node in starts), max(results.values())
        more = np.zeros(max(end, place) + 1 - first, dtype=np.int64)
        for node in starts:
            if not node.meta.get("donate"):
                more[at[node] - first : results[node] + 1 - first] -= nbytes(node)
            more[at[node] + 1 - first : place + 1 - first] += nbytes(node.args[0])  # type: ignore[arg-type]
        more[place + 1 - first : end + 1 - first] += out
        if place < end:
            more[place + 1 - first] += sum(nbytes(node.args[0]) for node in starts)  # type: ignore[arg-type]
            if OPERATORS[starts[0].target] == "all_gather":  # type: ignore[index]
                more[place + 1 - first] += out
        return first, more


def _buffer(start: fx.Node) -> int:
    """Return the bytes of the larger buffer of a collective."""
    return max(nbytes(start), nbytes(start.args[0]))  # type: ignore[arg-type]


def _pack(new: Appender, starts: list[fx.Node], own: list[bool]) -> fx.Node:
    """Add one collective for several, and give its parts to the users of their waits; return it.

    Args:
        own: for each whether its result must have memory of its own.
    """
    target: Any = starts[0].target
    kind, size = OPERATORS[target], group_size(starts[0])
    sizes = [math.prod(node.args[0].meta["val"][0]) for node in starts]  # type: ignore[union-attr]
    total, rows = sum(sizes), size if kind == "reduce_scatter" else 1
    parts = [
        new.flat(node.args[0], [rows, n // rows]) for node, n in zip(starts, sizes, strict=True)
    ]
    packed = new.make(aten.cat.default, (parts, 1), [rows, total // rows])
    flat = new.make(aten.view.default, (packed, [total]), [total])
    length = {"all_gather": total * size, "reduce_scatter": total // size}.get(kind, total)
    start = new.make(target, (flat, *starts[0].args[1:]), [length])
    start.meta["numbers"] = tuple(
        number for node in starts for number in node.meta.get("numbers", ())
    )
    start.meta["moved"] = "".join(dict.fromkeys(node.meta.get("moved", "") for node in starts))
    if kind == "all_reduce":
        start.meta["donate"] = True
    whole = new.make(WAIT, (start,), [length])
    if kind == "all_gather":
        whole = new.make(aten.view.default, (whole, [size, total]), [size, total])
    offset = 0
    for node, n, is_own in zip(starts, sizes, own, strict=True):
        (done,) = node.users
        done.replace_all_uses_with(_part(new, whole, offset, n // rows, is_own))
        done.graph.erase_node(done)
        offset += n // rows
    return start


def _part(new: Appender, whole: fx.Node, offset: int, count: int, is_own: bool) -> fx.Node:
    """Add what one of the packed collectives has of the packed result.

    The part is columns of a table, which are copied, or elements.
    """
    if len(whole.meta["val"][0]) == 2:
        size, total = whole.meta["val"][0]
        part = new.make(
            aten.slice.Tensor, (whole, 1, offset, offset + count), [size, count], [total, 1]
        )
        in_order = {"memory_format": torch.contiguous_format}
        part = new.make(aten.clone.default, (part,), [size, count], kwargs=in_order)
        return new.make(aten.view.default, (part, [size * count]), [size * count])
    part = new.make(aten.slice.Tensor, (whole, 0, offset, offset + count), [count])
    return new.make(aten.clone.default, (part,), [count]) if is_own else part
