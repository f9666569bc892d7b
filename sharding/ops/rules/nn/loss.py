"""Losses: one value for each element or row, then a mean that is right for uneven parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .....mesh.comm.call_site import arguments_of_calls
from ..decomposition_utils import body_of, is_split, reduce_pending
from ..elementwise.pointwise import broadcast, tensors_of
from ..notation import Rule, einrule
from ..reductions.reduction import accumulator_dtype
from ..registry import decomposition, decomposition_maker, handler, rule


def check_arguments(reduction: str, **legacy: Any) -> None:
    """Refuse arguments that torch has deprecated, and reductions that it does not have.

    Raises:
        ValueError: naming the argument.
    """
    deprecated = [name for name, value in legacy.items() if value is not None]
    if deprecated:
        raise ValueError(
            f"{deprecated[0]}= is deprecated by torch and not supported on ShardedTensors; pass "
            "reduction="
        )
    if reduction not in ("none", "mean", "sum", "batchmean"):
        raise ValueError(f"{reduction} is not a valid value for reduction")


def round_result(x: Any, dtype: torch.dtype) -> Any:
    """Return the result in its dtype; a pending sum is reduced before it is rounded."""
    return x if x.dtype is dtype else reduce_pending(x).to(dtype)


def _of_all(*operands: Tensor) -> Rule:
    """Return the rule of one number made from all elements, which are whole."""
    ndim = max(x.ndim for x in operands)
    names = [" ".join(f"[d{ndim - x.ndim + i}]" for i in range(x.ndim)) for x in operands]
    return einrule(f"{', '.join(names)} ->", *operands)


def _reduce_loss(each: Any, reduction: str) -> Any:
    total = each.sum(dtype=accumulator_dtype(each.dtype))
    return round_result(total / each.numel() if reduction == "mean" else total, each.dtype)


def _any_split(*args: Any, **kwargs: Any) -> bool:
    return any(map(is_split, tensors_of(*args, **kwargs)))


# -- by element ------------------------------------------------------------------------------------


def _run(func: Callable[..., Any], *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
    for name in ("size_average", "reduce"):
        kwargs.pop(name, None)
    return _reduce_loss(func(*args, reduction="none", **kwargs), reduction)


def _run_by_weight(
    func: Callable[..., Any], *args: Any, reduction: str = "mean", weight: Any = None, **kwargs: Any
) -> Any:
    """Return the mean by weight, as `mse_loss` does."""
    if weight is None:
        return _run(func, *args, reduction=reduction, **kwargs)
    total = _run(func, *args, reduction="sum", weight=weight, **kwargs)
    return total / weight.sum() if reduction == "mean" else total


def _run_kl_div(
    func: Callable[..., Any], input: Any, *args: Any, reduction: str = "mean", **kwargs: Any
) -> Any:
    if reduction != "batchmean":
        return _run(func, input, *args, reduction=reduction, **kwargs)
    total = _run(func, input, *args, reduction="sum", **kwargs)
    return total / (input.shape[0] if input.ndim else 1)


@handler("F.l1_loss")
def _l1_loss(
    input: Any, target: Any, *, weight: Any = None, reduction: str = "mean", **legacy: Any
) -> Any:
    """Return the mean by weight, which torch's `l1_loss` does not pass to `__torch_function__`.

    Under a mode torch calls the function once more from itself, without the weight: those calls
    have the same input.
    """
    if weight is None:
        calls = arguments_of_calls(F.l1_loss, "input", "weight")
        weights = (known for x, known in calls if x is input and known is not None)
        weight = next(weights, None)
    if weight is None:
        return NotImplemented
    check_arguments(reduction, **legacy)
    if weight.shape != input.shape:
        raise ValueError("Weights and input must have the same size.")
    each = (input - target).abs() * weight
    if reduction == "none":
        return each
    return each.sum() / weight.sum() if reduction == "mean" else each.sum()


# -- by row ----------------------------------------------------------------------------------------


def _cosine_embedding(input1: Tensor, input2: Tensor, target: Tensor, **_: Any) -> Rule:
    rows = "n " if input1.ndim > 1 else ""
    return einrule(f"{rows}[d], {rows}[d], {rows} -> {rows}", input1, input2, target)


def _triplet_margin(anchor: Tensor, positive: Tensor, negative: Tensor, **_: Any) -> Rule:
    return einrule("... [d], ... [d], ... [d] -> ...", anchor, positive, negative)


def _multi_margin(input: Tensor, target: Tensor, weight: Tensor | None = None, **_: Any) -> Rule:
    rows, result = "n " if input.ndim > 1 else "", input.new_empty(input.shape[:-1])
    return einrule(f"{rows}[c], {rows}, [c] -> {rows}", input, target, weight, result=result)


def _multilabel_margin(input: Tensor, target: Tensor, **_: Any) -> Rule:
    rows, result = "n " if input.ndim > 1 else "", input.new_empty(input.shape[:-1])
    return einrule(f"{rows}[c], {rows}[c] -> {rows}", input, target, result=result)


# -- the table -------------------------------------------------------------------------------------

_BY_ELEMENT = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.soft_margin_loss,
    F.poisson_nll_loss,
    F.hinge_embedding_loss,
    F.margin_ranking_loss,
)
_BY_ROW: dict[Any, Callable[..., Rule]] = {
    F.cosine_embedding_loss: _cosine_embedding,
    F.triplet_margin_loss: _triplet_margin,
    F.multi_margin_loss: _multi_margin,
    F.multilabel_margin_loss: _multilabel_margin,
}
_RUNS = {F.mse_loss: _run_by_weight, F.kl_div: _run_kl_div}


@decomposition_maker(also=(*_BY_ELEMENT, *_BY_ROW), with_func=True)
def _loss(
    func: Any, *args: Any, reduction: str = "mean", **kwargs: Any
) -> Callable[..., Any] | None:
    """Take the mean or sum, over all ranks, of one loss for each element or row."""
    legacy = {name: kwargs.pop(name, None) for name in ("size_average", "reduce")}
    check_arguments(reduction, **legacy)
    split = reduction != "none" and _any_split(*args, **kwargs)
    return partial(_RUNS.get(func, _run), func) if split else None


@rule(also=(*_BY_ELEMENT, *_BY_ROW), with_func=True)
def _loss_rule(func: Any, *args: Any, reduction: str = "mean", **kwargs: Any) -> Rule:
    if reduction != "none":
        return _of_all(*tensors_of(*args, **kwargs))
    by_row = _BY_ROW.get(func)
    return by_row(*args, **kwargs) if by_row else broadcast(*tensors_of(*args, **kwargs))


# -- of sequences ----------------------------------------------------------------------------------


def _ctc_rule(a: Any) -> Rule:
    """Return the rule: the batch may be split if every operand has a dim for it."""
    operands = tensors_of(a.log_probs, a.targets, a.input_lengths, a.target_lengths)
    if a.reduction != "none":
        return replace(_of_all(*operands), result=a.log_probs.new_empty(()))
    batch = "n" if a.targets.ndim == 2 and len(operands) == 4 else "[n]"
    rows = batch if a.log_probs.ndim == 3 else ""
    labels = f"{rows} [s]" if a.targets.ndim == 2 else "[s]"
    lengths = [rows if x.ndim else "" for x in operands[2:]]
    pattern = f"{', '.join([f'[t] {rows} [c]', labels, *lengths])} -> {rows}"
    result = a.log_probs.new_empty(a.log_probs.shape[1:2] if rows else ())
    return einrule(pattern, *operands, local=_ctc_local, result=result)


def _ctc_local(log_probs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call torch's own function, which refuses an empty batch."""
    return F.ctc_loss(log_probs, *args, **kwargs) if log_probs.numel() else log_probs.sum((0, -1))


