"""What a graph will do: as text, in flops and bytes, and the memory that it takes.

    f.lower(*args)   ->   Lowered         recorded on "meta": nothing runs and nothing is sent
    f.recorded       ->   [Lowered]       the graphs that calls have made
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from ...mesh.comm.null import null_world
from ...mesh.comm.world import World
from ..debug.eval_shape import _Inside, _root_mesh
from .collectives import OPERATORS, site_of
from .errors import JitError
from .hyperparameters import Hyperparameters
from .passes.alias import owner_of, root_of
from .program import Program
from .recording import record
from .state.snapshot import Snapshot

_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64", torch.int32: "i32",
}  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """What one call costs on this rank.

    Attributes:
        flops: of matrix products, convolutions and attention.
        bytes_received: bytes that collectives receive, by mesh axes.
        launches: collectives, by mesh axes.
        operators: nodes that compute.
    """

    flops: int
    bytes_received: dict[str, int]
    launches: dict[str, int]
    operators: int


@dataclass(frozen=True)
class Memory:
    """The memory of one call on this rank, in bytes, without what kernels need inside.

    Attributes:
        inputs: tensors that the graph takes: arguments, parameters, state.
        peak: the most that the graph's own tensors take at one time.
        at: the node at which that is.
        alive: the largest tensors that are alive there, as (node, bytes).
    """

    inputs: int
    peak: int
    at: str
    alive: list[tuple[str, int]] = field(repr=False)


class Lowered:
    """A recorded graph, for inspection. `print` shows it as text."""

    def __init__(self, program: Program, world: World, function: Any, layouts: dict[str, str]) -> None:
        self._program, self._function, self._layouts = program, function, layouts
        self._axes = {node: world.axes_of(_ranks(node)) for node in program.graph.nodes if node.target in OPERATORS}
        self._size = {node: len(_ranks(node)) for node in self._axes}

    @property
    def graph(self) -> fx.Graph:
        """The graph."""
        return self._program.graph

    @property
    def passes(self) -> dict[str, int]:
        """The passes that ran, and how many nodes each has changed."""
        return dict(self._program.passes)

    def compile(self) -> Callable[..., Any]:
        """Return the jitted function, which makes its graph of real tensors when it is first called."""
        return self._function

    def as_text(self) -> str:
        """Return one line per node: local shape, operator and operands; of a collective its axes, bytes and purpose."""
        return "\n".join(self._lines())

    __str__ = as_text

    def _lines(self) -> Iterator[str]:
        names = iter(self._program.names)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                name = next(names)
                yield f"{node.name}: {_type(node)} = input {name}{self._layouts.get(name, '')}"
            elif node.op == "output":
                yield f"return {', '.join(map(_text, node.args[0]))}"
            else:
                target = str(node.target).removeprefix("aten.") if isinstance(node.target, torch._ops.OpOverload) else _called(node.target)
                operands = ", ".join([*map(_text, node.args), *(f"{name}={_text(x)}" for name, x in node.kwargs.items())])
                yield f"{node.name}: {_type(node)} = {target}({operands}){self._purpose(node)}"

    def _purpose(self, node: fx.Node) -> str:
        if node not in self._axes:
            return ""
        site = site_of(node.args[-1])  # type: ignore[arg-type]
        tag = "" if site.tag is None else f"; {site.tag.text}"
        return f"    # over {self._axes[node]}, receives {self._received(node):,} bytes{tag}; {site.place}"

    def _received(self, node: fx.Node) -> int:
        """Return the bytes that a collective receives, as `CollectiveRecord` counts them."""
        x, n = node.args[0], self._size[node]
        size = _bytes(x)  # type: ignore[arg-type]
        name, width = OPERATORS[node.target], _width(x)  # type: ignore[index,arg-type]
        if name == "all_to_all" and node.args[1] is not None:
            splits: Any = node.args[1]
            return (sum(splits) - splits[self._program.rank_in(_ranks(node))]) * width
        if name == "permute":
            return node.args[1] * width  # type: ignore[operator]
        shares = {"all_gather": (n - 1) * size, "reduce_scatter": (n - 1) * size // n, "all_reduce": 2 * (n - 1) * size // n}
        return shares.get(name, (n - 1) * size // n if name == "all_to_all" else size)

    def cost_analysis(self) -> Cost:
        """Return flops, and bytes and launches by mesh axes."""
        received: dict[str, int] = {}
        launches: dict[str, int] = {}
        for node, axes in self._axes.items():
            received[axes] = received.get(axes, 0) + self._received(node)
            launches[axes] = launches.get(axes, 0) + 1
        nodes = [node for node in self.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        return Cost(sum(map(_flops, nodes)), received, launches, len(nodes) - len(launches))

    def memory_analysis(self) -> Memory:
        """Return the memory of the graph's tensors if each is freed after its last use."""
        nodes = list(self.graph.nodes)
        owner = {node: owner_of(node) for node in nodes}
        last: dict[fx.Node, int] = {}
        for i, node in enumerate(nodes):
            for x in (node, *node.all_input_nodes):
                last[root_of(x)] = i
        live: dict[fx.Node, int] = {}
        peak, best, at = 0, {}, ""
        for i, node in enumerate(nodes):
            if node.op == "call_function" and owner[node] is None:
                live[node] = _bytes(node)
            if (now := sum(live.values())) > peak:
                peak, best, at = now, dict(live), node.name
            live = {x: size for x, size in live.items() if last[x] > i}
        alive = sorted(((x.name, size) for x, size in best.items()), key=lambda item: -item[1])
        return Memory(sum(_bytes(node) for node in nodes if node.op == "placeholder"), peak, at, alive[:20])


