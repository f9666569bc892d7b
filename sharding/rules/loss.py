"""Losses: one value for each element or target, then a mean that is right for uneven shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .notation import Rule, einrule
from .pointwise import broadcast, tensors_of
from .reduction import accumulator_dtype
from .registry import handler, rule


def _check_arguments(reduction: str, **legacy: Any) -> None:
    given = [name for name, value in legacy.items() if value is not None]
    if given:
        raise ValueError(f"{given[0]}= is deprecated by torch and not supported on ShardedTensors; say reduction=")
    if reduction not in ("none", "mean", "sum", "batchmean"):
        raise ValueError(f"{reduction} is not a valid value for reduction")


# -- by element -------------------------------------------------------------------------------------------------------


def _elementwise(func: Callable[..., Any]) -> Callable[..., Any]:
    """A loss with one value per element: its mean is the sum over all ranks by the global count."""

    def run(input: Any, target: Any, *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
        _check_arguments(reduction, **{name: kwargs.pop(name, None) for name in ("size_average", "reduce")})
        if reduction == "none":
            return NotImplemented
        each = func(input, target, *args, reduction="none", **kwargs)
        if reduction == "sum":
            return each.sum()
        if reduction == "batchmean":
            return each.sum() / input.shape[0]
        weight = kwargs.get("weight") if func is F.mse_loss else None
        return each.mean() if weight is None else each.sum() / weight.sum()

    return run


def _rule_by_element(*args: Any, **kwargs: Any) -> Rule:
    return broadcast(*tensors_of(*args, **kwargs))


for _func in (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div, F.soft_margin_loss, F.poisson_nll_loss,
):  # fmt: skip
    handler(also=(_func,))(_elementwise(_func))
    rule(also=(_func,))(_rule_by_element)


# -- by class ---------------------------------------------------------------------------------------------------------


@handler("cross_entropy")
def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """The sum over all ranks by the global count (or weight) of targets that are not ignored."""
    _check_arguments(reduction, size_average=size_average, reduce=reduce)
    if reduction == "none":
        return NotImplemented
    options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    each = F.cross_entropy(input, target, reduction="none", **options)
    return _reduced(each, target, weight, ignore_index, reduction)


@handler("nll_loss")
def _nll_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    _check_arguments(reduction, size_average=size_average, reduce=reduce)
    if reduction == "none":
        return NotImplemented
    each = F.nll_loss(input, target, weight=weight, ignore_index=ignore_index, reduction="none")
    return _reduced(each, target, weight, ignore_index, reduction)


def _reduced(each: Any, target: Any, weight: Any, ignore_index: int, reduction: str) -> Any:
    wide = accumulator_dtype(each.dtype)
    total = each.sum(dtype=wide)
    if reduction == "sum":
        return total.to(each.dtype)
    if target.is_floating_point():  # class probabilities
        return (total / each.numel()).to(each.dtype)
    counted = target != ignore_index
    if weight is not None:
        rows = F.embedding(torch.where(counted, target, 0), weight.detach()[:, None])
        counted = torch.where(counted, rows[..., 0], 0.0)
    return (total / counted.sum(dtype=wide)).to(each.dtype)


@rule("cross_entropy", "nll_loss")
def _per_target(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "none",
    label_smoothing: float = 0.0,
) -> Rule:
    """One loss per target; the class dim is whole."""
    batch = "" if input.ndim == 1 else "n "
    rest = " ".join(f"d{i}" for i in range(input.ndim - 2))
    labels = f"{batch}[c] {rest}" if target.is_floating_point() else f"{batch}{rest}"
    return einrule(f"{batch}[c] {rest}, {labels}, [c] -> {batch}{rest}", input, target, weight)
