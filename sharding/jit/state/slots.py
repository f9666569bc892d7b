"""Attributes of leaves that hold gradients: what a graph reads there and writes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...tensor.sharded_tensor import ShardedTensor

_ALL_NONE = frozenset({type(None)})
_ATTRIBUTES = ("_reduced_grad", "_accumulated_grad")


class GradSlot(NamedTuple):
    """One attribute of a leaf.

    Attributes:
        owner: returns the tensor that has it, from the leaves of the arguments.
        name: the attribute.
        path: its name, for messages.
        fixed: that tensor, if it is no argument.
    """

    owner: Callable[[Sequence[Any]], Any]
    name: str
    path: str
    fixed: Any = None

    def get(self, leaves: Sequence[Any]) -> Any:
        return getattr(self.owner(leaves), self.name, None)


def slots_of(
    x: Tensor, owner: Callable[[Sequence[Any]], Any], path: str, fixed: bool
) -> list[GradSlot]:
    """Return the slots of a leaf.

    They are `.grad` of the plain tensor, and of a sharded one the part that is already reduced.
    """
    fixed_owner = x if fixed else None
    if not isinstance(x, ShardedTensor):
        return [GradSlot(owner, "grad", f"{path}.grad", fixed_owner)]
    local = GradSlot(
        lambda leaves: owner(leaves)._local,
        "grad",
        f"{path}.grad (unreduced)",
        x._local if fixed else None,
    )
    return [local, *(GradSlot(owner, name, f"{path}.grad", fixed_owner) for name in _ATTRIBUTES)]


def signature(value: Any) -> Any:
    """Return what of a slot's value a graph depends on."""
    if value is None:
        return None
    if isinstance(value, ShardedTensor):
        return value._layout, value._local.stride()
    if value.layout is not torch.strided:
        return value.layout, value.shape, value.dtype
    return value.shape, value.stride(), value.dtype, value.requires_grad


def emptiness_of(slots: Sequence[GradSlot], signatures: Sequence[Any]) -> Callable[[], bool] | None:
    """Return a function that tells whether slots, which are all empty, still are.

    None if a slot had a value, or if an owner is an argument.
    """
    if any(kind is not None for kind in signatures) or any(slot.fixed is None for slot in slots):
        return None
    by_name: dict[str, list[Any]] = {}
    for slot in slots:
        by_name.setdefault(slot.name, []).append(slot.fixed)
    leaves = by_name.pop("grad", [])
    others = [(attrgetter(name), owners) for name, owners in by_name.items()]

    def are_empty() -> bool:
        for x in leaves:
            if x.grad is not None:
                return False
        return all(_ALL_NONE.issuperset(map(type, map(get, owners))) for get, owners in others)

    return are_empty
