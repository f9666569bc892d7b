"""Pending values in operators: which are linear in them is what the operator table says.

    u pending:   2 * u, u + u, u @ w, u.sum()   pending            u * u, relu(u), u + r   not linear: psum first
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....mesh.abstract_mesh import AbstractMesh
from ...layout.layout import Layout
from ...layout.spec import P
from ...ops.rules.propagation import CannotKeep
from ...ops.rules.registry import FORMS, RULES
from ...ops.strategy import decide, name_of
from ...tensor.sharded_tensor import ShardedTensor
from .types import ShardingTypeError, place

if TYPE_CHECKING:
    from .type_checker import Following

_MESH = AbstractMesh((2,), ("ranks",))  # a sum over two ranks behaves as one over any number
_WHOLE, _PENDING = P(), P(unreduced="ranks")


def stays_pending(
    following: Following, axis: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], zeros: bool = False
) -> bool:
    """Whether the operator's result is pending over an axis over which some operand is.

    An operand that varies counts as pending beside one that is.

    Raises: ShardingTypeError where the operator is not linear in what is pending.
    """
    with torch._C.DisableTorchFunction():
        operands: list[Any] = []
        laid = _laid(following, axis, args, operands, zeros)
        named = dict(zip(kwargs, _laid(following, axis, kwargs.values(), operands, zeros), strict=True))
        layouts = [x._layout for x in operands]
        try:
            with warnings.catch_warnings(action="ignore"):  # of operators without a rule
                decision = decide(func, laid, named, operands, [object()])
        except (CannotKeep, NotImplementedError) as error:  # the second: an operator without a rule that writes in place
            raise _not_linear(following, func, axis, args, kwargs) from error
        if decision.form is not None or decision.moves or any(t is not s for t, s in zip(decision.targets, layouts, strict=True)):
            raise _not_linear(following, func, axis, args, kwargs)
        outputs = decision.outputs if isinstance(decision.outputs, list) else [decision.outputs]
        return decision.in_place or any(isinstance(out, Layout) and out.pending for out in outputs)


def share_of_gradient(following: Following, axis: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """The same in the backward of a custom function, which is linear in the gradient as a whole: an operator that nobody knows is taken to
    be linear, and zeros beside a share are a share of zero.

    Raises: ShardingTypeError where the operator is known not to be linear.
    """
    try:
        return stays_pending(following, axis, func, args, kwargs)
    except ShardingTypeError:
        if func not in RULES and func not in FORMS:
            return True
        return stays_pending(following, axis, func, args, kwargs, zeros=True)


def _laid(following: Following, axis: str, items: Any, operands: list[Any], zeros: bool) -> list[Any]:
    """The arguments with every tensor as a sharded one that is pending or whole over two ranks; with `zeros`, those may be pending."""
    found = []
    for item in items:
        if isinstance(item, Tensor):
            type_ = following.of(item).type
            pends = axis in type_.pending or axis in type_.varying or (zeros and not item.is_meta and not item.any())
            spec = _PENDING if pends else _WHOLE
            layout = Layout.of(_MESH, spec, item.shape, item.dtype)
            item = ShardedTensor._make(torch.empty(item.shape, dtype=item.dtype, device="meta"), layout)
            operands.append(item)
        elif isinstance(item, (list, tuple)):
            item = type(item)(_laid(following, axis, item, operands, zeros))
        found.append(item)
    return found


def _not_linear(following: Following, func: Any, axis: str, args: Sequence[Any], kwargs: dict[str, Any]) -> ShardingTypeError:
    since = following.pending_since(axis, args, kwargs)
    return ShardingTypeError(
        f"{place()}: {name_of(func)} of a value that is pending over {axis!r}{since}, each rank holding a share of a sum: the operator is "
        f"not linear in it, and would not give the share of a result; psum(x, {axis!r}) first"
    )