def lower(function: Any, f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Lowered:
    """Record `f` on "meta" tensors; see `eval_shape` for what arguments may be."""
    cells = _cells(f)
    root = _root_mesh(None, (args, kwargs, list(cells.values())))
    with null_world(math.prod(root.shape), 0) as world:
        world.observers.clear()  # lowering is not counted
        inside = _Inside(root)
        with inside.mesh:
            given, named, held = inside.enter((tuple(args), kwargs, cells))
            leaves = [*given, *named.values()]
            inner = _with_cells(f, held)
            snapshot = Snapshot([("f", inner), *((f"args[{i}]", x) for i, x in enumerate(leaves) if not isinstance(x, Tensor))])
            layouts = {path: f" @ {x._layout}" for x, path in snapshot.sharded}
            layouts |= {f"args[{i}]": f" @ {x._layout}" for i, x in enumerate(leaves) if hasattr(x, "_layout")}
            count = len(given)
            run = lambda now: inner(*now[:count], **dict(zip(named, now[count:], strict=True)))  # noqa: E731
            _, found, _ = record(run, leaves, snapshot, Hyperparameters().inputs(snapshot), world, first=False, abstract=True)
        if isinstance(found, str):
            raise JitError(f"{function!r} cannot be lowered: {found}")
        return Lowered(found.program, world, function, layouts)


def _cells(f: Any) -> dict[str, Any]:
    """Return the objects that a function closes over, and the object of a method."""
    inner = f.__func__ if isinstance(f, types.MethodType) else f
    found = {"": f.__self__} if isinstance(f, types.MethodType) else {}
    if isinstance(inner, types.FunctionType):
        found |= {name: cell.cell_contents for name, cell in zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)}
    return {"f": f} if isinstance(f, torch.nn.Module) else found


def _with_cells(f: Any, cells: dict[str, Any]) -> Callable[..., Any]:
    """Return the function with other values in its closure."""
    if isinstance(f, torch.nn.Module):
        return cells["f"]
    inner = f.__func__ if isinstance(f, types.MethodType) else f
    if not isinstance(inner, types.FunctionType):
        return f
    closure = tuple(types.CellType(cells[name]) for name in inner.__code__.co_freevars)
    made = types.FunctionType(inner.__code__, inner.__globals__, inner.__name__, inner.__defaults__, closure)
    made.__kwdefaults__, made.__qualname__ = inner.__kwdefaults__, inner.__qualname__
    return types.MethodType(made, cells[""]) if isinstance(f, types.MethodType) else made


# -- nodes ---------------------------------------------------------------------------------------------------------------


def _ranks(node: fx.Node) -> tuple[int, ...]:
    return tuple(map(int, str(node.args[-2]).split(",")))


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    if value is not None:
        return math.prod(value[0]) * value[2].itemsize
    return sum(_bytes(user) for user in node.users if getattr(user.target, "__name__", "") == "getitem")


def _width(node: fx.Node) -> int:
    return node.meta["val"][2].itemsize


def _flops(node: fx.Node) -> int:
    count = flop_registry.get(node.target.overloadpacket)  # type: ignore[union-attr]
    if count is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), _meta_of)
    items = [user for user in node.users if getattr(user.target, "__name__", "") == "getitem"]
    return count(*args, **kwargs, out_val=[_meta_of(x) for x in items] if items else _meta_of(node))


def _meta_of(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return None if value is None else torch.empty(value[0], dtype=value[2], device="meta")


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    return "number" if value is None else f"{_SHORT.get(value[2], str(value[2]).removeprefix('torch.'))}{list(value[0])}"


def _text(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(_text, x))}]"
    return str(x).removeprefix("torch.")


def _called(target: Any) -> str:
    return repr(target) if not hasattr(target, "__qualname__") else target.__name__
