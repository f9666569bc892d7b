"""`Step` and `Plan`: what a plan is made of, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ....kernels.quantize import BLOCK
from ....mesh.topology import Link, Topology
from ...layout.layout import Layout

LOCAL_OPS = frozenset({"slice", "pad", "scale"})
# collectives in which every rank does the same
RING_OPS = frozenset({"all_gather", "reduce_scatter", "all_reduce"})


@dataclass(frozen=True, eq=False)
class Step:
    """One local operation, or one collective over one group, with the layouts before and after it.

    Attributes:
        op: the operation:
            "slice", "pad", "scale": local, no communication;
            "all_gather", "reduce_scatter", "all_reduce": the collective of that name;
            "all_to_all_v": an all_to_all with uneven splits; every rank receives each element that
            it lacks once; "permute": an all_to_all_v in which every rank sends to one rank and
            receives from one rank; "hierarchical_all_to_all_v": an all_to_all_v between nodes, in
                which each node receives each element that it lacks once, followed by one inside
                each node that distributes them;
            "all_to_all_reduce": an all_to_all_v in which every rank receives all contributions to
                its elements and combines them, 16-bit floats in fp32.
        axes: the mesh axes that the group spans; `()` for a local operation.
        src: the layout before.
        dst: the layout after.
        kind: how values are combined, for reductions; whose neutral element is filled in, for
            "pad".
        rounds: into how many calls the boxes are cut, to make the buffers that much smaller.
        topology: which ranks share a node, where the choice of the sender depends on it.
        symmetric: the cost of the step through symmetric memory, if it is run that way; None: by
            the backend.
        transport: the 8-bit format in which values are sent, "int8" or "fp8"; None for their own
            dtype.
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
        """Whether nothing moves between ranks."""
        return self.op in LOCAL_OPS

    @property
    def variant(self) -> str:
        """` as int8` if quantized, ` in shared memory`, or nothing: follows the op in texts."""
        if self.transport:
            return f" as {self.transport}"
        return " in shared memory" if self.symmetric else ""

    @property
    def launches(self) -> int:
        """Number of collectives."""
        return (
            0
            if self.is_local
            else self.rounds * (2 if self.op == "hierarchical_all_to_all_v" else 1)
        )

    @cached_property
    def group_size(self) -> int:
        """Number of ranks in the group."""
        return self.src.mesh.size(self.axes) if self.axes else 1

    @cached_property
    def reduced_axes(self) -> tuple[str, ...]:
        """The axes over which pending values are combined."""
        return tuple(a for a in self.axes if a in self.src.pending and a not in self.dst.pending)

    @cached_property
    def keeps_all_elements(self) -> bool:
        """Whether the boxes of a group after the step cover all that its boxes covered before."""
        return all(a in self.axes or a in self.src.dim_of for a in self.dst.dim_of)

    def wire_bytes(self, elements: Any) -> Any:
        """Return the bytes that a number of elements (or an array of numbers) takes in a message.

        Quantized elements are counted in as few blocks as possible. Each box starts a new block, so
        many small boxes take more.
        """
        if self.transport is None:
            return elements * self.src.dtype.itemsize
        return (BLOCK + 4) * -(-elements // BLOCK)  # codes, and a float32 scale

    def __repr__(self) -> str:
        over = f" over {', '.join(self.axes)}" if self.axes else ""
        rounds = f" in {self.rounds} rounds" if self.rounds > 1 else ""
        return f"{self.op}{self.variant}{over}{rounds}: {self.src.spec} -> {self.dst.spec}"


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps from `src` to `dst`; none if the layout does not change.

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

    def __repr__(self) -> str:
        return (
            f"Plan({'; '.join(map(repr, self.steps))})"
            if self.steps
            else f"Plan({self.src.spec}: nothing to do)"
        )
