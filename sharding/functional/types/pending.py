"""Decide whether an operator keeps a value pending.

It must be linear in it, which the operator table tells.

u pending:   2 * u, u + u, u @ w, u.sum()   pending   u * u, relu(u), u + r   not linear: psum first
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....mesh.abstract_mesh import AbstractMesh
from ...layout.layout import Layout
from ...layout.spec import P
from ...ops.rules.propagation import CannotKeep
from ...ops.rules.registry import DECOMPOSITIONS, RULES
from ...ops.strategy import choose_strategy, name_of
from ...tensor.sharded_tensor import ShardedTensor
from ...trees import map_tensors, tensors_in
from .types import ShardingTypeError, user_location

if TYPE_CHECKING:
    from .type_checker import TypeChecker

_MESH = AbstractMesh((2,), ("ranks",))  # a sum over two ranks behaves as one over any number
_WHOLE, _PENDING = P(), P(unreduced="ranks")


def stays_pending(
    checker: TypeChecker,
    axis: str,
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    zeros: bool = False,
) -> bool:
    """Return whether the operator's result is pending over an axis over which some operand is.

    An operand that varies counts as pending next to one that is.

    Raises: ShardingTypeError if the operator is not linear in the pending operands.
    """
    with torch._C.DisableTorchFunction():
        convert = partial(_as_sharded, checker, axis, zeros)
        positional = map_tensors(convert, args)
        values = map_tensors(convert, kwargs.values())
        named = dict(zip(kwargs, values, strict=True))
        operands = list(tensors_in((*positional, *values)))
        layouts = [x._layout for x in operands]
        try:
            with warnings.catch_warnings(action="ignore"):  # of operators without a rule
                strategy = choose_strategy(func, positional, named, operands, [object()])
        except (CannotKeep, NotImplementedError) as error:
            # The second: an operator without a rule that writes in place.
            raise _not_linear(checker, func, axis, args, kwargs) from error
        is_moved = any(t is not s for t, s in zip(strategy.targets, layouts, strict=True))
        if strategy.decomposition is not None or strategy.moves or is_moved:
            raise _not_linear(checker, func, axis, args, kwargs)
        outputs = strategy.outputs if isinstance(strategy.outputs, list) else [strategy.outputs]
        return strategy.in_place or any(isinstance(out, Layout) and out.pending for out in outputs)


def share_of_gradient(
    checker: TypeChecker, axis: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    """Return the same as `stays_pending` for the backward of a custom function.

    As a whole that is linear in the gradient: an operator without a rule is taken to be linear, and
    zeros next to a share are a share of zero.

    Raises: ShardingTypeError if the operator is known not to be linear.
    """
    try:
        return stays_pending(checker, axis, func, args, kwargs)
    except ShardingTypeError:
        if func not in RULES and func not in DECOMPOSITIONS:
            return True
        return stays_pending(checker, axis, func, args, kwargs, zeros=True)


def _as_sharded(checker: TypeChecker, axis: str, zeros: bool, x: Tensor) -> ShardedTensor:
    """Return a `ShardedTensor` like an operand, pending or replicated over two ranks.

    With `zeros`, a tensor of zeros counts as pending.
    """
    type_ = checker.tag_of(x).type
    is_zero = zeros and not x.is_meta and not x.any()
    pends = axis in type_.pending or axis in type_.varying or is_zero
    layout = Layout.of(_MESH, _PENDING if pends else _WHOLE, x.shape, x.dtype)
    return ShardedTensor._make(torch.empty(x.shape, dtype=x.dtype, device="meta"), layout)


def _not_linear(
    checker: TypeChecker, func: Any, axis: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> ShardingTypeError:
    since = checker.pending_since(axis, args, kwargs)
    return ShardingTypeError(
        f"{user_location()}: {name_of(func)} of a value that is pending over {axis!r}{since}: each "
        "rank holds a share of a sum, and the operator is not linear, so its results would not add "
        f"up; call psum(x, {axis!r}) first"
    )
