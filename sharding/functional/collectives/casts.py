"""`axis_size` and `axis_index`, and changes of type without communication: `pcast`, `pvary`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...autograd.named_axes import AxisName, bound_axes
from ..mapped_env import current_mapped_env
from ..types.type_checker import untracked
from ..types.types import Type, TypeOrigin, user_location
from .apply import CollectiveCall, Prepared, TypingRule, map_collective
from .arguments import canonical_word
from .linear_maps import KeepFirstMap, apply


def axis_size(axis_name: AxisName) -> int:
    """axis_size(axis) -> int: return the number of ranks along the axis; of a tuple, the product.

    Communication: none.
    """
    return bound_axes(axis_name).size


def axis_index(axis_name: AxisName) -> Tensor:
    """axis_index(axis) -> S: return this rank's place along the axis, a 0-d int64 tensor.

    Places of a tuple count major to minor.

    It is a tensor, so that values computed from it are known to vary. After `int(axis_index(...))`
    every later result of the function counts as varying.

    Communication: none.
    """
    axes = bound_axes(axis_name)
    env = current_mapped_env()
    if env is None or env.checker is None:
        return axes.index_tensor.clone()
    with untracked():
        index = axes.index_tensor.clone()
    env.checker.set_tag(
        index,
        env.checker.make_tag(
            TypeOrigin("axis_index", user_location()), Type.of(frozenset(axes.names))
        ),
    )
    return index


_PCAST = {
    "sharded": TypingRule("pcast to 'sharded'"),
    "unreduced": TypingRule("pcast to 'unreduced'", varies=False, pends=True),
}


def _same(x: Tensor, op: Any, grad_dtype: Any, ready: Any) -> Tensor:
    return x.view_as(x)


def pcast(x: Any, axis_name: AxisName, *, to: str) -> Any:
    """pcast(x, axis, to="sharded" | "unreduced"): change the type of a value.

    pcast(x: R | S, axis, to="sharded") -> S, pcast(x: R, axis, to="unreduced") -> U.

    "sharded" ("varying"): the same data, which from now on counts as each rank's own. "unreduced"
    ("pending"): the first rank keeps the data and the others have zeros, so that the sum is the
    value.

    Raises: ValueError for another word.

    Communication: none, forward and backward.
    """
    to = canonical_word("pcast", to, _PCAST)
    use = _same if to == "sharded" else apply
    call = CollectiveCall(
        bound_axes(axis_name),
        _PCAST[to],
        None,
        lambda axes, _: Prepared(axes.cached(KeepFirstMap)),
        use,
    )
    return map_collective(x, call)


def pvary(x: Any, axis_name: AxisName) -> Any:
    """pvary(x: R | S, axis) -> S: `pcast(x, axis, to="varying")` by JAX's older name.

    Communication: none, forward and backward.
    """
    return pcast(x, axis_name, to="varying")
