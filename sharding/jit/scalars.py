"""Record Python numbers whose values are not known when a graph is made.

Such a number is a learning rate, `step.item()`, or one that was passed.

`TracedFloat` is a `torch.SymFloat`, so operators of torch take it where they take a number;
arithmetic on it is recorded as nodes of the graph, which compute in Python, in double precision, as
the program does. What would need the value itself is an error; for numbers that are known before a
call, those of optimizers, it is a condition under which the graph holds.

Some operators take C++ doubles, which have no symbols. Such a number is an argument of the node if
the operator is the function that the program has called and its gradient is not computed. Else it
is a value that was read: functions made of several operators compute with it before they run, and
autograd saves it for backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import fx
from torch.utils import _pytree as pytree

from .errors import JitError, value_read

RATE = "lr"
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
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

    def wrap_float(self, value: float) -> _ScalarNode:
        """Return a constant, for arithmetic in C++."""
        return _ScalarNode(self.builder, value, value, lambda: value, self.name)  # type: ignore[arg-type]

    wrap_int = wrap_float

    def guard_float(self, file: str, line: int) -> float:
        """Return the value for an operator that takes a C++ double.

        The recording looks for it among the arguments.
        """
        if not file.endswith(_ARGUMENTS):
            return self.fix("float()")
        self.builder.passed_as_double.append(self)
        return self.hint

    def fix(self, what: str) -> float:
        """Return the value, which is a constant of the graph from now on.

        It is an error for learning rates, which change in every call.
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

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """What `isinstance` compares: the program has passed a float."""
        return float

    def __copy__(self) -> TracedFloat:
        return self

    def __deepcopy__(self, memo: Any) -> TracedFloat:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return float, (self.node.fix("pickling"),)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.node.fix("NumPy"), dtype)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


def _read(name: str) -> Callable[..., Any]:
    function = getattr(float, name)

    def read(self: TracedFloat, *args: Any) -> Any:
        return function(self.node.fix(f"{name} of a number that changes from call to call"), *args)

    return read


def _comparison(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
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


def _operation(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
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
    setattr(TracedFloat, f"__{_name}__", _operation(getattr(operator, _name)))
    setattr(TracedFloat, f"__r{_name}__", _operation(getattr(operator, _name), swapped=True))
for _name in ("neg", "pos", "abs"):
    setattr(TracedFloat, f"__{_name}__", _operation(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TracedFloat, f"__{_name}__", _comparison(f"__{_name}__", getattr(operator, _name)))
setattr(TracedFloat, "__bool__", _comparison("__bool__", operator.truth))  # noqa: B010
for _name in ("float", "int", "repr", "str", "format", "round", "trunc", "floor", "ceil", "hash"):
    setattr(TracedFloat, f"__{_name}__", _read(f"__{_name}__"))
for _name in ("is_integer", "as_integer_ratio", "hex", "conjugate"):
    setattr(TracedFloat, _name, _read(_name))


# -- C++ code that computes with numbers, of gradients above all -----------------------------------


def _of_node(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `_ScalarNode` that computes what an operator of `TracedFloat` does."""

    def call(self: _ScalarNode, *others: Any) -> Any:
        result = function(*map(TracedFloat, (self, *others)))
        return result.node if type(result) is TracedFloat else _Answer(result)

    return call


class _Answer:
    """The answer of a comparison in C++, which the graph depends on."""

    def __init__(self, value: bool) -> None:
        self._value = value

    def is_bool(self) -> bool:
        return True

    def is_symbolic(self) -> bool:
        return False

    def guard_bool(self, file: str, line: int) -> bool:
        """Return the answer."""
        return self._value

    expect_true = guard_size_oblivious = guard_bool


for _name in ("add", "sub", "mul", "truediv", "neg", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_ScalarNode, _name, _of_node(getattr(operator, _name)))
_ScalarNode.float_truediv = _ScalarNode.truediv  # type: ignore[attr-defined]
_ScalarNode.pow = _ScalarNode.float_pow = _of_node(operator.pow)  # type: ignore[attr-defined]
_ScalarNode.sym_max = _of_node(max)  # type: ignore[attr-defined]
_ScalarNode.sym_min = _of_node(min)  # type: ignore[attr-defined]


# -- C++ doubles -----------------------------------------------------------------------------------


def settle_doubles(passed: Sequence[_ScalarNode], function: Any) -> None:
    """Note the values of numbers that a function has taken as C++ doubles.

    The function has passed them to no operator: it has computed with them.
    """
    for node in passed:
        node.constant(f"{getattr(function, '__name__', function)}, which computes with it,")


def settle_base(function: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of a function, with the value of a number that is the base of a power.

    The value replaces the number if the gradient of the power needs the logarithm of the number,
    for which C++ has no symbol.
    """
    is_power = getattr(function, "__name__", "") in ("pow", "__rpow__", "float_power")
    if not is_power or not torch.is_grad_enabled():
        return args
    return [
        x.node.constant("the gradient of a power of it") if type(x) is TracedFloat else x
        for x in args
    ]


def _is_direct(func: Any, function: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator runs because the program has called it with its numbers.

    Autograd must have saved none of the program's numbers for a gradient.
    """
    packet = func.overloadpacket
    if function is None or getattr(function, "__name__", None) != packet.__name__:
        return False
    overloads = [getattr(packet, name) for name in packet.overloads()]
    if any(x.has_kernel_for_dispatch_key(_COMPOSITE) for x in overloads):
        return False
    tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def among(
    passed: Sequence[_ScalarNode],
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    function: Any,
) -> dict[int, _ScalarNode]:
    """Return which of an operator's arguments are traced numbers that were passed as C++ doubles.

    They are told by their values; where several have the same value, by their names. One that is
    not found is a constant, under the condition that it stays.

    Args:
        function: what the program has called.

    Returns: the traced numbers, by the index of their argument among the flattened arguments.
    """
    if not _is_direct(func, function, (args, kwargs)):
        settle_doubles(passed, function or func)
        return {}
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
                node.constant(f"{func}, which has another argument of the same value,")
    return traced
