"""Adding in place: `x += y` keeps the layout of x.

Also where x is pending, and without communication for that.

    x pending as a sum over 2 ranks    [1 2]   | [3 4]        the value is [4 6]
    x += 10                            [11 12] | [3 4]        on the first rank alone
    x pending as a maximum             [1 2]   | [3 4]        the value is [3 4]
    x += 10                            [11 12] | [13 14]      on every rank; avg and min as well

The added value is redistributed to the layout of x: a replicated y is used on one rank, a split one
padded with zeros, a sum that is pending over the same axes added part by part. Two maxima do not
add up part by part, so along the axes of a maximum (or minimum) y must be replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ....layout.layout import Layout
from ..decomposition_utils import layout_of
from ..notation import Rule
from ..registry import rule
from .pointwise import broadcast, is_operand


@rule("add_", "sub_", "subtract_", "__iadd__", "__isub__", with_func=True)
def _accumulate(func: Callable[..., Any], input: Any, other: Any, **kwargs: Any) -> Rule:
    if not is_operand(input):
        return broadcast(other)
    shifted = _shifts_extreme(layout_of(input), layout_of(other) if is_operand(other) else None)
    if is_operand(other):
        return broadcast(input, other, linear=((0, 1),), additive=(1,), transparent=shifted)
    return broadcast(input, linear=((0,),), transparent=shifted, bind=partial(_bind_number, func))


def _shifts_extreme(layout: Layout, added: Layout | None) -> bool:
    """Return whether x is pending as a maximum (minimum), and what is added replicated there."""
    if not layout.pending or not set(layout.pending.values()) <= {"max", "min"}:
        return False
    return added is None or not any(a in added.dim_of or a in added.pending for a in layout.pending)


def _bind_number(func: Callable[..., Any], targets: Sequence[Layout], _: Any) -> Callable[..., Any]:
    """Return what adds a number to this rank's part; of a pending sum, on one rank only."""
    layout = targets[0]
    mesh: Any = layout.mesh
    summed = [mesh.axis_index(axis) for axis, kind in layout.spec.unreduced if kind == "sum"]
    if mesh.coordinate is None or all(mesh.coordinate[i] == 0 for i in summed):
        return func
    return lambda input, other, **kwargs: func(input, 0, **kwargs)
