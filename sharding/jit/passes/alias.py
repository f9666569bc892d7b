"""What memory the nodes of a graph share, read and write: the one place that knows.

Memory is numbered: a class is the memory of an input, or of a result that is no view. Inputs that
overlap are one class.

    x = input 0            of[x] = {0}
    v = x.view(4)          of[v] = {0}
    s = all_reduce(v)      of[s] = {1}     reads {0}
    y = wait(s)            of[y] = {1}     reads {0}: until then the collective may read its operand
    v.add_(1)              writes {0}      so it stays behind the wait

What is not known in detail counts as reading and writing everything.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_arg

from ..collectives import OPERATORS, WAIT
from ..draws import Draw
from ..program import is_pure

aten = torch.ops.aten
_None: frozenset[int] = frozenset()
# Operators whose schemas do not say that they write running statistics.
_UNDECLARED = (
    "native_batch_norm",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "_native_batch_norm",
    "batch_norm_with_update",
    "_batch_norm",
)


class MemoryUse:
    """The memory that each node of a graph uses.

    Attributes:
        graph: the graph.
        of: for each node the classes that its result may be in; none for numbers.
        reads, writes: for each node the classes that it may read or write.
        fences: nodes that may do anything: nothing moves across them.
        inputs: classes of inputs.
        outputs: classes that the graph returns.
        made_by: for the class of a result the node that makes it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.of: dict[fx.Node, frozenset[int]] = {}
        self.reads: dict[fx.Node, frozenset[int]] = {}
        self.writes: dict[fx.Node, frozenset[int]] = {}
        self.fences: set[fx.Node] = set()
        self.made_by: dict[int, fx.Node] = {}
        self.outputs = _None
        self.graph = graph
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        for node, number in zip(inputs, _classes(inputs), strict=True):
            self.of[node] = _None if number is None else frozenset({number})
        self.inputs = frozenset().union(*(self.of[node] for node in inputs))
        self._next = len(inputs)
        for node in graph.nodes:
            if node.op != "placeholder":
                self._visit(node)
            self.reads.setdefault(node, _None)
            self.writes.setdefault(node, _None)

    def union(self, nodes: Any) -> frozenset[int]:
        """Return the classes of several results."""
        return frozenset().union(*(self.of[x] for x in nodes if isinstance(x, fx.Node)))

    def _fresh(self, node: fx.Node) -> frozenset[int]:
        self._next += 1
        self.made_by[self._next] = node
        return frozenset({self._next})

    def _visit(self, node: fx.Node) -> None:
        operands = self.union(node.all_input_nodes)
        self.reads[node] = _None if is_view(node) else operands
        if node.op == "output":
            self.of[node], self.outputs = _None, operands
        elif node.target in OPERATORS:
            self.of[node] = self._fresh(node) | (operands if node.meta.get("donate") else _None)
            self.writes[node] = operands if node.meta.get("donate") else _None
        elif node.target is WAIT:
            started: Any = node.args[0]
            self.of[node] = self.of[started]
            self.reads[node] = operands | self.reads[started]
            self.writes[node] = self.writes[started]
        elif isinstance(node.target, torch._ops.OpOverload):
            self._operator(node, operands)
        elif node.target is operator.getitem:
            self.of[node] = operands
        elif isinstance(node.target, Draw):
            self.of[node] = self._fresh(node)
        elif is_pure(node) or getattr(node.target, "__name__", "") == "expect":
            self.of[node] = _None  # a number
        else:
            self.fences.add(node)
            self.of[node] = operands | self._fresh(node)

    def _operator(self, node: fx.Node, operands: frozenset[int]) -> None:
        form = _form(node.target)
        written = self.union(_args_named(node, form.written)) if form.written else _None
        if form.is_view and not form.shared:
            self.of[node] = operands
        elif form.is_view:  # results that are new next to such that are not: of both kinds
            shared = self.union(_args_named(node, form.shared))
            self.of[node] = shared | self._fresh(node) if form.is_new else shared
        else:
            self.of[node] = self._fresh(node) if form.is_new else _None
        if "owner" in node.meta:  # seen when it was recorded; not all schemas tell
            self.of[node] |= self.of[node.all_input_nodes[node.meta["owner"]]]
        self.writes[node] = operands if form.undeclared else written


class _Form(NamedTuple):
    """What the schema of an operator says of memory.

    Attributes:
        names: of all arguments.
        shared: names of the arguments whose memory results share.
        written: names of the arguments that are written.
        is_view: whether a result shares memory with an argument.
        is_new: whether a result has memory of its own.
        undeclared: whether the operator writes running statistics that its schema does not declare.
    """

    names: list[str]
    shared: frozenset[str]
    written: frozenset[str]
    is_view: bool
    is_new: bool
    undeclared: bool


