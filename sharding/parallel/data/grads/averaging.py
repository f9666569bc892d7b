"""Averages over ranks that can be differentiated again.

With plain inputs each rank has a loss of its own, and the loss of the program is their average. So
a parameter in use on each rank and the average of its gradients are a pair of linear maps, each the
transpose of the other for the average over ranks of products:

    parameter     ---- use ---->     value on each rank
    mean of g_r   <- average ---     g_r                      the factor is in this direction only
    c             ---- use ---->     c
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....layout.layout import Layout
from ....redistribute.autograd import redistribute_locals

Grads = list[Tensor | None]


def average(
    grads: Sequence[Tensor | None],
    bases: Sequence[Layout],
    rests: Sequence[Layout],
    scales: Sequence[float],
) -> Grads:
    """Scale and sum gradients differentiably, from layouts in use to layouts at rest.

    Communication: that of redistributing the gradients.
    """
    wholes = {
        i: scale_gradient(grad, scales[i]) for i, grad in enumerate(grads) if grad is not None
    }
    pairs = [
        (bases[i].dual.replace(dtype=x.dtype), rests[i].dual.replace(dtype=x.dtype))
        for i, x in wholes.items()
    ]
    averages: Grads = [None] * len(grads)
    for i, part in zip(wholes, redistribute_locals(list(wholes.values()), pairs), strict=True):
        averages[i] = part.to(rests[i].dtype)
    return averages


def scale_gradient(grad: Tensor, scale: float) -> Tensor:
    """Return a gradient times a factor; the gradient of the result is not scaled."""
    if scale == 1:
        return grad
    if not (torch.is_grad_enabled() and grad.requires_grad):
        return grad * scale
    return _Scaled.apply(grad, scale)  # type: ignore[return-value]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return grad * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _Used.apply(grads[0], ctx.scale), None


class _Used(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return scale_gradient(grads[0], ctx.scale), None
