"""Rows of forwards, for evaluation and generation."""

from __future__ import annotations

from functools import lru_cache

from .actions import Action, Rows


@lru_cache(16)
def forward_rows(placement: tuple[int, ...], microbatches: int) -> Rows:
    """Return for each rank the forwards of its stages, in the order of a wave.

    Equal arguments give the same object, by which a step knows what it has computed for its rows.

    Stage s begins microbatch m in slot s + m if nothing delays it. What a forward uses is in an
    earlier slot, so the rows cannot deadlock.

    Args:
        placement: the rank of each stage.
        microbatches: their number.
    """
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    stages = len(placement)
    for slot in range(stages + microbatches - 1):
        for stage in range(max(0, slot - microbatches + 1), min(stages, slot + 1)):
            rows[placement[stage]].append(Action(stage, "F", slot - stage))
    return tuple(map(tuple, rows))
