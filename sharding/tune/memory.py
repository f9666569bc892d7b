"""Bytes of a training step on a rank, by part, in closed form.

With P parameters on the rank's stages and tp rank, n ranks that share them, bfloat16 in use, and
AdamW in float32:

    parameters     4 P / n     and 2 P in use where n = 1
    gradients      4 P / n
    optimizer      8 P / n
    gathered       2 bytes of the outermost unit and of two blocks, and 6 of a block's gradients;
                   with gather="step" 2 P, and 4 P of gradients
    activations    what a microbatch saves in a block, times blocks and live microbatches; with
                   recomputation the inputs of blocks, and all of one block
    loss           what the head saves, and what its backward holds for a moment
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .description import Description
from .form import Form

_OWN, _IN_USE, _REDUCED = 4, 2, 4  # bytes of an element at rest, gathered, and of summed gradients
_MOMENTS = 8  # of AdamW's two moments


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank by part; see the module."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    loss: float

    @property
    def total(self) -> float:
        """The sum."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.gathered
            + self.activations
            + self.loss
        )


def live_microbatches(form: Form, rank: int) -> float:
    """Return the activations of a pipeline's rank, in microbatches of its whole share.

    The formulas of `parallel.pipeline.makers`.
    """
    p, m, v = form.pp, form.microbatches, form.stages
    if p == 1:
        return 1
    if form.schedule == "gpipe":
        return m
    if form.schedule == "1f1b":
        return min(m, p - rank)
    if form.schedule == "interleaved":
        in_round = m // max(1, m // p)
        return min(v * m, (v - 1) * in_round + 2 * (p - 1 - rank) + 1) / v
    return min(m, p)


def stages_of_rank(form: Form, rank: int) -> list[int]:
    """Return the stages of a rank of the pipeline; they go round the ranks."""
    return [rank + form.pp * chunk for chunk in range(form.stages)]


def memory_of(form: Form, model: Description, rank: int) -> Memory:
    """Return what a rank of the pipeline holds at the peak of a step."""
    costs = model.costs(form.tp, form.sequence_parallel)
    scale = form.rows / form.cp
    stages = stages_of_rank(form, rank)
    split = model.stages(form.tp, form.sequence_parallel, form.pp * form.stages)
    held = sum(split.parameters[stage] for stage in stages)
    blocks = sum(split.layers[stage] for stage in stages)
    edges = held - blocks * costs.block.parameters
    shards = form.shards
    if shards == 1:
        gathered = _IN_USE * held
    elif form.gather == "step":
        gathered = (_IN_USE + _REDUCED) * held
    else:
        units = edges + min(2, blocks) * costs.largest_block
        gathered = _IN_USE * units + (_IN_USE + _REDUCED) * costs.largest_block
    live = live_microbatches(form, rank)
    if form.recompute == "full":
        activations = scale * (live * blocks * costs.stream + costs.block.saved)
    else:
        activations = scale * live * blocks * costs.block.saved
    has_loss = len(split.layers) - 1 in stages
    loss = scale * (costs.edges.saved + costs.transient) if has_loss else 0.0
    return Memory(
        _OWN * held / shards,
        _OWN * held / shards,
        _MOMENTS * held / shards,
        gathered,
        activations,
        loss,
    )


def peak_memory(form: Form, model: Description) -> tuple[int, Memory]:
    """Return the rank of the pipeline that holds most, and what it holds."""
    ranks: Sequence[int] = sorted({0, min(1, form.pp - 1), form.pp - 1})
    by_rank = {rank: memory_of(form, model, rank) for rank in ranks}
    busiest = max(ranks, key=lambda rank: by_rank[rank].total)
    return busiest, by_rank[busiest]


def size(value: float) -> str:
    """Return bytes with a unit."""
    return f"{value / 1e9:.1f} GB" if value >= 1e8 else f"{value / 1e6:.2f} MB"
