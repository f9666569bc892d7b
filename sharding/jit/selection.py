"""Select the recording of a call by the values that Python code has read of tensors.

    call                  recordings                  mask.all()
    step(x, mask)         none                        True          recorded
    step(x, mask)         True                        True          runs
    step(x, mask)         True                        False         recorded
    step(x, mask)         True, False                 True          runs the first

Reads are in the order of the code: a recording is one path through its branches. Values that two
paths compute alike are computed once in a call.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ...mesh.comm.thread_context import thread_context
from .backends.repeats import key_of
from .collectives import OPERATORS
from .program import Read, compile_eagerly, is_same_value, run_plainly

MOST = 8  # recordings of one signature and state, by value
RUN, RECORD, FULL = range(3)  # what a rank needs to do; ranks do what the largest says
_MIXED_CALLS = 4  # after which ranks may part, and
_MIXED_SHARE = 10  # if one in so many calls was mixed


class Prologue:
    """Computes what a recording has read, before it runs.

    Attributes:
        reads: for each value that is read a key, what computes it, and the read.
        communicates: whether that takes collectives.
    """

    def __init__(self, reads: Sequence[Read]) -> None:
        self.reads, key = [], ""
        self.communicates = any(
            node.target in OPERATORS for read in reads for node in list(read.graph.nodes)
        )
        for read in reads:
            key = hashlib.blake2b(repr((key, _key(read))).encode(), digest_size=16).hexdigest()
            self.reads.append((key, compile_eagerly(read.graph), read))

    def results(self, leaves: Sequence[Any], known: dict[str, Sequence[Any]]) -> list[Any] | str:
        """Return the results of collectives, inputs of the graph; or which value differs.

        Args:
            known: what other recordings have computed in this call.
        """
        carried: list[Any] = []
        for key, runner, read in self.reads:
            if key not in known:
                inputs = [source([*leaves, *carried]) for source in read.sources]
                known[key] = run_plainly(runner, inputs)
            x, *results = known[key]
            now = x.item()
            if not is_same_value(now, read.value):
                return f"the value read at {read.place} is {now} and was {read.value}"
            carried += results
        return carried


def _key(read: Read) -> Any:
    """Return what is equal for reads that compute the same, after the same others."""
    inputs = [node for node in read.graph.nodes if node.op == "placeholder"]
    nodes = [node for node in read.graph.nodes if node.op == "call_function"]
    output = next(node for node in read.graph.nodes if node.op == "output")
    places = {node: i for i, node in enumerate((*inputs, *nodes))}
    return (
        key_of(nodes, inputs),
        [places[x] for x in output.args[0]],
        list(map(_source_key, read.sources)),
    )


def _source_key(source: Callable[[Sequence[Any]], Any]) -> Any:
    if not isinstance(source, functools.partial):
        return source
    function, values = source.func, source.args
    return function, [x if type(x) is int else id(x) for x in values]


class Entry(Protocol):
    """A recording, as far as it is selected here; that of `entry.py`.

    Attributes:
        number: that of its graph, see `ops/recomputation.py`.
    """

    prologue: Prologue
    number: int

    def change(self, leaves: Sequence[Any]) -> str | None:
        """Return which state has changed since, None if none has."""


class Selected(NamedTuple):
    """What a rank knows at the beginning of a call.

    Attributes:
        entry: the recording that holds, None if none does.
        carried: results of collectives, inputs of its graph.
        why: why the newest recording does not hold; empty if there is none.
        count: how many recordings hold but for their values.
    """

    entry: Any
    carried: Sequence[Any]
    why: str
    count: int

    @property
    def need(self) -> int:
        """What this rank alone would do."""
        if self.entry is not None:
            return RUN
        return FULL if self.count >= MOST else RECORD


class Peers:
    """The ranks that record a function together.

        call        rank 0      rank 1
        f(x)        [3]         [3]         both record: number 1
        f(x)        [5]         [5]         both record: number 2
        f(x)        [3]         [5]         numbers 1 and 2: a mixed call, which is eager
        f(x)        [3]         [7]         numbers 1 and 0: as well

    Attributes:
        meshes: over which they agree.
        may_differ: whether a rank has passed plain tensors, which may have other shapes on other
            ranks, so that they agree on each call.
        are_apart: whether each rank records by itself, without passes.
        count: how many signatures they have recorded together.
        calls, mixed_calls: how many calls they have agreed on, and in how many signatures differed.
    """

    def __init__(self) -> None:
        self.meshes: Sequence[Sequence[int]] = ()
        self.may_differ = self.are_apart = False
        self.count = self.calls = self.mixed_calls = 0

    @property
    def agree(self) -> bool:
        """Whether a call begins with an agreement."""
        return self.may_differ and self.count > 0 and not self.are_apart

    def note_call(self, is_mixed: bool) -> None:
        """Count a call; part if mixed ones are common."""
        self.calls += 1
        self.mixed_calls += is_mixed
        if self.mixed_calls >= _MIXED_CALLS and self.mixed_calls * _MIXED_SHARE >= self.calls:
            self.are_apart = True


class Recordings(list[Any]):
    """The recordings of one signature, the newest last.

    Attributes:
        is_own: whether ranks may have read other values, so that they agree on each call.
        meshes: over which ranks they agree.
        is_full: whether it was said that there are too many.
        peers: the ranks that record together.
        number: that of the signature among those of the peers; 0 before a recording.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_own = self.is_full = False
        self.meshes: Sequence[Sequence[int]] = ()
        self.peers: Peers | None = None
        self.number = 0

    @property
    def communicates(self) -> bool:
        """Whether selecting one takes collectives."""
        return any(entry.prologue.communicates for entry in self)

    def select(self, leaves: Sequence[Any]) -> Selected:
        """Return the newest recording that holds for a call.

        In a recomputation, it is the newest of those that its forward knew.
        """
        known: dict[str, Sequence[Any]] = {}
        why, count = "", 0
        before = thread_context.graphs_before
        for entry in reversed(self):
            if before is not None and entry.number > before:
                continue
            change = entry.change(leaves)
            if change is None:
                count += 1
                results = entry.prologue.results(leaves, known) if entry.prologue.reads else ()
                if not isinstance(results, str):
                    return Selected(entry, results, why, count)
                change = results
            why = why or change
        return Selected(None, (), why, count)

    def before_reads(self, leaves: Sequence[Any]) -> Selected:
        """Return the newest recording that holds for a call but for the values it has read."""
        why, before = "", thread_context.graphs_before
        for entry in reversed(self):
            if before is not None and entry.number > before:
                continue
            change = entry.change(leaves)
            if change is None:
                return Selected(entry, (), "", 1)
            why = why or change
        return Selected(None, (), why, 0)
