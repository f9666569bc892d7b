"""Gradients that have no derivative of their own: taking it raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def without_derivative(gradients: Sequence[Tensor | None], message: str) -> list[Tensor | None]:
    """Return the gradients of a backward pass, whose own derivatives raise.

    They raise if the backward is differentiated (`create_graph=True`).

    `once_differentiable` of torch does so only where the gradients of results have a history, but
    the gradients of inputs depend on the inputs as well: a penalty on them would take them for
    constants.

    Args:
        gradients: computed in a `torch.autograd.Function` under `torch.no_grad()`.
        message: of the RuntimeError.
    """
    if not torch.is_grad_enabled():
        return list(gradients)
    tensors = [g.detach().requires_grad_() for g in gradients if g is not None]
    if not tensors:
        return list(gradients)
    functions: Any = torch._C._functions  # type: ignore[attr-defined]
    raising = functions.DelayedError(message, len(tensors))(*tensors)
    remaining = iter([raising] if isinstance(raising, Tensor) else raising)
    return [None if g is None else next(remaining) for g in gradients]
