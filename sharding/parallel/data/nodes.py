"""The two autograd nodes through which parameters come to a unit.

    parameter --- _Enter ------------- _Gathered ---> what the unit computes with
                    |                      |
    backward:       wait for the sum  <--  start summing gradients over the ranks

In between other units go on with their backward: `_Enter` is made before them in forward, so autograd turns to it after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Grads = list[Tensor | None]


class Passage:
    """One use of a unit's parameters.

    Attributes:
        values: the tensors that the unit computes with; no gradient goes through it.
        reduce: from their gradients, and a scale, to what gives the gradients of the parameters' local parts later.
        differentiable: the same at once, for gradients of gradients.
        scale: with which gradients are multiplied; `factors` are what those of some are multiplied with besides.
    """

    def __init__(
        self,
        values: Callable[[], Sequence[Tensor]],
        reduce: Callable[[Grads, float], Callable[[], Grads]],
        differentiable: Callable[[Grads, float], Grads],
    ) -> None:
        self.values, self.reduce, self.differentiable, self.scale = values, reduce, differentiable, 1.0
        self.factors: Sequence[float] = ()
        self.wait: Callable[[], Grads] | None = None

    def weigh(self, scales: Sequence[float]) -> None:
        """Gradients are to be multiplied with these."""
        self.scale = max(scales, default=1.0)
        self.factors = () if min(scales, default=1.0) == self.scale else [scale / self.scale for scale in scales]

    def weighed(self, grads: Grads) -> Grads:
        """The gradients, multiplied with what differs between them."""
        if not self.factors:
            return grads
        return [grad if grad is None or factor == 1 else grad * factor for grad, factor in zip(grads, self.factors, strict=True)]

    def enter(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The parts, behind the node at which backward waits."""
        return _Enter.apply(self, *parts)  # type: ignore[return-value]

    def gathered(self, entered: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the unit computes with."""
        return _Gathered.apply(self, *entered)  # type: ignore[return-value]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.passage = passage
        ctx.set_materialize_grads(False)
        return _without_frozen(ctx, [x.view_as(x) for x in parts])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        wait, ctx.passage.wait = ctx.passage.wait, None
        return None, *(grads if wait is None else wait())


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.passage, ctx.parts = passage, [(x.shape, x.dtype, x.device) for x in parts]
        ctx.set_materialize_grads(False)
        return _without_frozen(ctx, passage.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        passage: Passage = ctx.passage
        asked = passage.weighed([grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad[1:], strict=True)])
        if torch.is_grad_enabled() and any(grad is not None and grad.requires_grad for grad in asked):
            return None, *passage.differentiable(asked, passage.scale)
        passage.wait = passage.reduce(asked, passage.scale)
        if torch.is_anomaly_enabled():  # which looks at the values between the nodes
            found, passage.wait = passage.wait(), None
            return None, *found
        return None, *[None if grad is None else _promised(*part) for grad, part in zip(asked, ctx.parts, strict=True)]


def _without_frozen(ctx: Any, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of a node; those of parameters that are not trained get no gradient."""
    ctx.mark_non_differentiable(*[x for x, needed in zip(values, ctx.needs_input_grad[1:], strict=True) if not needed])
    return tuple(values)


def _promised(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stands for a gradient that is under way; `_Enter` puts the real one in its place, nobody else sees it."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)
