"""What a plan is made of: steps, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ....kernels.quantize import BLOCK
from ....mesh.topology import Link, Topology
from ...layout.layout import Layout

LOCAL_OPS = frozenset({"slice", "pad", "scale"})
RING_OPS = frozenset({"all_gather", "reduce_scatter", "all_reduce"})  # collectives in which every rank does the same


@dataclass(frozen=True, eq=False)
class Step:
    """One local operation or one collective over one group, with the copies of boxes before and after it.

    Attributes:
        op: what is done:
            "slice", "pad", "scale": on this rank alone;
            "all_gather", "reduce_scatter", "all_reduce": the collective of that name;
            "exchange": an all_to_all with exact splits, every rank receives each element that it lacks once;
            "permute": an exchange in which every rank sends to one other and receives from one other;
            "two_phase": an exchange between nodes, in which each node receives each element that it lacks once, and one
                inside the nodes, in which its ranks share them;
            "exchange_reduce": an exchange in which every rank receives all contributions to its elements and combines
                them, 16-bit floats in fp32.
        axes: the mesh axes that the group spans; `()` for a local operation.
        src: the layout before.
        dst: the layout after.
        kind: how values combine, for reductions; the neutral element's kind, for "pad".
        rounds: into how many calls the boxes are cut, so that the buffers are that much smaller.
        topology: which ranks share a node, where the choice of the sender depends on it.
        symmetric: what it costs through memory that the ranks of a node share, if that is how it is done; None: by the backend.
        transport: the format of 8 bits in which values travel, "int8" or "fp8"; None for their own.
    """

    op: str
    axes: tuple[str, ...]
    src: Layout
    dst: Layout
    kind: str = "sum"
    rounds: int = 1
    topology: Topology | None = None
    transport: str | None = None
    symmetric: Link | None = None

    @property
    def is_local(self) -> bool:
        """Whether the step moves nothing between ranks."""
        return self.op in LOCAL_OPS

    @property
    def how(self) -> str:
        """What is special about the way in which it moves, in words."""
        return f" as {self.transport}" if self.transport else " in shared memory" if self.symmetric else ""

    @property
    def launches(self) -> int:
        """Number of collectives."""
        return 0 if self.is_local else self.rounds * (2 if self.op == "two_phase" else 1)

    @cached_property
    def group_size(self) -> int:
        """Ranks that take part in the collective."""
        return self.src.mesh.size(self.axes) if self.axes else 1

    @cached_property
    def reduced_axes(self) -> tuple[str, ...]:
        """The axes over which the step combines what is pending."""
        return tuple(a for a in self.axes if a in self.src.pending and a not in self.dst.pending)

    @cached_property
    def wants_all(self) -> bool:
        """Whether the ranks of a group together come to hold all that they held before."""
        return all(a in self.axes or a in self.src.dim_of for a in self.dst.dim_of)

    def wire_bytes(self, elements: Any) -> Any:
        """Bytes in which so many elements (a number, or an array of numbers) travel; quantised, in as few blocks as can be: each
        box begins a new one, so that many small boxes take more."""
        if self.transport is None:
            return elements * self.src.dtype.itemsize
        return (BLOCK + 4) * -(-elements // BLOCK)  # codes, and a float32 scale

    def bytes_received(self, coordinate: tuple[int, ...]) -> int:
        """Bytes that the rank at `coordinate` receives from others in this step."""
        from .traffic import bytes_received  # traffic measures steps

        return bytes_received(self, coordinate)

    def __repr__(self) -> str:
        where = f" over {', '.join(self.axes)}" if self.axes else ""
        rounds = f" in {self.rounds} rounds" if self.rounds > 1 else ""
        return f"{self.op}{self.how}{where}{rounds}: {self.src.spec} -> {self.dst.spec}"


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps from `src` to `dst`; empty when nothing has to be done.

    Attributes:
        topology: the links and nodes that the steps were chosen for.
    """

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]
    topology: Topology

    @property
    def launches(self) -> int:
        """Number of collectives."""
        return sum(step.launches for step in self.steps)

    def bytes_received(self, coordinate: tuple[int, ...]) -> int:
        """Bytes that the rank at `coordinate` receives over the whole plan."""
        return sum(step.bytes_received(coordinate) for step in self.steps)

    def __repr__(self) -> str:
        return f"Plan({'; '.join(map(repr, self.steps))})" if self.steps else f"Plan({self.src.spec}: nothing to do)"
