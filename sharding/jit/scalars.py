"""Python numbers whose values are not known when a graph is made: a learning rate, `step.item()`, a number that was passed.

`TracedFloat` is a `torch.SymFloat`, so operators of torch take it where they take a number; arithmetic on it is recorded as nodes of the
graph, which compute in Python, in double precision, as the program does. What would need the value itself is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .errors import value_read

if TYPE_CHECKING:
    from .recorder import GraphRecorder

_ARGUMENTS = "python_arg_parser.h"  # where torch reads a number that an operator takes as a C++ double


class _ScalarNode:
    """What torch's C++ code asks of a symbolic number.

    Attributes:
        hint: the value in this call.
        node: the node of the graph that computes it.
    """

    def __init__(self, recorder: GraphRecorder, node: fx.Node, hint: float) -> None:
        self.recorder, self.node, self.hint = recorder, node, hint

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
        """Return the value for an operator that takes a C++ double; the recorder finds it among the arguments."""
        if not file.endswith(_ARGUMENTS):
            raise value_read("float()")
        self.recorder.passed_as_double[self.hint] = self.node
        return self.hint

    def str(self) -> str:
        raise value_read("str()")

    _graph_repr = str


class TracedFloat(torch.SymFloat):
    """A number whose value is computed by the graph."""

    node: _ScalarNode

    @staticmethod
    def of(recorder: GraphRecorder, node: fx.Node, hint: float) -> TracedFloat:
        """Return the number that a node computes."""
        return TracedFloat(_ScalarNode(recorder, node, hint))

    def __hash__(self) -> int:
        return id(self)


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: TracedFloat, *_: Any) -> Any:
        raise value_read(f"{name} of a number that changes from call to call")

    return refuse


def _recorded(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def call(self: TracedFloat, *others: Any) -> Any:
        if any(not isinstance(x, (int, float, TracedFloat)) for x in others):
            return NotImplemented
        args = (*others, self) if swapped else (self, *others)
        hints = [x.node.hint if isinstance(x, TracedFloat) else x for x in args]
        recorder = self.node.recorder
        made = recorder.call(function, tuple(x.node.node if isinstance(x, TracedFloat) else x for x in args))
        return TracedFloat.of(recorder, made, function(*hints))

    return call


for _name in ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv"):
    setattr(TracedFloat, f"__{_name}__", _recorded(getattr(operator, _name)))
    setattr(TracedFloat, f"__r{_name}__", _recorded(getattr(operator, _name), swapped=True))
for _name in ("neg", "pos", "abs"):
    setattr(TracedFloat, f"__{_name}__", _recorded(getattr(operator, _name)))
for _name in ("bool", "float", "int", "eq", "ne", "lt", "le", "gt", "ge", "repr", "str", "format", "round", "trunc", "floor", "ceil"):
    setattr(TracedFloat, f"__{_name}__", _refused(f"__{_name}__"))
