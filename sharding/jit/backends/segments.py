"""Compile a graph with Inductor, or with another backend of `torch.compile`, in segments.

Between the segments are nodes that must run in Python.

    segment     operators of torch; collectives that are waited for at once, as opaque operators in
                one chain of tokens
    Python      collectives in flight, numbers, draws, random operators, checks, fused optimizer
                kernels, writes to memory from outside

A segment only reads its inputs, and its results have their own memory; views of them are made in
Python. So a compiler has nothing to know about aliases. Equal segments, such as the layers of a
model, are compiled once (`repeats.py`). A segment that the backend cannot compile runs as generated
Python, with a warning.
"""

from __future__ import annotations

import functools
import operator
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ....mesh.comm.thread_context import thread_context
from ..collectives import OPERATORS, ORDERED, WAIT, bound
from ..draws import Draw
from ..passes.alias import is_view, owner_of, root_of, writes
from ..passes.pipeline import copy_graph
from ..program import Program, Runner, compile_eagerly
from .repeats import cut, key_of

# Operators in a segment: a call of a compiled function costs as much as several operators.
_LEAST = 3
_NOT_COMPILED = (
    "_fused_",
    "_local_scalar_dense",
    "set_",
    "resize_",
    "_amp_",
    "record_stream",
    "_assert_async",
)


_PATIENCE_S = 2.0  # until rank 0 says that it compiles
Backend = Callable[[Program, Sequence[Any]], Runner]


def find_backend(
    backend: str | Callable[..., Any] | None, options: Sequence[tuple[str, Any]] = ()
) -> Backend:
    """Return the backend of this name; by default Inductor, or "eager" without a C++ compiler.

    Args:
        options: names in `torch._inductor.config` and their values.

    Raises: ValueError for such options with another backend.
    """
    if backend is None:
        backend = "inductor" if _has_compiler() else "eager"
    if options and backend != "inductor":
        raise ValueError(
            f"sm.jit: compiler_options has {options[0][0]!r}, an option of Inductor, but the "
            f"backend is {backend!r}"
        )
    if backend == "eager":
        return lambda program, inputs: compile_eagerly(program.graph)
    return functools.partial(compile_segments, backend, dict(options))


@functools.cache
def _has_compiler() -> bool:
    if any(map(shutil.which, ("g++", "clang++", "c++"))):
        return True
    warnings.warn(
        "sm.jit: no C++ compiler was found, so graphs run as Python; install g++, or pass "
        "backend='eager'",
        stacklevel=4,
    )
    return False


def compile_segments(
    backend: str | Callable[..., Any],
    options: dict[str, Any],
    program: Program,
    inputs: Sequence[Any],
) -> Runner:
    """Return the program's graph as a function of its inputs.

    The segments of the graph are compiled when they are first called.
    """
    graph = copy_graph(program.graph)
    _draw_first(graph)
    parts = [
        _Part(nodes) for run in _segments(graph) for nodes in cut(run) if _size(nodes) >= _LEAST
    ]
    outputs: dict[Any, set[int]] = {}
    for part in parts:
        outputs.setdefault(part.key, set()).update(part.outputs)
    compiled: dict[Any, CompiledSegment] = {}
    compiler, progress = _compiler(backend, options), CompileProgress(program)
    make = functools.partial(CompiledSegment, compiler=compiler, progress=progress)
    for part in parts:
        _replace(graph, part, sorted(outputs[part.key]), compiled, make)
    progress.parts = len(compiled)
    return compile_eagerly(graph)


