"""Bytes of a training step on a rank, by part, in closed form.

With P parameters on the rank's stages and tp rank, n ranks that share them, bfloat16 in use, and
AdamW in float32, or with the bytes of the form's own dtypes; in use are of experts those of the
rank of ep:

    parameters     4 P / n, and stacks of experts that are no intervals of the buffer once more.
                   With zero < 3 all pieces of blocks with experts are as long as the longest, here
                   and below
    gradients      4 P / n, if an earlier microbatch has made some
    optimizer      8 P / n
    gathered       2 bytes of the outermost unit; in a block's backward also of two blocks, and the
                   gradients of one, of 2 bytes, or of 4 while they are reduced. With gather="step"
                   6 P. Where n = 1, the copy in use of 2 P. After backward the gradients of what
                   is outside of the blocks and the buffer for them, and 4 P / n: the gradients of
                   several microbatches in the buffer that dp sums, or what AdamW computes of all
                   parameters at once
    activations    what a microbatch saves in a block, times blocks and live microbatches; with
                   recomputation the inputs of blocks, and all of one block; what a block's backward
                   computes
    loss           what the head saves, and what its backward holds for a moment

The peak is at the loss, in the backward of one of the last two blocks or of the first, after it, or
in the optimizer's step.
"""

from __future__ import annotations

from dataclasses import dataclass

from .description import Description
from .form import Form


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


def forwards_before_backward(form: Form, rank: int) -> int:
    """Return how many forwards a rank's stage at an end of the pipeline runs before a backward.

    With zb_h1 as many as with 1f1b: its ranks hold more since backwards for weights wait.
    """
    m, v = form.microbatches, form.stages
    if form.schedule == "interleaved" and rank == 0:
        # of all stages until backward comes from the last one to the first; stages take turns
        in_round = m // max(1, m // form.pp)
        others = (v - 1) * in_round
        rounds, rest = divmod(min(v * m, 2 * others + 2 * (form.pp - 1) + 1), v * in_round)
        return rounds * in_round + min(in_round, rest)
    return m if form.schedule == "gpipe" else min(m, form.pp - rank)


def stages_of_rank(form: Form, rank: int) -> list[int]:
    """Return the stages of a rank of the pipeline; they go round the ranks."""
    return [rank + form.pp * chunk for chunk in range(form.stages)]


