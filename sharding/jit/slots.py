"""Attributes of leaves that hold gradients: what a graph reads there and writes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..layout.layout import Layout
from ..tensor.sharded_tensor import ShardedTensor

_ATTRIBUTES = ("_reduced_grad", "_accumulated_grad")


class Slot(NamedTuple):
    """One attribute of a leaf.

    Attributes:
        owner: returns the tensor that has it, from the leaves of the arguments.
        name: the attribute.
        path: its name, for messages.
    """

    owner: Callable[[Sequence[Any]], Any]
    name: str
    path: str

    def get(self, leaves: Sequence[Any]) -> Any:
        return getattr(self.owner(leaves), self.name, None)


def slots_of(x: Tensor, owner: Callable[[Sequence[Any]], Any], path: str) -> list[Slot]:
    """Return the slots of a leaf: `.grad` of the plain tensor, and of a sharded one what is reduced already."""
    if not isinstance(x, ShardedTensor):
        return [Slot(owner, "grad", f"{path}.grad")]
    local = Slot(lambda leaves: owner(leaves)._local, "grad", f"{path}.grad (unreduced)")
    return [local, *(Slot(owner, name, f"{path}.grad") for name in _ATTRIBUTES)]


def signature(value: Any) -> Any:
    """Return what of a slot's value a graph depends on."""
    if value is None:
        return None
    if isinstance(value, ShardedTensor):
        return value._layout, value._local.stride()
    return value.shape, value.stride(), value.dtype, value.requires_grad


class Wrap(NamedTuple):
    """How an output of a graph becomes a value of the program: as it is, or as a `ShardedTensor`."""

    layout: Layout | None
    number: int

    def __call__(self, outputs: Sequence[Any]) -> Any:
        found = outputs[self.number]
        return found if self.layout is None else ShardedTensor._make_guarded(found, self.layout)
