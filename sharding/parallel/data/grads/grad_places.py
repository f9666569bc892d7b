"""Buffers for gradients: each is written into the buffer of its collective, when it is computed or
when all of the unit are.

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
        self._shapes, self._dtype, self._mesh = (
            [x.local_shape for x in layouts],
            layouts[0].dtype,
            layouts[0].mesh,
        )
        self._sizes = list(map(math.prod, self._shapes))
        self.length, self._memory = sum(self._sizes), memory

    def empty(self, length: int) -> Tensor:
        """Allocate memory for that many elements."""
        return torch.empty(length, dtype=self._dtype, device=self._mesh.device)  # type: ignore[attr-defined]

    def make(self) -> GradBuffer:
        """Allocate a buffer. To autograd its views are separate tensors, so that each may be
        written in place.
        """
        buffer = self.empty(self.length) if self._memory is None else self._memory(self)
        parts = torch.unsafe_split_with_sizes(buffer, self._sizes)
        return GradBuffer(
            buffer, [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        )


class GradWriter:
    """Writes the gradients of one use of a unit's parameters into buffers.

    Args:
        sources: for each parameter's number, the buffer and the index there. Other gradients stay
            where they are.
        deferred: returns whether this backward does not reduce gradients.
        at_end: write all gradients when the last one exists, freeing each as it is written. By then
            the unit's activations are freed and the buffer takes their memory; a buffer allocated
            for the first gradient would add to the peak.
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
        """Return a writer with all gradients so far; the next backward through the same graph
        starts with new buffers.
        """
        found = GradWriter(self._sources, self._deferred)
        found.buffers, self.buffers, found.written, self.written = (
            self.buffers,
            {},
            self.written,
            {},
        )
        found.leaves = self.leaves
        while self._held:
            found._write(*self._held.popitem(), scale)
        return found


def is_view_at(grad: Tensor, view: Tensor) -> bool:
    """Return whether a gradient is this view of a buffer."""
    return (
        grad.data_ptr() == view.data_ptr() and grad.dtype is view.dtype and grad.shape == view.shape
    )
