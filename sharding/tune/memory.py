"""Bytes of a training step on a rank, by part, in closed form.

With P parameters on the rank's stages and tp rank, n ranks that share them, bfloat16 in use, and
AdamW in float32:

    parameters     4 P / n
    gradients      4 P / n, but at the loss of a first microbatch
    optimizer      8 P / n
    gathered       2 bytes of the outermost unit; in a block's backward also of two blocks, and 6 of
                   its gradients. With gather="step" 6 P. Where n = 1, the copy in use of 2 P, and
                   4 P of sums while microbatches accumulate
    activations    what a microbatch saves in a block, times blocks and live microbatches; with
                   recomputation the inputs of blocks, and all of one block
    loss           what the head saves, and what its backward holds for a moment

The peak is at the loss, or in the backward of the last block.
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
    costs = model.costs(form.tp, form.sequence_parallel, form.compiled)
    scale = form.rows / form.cp
    stages = stages_of_rank(form, rank)
    split = model.stages(form.tp, form.sequence_parallel, form.pp * form.stages)
    held = sum(split.parameters[stage] for stage in stages)
    blocks = sum(split.layers[stage] for stage in stages)
    edges = held - blocks * costs.block.parameters
    shards = form.shards
    accumulates = form.microbatches > 1
    live = live_microbatches(form, rank)
    if form.recompute == "none":
        gathered = costs.block.gathered if form.regather else 0.0
        activations = scale * live * blocks * (costs.block.saved - gathered)
        activations += scale * gathered  # of one block
    else:
        saved = costs.stream
        if form.recompute == "selective":
            saved += costs.block.selected
        activations = scale * (live * blocks * saved + max(0.0, costs.block.saved - saved))
    has_loss = len(split.layers) - 1 in stages
    loss = scale * (costs.edges.saved + costs.transient) if has_loss else 0.0
    gradients = _OWN * held / shards
    at_loss = gradients if accumulates else 0.0
    if shards == 1:
        gathered = _IN_USE * held + (_REDUCED * held if accumulates else 0.0)
        in_block = in_loss = gathered
    elif form.gather == "step":
        in_block = in_loss = (_IN_USE + _REDUCED) * held
    else:
        in_loss = _IN_USE * edges
        in_block = in_loss + _IN_USE * min(2, blocks) * costs.largest_block
        in_block += (_IN_USE + _REDUCED) * costs.largest_block
    # the peak is at the loss, or in the backward of the last block, when the loss is gone
    peak_at_loss = in_loss + loss + at_loss > in_block + gradients
    return Memory(
        parameters=_OWN * held / shards,
        gradients=at_loss if peak_at_loss else gradients,
        optimizer=_MOMENTS * held / shards,
        gathered=in_loss if peak_at_loss else in_block,
        activations=activations,
        loss=loss if peak_at_loss else 0.0,
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
