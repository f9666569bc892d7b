"""Cross entropy and the negative log likelihood. Over split classes the logits stay where they are.

    logits, 6 classes over 2 ranks   [a b c | d e f]      target of this row: 4
    maximum, sum of exponentials      m, s    m, s        two small reductions
    logit of the target               0       e - m       pending: each rank takes the targets that it has
    loss                              log(s) - (e - m)    one reduction of the sum over all rows

A rank receives a few numbers for each row, whatever the number of classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....layout.layout import Layout
from ....layout.spec import P
from ..decomposition_utils import check_by_torch, from_parts, layout_of, reduced, settled, splits, splitting_axes
from ..notation import Rule, einrule
from ..reductions.reduction import accumulator_dtype
from ..registry import form, rule
from .loss import check_arguments, narrowed
from .softmax import log_sum_exp, peak_of


@rule("cross_entropy", "nll_loss")
def _one_for_each_target(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Rule:
    """One loss per target, the class dim being whole; or the reduced loss, everything being whole."""
    names = ["[c]"] if input.ndim == 1 else ["n", "[c]", *[f"d{i}" for i in range(input.ndim - 2)]]
    if reduction != "none":
        names = [f"[{name.strip('[]')}]" for name in names]
    rows = " ".join(name for name in names if name != "[c]")
    labels = " ".join(names) if target.is_floating_point() else rows
    return einrule(f"{' '.join(names)}, {labels}, [c] -> {rows if reduction == 'none' else ''}", input, target, weight)


def _maker(func: Callable[..., Any], of_split_classes: Callable[..., Any]) -> Callable[..., Any]:
    of_rows = partial(_of_rows, func)

    def make(
        input: Any,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Callable[..., Any] | None:
        check_arguments(reduction, size_average=size_average, reduce=reduce)
        if input.ndim and input.shape[_class_dim(input)] and splits(input, [_class_dim(input)]):
            check_by_torch(func, input, target, weight, ignore_index=ignore_index, reduction=reduction)
            return of_split_classes
        rows_split = any(splitting_axes(layout_of(x), d) for x in (input, target) for d in range(x.ndim))
        return of_rows if reduction != "none" and rows_split else None

    return make


def _class_dim(input: Any) -> int:
    return 0 if input.ndim == 1 else 1


# -- whole classes, split rows ----------------------------------------------------------------------------------------


def _of_rows(func: Callable[..., Any], input: Any, target: Any, *, reduction: str, **options: Any) -> Any:
    """The sum over all ranks by the global count (or weight) of targets that are not ignored."""
    options = {name: value for name, value in options.items() if name not in ("size_average", "reduce")}
    each = func(input, target, reduction="none", **options)
    total = each.sum(dtype=accumulator_dtype(each.dtype))
    if reduction == "mean" and target.is_floating_point():
        total = total / each.numel()
    elif reduction == "mean":
        total = total / _weights(target, options["weight"], options["ignore_index"], total.dtype).sum()
    return narrowed(total, each.dtype)


def _weights(target: Any, weight: Any, ignore_index: int, dtype: torch.dtype) -> Any:
    """What each target counts: its class' weight, or one; nothing if it is ignored."""
    counted = target != ignore_index
    if weight is None:
        return counted.to(dtype)
    rows = F.embedding(torch.where(counted, target, 0), weight.detach()[:, None].to(dtype))
    return torch.where(counted, settled(rows[..., 0]), 0)


# -- split classes ----------------------------------------------------------------------------------------------------
# Everything here keeps the class dim, with one element where it is reduced.


def _of_logits(
    input: Any, target: Any, *, weight: Any, ignore_index: int, reduction: str, label_smoothing: float = 0.0, **_: Any
) -> Any:
    if target.is_floating_point():
        return _of_probabilities(input, target, weight, reduction, label_smoothing)
    at, x = _class_dim(input), settled(input)
    peak = peak_of(x, (at,))
    labels = _labels_beside(x, target, at)
    log_total = torch.where(labels != ignore_index, log_sum_exp(x, peak, (at,)), 0)
    weights = _weights(labels, weight, ignore_index, peak.dtype)
    hits = _at_labels(x, labels, at, ignore_index, peak)
    if not label_smoothing:
        return _finished(weights * log_total, weights * hits, weights, at, reduction, x.dtype)
    share, of_all, distances = _over_all_classes(x - peak, weight, at, label_smoothing)
    held = log_total * ((1 - label_smoothing) * weights + share * of_all)
    pending = (1 - label_smoothing) * weights * hits + share * torch.where(labels != ignore_index, distances, 0)
    return _finished(held, pending, weights, at, reduction, x.dtype)


