"""A graph to look at: as text, in flops and bytes, and the memory that it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ....mesh.comm.world import World
from ..collectives import OPERATORS, site_of
from ..opaque import OpaqueNode
from ..passes.alias import owner_of, root_of
from ..program import Program
from .flops import flops_of

_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
}


@dataclass(frozen=True)
class Cost:
    """What one call costs on this rank.

    Attributes:
        flops: of matrix products, convolutions and attention.
        bytes_received: bytes that collectives receive, by mesh axes.
        launches: collectives, by mesh axes.
        operators: nodes that compute.
        not_counted: operators that are no less work than products and have no formula, and layers
            whose work and messages depend on values (experts).
    """

    flops: int
    bytes_received: dict[str, int]
    launches: dict[str, int]
    operators: int
    not_counted: tuple[str, ...] = ()


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


class StepGraph:
    """The graph of one call, on one rank. `print` shows it as text.

    Attributes:
        world: the world that it runs in, a null world for a graph that was only lowered.
        axes: the mesh axes of each collective.
        device_type: where it runs; "cuda" for one on an `AbstractMesh`, as for its topology.
    """

    def __init__(
        self,
        program: Program,
        world: World,
        layouts: dict[str, str],
        device_type: str | None = None,
    ) -> None:
        self._program, self.world, self._layouts = program, world, layouts
        self.axes = {
            node: world.axes_of(ranks_of(node))
            for node in program.graph.nodes
            if node.target in OPERATORS
        }
        self._size = {node: len(ranks_of(node)) for node in self.axes}
        self.device_type = device_type or next(
            (x.meta["val"][3].type for x in program.graph.nodes if "val" in x.meta), "cpu"
        )

    @property
    def graph(self) -> fx.Graph:
        """The graph."""
        return self._program.graph

    def as_text(self) -> str:
        """Return one line per node: local shape, operator and operands.

        The line of a collective also has its axes, bytes and purpose.
        """
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
                target = (
                    str(node.target).removeprefix("aten.")
                    if isinstance(node.target, torch._ops.OpOverload)
                    else _name_of(node.target)
                )
                operands = ", ".join(
                    [
                        *map(_text, node.args),
                        *(f"{name}={_text(x)}" for name, x in node.kwargs.items()),
                    ]
                )
                yield f"{node.name}: {_type(node)} = {target}({operands}){self._purpose(node)}"

    def _purpose(self, node: fx.Node) -> str:
        if node not in self.axes:
            return ""
        site = site_of(node.args[-1])  # type: ignore[arg-type]
        tag = "" if site.tag is None else f"; {site.tag.text}"
        return (
            f"    # over {self.axes[node]}, receives {self.bytes_received(node):,} bytes{tag}; "
            f"{site.place}"
        )

    def bytes_received(self, node: fx.Node) -> int:
        """Return the bytes that a collective receives, as `CollectiveRecord` counts them."""
        x, n = node.args[0], self._size[node]
        size = bytes_of(x)  # type: ignore[arg-type]
        name, width = OPERATORS[node.target], _width(x)  # type: ignore[index,arg-type]
        if name == "all_to_all" and node.args[1] is not None:
            splits: Any = node.args[1]
            return (sum(splits) - splits[self._program.rank_in(ranks_of(node))]) * width
        if name == "permute":
            return node.args[1] * width  # type: ignore[operator]
        shares = {
            "all_gather": (n - 1) * size,
            "reduce_scatter": (n - 1) * size // n,
            "all_reduce": 2 * (n - 1) * size // n,
        }
        return shares.get(name, (n - 1) * size // n if name == "all_to_all" else size)

    def cost_analysis(self) -> Cost:
        """Return flops, and bytes and launches by mesh axes."""
        received: dict[str, int] = {}
        launches: dict[str, int] = {}
        for node, axes in self.axes.items():
            received[axes] = received.get(axes, 0) + self.bytes_received(node)
            launches[axes] = launches.get(axes, 0) + 1
        nodes = [
            node for node in self.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
        ]
        flops = {node: flops_of(node) for node in nodes}
        unknown = [node.target.overloadpacket.__name__ for node in nodes if flops[node] is None]
        unknown += [str(x.target) for x in self.graph.nodes if isinstance(x.target, OpaqueNode)]
        return Cost(
            sum(x for x in flops.values() if x is not None),
            received,
            launches,
            len(nodes) - len(launches),
            tuple(sorted(set(unknown))),
        )

    def memory_analysis(self) -> Memory:
        """Return what the graph's tensors take if each is freed after its last use."""
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
                live[node] = bytes_of(node)
            if (now := sum(live.values())) > peak:
                peak, best, at = now, dict(live), node.name
            live = {x: size for x, size in live.items() if last[x] > i}
        alive = sorted(((x.name, size) for x, size in best.items()), key=lambda item: -item[1])
        return Memory(
            sum(bytes_of(node) for node in nodes if node.op == "placeholder"), peak, at, alive[:20]
        )


# -- nodes -----------------------------------------------------------------------------------------


def ranks_of(node: fx.Node) -> tuple[int, ...]:
    """Return the ranks of a collective."""
    return tuple(map(int, str(node.args[-2]).split(",")))


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of a node's result or results."""
    value = node.meta.get("val")
    if value is not None:
        return math.prod(value[0]) * value[2].itemsize
    return sum(
        bytes_of(user) for user in node.users if getattr(user.target, "__name__", "") == "getitem"
    )


def _width(node: fx.Node) -> int:
    return node.meta["val"][2].itemsize


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    return (
        node.meta.get("type", "number")
        if value is None
        else f"{_SHORT.get(value[2], str(value[2]).removeprefix('torch.'))}{list(value[0])}"
    )


def _text(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(_text, x))}]"
    return str(x).removeprefix("torch.")


def _name_of(target: Any) -> str:
    return repr(target) if not hasattr(target, "__qualname__") else target.__name__
