"""Look-ups of rows of a table: embedding, bags of embeddings, one-hot vectors.

A table with split rows (the vocabulary) is not moved: every rank looks up the rows that it has, and
the result is pending as a sum, to which one rank contributes each row. The gradient of the table
needs no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....layout.layout import Layout
from ..decomposition_utils import splitting_axes
from ..indexing.local_indices import Part, adds_in_parts, mask_values, not_empty
from ..notation import Rule, dim_names, einrule
from ..registry import rule


def _refuse(name: str, max_norm: float | None, sparse: bool) -> None:
    """Refuse options that write into the table, and sparse gradients."""
    if max_norm is not None or sparse:
        raise NotImplementedError(
            f"{name}: max_norm= (which writes into the weight) and sparse= are not supported on "
            "ShardedTensors; clip the rows yourself, weight.copy_(torch.renorm(weight, 2, 0, "
            "max_norm)) under torch.no_grad(), and use dense gradients"
        )


@rule("F.embedding")
def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Rule:
    """Return the rule; where gradients are scaled by frequency, all indices are counted."""
    _refuse("embedding", max_norm, sparse)
    padding = None if padding_idx is None else padding_idx % max(weight.shape[0], 1)
    indices = dim_names(input.ndim, range(input.ndim) if scale_grad_by_freq else (), "i")
    rows = "v" if adds_in_parts(weight) and not scale_grad_by_freq else "[v]"
    bind = partial(_bind_embedding, F.embedding, padding)
    return einrule(f"{indices}, {rows} d -> {indices} d", input, weight, linear=((1,),), bind=bind)


def _bind_embedding(
    func: Any, padding: int | None, targets: Sequence[Layout], _: Any
) -> Callable[..., Tensor]:
    table = targets[1]
    if not splitting_axes(table, 0):
        return func
    part, (start, stop) = Part(table, 0), table.box[0]
    local_padding = padding - start if padding is not None and start <= padding < stop else None
    return lambda input, weight, *_, **__: _rows(part, input, weight, local_padding)


def _rows(
    part: Part,
    input: Tensor,
    weight: Tensor,
    padding: int | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Return the rows that this rank has; zeros for others, and for those that are not counted."""
    local, own = part.find(input, 0)
    own = own if counted is None else own & counted
    return mask_values(own, F.embedding(local, not_empty(weight, [0]), padding), 1)


@rule("torch.embedding")
def _embedding_of_weight(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Rule:
    padding = None if padding_idx < 0 else padding_idx
    options = {"scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    rule_of_rows = _embedding(indices, weight, padding, **options)
    return replace(rule_of_rows, bind=partial(_bind_embedding_of_weight, padding))


def _bind_embedding_of_weight(
    padding: int | None, targets: Sequence[Layout], _: Any
) -> Callable[..., Tensor]:
    run = _bind_embedding(None, padding, targets, _)
    if run is None:
        return torch.embedding
    return lambda weight, indices, *_, **__: run(indices, weight)


# -- bags ------------------------------------------------------------------------------------------


@rule("F.embedding_bag")
def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Rule:
    """Return the rule: bags and features may be split; for sums and means, rows of the table."""
    _refuse("embedding_bag", max_norm, sparse)
    rows = "v" if mode != "max" and not scale_grad_by_freq and adds_in_parts(weight) else "[v]"
    bag = "[b]" if scale_grad_by_freq else "b"
    each, bags = (f"{bag} [n]", bag) if input.ndim == 2 else ("[n]", "1")
    count = input.shape[0] if offsets is None else offsets.shape[0] - include_last_offset
    padding = None if padding_idx is None else padding_idx % max(weight.shape[0], 1)
    linear = ((1,),) if mode != "max" else ()
    bind = partial(_bind_bags, mode, padding, include_last_offset)
    result = torch.empty(count, weight.shape[1], dtype=weight.dtype, device="meta")
    pattern, operands = f"{each}, {rows} d, [o], {each} -> {bags} d", (input, weight, offsets)
    options = {"linear": linear, "bind": bind, "result": result}
    return einrule(pattern, *operands, per_sample_weights, **options)


def _bind_bags(
    mode: str, padding: int | None, ends: bool, targets: Sequence[Layout], _: Any
) -> Callable[..., Tensor]:
    if not splitting_axes(targets[1], 0):
        return F.embedding_bag
    part = Part(targets[1], 0)

    def bags(
        input: Tensor,
        weight: Tensor,
        offsets: Tensor | None = None,
        *args: Any,
        per_sample_weights: Any = None,
        **_: Any,
    ) -> Tensor:
        every = torch.ones_like(input, dtype=torch.bool)
        counted = every if padding is None else input != padding
        rows = _rows(part, input, weight, counted=counted)
        if per_sample_weights is not None:
            rows = rows * per_sample_weights[..., None]
        add: Any = partial(torch.sum, dim=1)
        if offsets is not None:
            add = partial(_sum_of_runs, offsets, ends)
        if mode == "sum":
            return add(rows)
        return add(rows) / add(counted.to(rows.dtype)[..., None]).clamp_min(1)

    return bags


def _sum_of_runs(offsets: Tensor, ends: bool, rows: Tensor) -> Tensor:
    """Return sums of runs of rows from the offsets on; with `ends` the last one only ends a run."""
    starts = offsets[:-1] if ends else offsets
    numbers = torch.arange(len(rows), device=rows.device)
    bag = torch.searchsorted(starts, numbers, right=True) - 1
    used = numbers < offsets[-1] if ends else torch.ones_like(numbers, dtype=torch.bool)
    return rows.new_zeros(len(starts), rows.shape[1]).index_add(0, bag[used], rows[used])


# -- one-hot ---------------------------------------------------------------------------------------


@rule("one_hot")
def _one_hot(tensor: Tensor, num_classes: int = -1) -> Rule:
    if num_classes < 0:
        raise ValueError(
            "one_hot: give num_classes; without it the shape would depend on values on other ranks"
        )
    result = torch.empty((*tensor.shape, num_classes), dtype=torch.int64, device="meta")
    return einrule("... -> ... 1", tensor, result=result)