def _draw_first(graph: fx.Graph) -> None:
    """Move draws of random tensors that depend on nothing but inputs to the start of the graph.

    What uses the tensors can then be compiled together.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    moved = [
        node
        for node in graph.nodes
        if isinstance(node.target, Draw)
        and all(x.op == "placeholder" for x in node.all_input_nodes)
    ]
    place = inputs[-1] if inputs else None
    for node in moved:
        if place is not None:
            place.append(node)
            place = node


class _Part:
    """Nodes that become one call of a segment.

    Attributes:
        key: equal for parts that compute the same from their inputs.
        outputs: numbers of the nodes whose memory is used outside.
    """

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.nodes = nodes
        self.key = key_of(nodes, self.inputs())
        inside = {node: i for i, node in enumerate(nodes)}
        self.used = [node for node in nodes if any(user not in inside for user in node.users)]
        self.outputs = {
            inside[source] for node in self.used if (source := _made_at(node)) in inside
        }

    def inputs(self) -> list[fx.Node]:
        """Return the nodes from outside that it uses, in the order in which it does."""
        inside = set(self.nodes)
        return list(
            dict.fromkeys(x for node in self.nodes for x in node.all_input_nodes if x not in inside)
        )


def _compiler(
    backend: str | Callable[..., Any], options: dict[str, Any]
) -> Callable[[fx.GraphModule, list[Tensor]], Any]:
    """Return a function that compiles a graph, as a function of a list of its inputs."""
    if backend == "inductor":
        return functools.partial(_compile_with_inductor, options)
    if not callable(backend):
        from torch._dynamo.backends.registry import lookup_backend

        backend = lookup_backend(backend)
    return lambda module, inputs: _of_list(backend(module, inputs))


def _of_list(function: Callable[..., Any]) -> Callable[[list[Tensor]], Any]:
    return lambda inputs: function(*inputs)


def _compile_with_inductor(
    options: dict[str, Any], module: fx.GraphModule, inputs: list[Tensor]
) -> Any:
    """Return a graph compiled by Inductor, or loaded from its cache on disk.

    The cache takes only graphs that were traced with a `ShapeEnv`.

    What torch returns for a `GmWrapper` empties the list of inputs; for another module, it holds
    them until it returns.
    """
    from torch._dynamo.utils import GmWrapper
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with (
        tracing(TracingContext(fake)),
        config.patch({"fallback_random": True, "size_asserts": False} | options),
    ):
        return compile_fx(GmWrapper(module, lambda flat: flat), inputs)  # type: ignore[arg-type]


def _segments(graph: fx.Graph) -> Iterable[list[fx.Node]]:
    """Yield the longest runs of nodes that can be compiled."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if _is_compiled(node, run):
            run.append(node)
            continue
        if _size(run) >= _LEAST:
            yield run
        run = []


def _size(nodes: Sequence[fx.Node]) -> int:
    return sum(not is_view(node) for node in nodes)


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
    if (
        torch.Tag.nondeterministic_seeded in node.target.tags
        or torch.Tag.inplace_view in node.target.tags
    ):
        return False
    if node.target is torch.ops.aten.as_strided.default and root_of(node) not in before:
        return False  # its offset counts from the start of memory that a compiler does not see
    if any(root_of(x) not in before or _is_strided(x) for x in writes(node)):
        return False
    if "owner" in node.meta and all(r.alias_info is None for r in node.target._schema.returns):
        return False  # a view that the operator does not declare
    name = node.target._schema.name.partition("::")[2]
    if name == "_grouped_mm" and node.meta["val"][2] is not torch.bfloat16:
        return False  # torch 2.13 runs it in float32 on the CPU, and refuses it on fake tensors
    return not name.startswith(_NOT_COMPILED) and not any(
        "val" not in x.meta and not _is_list(x, before) for x in node.all_input_nodes
    )


def _is_strided(x: fx.Node) -> bool:
    """Return whether memory is reached through `as_strided`: AOTAutograd refuses to write there."""
    while x.target is not torch.ops.aten.as_strided.default:
        above = owner_of(x)
        if above is None or above is x:
            return False
        x = above
    return True


def _is_list(x: fx.Node, before: Sequence[fx.Node]) -> bool:
    """Return whether a node without a shape is a list of tensors from the same segment.

    A node without a shape that is no such list is a number.
    """
    return x in before and isinstance(x.target, torch._ops.OpOverload)


def _replace(
    graph: fx.Graph,
    part: _Part,
    outputs: list[int],
    compiled: dict[Any, CompiledSegment],
    compile_graph: Callable[..., CompiledSegment],
) -> None:
    """Replace the nodes of a part by one call of a segment."""
    nodes, inputs, inside = part.nodes, part.inputs(), set(part.nodes)
    # Again: what parts before it return in place of two inputs may be one.
    key = key_of(nodes, inputs), tuple(outputs)
    if key not in compiled:
        compiled[key] = compile_graph(_graph_of(nodes, inputs, outputs))
    calls = [bound(node) for node in nodes if node.target in OPERATORS]
    with graph.inserting_before(nodes[0]):
        call = graph.call_function(Segment(compiled[key], calls), tuple(inputs))
        replacements = {
            nodes[n]: graph.call_function(operator.getitem, (call, i))
            for i, n in enumerate(outputs)
            if n in part.outputs
        }
        for node in part.used:
            outside = _outside(graph, node, replacements, inside)
            outside.meta = dict(node.meta)
            node.replace_all_uses_with(outside, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)


