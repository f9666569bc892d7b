"""The origin of a pending gradient, so that a value that is already known is not summed again.

The gradient of a replicated value is pending: every use adds a share. Some pending gradients are
not sums, though. Backward starts from a value that all ranks have, a plain tensor that all ranks
use alike has one gradient, a bias is added on one rank:

    R -- keep on one rank --> U -- all_reduce --> R         step by step
    R ----------------------------------------------> R     from the origin: nothing moves

A conversion that makes a gradient pending records the original on its result; the next
redistribution of that tensor starts there. Both hold the same value, so the result is the same, and
no step is needed that would sum it.

Autograd passes a gradient on as the same object as long as only one use contributes to it. A sum of
several is another tensor, or this one with a new version, and has no origin. So the graph
determines whether there is one, equally on all ranks; except where a rank's part is empty: torch
takes short cuts there, and nothing is recorded.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..layout.layout import Layout


class Origin(NamedTuple):
    """A tensor that holds the value of a gradient.

    Attributes:
        grad_layout: the layout in which the tensor's own gradient flows, for second derivatives;
            None for the dual of its layout.
    """

    tensor: Tensor
    layout: Layout
    grad_layout: Layout | None = None


class _OriginRecord(NamedTuple):
    """The origin of a tensor.

    Attributes:
        layout: layout of the tensor. An operator may pass the gradient of its result on as that of
            an operand with another layout, such as a row that is added to all rows, on a rank that
            has one.
        versions: autograd versions of the tensor and of its origin; a write since then has changed
            them.
    """

    layout: Layout
    origin: Origin
    versions: tuple[int, int]


def noted_origin(grad: Tensor) -> tuple[Layout, Origin] | None:
    """Return the layout of a gradient and its origin, as recorded; None if it has none."""
    record: _OriginRecord | None = getattr(grad, "_origin", None)
    if record is None or (grad._version, record.origin.tensor._version) != record.versions:
        return None
    return record.layout, record.origin


def origin_of(grad: Tensor, layout: Layout, grad_layout: Layout | None = None) -> Origin:
    """Return the origin of a gradient laid out as `layout`; the gradient itself if it has none."""
    noted = noted_origin(grad)
    if noted is None:
        return Origin(grad, layout, grad_layout)
    (noted_layout, origin), dtype = noted, layout.dtype
    if noted_layout is not layout.replace(dtype=noted_layout.dtype):
        return Origin(grad, layout, grad_layout)
    return (
        origin
        if origin.layout.dtype is dtype
        else origin._replace(layout=origin.layout.replace(dtype=dtype))
    )


def note_origin(part: Tensor, layout: Layout, origin: Origin) -> Tensor:
    """Record that `part`, laid out as `layout`, holds the value of `origin`.

    Only if it is pending on axes on which that is not.

    Returns:
        `part`, or a view of it if it is the tensor of `origin` itself.
    """
    tensor = origin.tensor
    if (
        not layout.spec.unreduced
        or layout.pending.keys() <= origin.layout.pending.keys()
        or layout.has_empty_part
    ):
        return part
    if part is tensor:
        part = tensor.view_as(tensor)
    part._origin = _OriginRecord(layout, origin, (part._version, tensor._version))  # type: ignore[attr-defined]
    return part
