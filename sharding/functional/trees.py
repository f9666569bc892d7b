"""Trees of tensors in which None is not a leaf, as in JAX; torch's pytrees count it as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree


class _Leaf:
    def __repr__(self) -> str:
        return "*"


class TreeDef(NamedTuple):
    """The structure of a tree.

    Attributes:
        spec: torch's own, in which None is a leaf.
        places: the indices of the leaves that are not None.
    """

    spec: Any
    places: tuple[int, ...]

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Return the tree with these leaves, and None where it has None."""
        if len(leaves) == self.spec.num_leaves:
            return pytree.tree_unflatten(leaves, self.spec)
        every: list[Any] = [None] * self.spec.num_leaves
        for place, leaf in zip(self.places, leaves, strict=True):
            every[place] = leaf
        return pytree.tree_unflatten(every, self.spec)

    def __str__(self) -> str:
        """Return the tree with a star for each leaf."""
        return repr(self.unflatten([_Leaf()] * len(self.places)))


def flatten_without_none(tree: Any) -> tuple[list[Any], TreeDef]:
    """Return the leaves of a tree that are not None, and its structure."""
    leaves, spec = pytree.tree_flatten(tree)
    places = tuple(i for i, leaf in enumerate(leaves) if leaf is not None)
    return [leaves[i] for i in places], TreeDef(spec, places)