def memory_of(form: Form, model: Description, rank: int) -> Memory:
    """Return what a rank of the pipeline holds at the peak of a step."""
    model = model.computing_in(form.param_dtype)
    kept, reduced = form.kept_bytes, form.reduced_bytes
    costs = model.costs(form.tp, form.sequence_parallel, form.compiled, form.ep > 1)
    scale = form.rows / form.cp
    stages = stages_of_rank(form, rank)
    split = model.stages(form.tp, form.sequence_parallel, form.pp * form.stages, form.ep > 1)
    held = sum(split.parameters[stage] for stage in stages)
    blocks = sum(split.layers[stage] for stage in stages)
    edges = held - blocks * costs.block.parameters
    used = edges + blocks * costs.block.parameters_on(form.ep)
    largest = costs.largest_block(form.ep)
    shards = form.shards
    live = live_microbatches(form, rank)
    block = costs.block
    # of the busiest rank: what experts compute beyond the mean
    more = model.imbalance - 1 if form.ep > 1 else 0.0
    again = 0.0  # bytes of a row that backward of a block computes or gathers again
    whole_saved = saved = block.saved + more * block.saved_by_experts
    if form.ep > 1:  # what comes back is saved beside what experts return
        whole_saved = saved = saved + block.dispatched
    if form.regather:
        again = block.gathered
        saved -= again
    elif form.recompute != "none":
        saved = costs.stream
        if form.recompute == "selective":
            saved += block.selected + more * block.selected_by_experts
        again = max(0.0, whole_saved - saved)
    activations = scale * live * blocks * saved
    has_loss = len(split.layers) - 1 in stages
    # With recomputation, copies in use last no longer than gathered parameters do.
    keeps = form.gather == "step" or form.zero < 3
    frees = not keeps and (shards > 1 or form.recompute != "none")
    in_use = edges if frees else used
    sums_whole = form.gather == "step" or (form.zero == 1 and form.microbatches > 1)
    # a rank that has whole parameters uses them as they are, if no dtype differs
    used_bytes = form.used_bytes if shards > 1 or form.param_dtype != form.dtype else 0
    padding, parts = _padding(form, model)
    in_use += blocks * padding * parts
    whole_sums = reduced * (used + blocks * padding * parts)
    whole = used_bytes * in_use + (whole_sums if shards > 1 and sums_whole else 0.0)
    if form.dp > 1 and shards == 1 and not frees:  # each microbatch has its copy
        whole += used_bytes * (used - edges) * (live - 1)
    of_blocks = min(2 if shards > 1 else 1, blocks) * largest if frees else 0.0
    at_rest = kept * (held / shards + blocks * padding)
    gradients = at_rest
    # Sums of earlier microbatches: none if all forwards come before the first backward, and whole
    # ones, among what is gathered, with gather="step" and zero=1.
    if sums_whole:
        gradients = 0.0
    before = gradients if form.microbatches > live else 0.0
    # what the head has saved of microbatches when the first backward begins
    heads = scale * costs.edges.saved * forwards_before_backward(form, rank) if has_loss else 0.0
    loss = heads + scale * costs.transient if has_loss else 0.0
    heads -= scale * costs.edges.saved if has_loss else 0.0  # after that of the loss
    last = edges - costs.first if has_loss else 0.0
    head = reduction = opened = 0.0
    later = gradients  # when backward comes to the first block
    sums_pieces = shards > 1 and not sums_whole  # of each unit, when its last gradient exists
    if shards == 1:
        opened = kept * largest  # a buffer that gradients are copied into
    elif sums_pieces:  # gradients of the head wait for those of the embedding
        head = used_bytes * last
        later = max(before, gradients - kept * (edges + largest) / shards)
        reduction = reduced * largest
    if frees and shards > 1:
        of_blocks += costs.largest_block() / shards  # cast for the next gather
    in_blocks = whole + used_bytes * of_blocks + head
    # All gradients of a block, and the buffer that they are copied into; gathered parameters are
    # freed by then.
    products = form.used_bytes * largest + opened
    if sums_pieces:
        products = reduction if frees else products + reduction
    of_experts = 1 + more if block.experts else 1.0
    begin = scale * (again + of_experts * costs.block_transient)
    if form.ep > 1 and frees:
        # Experts are a unit of their own: those of the block before are gathered next to the block,
        # while the gradients of the rest of the block behind it are reduced.
        others = max(kind.parameters - kind.experts for kind in costs.kinds)
        in_blocks -= used_bytes * others
        reduction = reduced * others
    if form.pp > 1:
        begin += scale * costs.stream  # a gradient that is received
    one = scale * saved
    # (gradients, gathered, activations, loss) at the loss; at the beginning of the backward of the
    # last block, and at its end, when the gradients of its weights are there; and in the block
    # before, while those are reduced
    moments = [
        (before, whole, activations, loss),
        (before, in_blocks + opened, activations + begin, heads),
        (before, in_blocks + products, activations - one, heads),
    ]
    if blocks > 1:
        moments.append((before, in_blocks + reduction, activations - one + begin, heads))
    if before < gradients and live > 1:  # of the second microbatch
        fewer = activations * (live - 1) / live
        if heads:
            moments.append((gradients, whole, fewer, heads + scale * costs.transient))
            heads -= scale * costs.edges.saved
        moments.append((gradients, in_blocks + opened, fewer + begin, heads))
    if live == 1:  # in the first block, when other gradients are there
        if shards == 1 and not frees:  # whose copies in use are freed
            in_blocks -= used_bytes * max(0.0, used - edges - largest)
        moments += [
            (later, in_blocks + reduction, one + begin, 0.0),
            (later, in_blocks + products, 0.0, 0.0),
        ]
    if sums_pieces:  # the gradients of what is outside of the blocks, and the buffer for them
        at_end = (used_bytes + reduced) * edges + (0.0 if frees else whole)
        now = max(before, gradients - kept * edges / shards)
        moments.append((now, at_end, activations * (live - 1) / live, 0.0))
    # what AdamW computes, or the one buffer that dp sums; copies last until parameters are written
    copies = used_bytes * in_use if keeps and shards > 1 else 0.0
    moments.append((at_rest, at_rest + copies, 0.0, 0.0))
    gradients, gathered, activations, loss = max(moments, key=sum)
    return Memory(
        parameters=at_rest + kept * blocks * _held_beside(form, model),
        gradients=gradients,
        optimizer=2 * at_rest,
        gathered=gathered,
        activations=activations,
        loss=loss,
    )


def _padding(form: Form, model: Description) -> tuple[float, int]:
    """Return by how much pieces of blocks are longer than the mean, and how many there are.

    Elements of a block with experts, see `Description.padding`; with zero=3 they are not counted.
    """
    if not model.experts or form.zero == 3:
        return 0.0, 1
    if form.ep > 1:
        return model.padding(form.expert_shards, form.expert_ranks), form.expert_shards
    return (model.padding(form.shards, None) if form.tp == 1 else 0.0), form.shards


def _held_beside(form: Form, model: Description) -> float:
    """Return how many elements of a block a rank holds twice, see `Description.held_beside`."""
    if not model.experts or form.zero < 3:
        return 0.0
    if form.ep > 1:
        return model.held_beside(form.expert_shards, form.expert_ranks)
    return model.held_beside(form.shards, None) if form.tp == 1 else 0.0


def peak_memory(form: Form, model: Description) -> tuple[int, Memory]:
    """Return the rank of the pipeline that holds most, and what it holds."""
    ranks = sorted({0, min(1, form.pp - 1), form.pp - 1})
    by_rank = {rank: memory_of(form, model, rank) for rank in ranks}
    busiest = max(by_rank, key=lambda rank: by_rank[rank].total)
    return busiest, by_rank[busiest]


def size(value: float) -> str:
    """Return bytes with a unit."""
    return f"{value / 1e9:.1f} GB" if value >= 1e8 else f"{value / 1e6:.2f} MB"
