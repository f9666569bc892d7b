"""Small units whose gradients are summed together, as DDP's buckets: fewer and larger all_reduces.

    backward    unit 3: 3 MB, launched     units 2, 1, 0: 9 MB, together     what is around them: alone

The first sum of a backward goes as soon as it has 1 MiB, so that something is under way early; each later one when it has 25 MiB, or at
the end. Which units go together depends on their order and their layouts alone, so it is the same on all ranks. Units that went together
in the last backward have their gradients put side by side in one buffer in the next, so that nothing is packed. The outermost unit is
summed alone: its first gradients come before those of all others and its last ones after them, so a buffer for all would be there from the
beginning, when activations are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .....mesh.monitor.recording.recorder import CommTag
from ....layout.layout import Layout
from ....ops.lineage import comm_context, mixed, seed_of
from ....tensor.autograd import leaf_grads
from ....tensor.sharded_tensor import ShardedTensor
from .grad_places import InOrder
from .grad_reduction import summing

FIRST, LATER = 1 << 20, 25 << 20  # bytes from which on a sum is launched; those of torch's DDP
_SUMMING = seed_of("sum gradients of a unit")


class Part(NamedTuple):
    """The gradients of a unit that wait for others.

    Attributes:
        unit: its name.
        missing: the paths of its parameters that are trained and have no gradient.
        own: whether nobody else has these gradients.
        places: where they are; None where they do not all lie in one buffer.
        alone: whether to sum them with those of no other unit.
    """

    unit: str
    leaves: Sequence[ShardedTensor]
    grads: Sequence[Tensor]
    missing: Sequence[str]
    own: bool
    places: InOrder | None
    alone: bool


class Joint:
    """What waits to be summed in the running backward."""

    def __init__(self) -> None:
        self._waiting: list[Part] = []
        self._key: Any = None
        self._size, self._from = 0, FIRST
        self._together: dict[InOrder, tuple[InOrder, ...]] = {}  # in the backward before
        self._buffers: dict[tuple[InOrder, ...], dict[InOrder, Tensor]] = {}  # of this one, where no gradients lie yet

    def add(self, part: Part) -> None:
        """Sum these gradients, now or with those of other units. Communication: an all_reduce, or none yet."""
        key = None if part.alone else _kind(part)
        if key != self._key:
            self.launch()
        self._key = key
        if not self._waiting:
            leaf_grads.before_flush(part.leaves[0].mesh.world, self.end)
        self._waiting.append(part)
        self._size += sum_size(tuple([x._layout for x in part.leaves]))
        if key is None or self._size >= self._from:
            self.launch()

    def launch(self) -> None:
        """Launch the sum of what waits. Communication: an all_reduce per dtype and set of axes, or none."""
        parts, self._waiting, self._size = self._waiting, [], 0
        if not parts:
            return
        self._from = LATER
        homes = tuple([part.places for part in parts if part.places is not None])
        self._together.update(dict.fromkeys(homes, homes if len(homes) == len(parts) else ()))
        leaves = [x for part in parts for x in part.leaves]
        note = CommTag("; ".join(summing(part.unit, len(part.leaves), part.missing).text for part in parts))
        with comm_context(leaves[0].mesh.world, mixed(_SUMMING, leaves)):
            leaf_grads.start(leaves, [x for part in parts for x in part.grads], note, donate=all(part.own for part in parts))

    def end(self) -> None:
        """Backward has ended. Communication: as `launch`."""
        self.launch()
        self.forget()

    def forget(self) -> None:
        """Drop what waits: backward has ended, or failed."""
        self._waiting, self._size, self._from, self._key = [], 0, FIRST, None
        self._buffers.clear()

    def buffer(self, places: InOrder) -> Tensor:
        """Memory for the gradients of a unit, next to that of the units with which it is expected to be summed."""
        together = self._together.get(places, ())
        if len(together) < 2:
            return places.empty(places.length)
        if together not in self._buffers:
            whole = places.empty(sum(other.length for other in together))
            parts = torch.unsafe_split_with_sizes(whole, [other.length for other in together])
            self._buffers[together] = dict(zip(together, parts, strict=True))
        found = self._buffers[together].pop(places, None)
        return places.empty(places.length) if found is None else found


def _kind(part: Part) -> Any:
    """What is alike in gradients that can be in one all_reduce; None where these are not."""
    kinds = {(x._layout.mesh, x._layout.replicated_axes, grad.dtype) for x, grad in zip(part.leaves, part.grads, strict=True)}
    return kinds.pop() if len(kinds) == 1 else None


@lru_cache(4096)
def sum_size(layouts: tuple[Layout, ...]) -> int:
    """Bytes of the parts of these tensors, on average over the ranks: the same number on all of them."""
    return sum(
        math.prod(x.shape) * x.dtype.itemsize // math.prod(x.mesh.size(axis) for axis in x.spec.axes) for x in layouts
    )
