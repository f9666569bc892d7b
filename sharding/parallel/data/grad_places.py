"""Where gradients are put as they are made: into the buffers from which they are summed over the ranks.

    backward    grad of w_2 -> [      | w_2 |     ]    of a block, whose gradients come one after the other
                grad of w_1 -> [ w_1  | w_2 |     ]
                all there      [ w_1  | w_2 | w_3 ]    -> one collective
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from ...layout import Layout


class Places(Protocol):
    """The places of several parameters in one buffer."""

    @property
    def scales(self) -> bool:
        """Whether gradients are multiplied as they are put there."""
        ...

    def empty_buffer(self) -> Tensor:
        """A buffer whose places may hold anything; what lies between them is zero."""
        ...

    def place_in(self, buffer: Tensor, i: int) -> Tensor:
        """The place of a parameter, as a view."""
        ...


class InOrder:
    """Parameters that are not cut, one after the other: an all_reduce takes them as they lie."""

    scales = True

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._shapes, self._dtype, self._device = [x.local_shape for x in layouts], layouts[0].dtype, layouts[0].mesh.device  # type: ignore[attr-defined]
        self._starts = list(accumulate(map(math.prod, self._shapes), initial=0))

    def empty_buffer(self) -> Tensor:
        return torch.empty(self._starts[-1], dtype=self._dtype, device=self._device)

    def place_in(self, buffer: Tensor, i: int) -> Tensor:
        return buffer[self._starts[i] : self._starts[i + 1]].view(self._shapes[i])


class Placing:
    """The buffers of one use of a unit's parameters, each made when the first gradient comes.

    Args:
        places: by the number of a parameter its places, and its number among them. Gradients of others stay where they were made.
        waits: whether gradients are not to be summed in this backward.

    Attributes:
        placed: the gradients that have been put, by number, as views of the buffers.
    """

    def __init__(self, places: Mapping[int, tuple[Places, int]], waits: Callable[[], bool]) -> None:
        self._places, self._waits = places, waits
        self.buffers: dict[Places, Tensor] = {}
        self.placed: dict[int, Tensor] = {}

    def put(self, number: int, grad: Tensor, scale: float) -> bool:
        """Put a gradient in its place; whether it has one."""
        found = self._places.get(number)
        if found is None or self._waits():
            return False
        places, i = found
        buffer = self.buffers.get(places)
        if buffer is None:
            buffer = self.buffers[places] = places.empty_buffer()
        place = self.placed[number] = places.place_in(buffer, i)
        if places.scales and scale != 1:
            torch.mul(grad, scale, out=place)
        else:
            place.copy_(grad)
        return True

    def taken(self) -> Placing:
        """What has been put so far; the next backward through the same graph begins with new buffers."""
        found = Placing(self._places, self._waits)
        found.buffers, self.buffers, found.placed, self.placed = self.buffers, {}, self.placed, {}
        return found


def is_at(grad: Tensor, place: Tensor) -> bool:
    """Whether a gradient is this view of a buffer that nobody else has."""
    return grad.data_ptr() == place.data_ptr() and grad.dtype is place.dtype and grad.shape == place.shape
