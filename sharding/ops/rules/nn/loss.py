"""Losses: one value for each element or row, then a mean that is right for uneven shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..decomposition_utils import body_of, layout_of, settled, splitting_axes
from ..elementwise.pointwise import broadcast, tensors_of
from ..notation import Rule, einrule
from ..reductions.reduction import accumulator_dtype
from ..registry import form, handler, rule


def check_arguments(reduction: str, **legacy: Any) -> None:
    """Refuse what torch has deprecated, and reductions that it does not know.

    Raises:
        ValueError: naming the argument.
    """
    given = [name for name, value in legacy.items() if value is not None]
    if given:
        raise ValueError(f"{given[0]}= is deprecated by torch and not supported on ShardedTensors; say reduction=")
    if reduction not in ("none", "mean", "sum", "batchmean"):
        raise ValueError(f"{reduction} is not a valid value for reduction")


def narrowed(x: Any, dtype: torch.dtype) -> Any:
    """The result in its dtype; a sum is added up over all ranks before it is rounded."""
    return x if x.dtype is dtype else settled(x).to(dtype)


def _in_all(*operands: Tensor) -> Rule:
    """The rule of one number made of all elements, which are whole."""
    ndim = max(x.ndim for x in operands)
    names = [" ".join(f"[d{ndim - x.ndim + i}]" for i in range(x.ndim)) for x in operands]
    return einrule(f"{', '.join(names)} ->", *operands)


def _averaged(each: Any, reduction: str) -> Any:
    total = each.sum(dtype=accumulator_dtype(each.dtype))
    return narrowed(total / each.numel() if reduction == "mean" else total, each.dtype)


def _is_split(*args: Any, **kwargs: Any) -> bool:
    layouts = [layout_of(x) for x in tensors_of(*args, **kwargs)]
    return any(splitting_axes(layout, d) for layout in layouts for d in range(len(layout.shape)))


# -- by element -------------------------------------------------------------------------------------------------------


def _reduced_form(func: Callable[..., Any], run: Callable[..., Any]) -> None:
    """The mean or sum of split operands is that of one loss for each element or row, over all ranks."""

    def make(*args: Any, reduction: str = "mean", **kwargs: Any) -> Callable[..., Any] | None:
        legacy = {name: kwargs.pop(name, None) for name in ("size_average", "reduce")}
        check_arguments(reduction, **legacy)
        return run if reduction != "none" and _is_split(*args, **kwargs) else None

    form(also=(func,))(make)


def _run(func: Callable[..., Any], *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
    options = {name: value for name, value in kwargs.items() if name not in ("size_average", "reduce")}
    return _averaged(func(*args, reduction="none", **options), reduction)


def _run_by_weight(func: Callable[..., Any], *args: Any, reduction: str = "mean", weight: Any = None, **kwargs: Any) -> Any:
    """The mean by weight, as `mse_loss` has it."""
    total = _run(func, *args, reduction="sum" if weight is not None else reduction, weight=weight, **kwargs)
    return total / weight.sum() if weight is not None and reduction == "mean" else total


def _run_kl_div(func: Callable[..., Any], input: Any, *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
    batch = input.shape[0] if reduction == "batchmean" and input.ndim else 1
    return _run(func, input, *args, reduction="sum" if reduction == "batchmean" else reduction, **kwargs) / batch


def _rule_by_element(*args: Any, reduction: str = "mean", **kwargs: Any) -> Rule:
    return (broadcast if reduction == "none" else _in_all)(*tensors_of(*args, **kwargs))


_RUNS = {F.mse_loss: _run_by_weight, F.kl_div: _run_kl_div}

for _func in (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div, F.soft_margin_loss, F.poisson_nll_loss, F.hinge_embedding_loss, F.margin_ranking_loss,
):  # fmt: skip
    _reduced_form(_func, partial(_RUNS.get(_func, _run), _func))
    rule(also=(_func,))(_rule_by_element)


@handler(also=(F.l1_loss,))
def _l1_loss(input: Any, target: Any, *, weight: Any = None, reduction: str = "mean", **legacy: Any) -> Any:
    """With a weight, the mean by weight. torch's `l1_loss` does not hand its weight on: it is read where it was given."""
    weight = _argument_of(F.l1_loss, "weight") if weight is None else weight
    if weight is None:
        return NotImplemented
    check_arguments(reduction, **legacy)
    if weight.shape != input.shape:
        raise ValueError("Weights and input must have the same size.")
    each = (input - target).abs() * weight
    if reduction == "none":
        return each
    return each.sum() / weight.sum() if reduction == "mean" else each.sum()


def _argument_of(func: Any, name: str) -> Any:
    """An argument of a call of `func` that is going on; None where it has not got that far.

    Under a mode torch calls the function once more from itself, without the argument: those calls are of one input.
    """
    frame, found, first = inspect.currentframe(), None, None
    while frame is not None and found is None:
        if frame.f_code is func.__code__:
            first = frame.f_locals["input"] if first is None else first
            found = frame.f_locals[name] if frame.f_locals["input"] is first else None
        frame = frame.f_back
    return found


# -- by row -----------------------------------------------------------------------------------------------------------


