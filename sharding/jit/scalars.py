"""Python numbers whose values are not known when a graph is made: a learning rate, `step.item()`, a
number that was passed.

`TracedFloat` is a `torch.SymFloat`, so operators of torch take it where they take a number;
arithmetic on it is recorded as nodes of the graph, which compute in Python, in double precision, as
the program does. What would need the value itself is an error; for numbers that are known before a
call, those of optimizers, it is a condition under which the graph holds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .errors import JitError, value_read

RATE = "lr"
_ARGUMENTS = "python_arg_parser.h"  # where torch reads what an operator takes as a C++ double


class Condition(NamedTuple):
    """What Python code has found out about numbers that are known before a call.

    Attributes:
        name: of the number.
        function, args: what was asked: a function of numbers, or of functions that return them.
        answer: the answer.
    """

    name: str
    function: Callable[..., Any]
    args: Sequence[Any]
    answer: Any

    def change(self) -> str | None:
        """Return what has changed if the answer is another one now."""
        now = self.function(*[x() if callable(x) else x for x in self.args])
        return None if now == self.answer else f"{self.name} has changed"


class NumberGraph(Protocol):
    """What traced numbers need of the graph that they are recorded in, a `GraphBuilder`.

    Attributes:
        conditions: what the program has found out about numbers that are known before a call.
        passed_as_double: traced numbers that an operator is about to get as C++ doubles.
    """

    conditions: list[Condition]
    passed_as_double: list[_ScalarNode]

    def call(self, target: Callable[..., Any], args: Any) -> fx.Node:
        """Append a node."""
        ...

    def refuse(self, error: JitError) -> None:
        """Note what a graph cannot repeat, or raise it."""
        ...


class _ScalarNode:
    """What torch's C++ code asks of a symbolic number.

    Attributes:
        hint: the value in this call.
        node: the node of the graph that computes it.
        now: for a hyperparameter, and what is computed of some, a function that returns the value
            before a call.
        name: that of the hyperparameter.
    """

    def __init__(
        self,
        builder: NumberGraph,
        node: fx.Node,
        hint: float,
        now: Callable[[], float] | None = None,
        name: str | None = None,
    ) -> None:
        self.builder, self.node, self.hint, self.now, self.name = builder, node, hint, now, name

    def is_float(self) -> bool:
        return True

    def is_symbolic(self) -> bool:
        return True

    def has_hint(self) -> bool:
        return True

    def _is_not(self) -> bool:
        return False

    def _is_unknown(self) -> None:
        return None

    is_int = is_bool = is_nested_int = is_constant = _is_not
    maybe_as_int = maybe_as_float = maybe_as_bool = _is_unknown

    def guard_float(self, file: str, line: int) -> float:
        """Return the value for an operator that takes a C++ double; the recording finds it among
        the arguments.
        """
        if not file.endswith(_ARGUMENTS):
            return self.fixed("float()")
        self.builder.passed_as_double.append(self)
        return self.hint

    def fixed(self, what: str) -> float:
        """Return the value, which is a constant of the graph from now on; an error for learning
        rates, which change in every call.
        """
        if self.name == RATE:
            self.builder.refuse(value_read(what))
        return self.constant(what)

    def constant(self, what: str) -> float:
        """Return the value, under the condition that it stays."""
        if self.now is None:
            self.builder.refuse(value_read(what))
            return self.hint
        self.builder.conditions.append(
            Condition(str(self.name), operator.pos, (self.now,), self.hint)
        )
        return self.hint

    def str(self) -> str:
        self.builder.refuse(value_read("str()"))
        return str(self.hint)

    _graph_repr = str


class TracedFloat(torch.SymFloat):
    """A number whose value is computed by the graph."""

    node: _ScalarNode

    @staticmethod
    def of(
        builder: NumberGraph,
        node: fx.Node,
        hint: float,
        now: Callable[[], float] | None = None,
        name: str | None = None,
    ) -> TracedFloat:
        """Return the number that a node computes."""
        return TracedFloat(_ScalarNode(builder, node, hint, now, name))

    def __hash__(self) -> int:
        return id(self)


def _read(name: str) -> Callable[..., Any]:
    function = getattr(float, name)

    def read(self: TracedFloat, *args: Any) -> Any:
        return function(
            self.node.fixed(f"{name} of a number that changes from call to call"), *args
        )

    return read


def _compared(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A comparison: a condition if all numbers are known before a call."""

    def compare(self: TracedFloat, *others: Any) -> Any:
        if any(not isinstance(x, (int, float, TracedFloat)) for x in others):
            return NotImplemented
        args = (self, *others)
        if any(isinstance(x, TracedFloat) and x.node.now is None for x in args):
            self.node.builder.refuse(
                value_read(f"{name} of a number that changes from call to call")
            )
            return function(*map(_hint, args))
        answer = function(*map(_hint, args))
        condition = Condition(str(self.node.name), function, tuple(map(_now, args)), answer)
        self.node.builder.conditions.append(condition)
        return answer

    return compare


