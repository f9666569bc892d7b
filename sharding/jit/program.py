"""Hold a recorded graph that is ready to run.

A program has the sources of its inputs, its writes, its code, and what that calls besides
operators.

inputs    arguments | slots such as `.grad` | state by reference | constants | numbers
graph     operators in the order of the recording
outputs   new values of slots | results
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .collectives import OPERATORS, STARTS, WAIT, Site, group_of, site_of
from .draws import Draw, Position
from .errors import JitError, value_read

# in this folder, so that the line of a collective is that which called the function
_FILE = f"{__file__.rpartition('/')[0]}/<graph>"
Runner = Callable[..., Sequence[Any]]


class Read(NamedTuple):
    """A value that Python code has read, which is computed before the graph runs.

    Attributes:
        graph: its outputs are the value, and the results of its collectives.
        sources: as those of a program, of the leaves followed by such results of earlier reads.
        value: what was read when the graph was made.
        place: file:line of the code.
    """

    graph: fx.Graph
    sources: list[Callable[[Sequence[Any]], Any]]
    value: Any
    place: str


@dataclass
class Program:
    """One graph.

    Attributes:
        graph: placeholders, operators and an output: a tuple of the new values of slots and the
            results.
        sources: for each placeholder, a function that returns the input, of the leaves of the
            arguments followed by the results of the collectives of reads.
        names: a readable name of each input.
        draws: where the call leaves the stream of random numbers.
        rank: the global rank that recorded it.
        passes: names of the passes that ran, and how many nodes each changed.
        name: of the function, for people.
        reads: the values that select the program, in the order of the recording.
        is_own: whether other ranks of its meshes, or this one, may have read other values.
        is_alone: whether passes were dropped, since ranks that run recordings of different values
            would have other schedules.
    """

    graph: fx.Graph
    sources: list[Callable[[Sequence[Any]], Any]]
    names: list[str]
    draws: Position
    rank: int
    passes: tuple[tuple[str, int], ...] = ()
    name: str = "a function"
    reads: tuple[Read, ...] = ()
    is_own: bool = False
    is_alone: bool = False

    def rank_in(self, ranks: Sequence[int]) -> int:
        """Return the index of this rank in a group."""
        return ranks.index(self.rank)


class OfTraining:
    """Call an operator in grad mode, as it was recorded.

    A graph runs where gradients are disabled, and the operator would leave out what backward needs.
    """

    def __init__(self, operator: Callable[..., Any]) -> None:
        self.operator, self.__name__ = operator, getattr(operator, "__name__", "operator")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            return self.operator(*args, **kwargs)


def item(x: Tensor) -> Any:
    """Return the value of a tensor with one element."""
    return x.item()


def expect(x: Tensor, value: Any, place: str, why: str = "it is read inside") -> None:
    """Raise unless a tensor has the value that it had when the graph was made.

    Python code depended on that value.

    Args:
        why: the value does not select a recording.
    """
    now = x.item()
    if not is_same_value(now, value):
        raise value_read(
            f"{place}: the value was {value} when the graph was made and is {now} now, and selects "
            f"no other recording, since {why}; the line"
        )


def is_same_value(now: Any, before: Any) -> bool:
    """Return whether two numbers are equal, or neither is a number."""
    return now == before or (now != now and before != before)


def barrier(group: str) -> None:
    """Wait for all ranks of a group."""
    group_of(group).barrier()


class Exchange:
    """Exchange a Python object between ranks again.

    The library does so for shapes that may change on other ranks.
    """

    def __init__(self, group: str, sent: Any, expected: list[Any], place: str) -> None:
        self.group, self.sent, self.expected, self.place = group, sent, expected, place
        self.__name__ = "exchange"

    def __call__(self) -> None:
        objects = group_of(self.group).all_gather_object(self.sent)
        if objects != self.expected:
            raise JitError(
                f"{self.place}: the ranks had {self.expected} when the graph was made and have "
                f"{objects} now; call the function eagerly"
            )


# -- nodes -----------------------------------------------------------------------------------------


def is_pure(node: fx.Node) -> bool:
    """Return whether a node may be removed if it is not used."""
    if (
        node.op != "call_function"
        or node.target in OPERATORS
        or node.target is WAIT
        or isinstance(node.target, Draw)
    ):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema  # without results: a check
        is_random = torch.Tag.nondeterministic_seeded in node.target.tags
        return bool(schema.returns) and not (schema.is_mutable or is_random)
    return node.target.__module__ in ("_operator", "operator", "math") or node.target is item


def changes_metadata(graph: fx.Graph) -> bool:
    """Return whether an operator gives a tensor another shape or other memory in place.

    Aliases are then no longer alike.
    """
    return any(
        torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in graph.nodes
    ) or any(str(node.target).startswith(("aten.set_", "aten.resize_")) for node in graph.nodes)


# -- code ------------------------------------------------------------------------------------------


def run_plainly(runner: Runner, inputs: Sequence[Any]) -> Sequence[Any]:
    """Run a graph, whose operators are those below autograd and autocast."""
    is_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    has_grad = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # what `torch.no_grad()` does, in fewer calls
    try:
        if not is_autocast:
            return runner(*inputs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return runner(*inputs)
    finally:
        torch._C._set_grad_enabled(has_grad)


def compile_eagerly(graph: fx.Graph, mark: Callable[[int], None] | None = None) -> Runner:
    """Return the graph as a Python function of its inputs.

    The function frees each value after its last use.

    Args:
        mark: called after each node with its number.
    """
    return _Code(graph).function(mark)


class _Code:
    """The source of a graph, and the objects that it names."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.names = {node: f"v{i}" for i, node in enumerate(self.nodes)}
        self.known: dict[str, Any] = {}
        self._of_object: dict[int, str] = {}

    def function(self, mark: Callable[[int], None] | None) -> Runner:
        inputs = [self.names[node] for node in self.nodes if node.op == "placeholder"]
        lines = [f"def run({', '.join(inputs)}):"]
        dying = self._last_uses()
        for i, node in enumerate(self.nodes):
            if node.op == "output":
                lines.append(f"    return {self._value(node.args[0])}")
            else:
                lines += self._statements(node, i, dying.get(node, ()))
                lines += (
                    []
                    if mark is None or node.op != "call_function"
                    else [f"    {self._name(mark)}({i})"]
                )
        exec(compile("\n".join(lines), _FILE, "exec"), self.known)
        return self.known["run"]

    def _statements(self, node: fx.Node, i: int, dying: Sequence[fx.Node]) -> list[str]:
        """Return the statements of a node, which free what nothing uses after it."""
        names = [self.names[x] for x in dying if x is not node]
        free = [f"    del {', '.join(names)}"] if names else []
        free_own = [f"    del {self.names[node]}"] if node in dying else []
        if node.op != "call_function":
            return free
        if not getattr(node.target, "empties_list", False):
            return [f"    {self.names[node]} = {self._call(node, i)}", *free, *free_own]
        return [
            f"    operands = [{', '.join(map(self._value, node.args))}]",
            *free,
            f"    {self.names[node]} = {self._name(node.target)}(operands)",
            *free_own,
        ]

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """Return for each node the values that it uses for the last time.

        A value that is never used is listed at its own node.
        """
        last = {x: node for node in self.nodes for x in node.all_input_nodes}
        dying: dict[fx.Node, list[fx.Node]] = {}
        for x in self.nodes:
            if x.op == "call_function" or x in last:
                dying.setdefault(last.get(x, x), []).append(x)
        return dying

    def _call(self, node: fx.Node, i: int) -> str:
        if node.target is WAIT:
            return f"{self._value(node.args[0])}.wait()"
        operands = node.args
        if node.target in OPERATORS:  # a group and a site, which are looked up once
            operands = (*operands[:-2], group_of(operands[-2]), site_of(operands[-1]))  # type: ignore[arg-type]
        args = [self._value(x) for x in operands]
        kwargs = [f"{name}={self._value(x)}" for name, x in node.kwargs.items()]
        if node.target in OPERATORS:
            name = OPERATORS[node.target]  # type: ignore[index]
            following = self.nodes[i + 1] if i + 1 < len(self.nodes) else None
            now = following is not None and following.target is WAIT and following.args[0] is node
            kwargs.append(f"now={now}")
            kwargs += ["donate=True"] if node.meta.get("donate") else []
            return f"{self._name(STARTS[name])}({', '.join(args + kwargs)})"
        target = node.target._op if isinstance(node.target, torch._ops.OpOverload) else node.target
        return f"{self._name(target)}({', '.join(args + kwargs)})"

    def _name(self, x: Any) -> str:
        name = self._of_object.get(id(x))
        if name is None:
            name = self._of_object[id(x)] = f"k{len(self._of_object)}"
            self.known[name] = x
        return name

    def _value(self, x: Any) -> str:
        if isinstance(x, fx.Node):
            return self.names[x]
        if isinstance(x, (list, tuple)) and not isinstance(x, Site):
            inside = "".join(f"{self._value(part)}, " for part in x)
            return f"[{inside}]" if isinstance(x, list) else f"({inside})"
        if x is None or type(x) in (bool, int, str) or (type(x) is float and math.isfinite(x)):
            return repr(x)
        return self._name(x)
