"""What a pending gradient was made from, so that a value that is known is not summed again.

The gradient of a replicated value is pending: every use adds a share. Some pending gradients are no sums, though. Backward starts from a
value that all ranks have, a plain tensor that all ranks use alike hands back one gradient, a bias is added on one rank:

    R -- keep on one rank --> U -- all_reduce --> R         step by step
    R ----------------------------------------------> R     from the origin: nothing moves

A conversion that makes a gradient pending notes on its result what it was made from; the next redistribution of that tensor starts there.
Both hold the same value, so the result is the same value, and no step is needed that would sum it.

Autograd hands a gradient on as the same object as long as one use alone contributes to it. A sum of several is another tensor, or this one
written to, which its version tells, and it has no origin. So whether there is one follows from the graph, and is the same on all ranks;
but not where a rank's part is empty: there torch takes short cuts, and nothing is noted.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...layout.layout import Layout


class Origin(NamedTuple):
    """A tensor that holds the value of a gradient.

    Attributes:
        grad_layout: the layout in which the tensor's own gradient flows, for second derivatives; None for the dual of its layout.
    """

    tensor: Tensor
    layout: Layout
    grad_layout: Layout | None = None


class _Note(NamedTuple):
    """What a tensor was made from.

    Attributes:
        layout: of the tensor. An operator may hand the gradient of its result on as that of an operand that is laid out otherwise, such as
            a row that is added to all rows, on a rank that has one.
        versions: of the tensor and of its origin; what was written to since has another one.
    """

    layout: Layout
    origin: Origin
    versions: tuple[int, int]


def origin_of(grad: Tensor, layout: Layout, grad_layout: Layout | None = None) -> Origin:
    """Return what a gradient laid out as `layout` was made from; the gradient itself where that is not known."""
    found: _Note | None = getattr(grad, "_origin", None)
    if found is None or (grad._version, found.origin.tensor._version) != found.versions:
        return Origin(grad, layout, grad_layout)
    origin, dtype = found.origin, layout.dtype
    if found.layout is not layout.replace(dtype=found.layout.dtype):
        return Origin(grad, layout, grad_layout)
    return origin if origin.layout.dtype is dtype else origin._replace(layout=origin.layout.replace(dtype=dtype))


def note_origin(made: Tensor, layout: Layout, origin: Origin) -> Tensor:
    """Note that `made`, laid out as `layout`, holds the value of `origin`, if it is pending on axes on which that is not.

    Returns:
        `made`, or a view of it where it is the tensor of `origin` itself.
    """
    tensor = origin.tensor
    if not layout.spec.unreduced or layout.pending.keys() <= origin.layout.pending.keys() or layout.has_empty_part:
        return made
    if made is tensor:
        made = tensor.view_as(tensor)
    made._origin = _Note(layout, origin, (made._version, tensor._version))  # type: ignore[attr-defined]
    return made
