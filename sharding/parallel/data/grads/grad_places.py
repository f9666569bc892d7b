"""Buffers for gradients: each is written into the buffer of its collective.

When it is computed, or when all of the unit are.

backward  grad of w_2 -> [      | w_2 |     ]   the gradients of one block, in the order of backward
          grad of w_1 -> [ w_1  | w_2 |     ]
          complete       [ w_1  | w_2 | w_3 ]   -> one collective
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ....layout.layout import Layout
from ....tensor.sharded_tensor import ShardedTensor
from ..address import address_of


class GradBuffer(NamedTuple):
    """A buffer, and a view of it for each parameter."""

    buffer: Tensor
    views: Sequence[Tensor]


class GradBufferSource(Protocol):
    """Allocates a buffer for the gradients of several parameters."""

    @property
    def scales(self) -> bool:
        """Whether gradients are scaled when they are written."""
        ...

    def make(self) -> GradBuffer:
        """Allocate a buffer: views are uninitialised, gaps between them are zero."""
        ...


class ContiguousGrads:
    """Unsharded parameters one after the other, as an all_reduce takes them.

    Attributes:
        length: the number of their elements.
    """

    scales = True

    def __init__(
        self, layouts: Sequence[Layout], memory: Callable[[ContiguousGrads], Tensor] | None = None
    ) -> None:
        self._shapes = [x.local_shape for x in layouts]
        self._dtype, self._mesh = layouts[0].dtype, layouts[0].mesh
        self._sizes = list(map(math.prod, self._shapes))
        self.length, self._memory = sum(self._sizes), memory

    def empty(self, length: int) -> Tensor:
        """Allocate memory for that many elements."""
        return torch.empty(length, dtype=self._dtype, device=self._mesh.device)  # type: ignore[attr-defined]

    def make(self) -> GradBuffer:
        """Allocate a buffer, whose views are separate tensors to autograd."""
        buffer = self.empty(self.length) if self._memory is None else self._memory(self)
        parts = torch.unsafe_split_with_sizes(buffer, self._sizes)
        return GradBuffer(
            buffer, [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        )


class GradPlaces:
    """Where the gradients of a unit are written, in buffers that one collective can reduce.

    Args:
        buckets: the buffer of each split parameter, and the index in it; None if none is split.
        memory: allocates the buffer of a source for unsharded ones.
    """

    def __init__(
        self,
        buckets: Mapping[int, tuple[GradBufferSource, int]] | None,
        memory: Callable[[ContiguousGrads], Tensor],
    ) -> None:
        self._buckets, self._memory = buckets, memory
        self._layouts: list[Layout | None] = []
        self._sources: dict[int, tuple[GradBufferSource, int]] = {}

    def sources(
        self, parameters: Sequence[ShardedTensor]
    ) -> Mapping[int, tuple[GradBufferSource, int]]:
        """Return the buffer of each parameter's gradient, and the index in it, by number."""
        if self._buckets is not None:
            return self._buckets
        layouts = [
            x._layout if x.requires_grad and x._local.is_contiguous() else None for x in parameters
        ]
        if self._layouts != layouts:
            self._layouts, self._sources = layouts, {}
            alike: dict[Any, dict[int, Layout]] = {}
            for i, layout in enumerate(layouts):
                if layout is not None:
                    kind = layout.replicated_axes, layout.dtype
                    alike.setdefault(kind, {})[i] = layout
            for members in alike.values():
                source = ContiguousGrads(list(members.values()), self._memory)
                self._sources |= {i: (source, k) for k, i in enumerate(members)}
        return self._sources


class GradWriter:
    """Writes the gradients of one use of a unit's parameters into buffers.

    Args:
        sources: for each parameter's number, the buffer and the index there. Other gradients stay
            where they are.
        deferred: returns whether this backward does not reduce gradients.
        at_end: write all gradients when the last one exists, freeing each as it is written. By then
            the unit's activations are freed and the buffer takes their memory; a buffer allocated
            for the first gradient would add to the peak, that of the outermost unit, with the head
            of a language model, during all of backward.
        on_half: with `at_end`, called when half of the gradients exist.

    Attributes:
        written: the written gradients by number, as views of the buffers.
        leaves: for each parameter's number, the autograd node that adds its gradient to `.grad`.
    """

    def __init__(
        self,
        sources: Mapping[int, tuple[GradBufferSource, int]],
        deferred: Callable[[], bool],
        *,
        at_end: bool = False,
        on_half: Callable[[], None] | None = None,
    ) -> None:
        self._sources, self._deferred, self._at_end = sources, deferred, at_end
        self._on_half, self._half_count = on_half, (len(sources) + 1) // 2
        self.buffers: dict[GradBufferSource, GradBuffer] = {}
        self.written: dict[int, Tensor] = {}
        self.leaves: Sequence[Any] = ()
        self._held: dict[int, Tensor] = {}

    def write(self, number: int, grad: Tensor, scale: float) -> bool:
        """Write a whole gradient, or keep it until the end; return whether it has a buffer."""
        if number not in self._sources or self._deferred():
            return False
        if self._at_end:
            self._held[number] = grad
            if self._on_half is not None and len(self._held) == self._half_count:
                self._on_half()
        else:
            self._write(number, grad, scale)
        return True

    def _write(self, number: int, grad: Tensor, scale: float) -> None:
        source, i = self._sources[number]
        buffer = self.buffers.get(source)
        if buffer is None:
            buffer = self.buffers[source] = source.make()
        view = self.written[number] = buffer.views[i]
        if source.scales and scale != 1:
            torch.mul(grad, scale, out=view)
        else:
            view.copy_(grad)

    def discard(self, number: int) -> None:
        """Discard a gradient that a failed backward left."""
        self.written.pop(number, None)
        self._held.pop(number, None)

    def take(self, scale: float) -> GradWriter:
        """Return a writer with all gradients so far; the next backward begins with new buffers."""
        full = GradWriter(self._sources, self._deferred)
        full.buffers, self.buffers = self.buffers, {}
        full.written, self.written = self.written, {}
        full.leaves = self.leaves
        while self._held:
            full._write(*self._held.popitem(), scale)
        return full


def is_view_at(grad: Tensor, view: Tensor) -> bool:
    """Return whether a gradient is this view of a buffer."""
    return (
        address_of(grad) == address_of(view)
        and grad.dtype is view.dtype
        and grad.shape == view.shape
    )
