"""Move what Python code has read in front of the graph: the values select which graph runs.

    s = sum(mask); a = wait(all_reduce(s)); e = eq(a, 8)
    expect(e, True)             code of the recording:  if mask.sum() == 8:
    y = where(a, x, 0)

    read     inputs mask        outputs eq(a, 8), a
    graph    inputs x, a        y = where(a, x, 0)

A collective of a read runs once, and its result is an input of the graph and of later reads. Other
operators that both need run twice. What cannot be computed before the graph stays in it, as an
`expect` that says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from ..collectives import OPERATORS, WAIT
from ..draws import Draw
from ..program import Program, Read, changes_metadata, expect, is_pure
from .alias import MemoryUse, is_view, nbytes

_MOST = 64  # operators that compute one value


def hoist_reads(
    program: Program, rounds: Sequence[Sequence[int]], agreed: bool, collectives: bool = True
) -> Program:
    """Return the program with reads in front of its graph, which is changed.

    Args:
        rounds: the ranks that may run other recordings at the same time.
        agreed: whether all of these record in the same calls. Then those that have read the same
            values run the same collectives; else no read of a rank's own value may have any.
        collectives: whether reads may have collectives.
    """
    graph = program.graph
    movable = [node for node in graph.nodes if is_movable(node)]
    own = {x: not all(x.meta["ranks"].issuperset(ranks) for ranks in rounds) for x in movable}
    hoist = _Hoist(program)
    for node in movable:
        before = hoist.is_own if agreed else any(own.values())
        hoist.read(node, own[node], collectives and not before)
    return hoist.program()


class _Hoist:
    """The reads of one program.

    Attributes:
        is_own: whether a read so far is of a value that other ranks may not have.
    """

    def __init__(self, program: Program) -> None:
        self._program, self._graph = program, program.graph
        self._nodes = list(self._graph.nodes)
        self._place = {node: i for i, node in enumerate(self._nodes)}
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        self._sources = dict(zip(inputs, program.sources, strict=True))
        self._names = dict(zip(inputs, program.names, strict=True))
        self._use = MemoryUse(self._graph)
        self._writers: dict[int, list[fx.Node]] = {}
        for node in self._nodes:
            for c in self._use.writes[node]:
                self._writers.setdefault(c, []).append(node)
        self._changes_metadata = changes_metadata(self._graph)
        self._waits: list[fx.Node] = []  # of collectives of reads
        self._reads: list[Read] = []
        self.is_own = False

    def read(self, node: fx.Node, is_own: bool, collectives: bool) -> None:
        """Move a read out of the graph, or note at its node why it stays."""
        needed = self._nodes_for(node)
        waits = [x for x in needed if x.target is WAIT and x not in self._waits]
        why = self._obstacle(needed)
        if why is None and waits and not collectives:
            why = "it needs a collective that other ranks may not run at that time"
        x, value, place = node.args
        if why is not None:
            node.args = x, value, place, why
            return
        graph, sources = self._extract(needed, [x, *waits])  # type: ignore[list-item]
        self._reads.append(Read(graph, sources, value, str(place)))
        self._waits += waits
        self.is_own = self.is_own or is_own
        self._graph.erase_node(node)

    def _nodes_for(self, read: fx.Node) -> list[fx.Node]:
        """Return what computes a read, in order: operands, and what has written to them before."""
        needed: set[fx.Node] = set()
        work = list(read.all_input_nodes)
        while work:
            node = work.pop()
            if node in needed:
                continue
            needed.add(node)
            if node in self._waits:
                continue
            work += node.all_input_nodes
            work += [x for x in self._writers_before(node) if not self._writes_input(x)]
        return sorted(needed, key=self._place.__getitem__)

    def _writers_before(self, node: fx.Node) -> list[fx.Node]:
        return [
            writer
            for c in self._use.reads[node]
            for writer in self._writers.get(c, ())
            if self._place[writer] < self._place[node]
        ]

    def _writes_input(self, node: fx.Node) -> bool:
        return bool(self._use.writes[node] & self._use.inputs)

    def _obstacle(self, needed: Sequence[fx.Node]) -> str | None:
        """Return why these nodes cannot run before the graph, None if they can."""
        if self._changes_metadata:
            return "the function replaces the memory of a tensor"
        calls = [node for node in needed if node.op == "call_function"]
        if any(map(_is_random, calls)):
            return "it depends on random numbers"
        if any(node in self._use.fences for node in calls):
            return "it depends on what the ranks exchange"
        received: frozenset[int] = frozenset()
        for node in calls:
            if self._writes_input(node) or any(map(self._writes_input, self._writers_before(node))):
                return "it depends on what the function has written before"
            if node.target is WAIT:
                received |= self._use.of[node]
            elif node.target in OPERATORS:
                if not any(user.target is WAIT and user in needed for user in node.users):
                    return "a collective was in flight"
            elif self._use.writes[node] & received:
                return "a result of a collective was changed in place"
        count = sum(not is_view(node) for node in calls)
        return None if count <= _MOST else f"{count} operators compute it"

    def _extract(
        self, needed: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> tuple[fx.Graph, list[Any]]:
        """Return nodes as a graph of their own, and the sources of its inputs."""
        graph, values, sources = fx.Graph(), {}, []
        for node in needed:
            if node.op == "placeholder" or node in self._waits:
                values[node] = graph.placeholder(node.name)
                values[node].meta = dict(node.meta)
                sources.append(
                    self._sources[node]
                    if node.op == "placeholder"
                    else itemgetter(self._waits.index(node) - len(self._waits))
                )
        for node in needed:
            if node not in values:
                values[node] = graph.node_copy(node, values.__getitem__)
        graph.output(tuple(values[x] for x in outputs))
        return graph, sources

    def program(self) -> Program:
        """Return the program without what its reads have computed."""
        if not self._reads:
            return self._program
        first = next(node for node in self._graph.nodes if node.op != "placeholder")
        with self._graph.inserting_before(first):
            for i, node in enumerate(self._waits):
                value = self._graph.placeholder(f"read_{i}")
                value.meta = {"val": node.meta["val"], "memory": (-(i + 1) << 48, nbytes(node))}
                self._sources[value] = itemgetter(i - len(self._waits))
                self._names[value] = f"a result of a collective before the graph, {i}"
                node.replace_all_uses_with(value)
        for node in self._waits:
            start: Any = node.args[0]
            self._graph.erase_node(node)
            self._graph.erase_node(start)
        for node in reversed(list(self._graph.nodes)):
            if not node.users and (node.op == "placeholder" or is_pure(node)):
                self._graph.erase_node(node)
        inputs = [node for node in self._graph.nodes if node.op == "placeholder"]
        return dataclasses.replace(
            self._program,
            sources=[self._sources[node] for node in inputs],
            names=[self._names[node] for node in inputs],
            reads=tuple(self._reads),
            is_own=self.is_own,
        )


def unmovable_read(program: Program) -> str | None:
    """Return why a value that an installed package reads cannot be known before the graph.

    The reason begins with the place of the read. The result is None if all values can be known, as
    far as one rank can tell.
    """
    graph, values = fx.Graph(), {}
    graph.output(graph.graph_copy(program.graph, values))
    copies = [values[node] for node in program.graph.nodes if is_movable(node)]
    if copies:
        for old, new in values.items():
            new.meta = dict(old.meta)
        hoist_reads(dataclasses.replace(program, graph=graph), (), agreed=False)
    for node in copies:
        if len(node.args) > 3:
            _, _, place, why = node.args
            return f"{place}: a value is read that cannot select a recording, since {why}"
    return None


def is_movable(node: fx.Node) -> bool:
    """Return whether a node is a read that may select the recording: it does not say why not."""
    return node.target is expect and len(node.args) == 3


def _is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return isinstance(node.target, Draw) or torch.Tag.nondeterministic_seeded in tags