@functools.cache
def _form(target: Any) -> _Form:
    schema = target._schema
    name = schema.name.partition("::")[2]
    shared = frozenset(a.name for a in schema.arguments if a.alias_info is not None)
    written = frozenset(
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    )
    is_view = name == "_unsafe_view" or any(r.alias_info is not None for r in schema.returns)
    is_new = any(r.alias_info is None for r in schema.returns)
    return _Form(
        [a.name for a in schema.arguments], shared, written, is_view, is_new, name in _UNDECLARED
    )


def _args_named(node: fx.Node, names: frozenset[str]) -> list[fx.Node]:
    """Return the nodes among the arguments with these names, also those in their lists."""
    named_args = [*zip(_form(node.target).names, node.args, strict=False), *node.kwargs.items()]
    nodes: list[fx.Node] = []
    map_arg([x for name, x in named_args if name in names], nodes.append)
    return nodes


def _classes(inputs: list[fx.Node]) -> list[int | None]:
    """Return a number for each input that is a tensor: the same one for inputs that may overlap.

    Gradients that are set are one class: another call may find them elsewhere.
    """
    spans: list[tuple[float, float, int]] = []
    classes: list[int | None] = []
    for i, node in enumerate(inputs):
        low, size = node.meta.get("memory", (0, float("inf")))
        classes.append(None if "val" not in node.meta or not size else i)
        if classes[-1] is not None:
            spans.append((low, low + size, i))
    end, current = float("-inf"), 0
    for low, high, i in sorted(spans):
        current = i if low >= end and spans else current
        end = max(end, high)
        classes[i] = current
    gradients = {
        classes[i]
        for i, node in enumerate(inputs)
        if node.meta.get("slot") and classes[i] is not None
    }
    return [min(gradients) if number in gradients else number for number in classes]  # type: ignore[type-var]


def is_view(node: fx.Node) -> bool:
    """Return whether a node's result is a view, and nothing else happens."""
    if node.target is operator.getitem or node.target is aten._unsafe_view.default:
        return True
    schema = getattr(node.target, "_schema", None)
    return (
        schema is not None
        and not schema.is_mutable
        and bool(schema.returns)
        and all(r.alias_info is not None for r in schema.returns)
    )


def owner_of(node: fx.Node) -> fx.Node | None:
    """Return the operand whose memory a node's result shares; None if it has its own.

    An input is its own owner.
    """
    if node.op == "placeholder":
        return node
    if node.target is WAIT or node.target is operator.getitem:
        return node.all_input_nodes[0]
    if "owner" in node.meta:  # seen when it was recorded
        return node.all_input_nodes[node.meta["owner"]]
    if not isinstance(node.target, torch._ops.OpOverload) or not _form(node.target).is_view:
        return None
    shared = _args_named(node, _form(node.target).shared)
    return shared[0] if shared else node.all_input_nodes[0]


def root_of(node: fx.Node) -> fx.Node:
    """Return the node that allocated the memory of a node's result."""
    while (above := owner_of(node)) is not None and above is not node:
        node = above
    return node


def writes(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a node declares to write."""
    return (
        _args_named(node, _form(node.target).written)
        if isinstance(node.target, torch._ops.OpOverload)
        else []
    )


def written_inputs(graph: fx.Graph) -> list[int]:
    """Return the numbers of the inputs that a graph writes to."""
    roots = {root_of(x) for node in graph.nodes for x in writes(node)}
    return [
        i
        for i, node in enumerate(node for node in graph.nodes if node.op == "placeholder")
        if node in roots
    ]


def nbytes(node: fx.Node) -> int:
    """Return the bytes of a node's result, 0 if it is no tensor."""
    value = node.meta.get("val")
    return 0 if value is None else math.prod(value[0]) * value[2].itemsize


def is_contiguous(node: fx.Node) -> bool:
    """Return whether the values of a node's result are in order in memory."""
    shape, strides, *_ = node.meta["val"]
    return torch.empty_strided(shape, strides, device="meta").is_contiguous()


def class_bytes(node: fx.Node) -> int:
    """Return the bytes of the memory that a node makes."""
    if node.meta.get("donate"):
        return 0
    return nbytes(node) or sum(nbytes(x) for x in node.users if x.target is operator.getitem)


def live_bytes(graph: fx.Graph, use: MemoryUse) -> list[int]:
    """Return for each node how many bytes of results are in memory while it runs.

    Each result is taken to be freed after its last use.
    """
    nodes = list(graph.nodes)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, node in enumerate(nodes):
        for c in use.of[node] - use.inputs:
            first.setdefault(c, i)
        for c in (use.of[node] | use.reads[node] | use.writes[node]) - use.inputs:
            last[c] = i
    change = [0] * (len(nodes) + 1)
    for c, i in first.items():
        size = class_bytes(use.made_by[c])
        change[i] += size
        change[last[c] + 1] -= size
    live, now = [], 0
    for delta in change[:-1]:
        now += delta
        live.append(now)
    return live
