"""The autograd nodes between sharded parameters and the values that a unit computes with.

    parameter --- _WaitForGrads ----------- _GatherParams ------ a view per parameter ---> unsharded
                    |                          |                      |
    backward:     wait for the reduction <-- launch the reduction   write the gradient to its buffer

`_WaitForGrads` is created in forward before the nodes of later units, so autograd runs it after
their backward: the reduction overlaps with them. It is left out if nothing is to be waited for, as
with DDP. Autograd runs the views' nodes as soon as they are ready, as it does leaves: the gradient
is still in cache, and the next one may reuse its memory. They are nodes of torch with a hook, which
take a third of the time of an `autograd.Function`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ....autograd import engine_hooks
from ..grads.averaging import scaled
from ..grads.grad_places import GradWriter

Grads = list[Tensor | None]


class GatherOp:
    """Gathers a unit's parameters for one use, and reduces their gradients.

    Attributes:
        values: returns the unsharded tensors, outside of autograd.
        reduce: `(gradients, scale, writer)` -> a function that waits and returns the gradients of
            the local parts.
        differentiable: the same, at once and differentiably, for gradients of gradients.
        writer: writes gradients to their buffers as they are computed.
        overlaps: whether to wait for the reduction only after other units' backward.
        scale: a factor for all gradients; `factors` has further ones per parameter.
    """

    def __init__(
        self,
        values: Callable[[], Sequence[Tensor]],
        reduce: Callable[[Grads, float, GradWriter], Callable[[], Grads]],
        differentiable: Callable[[Grads, float], Grads],
        writer: GradWriter,
        *,
        overlaps: bool = True,
    ) -> None:
        self.values, self.reduce, self.differentiable, self.writer, self.scale = (
            values,
            reduce,
            differentiable,
            writer,
            1.0,
        )
        self.overlaps = overlaps
        self.factors: Sequence[float] = ()
        self.seen: set[int] = (
            set()
        )  # the numbers of the gradients that the views' nodes have had in this backward
        self.wait: Callable[[], Grads] | None = None

    def set_grad_scale(self, scales: Sequence[float]) -> None:
        """Set the factor for each parameter's gradient."""
        self.scale = max(scales, default=1.0)
        self.factors = (
            ()
            if min(scales, default=1.0) == self.scale
            else [scale / self.scale for scale in scales]
        )

    def scale_grad(self, i: int, grad: Tensor) -> Tensor:
        """Return a gradient times its parameter's own factor."""
        return grad if not self.factors else scaled(grad, self.factors[i])

    def enter(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the local parts as outputs of the node at which backward waits."""
        if not self.overlaps:
            return tuple(parts)
        entered: tuple[Tensor, ...] = _WaitForGrads.apply(self, *parts)  # type: ignore[assignment]
        self._find_leaves(entered)
        return entered

    def gather(self, entered: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the unsharded values."""
        found: tuple[Tensor, ...] = _GatherParams.apply(self, *entered)  # type: ignore[assignment]
        if not self.overlaps:
            self._find_leaves(found)
        return tuple(
            [_use_param(self, i, x) if x.requires_grad else x for i, x in enumerate(found)]
        )

    def _find_leaves(self, outputs: Sequence[Tensor]) -> None:
        """Store the nodes that add gradients to `.grad`: the inputs of the node that made these
        outputs.
        """
        node = next((x.grad_fn for x in outputs if x.grad_fn is not None), None)
        self.writer.leaves = [] if node is None else [leaf for leaf, _ in node.next_functions]


class _WaitForGrads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: GatherOp, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        ctx.set_materialize_grads(False)
        return _mark_frozen(ctx, [x.view_as(x) for x in parts])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        wait, ctx.op.wait = ctx.op.wait, None
        return None, *(grads if wait is None else wait())


class _GatherParams(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: GatherOp, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.op, ctx.parts = op, [(x.shape, x.dtype, x.device) for x in parts]
        ctx.set_materialize_grads(False)
        return _mark_frozen(ctx, op.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        op: GatherOp = ctx.op
        writer = op.writer.take(op.scale)
        seen, op.seen = op.seen, set()
        wanted = [  # a write in forward replaces the node of a view
            None
            if grad is None or not needed
            else writer.written.get(i, grad)
            if i in seen
            else op.scale_grad(i, grad)
            for i, (grad, needed) in enumerate(zip(grads, ctx.needs_input_grad[1:], strict=True))
        ]
        if torch.is_grad_enabled() and any(
            grad is not None and grad.requires_grad for grad in wanted
        ):
            return None, *op.differentiable(wanted, op.scale)
        op.wait = op.reduce(wanted, op.scale, writer)
        if (
            not op.overlaps or torch.is_anomaly_enabled()
        ):  # anomaly mode reads the values between nodes
            found, op.wait = op.wait(), None
            return None, *found
        return None, *[
            None if grad is None else _placeholder(*part)
            for grad, part in zip(wanted, ctx.parts, strict=True)
        ]


def _use_param(op: GatherOp, number: int, value: Tensor) -> Tensor:
    """Return a view of a value whose gradient is written to its buffer."""

    def write_grad(grads: tuple[Tensor | None, ...]) -> tuple[Tensor, ...] | None:
        (grad,) = grads
        if grad is None:
            return None
        writer = op.writer
        writer.discard(number)
        op.seen.add(number)
        grad = op.scale_grad(number, grad)
        if (
            torch.is_grad_enabled()
            or torch.is_anomaly_enabled()
            or not writer.write(number, grad, op.scale)
        ):
            return (grad,)
        return (_placeholder(grad.shape, grad.dtype, grad.device),)

    found = value.view_as(value)
    node: Any = found.grad_fn
    if node is not None:  # grad mode is on
        node.register_prehook(write_grad)
        engine_hooks.run_as_soon_as_ready(node)
    return found


def _mark_frozen(ctx: Any, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a node's outputs; mark those of frozen parameters as non-differentiable."""
    ctx.mark_non_differentiable(
        *[x for x, needed in zip(values, ctx.needs_input_grad[1:], strict=True) if not needed]
    )
    return tuple(values)


@lru_cache(4096)
def _placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor without memory in place of a gradient that is in a buffer or being reduced;
    the next node replaces it.
    """
    return torch.empty((), dtype=dtype, device=device).expand(shape)
