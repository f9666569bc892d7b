"""Cross entropy and the negative log likelihood. Over split classes the logits are not moved.

    logits, 6 classes over 2 ranks   [a b c | d e f]      target of this row: 4
    maximum, sum of exponentials      m, s    m, s        two small reductions
    logit of the target               0       e - m       pending: each rank looks among its classes
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
from ..decomposition_utils import from_parts, is_split, layout_after_reduction, reduce_pending
from ..notation import Rule, einrule
from ..reductions.reduction import accumulator_dtype
from ..registry import decomposition_maker
from .loss import check_arguments, round_result
from .softmax import log_sum_exp, max_over


def _rule(a: Any) -> Rule:
    """Give one loss per target, with whole classes; or the reduced loss, with everything whole."""
    names = (
        ["[c]"] if a.input.ndim == 1 else ["n", "[c]", *[f"d{i}" for i in range(a.input.ndim - 2)]]
    )
    if a.reduction != "none":
        names = [f"[{name.strip('[]')}]" for name in names]
    rows = " ".join(name for name in names if name != "[c]")
    labels = " ".join(names) if a.target.is_floating_point() else rows
    pattern = f"{' '.join(names)}, {labels}, [c] -> {rows if a.reduction == 'none' else ''}"
    return einrule(pattern, a.input, a.target, a.weight)


@decomposition_maker("cross_entropy", "nll_loss", with_func=True, rule=_rule)
def _make(
    func: Any,
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
    if input.ndim and input.shape[_class_dim(input)] and is_split(input, [_class_dim(input)]):
        with torch.no_grad():
            func(input, target, weight, ignore_index=ignore_index, reduction=reduction)
        return _of_logits if func is F.cross_entropy else _of_log_probabilities
    split = reduction != "none" and (is_split(input) or is_split(target))
    return partial(_of_rows, func) if split else None


def _class_dim(input: Any) -> int:
    return 0 if input.ndim == 1 else 1


# -- whole classes, split rows ---------------------------------------------------------------------


def _of_rows(
    func: Callable[..., Any], input: Any, target: Any, *, reduction: str, **options: Any
) -> Any:
    """Divide the sum over all ranks by the global count (or weight) of targets not ignored."""
    for name in ("size_average", "reduce"):
        options.pop(name, None)
    each = func(input, target, reduction="none", **options)
    total = each.sum(dtype=accumulator_dtype(each.dtype))
    if reduction == "mean" and target.is_floating_point():
        total = total / each.numel()
    elif reduction == "mean":
        weights = _weights(target, options["weight"], options["ignore_index"], total.dtype)
        total = total / weights.sum()
    return round_result(total, each.dtype)


def _weights(target: Any, weight: Any, ignore_index: int, dtype: torch.dtype) -> Any:
    """Return the weight of each target: that of its class, or one; zero if it is ignored."""
    counted = target != ignore_index
    if weight is None:
        return counted.to(dtype)
    rows = F.embedding(torch.where(counted, target, 0), weight.detach()[:, None].to(dtype))
    return torch.where(counted, reduce_pending(rows[..., 0]), 0)


# -- split classes ---------------------------------------------------------------------------------
# All tensors keep the class dim, with one element where it is reduced.


def _of_logits(
    input: Any,
    target: Any,
    *,
    weight: Any,
    ignore_index: int,
    reduction: str,
    label_smoothing: float = 0.0,
    **_: Any,
) -> Any:
    if target.is_floating_point():
        return _of_probabilities(input, target, weight, reduction, label_smoothing)
    at, x = _class_dim(input), reduce_pending(input)
    peak = max_over(x, (at,))
    labels = _align_labels(x, target, at)
    log_total = torch.where(labels != ignore_index, log_sum_exp(x, peak, (at,)), 0)
    weights = _weights(labels, weight, ignore_index, peak.dtype)
    hits = _at_labels(x, labels, at, ignore_index, peak)
    if not label_smoothing:
        return _finish_loss(weights * log_total, weights * hits, weights, at, reduction, x.dtype)
    share, of_all, distances = _over_all_classes(x - peak, weight, at, label_smoothing)
    held = log_total * ((1 - label_smoothing) * weights + share * of_all)
    pending = (1 - label_smoothing) * weights * hits + share * torch.where(
        labels != ignore_index, distances, 0
    )
    return _finish_loss(held, pending, weights, at, reduction, x.dtype)


def _over_all_classes(
    distance: Any, weight: Any, at: int, label_smoothing: float
) -> tuple[float, Any, Any]:
    """Return each class's share in label smoothing, the sum of weights, and that of logits."""
    share, classes = label_smoothing / distance.shape[at], distance.shape[at]
    if weight is None:
        return share, classes, distance.sum(at, keepdim=True)
    each = weight.detach().to(distance.dtype).view(classes, *[1] * (distance.ndim - 1 - at))
    return share, reduce_pending(each.sum()), (distance * each).sum(at, keepdim=True)


