"""The largest or smallest value over the ranks of some axes, and its gradient.

The gradient goes to the ranks that hold the extreme value, in equal parts:

    [1 5] [3 5]  ->  [3 5] [3 5]    gradients [g h] on each: [0 h] [2g h]   (h + h over two holders)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....mesh.comm.pending import Pending
from ...autograd.engine_hooks import transforming, with_memory, with_tangents
from ...autograd.named_axes import Axes
from .linear_maps import ReduceMap, apply, check_forward_mode


class Extreme:
    """Maximum or minimum over axes.

    Attributes:
        axes: the axes.
        kind: "max" or "min".
        sum: the map that sums gradients.
    """

    def __init__(self, axes: Axes, kind: str) -> None:
        self.axes, self.kind, self.sum = axes, kind, ReduceMap(axes)

    def start(self, x: Tensor) -> Pending[Tensor]:
        """Launch it."""
        out = x.detach().clone(memory_format=torch.contiguous_format)
        work = self.axes.group.all_reduce(out, self.kind, async_op=True)
        return Pending.after(work, lambda: out)

    def shares(self, x: Tensor, out: Tensor) -> Tensor:
        """Return the share of the result's gradient for each of this rank's elements.

        1 / number of holders, or 0.
        """
        holds = ((x == out) | (x.isnan() & out.isnan())).to(out.dtype)
        return holds / apply(holds, self.sum)


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: Extreme, ready: Pending[Tensor] | None) -> Tensor:
        out = (op.start(x) if ready is None else ready).wait()
        ctx.op = op
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shares = ctx.op.shares(*(t.detach() for t in ctx.saved_tensors))
        return apply(grads[0], ctx.op.sum) * shares, None, None


class _PickTransformed(torch.autograd.Function):
    """The same in the form that `torch.func` requires."""

    @staticmethod
    def forward(x: Tensor, op: Extreme) -> Tensor:
        return op.start(with_memory(x)).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op = inputs[1]
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Pick.backward(ctx, *grads)[:2]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        with with_tangents():
            shares = ctx.op.shares(*(t.detach() for t in ctx.saved_tensors))
            return apply(tangents[0] * shares, ctx.op.sum)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, op: Extreme) -> tuple[Tensor, Any]:
        return pick(x.movedim(in_dims[0], -1), op), -1


def pick(
    x: Tensor, op: Extreme, grad_dtype: Any = None, ready: Pending[Tensor] | None = None
) -> Tensor:
    """Return the extreme value, differentiable any number of times; see `linear_maps.apply`."""
    if transforming():
        check_forward_mode(op.axes)
        return _PickTransformed.apply(x, op)  # type: ignore[return-value]
    if x.requires_grad and torch.is_grad_enabled():
        return _Pick.apply(x, op, ready)  # type: ignore[return-value]
    return (op.start(x) if ready is None else ready).wait()
