"""`evaluate_loss`: the mean loss of a token over batches of any lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .packing import IGNORED


@torch.no_grad()
def evaluate_loss(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> float:
    """evaluate_loss(model, batches) -> the mean loss of a token that has a label.

        batch of 30 labels, loss 2.0 | batch of 10 labels, loss 3.0          ->  2.25

    The model is in evaluation mode meanwhile.

    Args:
        model: a causal model of transformers: its loss is the mean over the labels of a batch,
            which it shifts by one.
        batches: with "labels" [rows, length], -100 where there is none, and the model's other
            arguments; of `ShardedTensor`s, as from `sm.training.batches`, or plain ones in one
            process.

    Returns: the same on every rank; NaN if no token has a label.

    Communication: that of the model, and two small reductions for each batch.

    Example:
        >>> rows = sm.training.batches(loader, mesh, P("fsdp"))
        >>> loss = sm.training.evaluate_loss(model, rows)
    """
    total, tokens = 0.0, 0
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            count = int((batch["labels"][:, 1:] != IGNORED).sum())
            loss = model(**batch, use_cache=False).loss
            if count:
                total += loss.item() * count
                tokens += count
    finally:
        model.train(was_training)
    return total / tokens if tokens else float("nan")
