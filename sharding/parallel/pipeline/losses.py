"""The loss of a batch from the losses of its microbatches.

    loss of the batch = sum over microbatches and data ranks of weight * loss / sum of weights

With a mean over valid tokens, the weight of a microbatch is the number of its valid tokens, so the
result is the mean over all of them, as in one process, and not a mean of means. The weights follow
from the targets, so that the divisor is known before the first backward.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
Weight: TypeAlias = Callable[[Any], "Tensor | float"]

_OF_VALID_TARGETS = (F.cross_entropy, F.nll_loss)
_OF_ELEMENTS = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.soft_margin_loss,
)
_FUNCTION_OF_MODULE: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.SoftMarginLoss: F.soft_margin_loss,
}


@dataclass(frozen=True)
class MicrobatchLoss:
    """How the loss of one microbatch is computed, and how it counts.

    Attributes:
        function: the loss of a microbatch from output and target.
        weight: the weight of a microbatch, from its target; None if the losses are added up and
            nothing is divided.
        is_sum: whether `function` returns the weighted sum already, and not a mean.
    """

    function: LossFunction
    weight: Weight | None
    is_sum: bool

    def weight_of(self, target: Any) -> Tensor | float:
        return 1.0 if self.weight is None else self.weight(target)


@dataclass(frozen=True)
class Scales:
    """By what losses of one microbatch are multiplied.

    Attributes:
        loss: of the loss function's result.
        mean: of a mean over the microbatch.
    """

    loss: Tensor
    mean: Tensor


def microbatch_loss(function: LossFunction, weight: Weight | None = None) -> MicrobatchLoss:
    """Return how a loss counts.

    Args:
        function: a loss of torch.nn.functional or torch.nn with a mean over valid targets or over
            elements, also as functools.partial: it is called with reduction="sum" and divided once.
            With reduction="sum" nothing is divided. Another function is a mean over its microbatch.
        weight: what that mean is over, from the target; by default the rows of the target.

    Raises:
        ValueError: reduction="none".
    """
    if not callable(function):
        raise TypeError(f"loss_fn={function!r}: give a function of output and target")
    known, keywords = _known_loss(function)
    reduction = keywords.get("reduction", "mean") if known is not None else "mean"
    if reduction == "none":
        raise ValueError(
            f"loss_fn={function!r} has reduction='none', which gives no loss: use 'mean' or 'sum'"
        )
    if reduction == "sum":
        return MicrobatchLoss(function, None, True)
    if weight is not None:
        return MicrobatchLoss(function, weight, False)
    if known in _OF_VALID_TARGETS:
        count: Weight = functools.partial(_valid_targets, keywords=keywords)
        return MicrobatchLoss(_with_sum(function), count, True)
    if known in _OF_ELEMENTS:
        return MicrobatchLoss(_with_sum(function), _elements, True)
    return MicrobatchLoss(function, _rows, False)


def _known_loss(
    function: LossFunction,
) -> tuple[Callable[..., Tensor] | None, Mapping[str, Any]]:
    """Return the function of torch behind a loss, None if there is none, and its keywords."""
    if isinstance(function, nn.Module):
        return _FUNCTION_OF_MODULE.get(type(function)), vars(function) | dict(
            function.named_buffers()
        )
    keywords: dict[str, Any] = {}
    inner: Any = function
    while isinstance(inner, functools.partial):
        if inner.args:
            return None, {}
        keywords = {**inner.keywords, **keywords}
        inner = inner.func
    known = inner if inner in (*_OF_VALID_TARGETS, *_OF_ELEMENTS) else None
    return known, keywords


def _with_sum(function: LossFunction) -> LossFunction:
    """Return the same loss with reduction="sum"."""
    summed: Any = function
    if not isinstance(function, nn.Module):
        return functools.partial(summed, reduction="sum")
    summed = copy.copy(function)
    summed.reduction = "sum"
    return summed


def _valid_targets(target: Tensor, keywords: Mapping[str, Any]) -> Tensor | float:
    """Return what the mean of a cross entropy divides by."""
    class_weights = keywords.get("weight")
    if target.is_floating_point():  # probabilities of classes, in dim 1
        classes = target.shape[1] if target.ndim > 1 else target.shape[0]
        return target.numel() / max(classes, 1)
    valid = target != keywords.get("ignore_index", -100)
    if class_weights is None:
        return valid.sum()
    return class_weights[target.where(valid, 0)].where(valid, 0).sum()


def _elements(target: Tensor) -> float:
    return target.numel()


def _rows(target: Any) -> float:
    for leaf in pytree.tree_leaves(target):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    raise ValueError(
        "the loss is a mean over the rows of a microbatch, and the targets have none: give "
        "weight=..., a function of the target"
    )


def total_weight(weights: list[Tensor | float], device: torch.device) -> Tensor:
    """Return the sum of weights, 0-d in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for weight in weights:
        total = total + weight
    return total
