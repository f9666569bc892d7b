"""Where gradients are put: into the buffers from which they are summed over the ranks, as they are made or when a unit's are all there.

    backward    grad of w_2 -> [      | w_2 |     ]    of a block, whose gradients come one after the other
                grad of w_1 -> [ w_1  | w_2 |     ]
                all there      [ w_1  | w_2 | w_3 ]    -> one collective
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ....layout.layout import Layout


class Filling(NamedTuple):
    """A buffer, and the places of the parameters in it."""

    buffer: Tensor
    places: Sequence[Tensor]


class Places(Protocol):
    """The places of several parameters in one buffer."""

    @property
    def scales(self) -> bool:
        """Whether gradients are multiplied as they are put there."""
        ...

    def make(self) -> Filling:
        """A buffer whose places may hold anything; what lies between them is zero."""
        ...


class InOrder:
    """Parameters that are not cut, one after the other: an all_reduce takes them as they lie.

    Attributes:
        length: how many elements they have.
    """

    scales = True

    def __init__(self, layouts: Sequence[Layout], memory: Callable[[InOrder], Tensor] | None = None) -> None:
        self._shapes, self._dtype, self._device = [x.local_shape for x in layouts], layouts[0].dtype, layouts[0].mesh.device  # type: ignore[attr-defined]
        self._sizes = list(map(math.prod, self._shapes))
        self.length, self._memory = sum(self._sizes), memory

    def empty(self, length: int) -> Tensor:
        """So many elements of memory."""
        return torch.empty(length, dtype=self._dtype, device=self._device)

    def make(self) -> Filling:
        """The places are tensors of their own for autograd, that may be written in place one by one."""
        buffer = self.empty(self.length) if self._memory is None else self._memory(self)
        parts = torch.unsafe_split_with_sizes(buffer, self._sizes)
        return Filling(buffer, [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)])


class Placing:
    """The buffers of one use of a unit's parameters.

    Args:
        places: by the number of a parameter its places, and its number among them. Gradients of others stay where they were made.
        waits: whether gradients are not to be summed in this backward.
        late: whether to put all gradients when all are there, one by one, each let go as it is put. Backward has let go the unit's
            activations by then: the buffer takes their memory, where one that is made for the first gradient adds to them.
        half: then, what to call when half of the gradients are there.

    Attributes:
        placed: the gradients that have been put, by number, as views of the buffers.
        leaves: by the number of a parameter, the node that adds its gradient to `.grad`.
    """

    def __init__(
        self,
        places: Mapping[int, tuple[Places, int]],
        waits: Callable[[], bool],
        *,
        late: bool = False,
        half: Callable[[], None] | None = None,
    ) -> None:
        self._places, self._waits, self._late = places, waits, late
        self._half, self._count_of_half = half, (len(places) + 1) // 2
        self.buffers: dict[Places, Filling] = {}
        self.placed: dict[int, Tensor] = {}
        self.leaves: Sequence[Any] = ()
        self._held: dict[int, Tensor] = {}

    def put(self, number: int, grad: Tensor, scale: float) -> bool:
        """Take a gradient that is whole; whether it has a place."""
        if number not in self._places or self._waits():
            return False
        if self._late:
            self._held[number] = grad
            if self._half is not None and len(self._held) == self._count_of_half:
                self._half()
        else:
            self._put(number, grad, scale)
        return True

    def _put(self, number: int, grad: Tensor, scale: float) -> None:
        places, i = self._places[number]
        filling = self.buffers.get(places)
        if filling is None:
            filling = self.buffers[places] = places.make()
        place = self.placed[number] = filling.places[i]
        if places.scales and scale != 1:
            torch.mul(grad, scale, out=place)
        else:
            place.copy_(grad)

    def forget(self, number: int) -> None:
        """A backward that came here before has failed."""
        self.placed.pop(number, None)
        self._held.pop(number, None)

    def taken(self, scale: float) -> Placing:
        """What has been put so far; the next backward through the same graph begins with new buffers."""
        found = Placing(self._places, self._waits)
        found.buffers, self.buffers, found.placed, self.placed = self.buffers, {}, self.placed, {}
        found.leaves = self.leaves
        while self._held:
            found._put(*self._held.popitem(), scale)
        return found


def is_at(grad: Tensor, place: Tensor) -> bool:
    """Whether a gradient is this view of a buffer that nobody else has."""
    return grad.data_ptr() == place.data_ptr() and grad.dtype is place.dtype and grad.shape == place.shape