def _of_log_probabilities(
    input: Any, target: Any, *, weight: Any, ignore_index: int, reduction: str, **_: Any
) -> Any:
    at, x = _class_dim(input), reduce_pending(input)
    labels = _align_labels(x, target, at)
    weights = _weights(labels, weight, ignore_index, accumulator_dtype(x.dtype))
    hits = weights * _at_labels(x, labels, at, ignore_index)
    return _finish_loss(0, hits, weights, at, reduction, x.dtype)


def _of_probabilities(
    input: Any, target: Any, weight: Any, reduction: str, label_smoothing: float
) -> Any:
    at, classes = _class_dim(input), input.shape[_class_dim(input)]
    log_probabilities = F.log_softmax(input, at, dtype=accumulator_dtype(input.dtype))
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / classes
    each = log_probabilities * target
    if weight is not None:
        each = each * weight.view(classes, *[1] * (input.ndim - 1 - at))
    total = -each.sum(at if reduction == "none" else None)
    if reduction == "mean":
        total = total / (input.numel() // classes)
    return round_result(total, input.dtype)


def _align_labels(x: Any, target: Any, at: int) -> Any:
    """Return the targets split as the rows of x are."""
    cuts = [cut for d, cut in enumerate(x.spec.cuts) if d != at]
    return target.redistribute(P.of_cuts(cuts, {})).unsqueeze(at)


def _at_labels(x: Any, labels: Any, at: int, ignore_index: int, *peak: Any) -> Any:
    """Return x at each row's label, less the peak; pending over the axes that split the classes."""
    dtype = accumulator_dtype(x.dtype)
    take = partial(_hits, x._layout, at, ignore_index)
    return from_parts(
        layout_after_reduction(x._layout.replace(dtype=dtype), (at,)), take, x, labels, *peak
    )


def _hits(
    layout: Layout,
    at: int,
    ignore_index: int,
    x: Tensor,
    labels: Tensor,
    peak: Tensor | None = None,
) -> Tensor:
    """Look up the labels among this rank's classes; others give zero.

    Raises:
        IndexError: a label that is no class.
    """
    (start, stop), dtype = layout.box[at], accumulator_dtype(x.dtype)
    is_class = (labels >= 0) & (labels < layout.shape[at]) | (labels == ignore_index)
    # Elsewhere reading values would synchronise with the device, and `gather` checks them, as in
    # torch.
    if labels.device.type == "cpu" and not is_class.all():
        raise IndexError(f"Target {labels[~is_class][0].item()} is out of bounds.")
    if start == stop:
        return x.sum(at, keepdim=True, dtype=dtype)
    is_local = (labels >= start) & (labels < stop) & (labels != ignore_index)
    index = torch.where(is_local, labels - start, torch.where(is_class, 0, layout.shape[at]))
    hits = x.gather(at, index).to(dtype)
    return torch.where(is_local, hits if peak is None else hits - peak, 0)


def _finish_loss(
    held: Any, pending: Any, weights: Any, at: int, reduction: str, dtype: torch.dtype
) -> Any:
    """Return the loss `held - pending`. With the rows reduced first, a single number is pending."""
    if reduction == "none":
        return round_result((held - pending).squeeze(at), dtype)
    total = (held if isinstance(held, int) else held.sum()) - pending.sum()
    return round_result(total / weights.sum() if reduction == "mean" else total, dtype)
