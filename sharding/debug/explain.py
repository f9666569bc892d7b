"""`explain`: the steps, bytes and time of a redistribution, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from ...mesh.figure import Pictured
from ...mesh.text import table_lines
from ...mesh.topology import Topology, seconds_text
from ..layout.layout import Layout
from ..layout.spec import Placement, SpecLike
from ..redistribute.plan import Plan, Step, plan
from ..redistribute.plan.bounds import is_reduction, node_bound, rank_bound
from ..redistribute.plan.cost import memory_bytes, seconds
from ..redistribute.plan.memory import buffer_bytes, peak_bytes
from ..redistribute.plan.traffic import most_received, traffic
from .picture import plan_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class StepCost:
    """One step and its cost; bytes are those of the busiest rank or node.

    Attributes:
        op: the collective or local operation, see `Step`.
        axes: the mesh axes that the group spans.
        ranks: the size of the group.
        result: the spec after the step.
        launches: number of collectives.
        variant: ` as int8` or the like if values are quantized, ` in shared memory` if ranks read
            each other's memory, else empty.
        bytes_sent, bytes_received: per rank, to and from others.
        bytes_into_node: from other nodes, for all ranks of the node.
        buffer_bytes: memory in addition to input and result.
        memory_bytes: read and written in a rank's own memory, to pack, unpack, cast and add up.
        seconds: estimated time.
    """

    op: str
    axes: tuple[str, ...]
    ranks: int
    result: str
    launches: int
    variant: str
    bytes_sent: int
    bytes_received: int
    bytes_into_node: int
    buffer_bytes: int
    memory_bytes: int
    seconds: float

    @staticmethod
    def of(step: Step, topology: Topology) -> StepCost:
        moved = traffic(step, topology)
        return StepCost(
            step.op,
            step.axes,
            step.group_size,
            repr(step.dst.spec),
            step.launches,
            step.variant,
            moved.sent,
            moved.received,
            moved.into_node,
            buffer_bytes(step),
            memory_bytes(step, topology),
            seconds(step, topology),
        )


@dataclass(frozen=True, eq=False)
class Explanation(Pictured):
    """A plan with its costs; prints as a table.

    On meshes of more than 64 ranks, the bytes, buffers and seconds of a step are the maximum over a
    sample of ranks, and the bytes into a node the maximum over a few nodes. The total received and
    its bound are exact.

    Attributes:
        plan: the steps.
    """

    plan: Plan

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps, in order."""
        return self.plan.steps

    @cached_property
    def costs(self) -> tuple[StepCost, ...]:
        """The cost of each step."""
        return tuple(StepCost.of(step, self.plan.topology) for step in self.steps)

    @property
    def launches(self) -> int:
        """Number of collectives."""
        return self.plan.launches

    @cached_property
    def bytes_received(self) -> int:
        """Bytes received by the busiest rank."""
        return most_received(self.steps)

    @cached_property
    def bytes_into_node(self) -> int:
        """Bytes that the busiest node receives from others, added up over the steps."""
        return sum(cost.bytes_into_node for cost in self.costs)

    @cached_property
    def lower_bound(self) -> int | None:
        """The fewest bytes that the busiest rank must receive: its box after, less its box before.

        None for a reduction, in which every element depends on values of other ranks.
        """
        src, dst = self.plan.src, self.plan.dst
        return None if is_reduction(src, dst) else rank_bound(src, dst)

    @cached_property
    def node_lower_bound(self) -> int | None:
        """The fewest bytes that the busiest node must receive from others; see `lower_bound`."""
        src, dst = self.plan.src, self.plan.dst
        return None if is_reduction(src, dst) else node_bound(src, dst, self.plan.topology)

    @cached_property
    def ratio(self) -> float | None:
        """Bytes received / the lower bound; 1.0 if both are zero, None if there is no bound."""
        bound = self.lower_bound
        if bound is None:
            return None
        return self.bytes_received / bound if bound else 1.0 + self.bytes_received

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that a rank holds at one time.

        Its part before, its part after, intermediate results and buffers.
        """
        return peak_bytes(self.steps, self.plan.src)

    @cached_property
    def seconds(self) -> float:
        """Estimated time, with the topology's latencies and bandwidths."""
        return sum(cost.seconds for cost in self.costs)

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data, for JSON; bytes and seconds are numbers."""
        return {
            "src": str(self.plan.src),
            "dst": str(self.plan.dst),
            "steps": [asdict(cost) for cost in self.costs],
            "launches": self.launches,
            "bytes_received": self.bytes_received,
            "lower_bound": self.lower_bound,
            "bytes_into_node": self.bytes_into_node,
            "node_lower_bound": self.node_lower_bound,
            "ratio": self.ratio,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
        }

    def picture(self, path: str | PathLike[str] | None = None) -> Figure:
        """Draw every rank's boxes before and after each of the steps: `picture.plan_picture`."""
        return plan_picture(self.plan, [cost.bytes_received for cost in self.costs], path)

    def __str__(self) -> str:
        title = f"{self.plan.src}\n  -> {self.plan.dst.spec}"
        if not self.steps:
            return f"{title}\nnothing to do"
        nodes = self.plan.topology.nodes(self.plan.src.mesh) > 1
        header = [
            "step",
            "axes",
            "ranks",
            "result",
            "sent",
            "received",
            *["into node"] * nodes,
            "buffers",
            "memory",
            "time",
        ]
        return "\n".join(
            [
                title,
                *table_lines([header, *(_row(cost, nodes) for cost in self.costs)]),
                *self._totals(nodes),
            ]
        )

    __repr__ = __str__

    def _totals(self, nodes: bool) -> list[str]:
        """Return the lines below the table."""
        plural = "" if self.launches == 1 else "s"
        lines = [
            f"{self.launches} collective{plural}, about {seconds_text(self.seconds)}, peak "
            f"{self.peak_bytes:,} bytes in a rank"
        ]
        lines.append(f"into a rank {_with_bound(self.bytes_received, self.lower_bound)}")
        if nodes:
            lines.append(f"into a node {_with_bound(self.bytes_into_node, self.node_lower_bound)}")
        return lines