def _graph_of(nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[int]) -> fx.Graph:
    """Return nodes as a graph of their own.

    If the nodes communicate, the last input and the last output of the graph are a token.
    """
    graph, values = fx.Graph(), {}
    for i, x in enumerate(inputs):
        values[x] = graph.placeholder(f"x{i}")
    token = first = graph.placeholder("token")
    count = 0
    for node in nodes:
        if node.target is WAIT:
            values[node] = values[node.args[0]]
        elif node.target in OPERATORS:
            size = (
                None
                if OPERATORS[node.target] in ("all_reduce", "broadcast")  # type: ignore[index]
                else node.meta["val"][0][0]
            )
            both = graph.call_function(ORDERED, (values[node.args[0]], token, size, count))  # type: ignore[index]
            values[node], token = (
                graph.call_function(operator.getitem, (both, 0)),
                graph.call_function(operator.getitem, (both, 1)),
            )
            count += 1
        else:
            values[node] = graph.node_copy(node, lambda x: values[x])
    graph.output((*(values[nodes[n]] for n in outputs), *([token] if count else [])))
    if not count:
        graph.erase_node(first)
    return graph


def _made_at(node: fx.Node) -> fx.Node:
    """Return the node whose result has the memory of this one's: itself if it is no view."""
    while (above := owner_of(node)) is not None and above is not node:
        if node.target is WAIT or (node.target is operator.getitem and owner_of(above) is None):
            return node  # one of several results
        node = above
    return node


def _outside(
    graph: fx.Graph, node: fx.Node, replacements: dict[fx.Node, fx.Node], inside: set[fx.Node]
) -> fx.Node:
    """Return a node outside of a segment with the value of a node inside of it.

    The node outside is a result of the segment, or a view that is created again from one.
    """
    outside = replacements.get(node, node if node not in inside else None)
    if outside is None:
        owner: Any = owner_of(node)
        above = _outside(graph, owner, replacements, inside)
        outside = (
            above if writes(node) else graph.node_copy(node, lambda x: above if x is owner else x)
        )
        replacements[node] = outside
    return outside


class Segment:
    """A call of a compiled part of a graph.

    Attributes:
        compiled: what runs.
        calls: its collectives, which a token keeps in order.
    """

    empties_list = True  # so it takes its inputs as a list, which only the list holds

    def __init__(self, compiled: CompiledSegment, calls: list[Callable[[Tensor], Tensor]]) -> None:
        self.compiled, self.calls = compiled, calls
        self._token = (torch.empty(0),) if calls else ()
        self.__name__ = f"segment_of_{len(compiled.graph.nodes)}"

    def __call__(self, inputs: list[Tensor]) -> Any:
        """Run the segment and empty the list of its inputs.

        An input that nothing else needs is then freed after its last use.
        """
        inputs += self._token
        run = self.compiled.run or self.compiled.compile(inputs)
        if not self.calls:
            return run(inputs)
        before, thread_context.segment_calls = thread_context.segment_calls, self.calls
        try:
            return run(inputs)
        finally:
            thread_context.segment_calls = before


class CompiledSegment:
    """A graph that a backend compiles when it is first called.

    Attributes:
        graph: its operators.
        run: the compiled function of a list of its inputs, which it empties; None before.
    """

    def __init__(self, graph: fx.Graph, compiler: Any, progress: CompileProgress) -> None:
        self.graph, self._compiler, self._progress = graph, compiler, progress
        self.run: Callable[[list[Tensor]], Any] | None = None

    def compile(self, inputs: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        """Return the compiled function, of inputs like these."""
        with self._progress:
            self.run = self._compile(inputs)
        return self.run

    def _compile(self, inputs: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        try:
            return self._compiler(fx.GraphModule(torch.nn.Module(), self.graph), inputs)
        except Exception as error:
            warnings.warn(
                f"sm.jit: a part of {len(self.graph.nodes)} operators runs as Python, since the "
                f"backend cannot compile it: {type(error).__name__}: {str(error)[:300]}",
                stacklevel=2,
            )
            return _of_list(compile_eagerly(self.graph))


class CompileProgress:
    """Say on rank 0 that compiling takes long: a context manager around each compilation.

    Attributes:
        parts: how many there are.
    """

    def __init__(self, program: Program) -> None:
        self.parts = self._done = 0
        self._rank, self._name = program.rank, program.name
        self._seconds, self._is_shown = 0.0, False

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        self._timer = threading.Timer(max(0.0, _PATIENCE_S - self._seconds), self._show)
        self._timer.daemon = True
        if self._rank == 0 and not self._is_shown:
            self._timer.start()

    def __exit__(self, *error: Any) -> None:
        self._timer.cancel()
        self._done += 1
        self._seconds += time.perf_counter() - self._start
        if self._is_shown and self._done == self.parts:
            _print(f"compiled {self._name} in {self._seconds:.1f} s")

    def _show(self) -> None:
        self._is_shown = True
        _print(f"compiling {self._name}, part {self._done + 1} of {self.parts} ...")


def _print(text: str) -> None:
    print(f"sm.jit: {text}", file=sys.stderr, flush=True)