def _over_all_classes(distance: Any, weight: Any, at: int, label_smoothing: float) -> tuple[float, Any, Any]:
    """What label smoothing gives every class, the weight of all of them, and the sum of logits by weight."""
    share, classes = label_smoothing / distance.shape[at], distance.shape[at]
    if weight is None:
        return share, classes, distance.sum(at, keepdim=True)
    each = weight.detach().to(distance.dtype).view(classes, *[1] * (distance.ndim - 1 - at))
    return share, settled(each.sum()), (distance * each).sum(at, keepdim=True)


def _of_log_probabilities(input: Any, target: Any, *, weight: Any, ignore_index: int, reduction: str, **_: Any) -> Any:
    at, x = _class_dim(input), settled(input)
    labels = _labels_beside(x, target, at)
    weights = _weights(labels, weight, ignore_index, accumulator_dtype(x.dtype))
    hits = weights * _at_labels(x, labels, at, ignore_index)
    return _finished(0, hits, weights, at, reduction, x.dtype)


def _of_probabilities(input: Any, target: Any, weight: Any, reduction: str, label_smoothing: float) -> Any:
    at, classes = _class_dim(input), input.shape[_class_dim(input)]
    log_probabilities = F.log_softmax(input, at, dtype=accumulator_dtype(input.dtype))
    smoothed = target * (1 - label_smoothing) + label_smoothing / classes if label_smoothing else target
    each = log_probabilities * smoothed
    if weight is not None:
        each = each * weight.view(classes, *[1] * (input.ndim - 1 - at))
    total = -each.sum(at if reduction == "none" else None)
    return narrowed(total / (input.numel() // classes) if reduction == "mean" else total, input.dtype)


def _labels_beside(x: Any, target: Any, at: int) -> Any:
    """The targets cut as the rows of x are."""
    cuts = [cut for d, cut in enumerate(x.spec.cuts) if d != at]
    return target.redistribute(P.of_cuts(cuts, {})).unsqueeze(at)


def _at_labels(x: Any, labels: Any, at: int, ignore_index: int, *peak: Any) -> Any:
    """x at each row's label, less the peak; pending over the axes that split the classes."""
    dtype = accumulator_dtype(x.dtype)
    take = partial(_hits, x._layout, at, ignore_index)
    return from_parts(reduced(x._layout.replace(dtype=dtype), (at,)), take, x, labels, *peak)


def _hits(layout: Layout, at: int, ignore_index: int, x: Tensor, labels: Tensor, peak: Tensor | None = None) -> Tensor:
    """For the labels among this rank's classes; zero for others."""
    (start, stop), dtype = layout.box[at], accumulator_dtype(x.dtype)
    is_class = (labels >= 0) & (labels < layout.shape[at]) | (labels == ignore_index)
    _check_labels(labels, is_class)
    if start == stop:
        return x.sum(at, keepdim=True, dtype=dtype)
    here = (labels >= start) & (labels < stop) & (labels != ignore_index)
    found = x.gather(at, torch.where(here, labels - start, torch.where(is_class, 0, layout.shape[at]))).to(dtype)
    return torch.where(here, found if peak is None else found - peak, 0)


def _check_labels(labels: Tensor, is_class: Tensor) -> None:
    """On the CPU, an error; elsewhere looking would make the host wait, and it is left to `gather`, as torch leaves it.

    Raises:
        IndexError: a label that is no class.
    """
    if labels.device.type == "cpu" and not is_class.all():
        raise IndexError(f"Target {labels[~is_class][0].item()} is out of bounds.")


def _finished(held: Any, pending: Any, weights: Any, at: int, reduction: str, dtype: torch.dtype) -> Any:
    """The loss `held - pending`. Reduced over the rows first, what is pending is a single number."""
    if reduction == "none":
        return narrowed((held - pending).squeeze(at), dtype)
    total = (held if isinstance(held, int) else held.sum()) - pending.sum()
    return narrowed(total / weights.sum() if reduction == "mean" else total, dtype)


form("cross_entropy")(_maker(F.cross_entropy, _of_logits))
form("nll_loss")(_maker(F.nll_loss, _of_log_probabilities))
