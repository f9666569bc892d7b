"""Gathers sharded values that replace parameters for one call, and averages their gradients.

Nothing is kept for the next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .....mesh.comm.world import World
from ....layout.layout import Layout
from ....lineage import comm_context, mixed, seed_of
from ....redistribute.autograd import redistribute_locals
from ....tensor.sharded_tensor import ShardedTensor
from ..grads.grad_reduction import differentiable

_GATHERING = seed_of("gather values in place of parameters")
_REDUCING = seed_of("sum gradients of values in place of parameters")


def gather_values(
    values: Sequence[ShardedTensor],
    bases: Sequence[Layout],
    scales: Sequence[float],
    world: World,
) -> list[Tensor]:
    """Return this rank's part of values in the layouts in which parameters are used.

    Gradients are scaled, and can be differentiated.

    Args:
        values: of the shapes of the parameters; they may be pending sums.
        bases: the layout of each, in its dtype.
        scales: the factor for each gradient.

    Communication: one redistribution of all values, and in backward one of all gradients.
    """
    if not values:
        return []
    op = _Op(values, bases, scales, world)
    parts = [x._local for x in values]
    if torch.is_grad_enabled() and any(x.requires_grad for x in parts):
        return list(_GatherValues.apply(op, *parts))  # type: ignore[arg-type]
    return op.gather(parts)


class _Op:
    def __init__(
        self,
        values: Sequence[ShardedTensor],
        bases: Sequence[Layout],
        scales: Sequence[float],
        world: World,
    ) -> None:
        self._layouts = [x._layout for x in values]
        self._bases, self._scales, self._world = bases, scales, world
        self._gathering = mixed(_GATHERING, values)
        self._reducing = mixed(_REDUCING, values)

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        # not the lineage of the loss: with plain inputs each rank has a loss of its own
        with comm_context(self._world, self._gathering):
            return redistribute_locals(parts, list(zip(self._layouts, self._bases, strict=True)))

    def reduce(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        with comm_context(self._world, self._reducing):
            return differentiable(grads, self._bases, self._layouts, self._scales)


class _GatherValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: _Op, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        ctx.set_materialize_grads(False)
        wholes = tuple([whole.view_as(whole) for whole in op.gather(parts)])
        needed = zip(wholes, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*[whole for whole, needs_grad in needed if not needs_grad])
        return wholes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.op.reduce(grads)
