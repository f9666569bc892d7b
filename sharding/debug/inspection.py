"""`inspect`: everything about one tensor that is known without communication, on one screen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...kernels.box import Box, box_shape
from ...mesh.abstract_mesh import axes_text
from ...mesh.text import elided, rank_ranges, table_lines
from ..layout.layout import Layout
from ..layout.shard_holders import elements, title
from ..layout.spec import EACH
from .visualize import layout_of

if TYPE_CHECKING:
    from ..tensor.sharded_tensor import ShardedTensor

_MAX_RANKS, _MAX_GROUPS = 16, 6  # lines, and groups on a line


@dataclass(frozen=True)
class RankPart:
    """What one rank holds.

    Attributes:
        rank: the global rank.
        coordinate: its index along each axis of the mesh.
        box: the interval of each dim, in the global tensor.
        shape: the shape of the box.
        nbytes: bytes of its elements.
    """

    rank: int
    coordinate: tuple[int, ...]
    box: Box
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class LocalPart:
    """The memory and the autograd state of a tensor on this rank.

    Attributes:
        rank: this rank.
        part: this rank's part; None outside the mesh.
        device: the device of the local tensor.
        strides: of the local tensor, in elements.
        is_contiguous: whether the local tensor is contiguous.
        requires_grad: whether the tensor requires grad.
        is_leaf: whether it is a leaf of the autograd graph.
        grad_fn: the name of its autograd node; None for a leaf.
        grad: the layout of `.grad`; None if that is None.
    """

    rank: int
    part: RankPart | None
    device: torch.device
    strides: tuple[int, ...]
    is_contiguous: bool
    requires_grad: bool
    is_leaf: bool
    grad_fn: str | None
    grad: Layout | None


@dataclass(frozen=True, eq=False, repr=False)
class Inspection:
    """The result of `inspect`; prints as one screen. All but `here` is the same on every rank.

    Attributes:
        layout: mesh, spec, global shape and dtype.
        here: memory and autograd state on this rank; None if a layout was given.
        parts: what each rank holds, in mesh order.
        same: groups of ranks that hold the same values, in mesh order, without ranks that hold
            nothing.
        empty: the ranks that hold nothing, ascending.
        pending: axis -> kind, for the axes with a pending reduction.
        nbytes: bytes of the global tensor.
        nbytes_held: bytes that all ranks hold in total.
        nbytes_most, nbytes_least: bytes of the rank that holds most and of the one that holds
            least.
        copies: how many ranks hold each element.
        grad_layout: the layout of `.grad`.
    """

    layout: Layout
    here: LocalPart | None

    @cached_property
    def _elements(self) -> np.ndarray:
        return elements(self.layout)

    @property
    def parts(self) -> tuple[RankPart, ...]:
        return tuple(self._part(index) for index in range(self._elements.size))

    @cached_property
    def same(self) -> tuple[tuple[int, ...], ...]:
        mesh, copied = self.layout.mesh, self.layout.replicated_axes
        order = [
            *[i for i, a in enumerate(mesh.axis_names) if a not in copied],
            *[mesh.axis_index(a) for a in copied],
        ]
        width = mesh.size(copied) if copied else 1
        groups = mesh.ranks.transpose(order).reshape(-1, width)
        holding = self._elements.transpose(order).reshape(-1, width)[:, 0] > 0
        return tuple(tuple(sorted(group)) for group in groups[holding].tolist())

    @cached_property
    def empty(self) -> tuple[int, ...]:
        return tuple(sorted(self.layout.mesh.ranks[self._elements == 0].tolist()))

    @property
    def pending(self) -> dict[str, str]:
        return dict(self.layout.pending)

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def nbytes_held(self) -> int:
        return int(self._elements.sum()) * self.layout.dtype.itemsize

    @property
    def nbytes_most(self) -> int:
        return int(self._elements.max()) * self.layout.dtype.itemsize

    @property
    def nbytes_least(self) -> int:
        return int(self._elements.min()) * self.layout.dtype.itemsize

    @property
    def copies(self) -> int:
        split = self.layout.dim_of
        return int(
            np.prod(
                [self.layout.mesh.size(a) for a in self.layout.mesh.axis_names if a not in split],
                dtype=np.int64,
            )
        )

    @property
    def grad_layout(self) -> Layout:
        return self.layout.grad

    def _part(self, index: int) -> RankPart:
        """Return what one rank holds, by its position in the mesh."""
        mesh = self.layout.mesh
        coordinate = tuple(int(i) for i in np.unravel_index(index, mesh.shape))
        box = self.layout.box_at(coordinate)
        nbytes = int(self._elements[coordinate]) * self.layout.dtype.itemsize
        return RankPart(int(mesh.ranks[coordinate]), coordinate, box, box_shape(box), nbytes)

    def __str__(self) -> str:
        blocks = [
            [title(self.layout)],
            self._axis_lines(),
            self._rank_lines(),
            self._summary(),
            self._local_lines(),
        ]
        return "\n".join(line for block in blocks for line in block)

    __repr__ = __str__

    def _axis_lines(self) -> list[str]:
        mesh = self.layout.mesh
        rows = [[axis, str(mesh.size(axis)), self._on_axis(axis)] for axis in mesh.axis_names]
        return table_lines([["axis", "ranks", "along it"], *rows], right=(1,))

    def _on_axis(self, axis: str) -> str:
        if axis in self.layout.pending:
            kind = self.layout.pending[axis]
            return "a separate value on every rank" if kind == EACH else f"pending {kind}"
        if axis not in self.layout.dim_of:
            return "replicated"
        dim = self.layout.dim_of[axis]
        together = self.layout.spec.dims[dim]
        position = (
            f", axis {together.index(axis) + 1} of {len(together)} that split it"
            if len(together) > 1
            else ""
        )
        sized = any(axis in axes for axes, _ in self.layout.spec.sizes)
        return f"splits dim {dim}{position}{', into parts of given sizes' if sized else ''}"

    def _rank_lines(self) -> list[str]:
        indices = elided(range(self._elements.size), _MAX_RANKS)
        rows = [["..."] * 5 if i is None else self._rank_row(self._part(i)) for i in indices]
        table = table_lines([["rank", "at", "box", "shape", "bytes"], *rows], right=(0, 4))
        left_out = self._elements.size - _MAX_RANKS
        return [
            *table,
            *[f"not shown: {left_out:,} of {self._elements.size:,} ranks"] * (left_out > 0),
        ]

    def _rank_row(self, part: RankPart) -> list[str]:
        at = axes_text(part.coordinate, self.layout.mesh.axis_names)
        box = ", ".join(f"{start}:{stop}" for start, stop in part.box)
        return [
            str(part.rank),
            at,
            box or "the one element",
            str(list(part.shape)),
            f"{part.nbytes:,}",
        ]

    def _summary(self) -> list[str]:
        least, most = self.nbytes_least, self.nbytes_most
        held = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        times = {1: "once", 2: "twice"}.get(self.copies, f"{self.copies:,} times")
        return [
            f"same values: {self._same_text()}",
            *[f"hold nothing: {rank_ranges(self.empty)}"] * bool(self.empty),
            f"bytes: {self.nbytes:,} in total; a rank holds {held}; all ranks together "
            f"{self.nbytes_held:,}, each element {times}",
        ]

    def _same_text(self) -> str:
        if not self.same or len(self.same[0]) == 1:
            return "on no two ranks"
        shown = [
            "..." if group is None else rank_ranges(group)
            for group in elided(self.same, _MAX_GROUPS)
        ]
        count = f" ({len(self.same):,} groups)" if len(self.same) > _MAX_GROUPS else ""
        return f"{' | '.join(shown)}{count}"

    def _local_lines(self) -> list[str]:
        local = self.here
        if local is None:
            return []
        if local.part is None:
            memory = f"this rank, {local.rank}: outside the mesh, holds nothing"
        else:
            order = (
                "contiguous" if local.is_contiguous else f"not contiguous, strides {local.strides}"
            )
            memory = f"this rank, {local.rank}: on {local.device}, {order}"
        return [memory, f"gradient: {self._gradient_text(local)}"]

    def _gradient_text(self, local: LocalPart) -> str:
        if not local.requires_grad:
            return "not required"
        node = "leaf" if local.is_leaf else f"grad_fn {local.grad_fn}"
        if local.grad is not None:
            return f"{node}, .grad is {local.grad.spec}"
        if local.is_leaf:
            return f"{node}, no .grad yet, will be {self.grad_layout.spec}"
        return f"{node}, flows as {self.layout.dual.spec}"


def inspect(x: ShardedTensor | Layout) -> Inspection:
    """inspect(x) -> Inspection: what ranks hold of a tensor, replicas, bytes, memory and gradient.

    Args:
        x: a tensor, or a layout (on an `AbstractMesh`, too); ranks outside its mesh may call this
            as well.

    Raises:
        TypeError: `x` is something else, such as a plain tensor or a module.

    Communication: none.

    Example:
        >>> inspection = inspect(Layout.of(AbstractMesh((2, 2), ("dp", "tp")), P("dp"), (5, 8)))
        >>> inspection
        f32[5, 8] @ P('dp', None) on (dp=2, tp=2)
        axis  ranks  along it
        dp        2  splits dim 0
        tp        2  replicated
        rank  at          box       shape   bytes
           0  dp=0, tp=0  0:3, 0:8  [3, 8]     96
           1  dp=0, tp=1  0:3, 0:8  [3, 8]     96
           2  dp=1, tp=0  3:5, 0:8  [2, 8]     64
           3  dp=1, tp=1  3:5, 0:8  [2, 8]     64
        same values: 0,1 | 2,3
        bytes: 160 in total; a rank holds 64 to 96; all ranks together 320, each element twice
        >>> inspection.same, inspection.copies, inspection.parts[2].box
        (((0, 1), (2, 3)), 2, ((3, 5), (0, 8)))
    """
    layout = layout_of(x, "inspect")
    local = getattr(x, "_local", None)
    inspection = Inspection(layout, None)
    return inspection if local is None else Inspection(layout, _local_part(x, local, inspection))


def _local_part(x: Any, local: torch.Tensor, inspection: Inspection) -> LocalPart:
    mesh = x.mesh
    part = (
        None
        if mesh.coordinate is None
        else inspection._part(int(np.ravel_multi_index(mesh.coordinate, mesh.shape)))
    )
    grad = x.grad if local.requires_grad and (local.is_leaf or local.retains_grad) else None
    grad_fn = None if local.grad_fn is None else type(local.grad_fn).__name__
    return LocalPart(
        mesh.world.rank,
        part,
        local.device,
        tuple(local.stride()),
        local.is_contiguous(),
        local.requires_grad,
        local.is_leaf,
        grad_fn,
        None if grad is None else grad._layout,
    )
