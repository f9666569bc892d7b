"""Compile a graph with Inductor, or with another backend of `torch.compile`: in segments, between nodes that must run in Python.

    segment     operators of torch; collectives that are waited for at once, as opaque operators in one chain of tokens
    Python      collectives in flight, numbers, draws, random operators, checks, fused optimizer kernels, writes to memory from outside

A segment only reads its inputs, and its results have their own memory; views of them are made in Python. So a compiler has nothing to
know about aliases. A segment that the backend cannot compile runs as generated Python, with a warning.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .collectives import OPERATORS, WAIT
from .passes.schedule import draw_first
from .program import Program, Runner, compile_eagerly, owner_of, root_of, writes

_LEAST = 3  # operators in a segment: a call of a compiled function costs as much as several operators
_NOT_COMPILED = ("_fused_", "_local_scalar_dense", "set_", "resize_", "_amp_", "record_stream")


def compile_segments(backend: str | Callable[..., Any], program: Program, inputs: Sequence[Any]) -> Runner:
    """Return the program's graph as a function of its inputs, whose segments are compiled when they are first called."""
    graph = fx.Graph()
    output = graph.graph_copy(program.graph, values := {})
    graph.output(output)
    for old, new in values.items():
        new.meta = dict(old.meta)
    draw_first(graph)
    compiler = _compiler(backend)
    for nodes in list(_segments(graph)):
        _replace(graph, nodes, compiler)
    return compile_eagerly(graph)


def _compiler(backend: str | Callable[..., Any]) -> Callable[[fx.GraphModule, list[Tensor]], Any]:
    if backend == "inductor":
        from torch._inductor.compile_fx import compile_fx

        return compile_fx
    if callable(backend):
        return backend
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(backend)


def _segments(graph: fx.Graph) -> Iterable[list[fx.Node]]:
    """Yield the longest runs of nodes that can be compiled."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if _is_compiled(node, found):
            found.append(node)
            continue
        if _size(found) >= _LEAST:
            yield found
        found = []


def _size(nodes: Sequence[fx.Node]) -> int:
    return sum(not _is_view(node) for node in nodes)


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _is_compiled(node: fx.Node, before: list[fx.Node]) -> bool:
    if node.op != "call_function":
        return False
    if node.target in OPERATORS:
        following = node.next
        return following.target is WAIT and following.args[0] is node
    if node.target is WAIT:
        return bool(before) and before[-1] is node.args[0]
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__name__", "") == "getitem" and node.args[0] in before
    if torch.Tag.nondeterministic_seeded in node.target.tags or torch.Tag.inplace_view in node.target.tags:
        return False
    if node.target is torch.ops.aten.as_strided.default and root_of(node) not in before:
        return False  # its offset counts from the start of memory that a compiler does not see
    if any(root_of(x) not in before for x in writes(node)):
        return False
    if "owner" in node.meta and all(r.alias_info is None for r in node.target._schema.returns):
        return False  # a view that the operator does not declare
    name = node.target._schema.name.partition("::")[2]
    return not name.startswith(_NOT_COMPILED) and not any("val" not in x.meta and not _is_list(x, before) for x in node.all_input_nodes)


def _is_list(x: fx.Node, before: Sequence[fx.Node]) -> bool:
    """Return whether a node without a shape is a list of tensors, made in the same segment; else it is a number."""
    return x in before and isinstance(x.target, torch._ops.OpOverload)


def _replace(graph: fx.Graph, nodes: list[fx.Node], compiler: Any) -> None:
    """Replace nodes by one call of a segment."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside))
    used = [node for node in nodes if any(user not in inside for user in node.users)]
    outputs = list(dict.fromkeys(source for node in used if (source := _made_at(node)) in inside))
    part, values = fx.Graph(), {}
    for i, x in enumerate(inputs):
        values[x] = part.placeholder(f"x{i}")
    token = first = part.placeholder("token")
    for node in nodes:
        if node.target is WAIT:
            values[node] = values[node.args[0]]
        elif node.target in OPERATORS:
            args = [values[a] if isinstance(a, fx.Node) else a for a in node.args]
            ordered = getattr(torch.ops.shardmesh, f"ordered_{OPERATORS[node.target]}").default  # type: ignore[index]
            both = part.call_function(ordered, (args[0], token, *args[1:]))
            values[node], token = part.call_function(operator.getitem, (both, 0)), part.call_function(operator.getitem, (both, 1))
        else:
            values[node] = part.node_copy(node, lambda x: values[x])
    part.output((*(values[node] for node in outputs), *([token] if token is not first else [])))
    if token is first:
        part.erase_node(first)
    with graph.inserting_before(nodes[0]):
        call = graph.call_function(Segment(part, compiler, token is not first), tuple(inputs))
        made = {node: graph.call_function(operator.getitem, (call, i)) for i, node in enumerate(outputs)}
        for node in used:
            outside = _outside(graph, node, made, inside)
            outside.meta = dict(node.meta)
            node.replace_all_uses_with(outside, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)


def _made_at(node: fx.Node) -> fx.Node:
    """Return the node whose result has the memory of this one's: itself if it is no view."""
    while (above := owner_of(node)) is not None and above is not node:
        if node.target is WAIT or (node.target is operator.getitem and owner_of(above) is None):
            return node  # one of several results
        node = above
    return node


def _outside(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node], inside: set[fx.Node]) -> fx.Node:
    """Return a node outside of a segment with the value of one inside: a result, or a view made of one again."""
    found = made.get(node, node if node not in inside else None)
    if found is None:
        owner: Any = owner_of(node)
        above = _outside(graph, owner, made, inside)
        found = above if writes(node) else graph.node_copy(node, lambda x: above if x is owner else x)
        made[node] = found
    return found


class Segment:
    """A part of a graph as one compiled function.

    Attributes:
        graph: its operators.
        takes_token: whether it has collectives, whose order a token keeps.
    """

    def __init__(self, graph: fx.Graph, compiler: Any, takes_token: bool) -> None:
        self.graph, self.takes_token, self._compiler = graph, takes_token, compiler
        self._run: Callable[..., Any] | None = None
        self._token = (torch.empty(0),) if takes_token else ()
        self.__name__ = f"segment_of_{len(graph.nodes)}"

    def __call__(self, *inputs: Tensor) -> Any:
        if self._run is None:
            self._run = self._compiled([*inputs, *self._token])
        return self._run(*inputs, *self._token)

    def _compiled(self, inputs: list[Tensor]) -> Callable[..., Any]:
        from torch._inductor import config as inductor_config  # takes long to import

        module = fx.GraphModule(torch.nn.Module(), self.graph)
        try:
            with inductor_config.patch(fallback_random=True):
                return self._compiler(module, inputs)
        except Exception as error:
            warnings.warn(
                f"sm.jit: a part of {len(self.graph.nodes)} operators runs as Python, since the backend cannot compile it: "
                f"{type(error).__name__}: {str(error)[:300]}",
                stacklevel=2,
            )
            return compile_eagerly(self.graph)