def explain(
    src: Layout | Any,
    dst: Layout | SpecLike | Sequence[Placement],
    *,
    topology: Topology | None = None,
    max_bytes: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    transport: str | None = None,
) -> Explanation:
    """explain(typeof(x), dst) -> the steps, bytes and bounds of `redistribute`, without running it.

    Args:
        src: a `Layout`, or a `ShardedTensor`.
        dst: a `Layout`, a `P`, a `NamedSharding`, or placements.
        topology: links and nodes to plan for; by default the mesh's.
        max_bytes, accumulate_dtype, transport: as for `redistribute`.

    Raises:
        ValueError: the layouts differ in more than the spec, or no plan fits into `max_bytes`.

    Communication: none. Works on an `AbstractMesh`, too.

    Example:
        >>> layout = Layout.of(AbstractMesh((4,), ("x",)), P("x"), (8, 8))
        >>> print(explain(layout, P(None, "x")))
        f32[8, 8] @ P('x', None) on (x=4)
          -> P(None, 'x')
        step          axes  ranks  result        sent  received  buffers  memory   time
        all_to_all_v  x         4  P(None, 'x')    48        48      128     192  11 us
        1 collective, about 11 us, peak 256 bytes in a rank
        into a rank 48 bytes, the lower bound
    """
    before = src if isinstance(src, Layout) else src._layout
    after = dst if isinstance(dst, Layout) else before.replace(dst)
    return Explanation(
        plan(
            before,
            after,
            topology,
            max_bytes=max_bytes,
            accumulate_dtype=accumulate_dtype,
            transport=transport,
        )
    )


def _row(cost: StepCost, nodes: bool) -> list[str]:
    op = f"{cost.op}{cost.variant}" + (f" x{cost.launches}" if cost.launches > 2 else "")
    numbers = [
        cost.bytes_sent,
        cost.bytes_received,
        *[cost.bytes_into_node] * nodes,
        cost.buffer_bytes,
        cost.memory_bytes,
    ]
    shown = [f"{number:,}" for number in numbers]
    return [
        op,
        ", ".join(cost.axes) or "-",
        str(cost.ranks),
        cost.result,
        *shown,
        seconds_text(cost.seconds),
    ]


def _with_bound(moved: int, bound: int | None) -> str:
    if bound is None:
        return f"{moved:,} bytes"
    if moved == bound:
        return f"{moved:,} bytes, the lower bound"
    return f"{moved:,} bytes, lower bound {bound:,}" + (f" ({moved / bound:.2f}x)" if bound else "")