def _ctc_applies(a: Any) -> bool:
    tensors = (a.log_probs, a.targets, a.input_lengths, a.target_lengths)
    return isinstance(a.target_lengths, Tensor) and a.reduction != "none" and _any_split(*tensors)


@decomposition("F.ctc_loss", when=_ctc_applies, rule=_ctc_rule)
def _ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    *,
    reduction: str = "mean",
    **options: Any,
) -> Any:
    """Take the mean over sequences, of the loss divided by the length of the target."""
    each = F.ctc_loss(
        log_probs, targets, input_lengths, target_lengths, reduction="none", **options
    )
    return _reduce_loss(
        each / target_lengths.clamp_min(1) if reduction == "mean" else each, reduction
    )


# -- made of other operators -----------------------------------------------------------------------


@decomposition(
    "F.multilabel_soft_margin_loss",
    "F.gaussian_nll_loss",
    "F.triplet_margin_with_distance_loss",
    with_func=True,
)
def _composed_loss(func: Any, *args: Any, **kwargs: Any) -> Any:
    legacy = {name: kwargs.get(name) for name in ("size_average", "reduce")}
    check_arguments(kwargs.get("reduction", "mean"), **legacy)
    args = tuple(reduce_pending(x) if isinstance(x, Tensor) else x for x in args)
    return body_of(func)(*args, **kwargs)


if hasattr(F, "linear_cross_entropy"):  # torch 2.13

    @decomposition("linear_cross_entropy")
    def _linear_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> Any:
        """Compute the logits, then their cross entropy; `options` change no value."""
        return body_of(F.linear_cross_entropy)(*args, **kwargs)


# -- under torch -----------------------------------------------------------------------------------

# Parameters of the functions in `torch`, which take the reduction as a number.
_OF_TORCH = {
    "cosine_embedding_loss": "input1 input2 target margin reduction",
    "hinge_embedding_loss": "input target margin reduction",
    "margin_ranking_loss": "input1 input2 target margin reduction",
    "triplet_margin_loss": "anchor positive negative margin p eps swap reduction",
    "poisson_nll_loss": "input target log_input full eps reduction",
    "binary_cross_entropy_with_logits": "input target weight pos_weight reduction",
    "kl_div": "input target reduction",
    "ctc_loss": "log_probs targets input_lengths target_lengths blank reduction zero_infinity",
}


@decomposition(*(f"torch.{name}" for name in _OF_TORCH), with_func=True)
def _loss_by_number(func: Any, *args: Any, **kwargs: Any) -> Any:
    named = dict(zip(_OF_TORCH[func.__name__].split(), args, strict=False)) | kwargs
    number = named.pop("reduction", 0)  # torch's bindings default to 0
    return getattr(F, func.__name__)(**named, reduction=("none", "mean", "sum")[number])
