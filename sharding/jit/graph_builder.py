"""The graph of a recording in progress: which node stands for which tensor.

made by a recorded operator      the operator's node
alias without an operator        its memory is that of a known tensor: a node `as_strided`
from outside                     *captured*: a placeholder; `recording.py` finds its source in later
                                 calls
from Python numbers              a copy of a constant
number that changes              a placeholder, `TracedFloat`
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ...mesh.comm.call_site import user_call
from .errors import JitError, at_line
from .program import item
from .scalars import Condition, TracedFloat

aten = torch.ops.aten
# Operators that return views without saying so, and those that say so: a compiler must know.
_VIEWS: dict[Any, Any] = {
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten._unsafe_view.default: aten.view.default,
}


class Captured:
    """A tensor that the function uses and has not made.

    Attributes:
        ref: the tensor.
        node: its placeholder.
        place: the first line of the program that used it.
        address: where its memory was then.
    """

    def __init__(self, tensor: Tensor, node: fx.Node) -> None:
        self.ref, self.node = TensorWeakRef(tensor), node
        self.place = user_call().place
        self.address = tensor.data_ptr()


class NumberInput(NamedTuple):
    """A number that is an input.

    Attributes:
        node: its placeholder.
        path: its name, for messages.
        source: returns its value in a call, from the leaves of the arguments.
    """

    node: fx.Node
    path: str
    source: Callable[..., float]


class GraphBuilder:
    """The graph of a recording in progress.

    Attributes:
        graph: the operators so far.
        captured: the tensors that it takes from outside.
        constants: tensors made from Python numbers, and their placeholders.
        numbers: the numbers that are inputs, by what identifies them.
        passed_as_double: traced numbers that an operator is about to get as C++ doubles.
        conditions: what the function has found out about numbers that are known before a call.
        arguments: placeholders of arguments.
        reachable: ids of the tensors that the function can reach in Python.
        refusal: the first thing that a graph cannot repeat; None so far. The function runs on, and
            there is no graph.

    Args:
        fullgraph: whether such a thing is raised.
    """

    def __init__(self, fullgraph: bool = True) -> None:
        self.fullgraph = fullgraph
        self.refusal: JitError | None = None
        self.graph = fx.Graph()
        self.captured: list[Captured] = []
        self.constants: list[tuple[fx.Node, Tensor]] = []
        self.numbers: dict[Any, NumberInput] = {}
        self.passed_as_double: list[Any] = []
        self.conditions: list[Condition] = []
        self.arguments: set[fx.Node] = set()
        self.reachable: set[int] = set()
        self._nodes: Any = WeakTensorKeyDictionary()  # tensor -> its node, its memory then
        self._aliases: dict[int, list[TensorWeakRef]] = {}  # by memory
        self._end_of_inputs = self.graph.call_function(_begin)

    def refuse(self, error: JitError) -> None:
        """Note what a graph cannot repeat, so that there is none; raise it with `fullgraph`."""
        if self.fullgraph:
            raise error
        self.refusal = self.refusal or error

    # -- nodes -------------------------------------------------------------------------------------

    def call(self, target: Callable[..., Any], args: Any, kwargs: Any = None) -> fx.Node:
        """Append a node."""
        return self.graph.call_function(target, tuple(args), kwargs or {})

    def call_operator(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        """Append a call of an operator of torch."""
        return self.call(_VIEWS.get(func, func), args, kwargs)

    def placeholder(self, name: str) -> fx.Node:
        """Add an input."""
        with self.graph.inserting_before(self._end_of_inputs):
            return self.graph.placeholder(name)

    def number(
        self,
        key: Any,
        hint: float,
        path: str,
        source: Callable[..., float],
        now: Callable[[], float] | None = None,
    ) -> TracedFloat:
        """Return a number as an input, the same one for the same key.

        Args:
            path, source: as in `NumberInput`.
            hint: its value in this call.
            now: for a hyperparameter, which `path` names: returns the value before a call.
        """
        if key not in self.numbers:
            node = self.placeholder(f"number_{len(self.numbers)}")
            self.numbers[key] = NumberInput(node, path, source)
        return TracedFloat.of(self, self.numbers[key].node, hint, now, path if now else None)

    @property
    def operators(self) -> list[fx.Node]:
        """The nodes so far that are no inputs."""
        nodes = list(self.graph.nodes)
        return nodes[nodes.index(self._end_of_inputs) + 1 :]

    @property
    def has_numbers(self) -> bool:
        """Whether autograd may have saved numbers that are traced."""
        return bool(self.numbers) or any(node.target is item for node in self.graph.nodes)

    def finish(self, outputs: Sequence[fx.Node]) -> fx.Graph:
        """End the graph, with these outputs, and return it."""
        self.graph.output(tuple(outputs))
        self.graph.erase_node(self._end_of_inputs)
        return self.graph

    # -- tensors -----------------------------------------------------------------------------------

    def know(self, x: Tensor, node: fx.Node) -> None:
        """Record that this tensor is the result of this node."""
        self._nodes[x] = node, storage_of(x)
        self._aliases.setdefault(storage_of(x), []).append(TensorWeakRef(x))
        node.meta.setdefault("val", _meta_of(x))

    def node_of(self, x: Tensor) -> fx.Node | None:
        """Return the node of a tensor that the recording has made or captured; None for another."""
        known = self._nodes.get(x)
        if known is not None and known[1] == storage_of(x):
            return known[0]
        return self._node_of_alias(x)

    def has_computed(self, x: Any) -> bool:
        """Return whether the recording has computed a value, rather than captured it."""
        if isinstance(x, TracedFloat):
            return True
        if not isinstance(x, Tensor):
            return False
        node = self.node_of(x)
        if node is None or any(one.ref() is x for one in self.captured):
            return False
        return node.op != "placeholder"

    def _node_of_alias(self, x: Tensor) -> fx.Node | None:
        """Return the node of an alias of a known tensor, None if the tensor is no such alias.

        Torch makes some aliases without an operator. Such an alias has the memory of the known
        tensor, and is recorded as a view of it.

        A tensor that the program can reach is a separate input, so that its writes are counted.
        """
        storage = storage_of(x)
        if id(x) in self.reachable:
            return None
        aliases = [ref() for ref in self._aliases.get(storage, ())]
        known = [
            other
            for other in aliases
            if other is not None
            and other is not x
            and other.dtype is x.dtype
            and storage_of(other) == self._nodes[other][1] == storage
        ]
        if not known:
            return None
        # Parameters that are gathered together share memory: one in the same place comes first.
        other = next((one for one in known if _geometry(one) == _geometry(x)), known[0])
        node = self._nodes[other][0]
        if _geometry(x) != _geometry(other):
            if node in self.arguments:
                self.refuse(
                    at_line(
                        "a view of an argument was made without an operator of torch",
                        "Pass a copy of it",
                    )
                )
            geometry = list(x.shape), list(x.stride()), x.storage_offset()
            node = self.call(aten.as_strided.default, (node, *geometry))
        self.know(x, node)
        return node

    def add_argument(self, x: Tensor) -> None:
        """Make a tensor an input before anything uses it."""
        if self._nodes.get(x) is None:
            self.arguments.add(self._capture(x, f"argument_{len(self.arguments)}"))

    def input_of(self, x: Tensor) -> fx.Node:
        """Return the node of an operand, which is captured if it is not known."""
        node = self.node_of(x)
        return self._capture(x, f"captured_{len(self.captured)}") if node is None else node

    def _capture(self, x: Tensor, name: str) -> fx.Node:
        node = self.placeholder(name)
        self.captured.append(Captured(x, node))
        self.know(x, node)
        return node

    def constant(self, x: Tensor) -> None:
        """Record a tensor that the program has made from Python numbers.

        The graph has a copy of its current values.
        """
        source = self.placeholder(f"constant_{len(self.constants)}")
        with _disable_current_modes():
            self.constants.append((source, x.detach().clone()))
        self.know(x, self.call(aten.clone.default, (source,)))

    def results(self, result: Any, node: fx.Node, operands: Sequence[Any]) -> None:
        """Record the result of an operator, and which operand's memory it shares.

        The schemas of unsafe views do not say what memory they share.
        """
        memory = {storage_of(x) for x in pytree.tree_leaves(result) if isinstance(x, Tensor)}
        for x in operands:
            if isinstance(x, Tensor) and storage_of(x) in memory and x.numel():
                node.meta["owner"] = node.all_input_nodes.index(self._nodes[x][0])
                break
        if isinstance(result, Tensor):
            if self._nodes.get(result) is None or self.node_of(result) is None:
                self.know(result, node)
            node.meta.setdefault("val", _meta_of(result))
        elif isinstance(result, (list, tuple)):
            for i, x in enumerate(result):
                if isinstance(x, Tensor):
                    self.know(x, self.call(operator.getitem, (node, i)))

    def write(self, out: Tensor, node: fx.Node) -> None:
        """Record that a collective has written its result, flat, into a buffer."""
        result = self.call(aten.view.default, (node, list(out.shape)))
        if self._is_fresh(out):
            result.meta["fresh"] = True
            self.know(out, result)
        else:
            self.call(aten.copy_.default, (self.input_of(out), result))

    def _is_fresh(self, out: Tensor) -> bool:
        """Return whether nothing else can see this buffer's memory.

        The result of a collective may then take the buffer's place.
        """
        known = self._nodes.get(out)
        if known is None or known[0].op == "placeholder" or _writes_or_views(known[0]):
            return False
        others = (ref() for ref in self._aliases.get(storage_of(out), ()))
        return all(x is None or x is out or storage_of(x) != storage_of(out) for x in others)


def _begin() -> None:
    """Separate inputs from operators, as the target of a node."""


def storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _geometry(x: Tensor) -> Any:
    return x.shape, x.stride(), x.storage_offset()


def _meta_of(x: Tensor) -> Any:
    """Return what passes need to know of a result."""
    return tuple(x.shape), tuple(x.stride()), x.dtype, x.device


def _writes_or_views(node: fx.Node) -> bool:
    """Return whether a node's result shares memory with an operand."""
    if node.meta.get("fresh"):
        return False
    schema = getattr(node.target, "_schema", None)
    return (
        schema is None
        or any(r.alias_info is not None for r in schema.returns)
        or node.target is aten.view.default
    )