def _by_row(func: Callable[..., Any], maker: Callable[..., Rule]) -> None:
    """A loss with one value for each row. The maker gives the rule without reduction: features are whole there."""

    def make(*args: Any, reduction: str = "mean", **kwargs: Any) -> Rule:
        return maker(*args, **kwargs) if reduction == "none" else _in_all(*tensors_of(*args, **kwargs))

    _reduced_form(func, partial(_run, func))
    rule(also=(func,))(make)


def _cosine_embedding(input1: Tensor, input2: Tensor, target: Tensor, **_: Any) -> Rule:
    rows = "n " if input1.ndim > 1 else ""
    return einrule(f"{rows}[d], {rows}[d], {rows} -> {rows}", input1, input2, target)


def _triplet_margin(anchor: Tensor, positive: Tensor, negative: Tensor, **_: Any) -> Rule:
    return einrule("... [d], ... [d], ... [d] -> ...", anchor, positive, negative)


def _multi_margin(input: Tensor, target: Tensor, weight: Tensor | None = None, **_: Any) -> Rule:
    rows = "n " if input.ndim > 1 else ""
    return einrule(f"{rows}[c], {rows}, [c] -> {rows}", input, target, weight, result=input.new_empty(input.shape[:-1]))


def _multilabel_margin(input: Tensor, target: Tensor, **_: Any) -> Rule:
    rows = "n " if input.ndim > 1 else ""
    return einrule(f"{rows}[c], {rows}[c] -> {rows}", input, target, result=input.new_empty(input.shape[:-1]))


_by_row(F.cosine_embedding_loss, _cosine_embedding)
_by_row(F.triplet_margin_loss, _triplet_margin)
_by_row(F.multi_margin_loss, _multi_margin)
_by_row(F.multilabel_margin_loss, _multilabel_margin)


# -- of sequences -----------------------------------------------------------------------------------------------------


@rule(also=(F.ctc_loss,))
def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *, reduction: str = "mean", **_: Any
) -> Rule:
    """The batch may be split where each operand has its part of it: not targets that stand one after the other."""
    operands = tensors_of(log_probs, targets, input_lengths, target_lengths)
    if reduction != "none":
        return replace(_in_all(*operands), result=log_probs.new_empty(()))
    batch = "n" if targets.ndim == 2 and len(operands) == 4 else "[n]"
    rows = batch if log_probs.ndim == 3 else ""
    labels = f"{rows} [s]" if targets.ndim == 2 else "[s]"
    lengths = [rows if x.ndim else "" for x in operands[2:]]
    pattern = f"{', '.join([f'[t] {rows} [c]', labels, *lengths])} -> {rows}"
    result = log_probs.new_empty(log_probs.shape[1:2] if rows else ())
    return einrule(pattern, *operands, local=_ctc_local, result=result)


def _ctc_local(log_probs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch's own, which refuses an empty batch."""
    return F.ctc_loss(log_probs, *args, **kwargs) if log_probs.numel() else log_probs.sum((0, -1))


@form(also=(F.ctc_loss,))
def _ctc_loss_form(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *, reduction: str = "mean", **_: Any
) -> Callable[..., Any] | None:
    tensors = isinstance(target_lengths, Tensor) and _is_split(log_probs, targets, input_lengths, target_lengths)
    return _run_ctc_loss if tensors and reduction != "none" else None


def _run_ctc_loss(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *, reduction: str, **options: Any) -> Any:
    """The mean is over sequences, of the loss by the length of the target."""
    each = F.ctc_loss(log_probs, targets, input_lengths, target_lengths, reduction="none", **options)
    return _averaged(each / target_lengths.clamp_min(1) if reduction == "mean" else each, reduction)


# -- made of other operators ------------------------------------------------------------------------------------------


def _run_body(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    check_arguments(kwargs.get("reduction", "mean"), **{name: kwargs.get(name) for name in ("size_average", "reduce")})
    return body_of(func)(*[settled(x) if isinstance(x, Tensor) else x for x in args], **kwargs)


for _func in (F.multilabel_soft_margin_loss, F.gaussian_nll_loss, F.triplet_margin_with_distance_loss):
    form(also=(_func,))(lambda *args, func=_func, **kwargs: partial(_run_body, func))


if hasattr(F, "linear_cross_entropy"):  # torch 2.13

    @form("linear_cross_entropy")
    def _linear_cross_entropy(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        return _run_linear_cross_entropy


def _run_linear_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> Any:
    """The logits, then their cross entropy. `options` say how torch should save memory on the way; they change no value."""
    return body_of(F.linear_cross_entropy)(*args, **kwargs)


# -- under torch ------------------------------------------------------------------------------------------------------

# The arguments of torch's own functions, which take a reduction as a number.
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


def _run_of_torch(name: str, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(_OF_TORCH[name].split(), args, strict=False)) | kwargs
    reduction = ("none", "mean", "sum")[given.pop("reduction", 0)]  # where none is given, torch's bindings take 0
    return getattr(F, name)(**given, reduction=reduction)


for _name in _OF_TORCH:
    form(also=(getattr(torch, _name),))(lambda *args, name=_name, **kwargs: partial(_run_of_torch, name))
