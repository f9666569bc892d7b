"""Places along axes, and the same value by another type: `axis_size`, `axis_index`, `pcast`, `pvary`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..named_axes import AxisName, bound, current_mapping
from ..types.type_checker import unfollowed
from ..types.types import Origin, Type, place
from .apply import Call, Law, Prepared, each
from .arguments import word
from .linear_maps import KeepFirst, apply


def axis_size(axis_name: AxisName) -> int:
    """axis_size(axis) -> int: number of ranks along the axis, of a tuple the product. Communication: none."""
    return bound(axis_name).size


def axis_index(axis_name: AxisName) -> Tensor:
    """axis_index(axis) -> S: this rank's place along the axis, of a tuple major to minor; a 0-d int64 tensor.

    It is a tensor so that what is computed from it is known to vary. `int(axis_index(...))` works, and from then on whatever
    the function makes counts as varying.

    Communication: none.
    """
    axes = bound(axis_name)
    mapping = current_mapping()
    if mapping is None or mapping.checker is None:
        return axes.index_tensor.clone()
    with unfollowed():
        index = axes.index_tensor.clone()
    mapping.checker.note(index, mapping.checker.varying(Origin("axis_index", place()), Type.of(frozenset(axes.names))))
    return index


_PCAST = {"sharded": Law("pcast to 'sharded'"), "unreduced": Law("pcast to 'unreduced'", varies=False, pends=True)}


def _same(x: Tensor, op: Any, travel: Any, ready: Any) -> Tensor:
    return x.view_as(x)


def pcast(x: Any, axis_name: AxisName, *, to: str) -> Any:
    """pcast(x: R | S, axis, to="sharded") -> S, pcast(x: R, axis, to="unreduced") -> U: the same value by another type.

    "sharded" ("varying"): the same data, which from now on counts as each rank's own. "unreduced" ("pending"): what the first
    rank has stays there, and the others have zeros, so that the sum is the value.

    Raises: ValueError for another word.

    Communication: none, neither way.
    """
    to = word("pcast", to, _PCAST)
    use = _same if to == "sharded" else apply
    return each(x, Call(bound(axis_name), _PCAST[to], None, lambda axes, _: Prepared(axes.kept(KeepFirst)), use))


def pvary(x: Any, axis_name: AxisName) -> Any:
    """pvary(x: R | S, axis) -> S: `pcast(x, axis, to="varying")` by the name that JAX gave it first. Communication: none, neither way."""
    return pcast(x, axis_name, to="varying")