def _hint(x: Any) -> Any:
    return x.node.hint if isinstance(x, TracedFloat) else x


def _now(x: Any) -> Any:
    return x.node.now if isinstance(x, TracedFloat) else x


def _recorded(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def call(self: TracedFloat, *others: Any) -> Any:
        if any(not isinstance(x, (int, float, TracedFloat)) for x in others):
            return NotImplemented
        args = (*others, self) if swapped else (self, *others)
        traced = [x.node for x in args if isinstance(x, TracedFloat)]
        operands = [x.node.node if isinstance(x, TracedFloat) else x for x in args]
        node = self.node.builder.call(function, operands)
        name = next((x.name for x in traced if x.name == RATE), traced[0].name)
        known, now = [_now(x) for x in args], None
        if all(x.now is not None for x in traced):
            now = lambda: function(*[x() if callable(x) else x for x in known])  # noqa: E731
        return TracedFloat.of(self.node.builder, node, function(*map(_hint, args)), now, name)

    return call


for _name in ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv"):
    setattr(TracedFloat, f"__{_name}__", _recorded(getattr(operator, _name)))
    setattr(TracedFloat, f"__r{_name}__", _recorded(getattr(operator, _name), swapped=True))
for _name in ("neg", "pos", "abs"):
    setattr(TracedFloat, f"__{_name}__", _recorded(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TracedFloat, f"__{_name}__", _compared(f"__{_name}__", getattr(operator, _name)))
setattr(TracedFloat, "__bool__", _compared("__bool__", operator.truth))  # noqa: B010
for _name in ("float", "int", "repr", "str", "format", "round", "trunc", "floor", "ceil"):
    setattr(TracedFloat, f"__{_name}__", _read(f"__{_name}__"))


# -- C++ doubles -----------------------------------------------------------------------------------


def among(
    passed: Sequence[_ScalarNode], func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[int, _ScalarNode]:
    """Return which of an operator's arguments, flattened, are the traced numbers that were passed
    as C++ doubles, by index.

    They are told by their values; where several have the same value, by their names. One that is
    not found is a constant, under the condition that it stays.
    """
    named_args = [(a.name, x) for a, x in zip(func._schema.arguments, args, strict=False)] + list(
        kwargs.items()
    )
    flat = [(name, leaf) for name, x in named_args for leaf in pytree.tree_leaves(x)]
    traced: dict[int, _ScalarNode] = {}
    for hint in dict.fromkeys(x.hint for x in passed):
        nodes = [x for x in passed if x.hint is hint or x.hint == hint]
        places = [
            i
            for i, (_, x) in enumerate(flat)
            if type(x) is float and (x == hint or (x != x and hint != hint))
        ]
        for node in nodes:
            named = (
                places
                if len(nodes) == len(places) == 1
                else [i for i in places if flat[i][0] == node.name]
            )
            if len(named) == 1:
                traced[named[0]] = node
            else:
                node.constant(
                    f"{func}, which computes with it before it runs or has another argument of the "
                    "same value,"
                )
    return traced
