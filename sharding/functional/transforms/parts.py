"""Trees of tensors as transforms of torch.func take them.

Flat lists of local parts, and how to rebuild the trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...layout.layout import Layout
from ...tensor.sharded_tensor import ShardedTensor
from ...trees import flatten, unflatten
from ..mapped_env import current_mapped_env
from ..types.type_checker import untracked


def with_part(x: Any, part: Tensor) -> Any:
    """Return a tensor like `x` with another local part, and the same layout or type."""
    out = part
    if isinstance(x, ShardedTensor):
        out = ShardedTensor._make(part, x._layout.replace(dtype=part.dtype))
        out._lineage = x._lineage
    return same_type(out, x)


def same_type(out: Any, *sources: Any) -> Any:
    """Set the type of a tensor to that of a value computed from the sources, and return it."""
    env = current_mapped_env()
    if env is not None and env.checker is not None:
        checker = env.checker
        with untracked():
            tag = checker.join_all(iter(sources), checker.replicated)
        checker.set_tag(out, tag)
    return out


class Results(NamedTuple):
    """The results of a function.

    Attributes:
        leaves: their leaves.
        tree: their tree.
        at: the indices of the leaves that are tensors.
    """

    leaves: list[Any]
    tree: Any
    at: list[int]

    @staticmethod
    def of(value: Any) -> Results:
        """Return the results in this tree."""
        leaves, tree = flatten(value)
        return Results(leaves, tree, [i for i, x in enumerate(leaves) if isinstance(x, Tensor)])

    @property
    def tensors(self) -> list[Any]:
        return [self.leaves[i] for i in self.at]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(getattr(x, "_local", x) for x in self.tensors)

    def with_parts(self, parts: Sequence[Tensor]) -> Any:
        """Return the tree with other parts in the same layouts."""
        return self.rebuild(
            [with_part(x, part) for x, part in zip(self.tensors, parts, strict=True)]
        )

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """Return the tree with other tensors."""
        leaves = list(self.leaves)
        for i, x in zip(self.at, tensors, strict=True):
            leaves[i] = x
        return unflatten(self.tree, leaves)


def replace_args(args: Sequence[Any], nums: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Return the arguments with those at the positions `nums` replaced."""
    replaced = list(args)
    for i, x in zip(nums, new, strict=True):
        replaced[i] = x
    return replaced


def layout_with(layout: Layout, dim: int, cuts: Any, size: int) -> Layout:
    """Return the layout with a new dim at this position."""
    spec = layout.spec.of_cuts(
        [*layout.spec.cuts[:dim], cuts, *layout.spec.cuts[dim:]], layout.pending
    )
    return Layout.of(
        layout.mesh, spec, (*layout.shape[:dim], size, *layout.shape[dim:]), layout.dtype
    )


def layout_without(layout: Layout, dim: int) -> Layout:
    """Return the layout without one of its dims."""
    cuts = [cut for d, cut in enumerate(layout.spec.cuts) if d != dim]
    shape = [n for d, n in enumerate(layout.shape) if d != dim]
    return Layout.of(layout.mesh, layout.spec.of_cuts(cuts, layout.pending), shape, layout.dtype)
