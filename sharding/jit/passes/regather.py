"""Gather again instead of saving: less memory, more bytes.

    before    w = gather(x); f(w); ...         ...; g(w)         w is kept, which is large
    after     w = gather(x); f(w); ...; v = gather(x); g(v)      x is kept, which is small, or is
                                                                 there anyway: a parameter

Activations that sequence parallelism gathers for forward are needed again for the gradients of
weights, and so are the parameters of `fully_shard(reshard_after_forward=False)`. What is copied
from a gathered buffer, also to another dtype, is copied again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import fx

from .alias import class_bytes, is_view, live_bytes
from .movement import Movement, is_copy, is_moving


class _Again(NamedTuple):
    """How the values of a collective can be had again.

    Attributes:
        start: the collective.
        place: the place of the node before which it runs again.
        nodes: what runs again, in order.
        needed: classes that are read from then on.
        retained: classes that must be kept for it and would not be otherwise.
        sources: all classes that it reads.
        saved: bytes that it saves at the peak.
        more: bytes that it takes when it runs.
    """

    start: fx.Node
    place: int
    nodes: list[fx.Node]
    needed: list[int]
    retained: list[int]
    sources: set[int]
    saved: int
    more: int


def regather(
    graph: fx.Graph, max_live_bytes: int | None = None, only: frozenset[object] | None = None
) -> int:
    """Run collectives again before the later uses of their results, to take less memory.

    That is done where keeping the results makes the graph take the most memory. It goes on until no
    result is kept at the peak that could be gathered again, or until the graph takes at most
    `max_live_bytes`.

    Args:
        only: the collectives that may run twice, by `name_of`; by default all.

    Returns: how many run twice.
    """
    memory = _LiveMemory(graph)
    peak = memory.peak
    chosen: list[_Again] = []
    starts = [
        node
        for node in memory.move.nodes
        if is_moving(node) and (only is None or name_of(node) in only)
    ]
    families = [
        (node, classes)
        for node in starts
        if not memory.unsafe & set(classes := memory.move.classes_derived_from(node))
    ]
    while memory.peak > (max_live_bytes or 0):
        place = int(memory.live.argmax())
        candidates = [
            again
            for node, classes in families
            if (again := memory.again(node, classes, place)) is not None
        ]
        if not candidates:
            break
        best = max(
            candidates,
            key=lambda again: (
                again.saved / class_bytes(again.start),
                -memory.move.at[again.start],
            ),
        )
        memory.apply(best)
        chosen.append(best)
        families = [family for family in families if family[0] is not best.start]
    if memory.peak >= peak:
        return 0
    for again in chosen:
        _insert(graph, memory.move, again)
    return len(chosen)


def name_of(start: fx.Node) -> object:
    """Return which collective of the recorded program a node is.

    The name is the same on all ranks of its group.
    """
    return start.args[-2], start.meta.get("numbers", ())


def run_again(graph: fx.Graph) -> frozenset[object]:
    """Return the names of the collectives that the pass has let run twice."""
    return frozenset(name_of(node) for node in graph.nodes if node.meta.get("again"))


class _LiveMemory:
    """The memory that a graph takes at each node, with what was chosen to be gathered again."""

    def __init__(self, graph: fx.Graph) -> None:
        self.move = Movement(graph)
        self.use = self.move.use
        self.live = np.array(live_bytes(graph, self.use), dtype=np.int64)
        self.touched: dict[int, list[int]] = {}
        for i, node in enumerate(self.move.nodes):
            for c in self.use.of[node] | self.use.reads[node] | self.use.writes[node]:
                self.touched.setdefault(c, []).append(i)
        self.last = {c: places[-1] for c, places in self.touched.items()}
        self.unsafe = self.move.mixed | self.use.outputs | self.use.inputs
        self._fences = [self.move.at[node] for node in self.use.fences]
        self._sources: set[int] = set()  # of what was chosen
        self._gone: set[int] = set()  # what is no longer kept

    @property
    def peak(self) -> int:
        return int(self.live.max(initial=0))

    def again(self, start: fx.Node, classes: list[int], peak: int) -> _Again | None:
        """Return how the values of a collective that are kept at a place can be had again after it.

        The result is None if they cannot or need not.
        """
        at, use = self.move.at, self.use
        members: set[int] = set()
        # Those that are complete at this place, and not written once they are read.
        for c in classes:
            inside = {x for node in self.move.fillers[c] for x in use.reads[node]} & set(classes)
            if at[self.move.fillers[c][-1]] < peak and inside <= members | {c}:
                members.add(c)
        filling = {node for c in members for node in self.move.fillers[c]}
        reads = {
            c: [
                at[node]
                for node in self.move.readers.get(c, ())
                if node not in filling and start not in node.all_input_nodes
            ]
            for c in members
        }
        needed = [c for c in classes if any(i > peak for i in reads.get(c, ()))]
        if (
            not needed
            or any(peak in places for places in reads.values())
            or not any(i < peak for c in members for i in reads[c])
        ):
            return None
        if (
            any(reads[c] and at[self.move.fillers[c][-1]] > reads[c][0] for c in members)
            or self._sources & members
        ):
            return None
        place = min(i for c in needed for i in reads[c] if i > peak)
        begin = at[start]
        if any(begin < i < place for i in self._fences):
            return None
        run = self._run(members, needed)
        sources = {
            c for node in run for x in node.all_input_nodes if x not in run for c in use.of[x]
        }
        if not self._can_be_read(sources, run, place):
            return None
        retained = [c for c in sources if not self._is_there(c, place)]
        for c in list(retained):  # made again rather than kept, if what they are made from is there
            nodes = self._close(set(self.move.fillers[c]), {c})
            inputs = {
                d
                for node in nodes
                for x in node.all_input_nodes
                if x not in nodes
                for d in use.of[x]
            }
            is_copied = all(map(is_copy, self.move.fillers[c])) and c not in self.move.mixed
            if (
                is_copied
                and all(self._is_there(d, place) for d in inputs)
                and self._can_be_read(inputs, nodes, place)
            ):
                run |= nodes
                retained.remove(c)
                sources = sources - {c} | inputs
        outputs = {c for node in run for c in use.of[node] if use.made_by.get(c) in run}
        saved = sum(self.size(c) for c in needed) - sum(self.size(c) for c in retained)
        more = sum(self.size(c) for c in outputs if c not in needed)
        if (
            saved <= 0
            or sources & self._gone
            or self.live[place] + more + sum(self.size(c) for c in retained) >= self.peak
        ):
            return None
        return _Again(
            start, place, sorted(run, key=at.__getitem__), needed, retained, sources, saved, more
        )

    def size(self, c: int) -> int:
        """Return the bytes of a class."""
        return class_bytes(self.use.made_by[c])

    def _run(self, members: set[int], needed: list[int]) -> set[fx.Node]:
        """Return the nodes that fill these classes, from the operand of the collective on."""
        return self._close({node for c in needed for node in self.move.fillers[c]}, members)

    def _close(self, run: set[fx.Node], members: set[int]) -> set[fx.Node]:
        work = list(run)
        while work:
            for x in work.pop().all_input_nodes:
                for node in [
                    x,
                    *(filler for c in self.use.of[x] for filler in self.move.fillers.get(c, ())),
                ]:
                    if node not in run and self.use.of[x] and self.use.of[x] <= members:
                        run.add(node)
                        work.append(node)
        return run

    def _can_be_read(self, sources: set[int], run: set[fx.Node], place: int) -> bool:
        """Return whether sources have the same values at a later place as when they are read.

        The nodes that read them are those that run again.
        """
        first: dict[int, int] = {}
        for node in sorted(run, key=self.move.at.__getitem__, reverse=True):
            first |= dict.fromkeys(
                self.use.union(x for x in node.all_input_nodes if x not in run), self.move.at[node]
            )
        return not any(
            first[c] < self.move.at[node] < place
            for c in sources
            for node in self.move.fillers.get(c, ())
        )

    def _is_there(self, c: int, place: int) -> bool:
        return c in self.use.inputs or self.last[c] >= place

    def apply(self, again: _Again) -> None:
        """Note what is kept no longer, and what is kept instead."""
        peak = int(self.live.argmax())
        for c in again.needed:
            before = max(i for i in self.touched[c] if i <= peak)
            self.live[before + 1 : again.place] -= self.size(c)
        for c in again.retained:
            self.live[self.last[c] + 1 : again.place + 1] += self.size(c)
            self.last[c] = again.place
        self.live[again.place] += again.more
        self._sources |= again.sources
        self._gone |= set(again.needed)


def _insert(graph: fx.Graph, move: Movement, again: _Again) -> None:
    """Run nodes again, and let later ones use what they make."""
    place, needed = move.nodes[again.place], set(again.needed)
    copies: dict[fx.Node, fx.Node] = {}

    def copy_of(x: fx.Node) -> fx.Node:
        if x not in copies and move.use.of[x] and move.use.of[x] <= needed:
            copies[x] = graph.node_copy(x, copy_of)
        return copies.get(x, x)

    with graph.inserting_before(place):
        for node in again.nodes:
            copies[node] = graph.node_copy(node, lambda x: copies.get(x, x))
            if node is again.start:
                copies[node].meta["again"] = True
        old = [x for x in move.nodes if move.use.of[x] and move.use.of[x] <= needed]
        for x in old:
            for user in list(x.users):
                if move.at.get(user, -1) >= again.place and user not in old:
                    user.replace_input_with(x, copy_of(x))
    for x in reversed(old):
        if not x.users and is_view(x):
            graph.erase_node(x)
