"""Reshapes of dims that are cut into uneven parts.

Where every part is whole rows of the new shape, nothing moves.

    x [b, 40] in parts of 12 12 12 4     x.view(b, 10, 4)   [b, 10, 4] in parts of 3 3 3 1: heads,
                                                            over more ranks than divide them
    y [b, 10, 4] in parts of 3 3 3 1     y.flatten(1)       [b, 40] in parts of 12 12 12 4

A part of the first of the dims that are merged, or of a dim that is unflattened, is an interval of
the elements of all of them. Reshapes that the rule runs without moving anything, and those that
this cannot run, are left to the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor

from ....layout.layout import Layout
from ....layout.spec import Cut, P
from ..decomposition_utils import from_parts, layout_of, part_sizes, splitting_axes
from ..registry import decomposition_maker
from .view import factor_shapes, groups


def reshaped_layout(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """Return the layout under another shape with all elements where they are; None if not boxes."""
    alone = [d for d, n in enumerate(layout.shape) if n == 1 and splitting_axes(layout, d)]
    if alone or not prod(shape):
        return None
    cuts: list[Sequence[Cut]] = [() for _ in shape]
    for before, after in groups(layout.shape, shape):
        if any(splitting_axes(layout, d) for d in before[1:]):
            return None
        cuts_of_first = _first_dim(layout, before, [shape[d] for d in after])
        if cuts_of_first is None:
            return None
        cuts[after[0]] = cuts_of_first
    return Layout.of(layout.mesh, P.of_cuts(cuts, layout.pending), shape, layout.dtype)


def _first_dim(layout: Layout, before: Sequence[int], after: Sequence[int]) -> Sequence[Cut] | None:
    """Return the cuts of the first dim of a group as `after`; None if one would cut a row."""
    own = layout.spec.cuts[before[0]]
    if not own or len(before) == len(after) == 1:
        return own
    row, rows = prod(after[1:]), prod(layout.shape[d] for d in before[1:])
    lengths = [n * rows for n in part_sizes(layout, before[0])]
    if any(n % row for n in lengths):
        return None
    return [Cut(layout.spec.dims[before[0]], tuple(n // row for n in lengths))]


def _rule_moves(layout: Layout, shape: Sequence[int]) -> bool:
    """Return whether the rule would move elements.

    It does where a dim that is merged or unflattened is cut into parts of different lengths, or
    where the two shapes have no common factors (as 4x6 and 6x4).
    """
    dims, _, _, whole = factor_shapes(layout.shape, shape)
    pairs = groups(layout.shape, shape)
    joined = [before[0] for before, after in pairs if len(before) > 1 or len(after) > 1]
    split = [d for d in joined if splitting_axes(layout, d)]
    return any(whole.intersection(dims[d]) or len(set(part_sizes(layout, d))) > 1 for d in split)


@decomposition_maker("view", "reshape", "flatten", "unflatten", with_func=True)
def _reshape(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
    result, layout = func(input, *args, **kwargs), layout_of(input)
    if result.dtype != layout.dtype or not prod(result.shape):
        return None
    target = reshaped_layout(layout, result.shape) if _rule_moves(layout, result.shape) else None
    reshape = Tensor.view if func is Tensor.view else Tensor.reshape
    return target and (
        lambda input, *_, **__: from_parts(
            target, lambda part: reshape(part, tuple(target.local_shape)), input
        )
    )
