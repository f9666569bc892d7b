"""Seconds of a training step, by part.

A block takes its matrix products, attention and other operators one after the other, and its
collectives over tp, which nothing hides. Behind it run

    over fsdp    the gather of the next block, and in backward the reduction of the one before
    over cp      the keys and values of the next step of the ring, behind attention
    over dp      the all_reduce of gradients, behind backward if there is one microbatch

and what is longer than the block is exposed. A pipeline adds its bubble, by `Schedule.simulate` or,
in the search, by formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..parallel.pipeline.make_schedule import make_schedule
from .counts import Phase
from .description import Costs, Description
from .form import Form
from .memory import stages_of_rank
from .prices import Prices

_IN_USE, _REDUCED, _OWN = 2, 4, 4  # bytes of an element: gathered, summed, and at rest
# Bytes read and written for an element of a gradient: its norm, clipping, and AdamW, which reads
# p, g and two moments, and writes all but g.
_STEP = 4 + 8 + 28
# Bytes that copies of FSDP read and write for an element: out of the gathered buffer, and of the
# gradient into the buffer that is reduced, in float32.
_COPY_OUT, _COPY_IN = 2 + 2, 2 + 4


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, on the busiest rank of the pipeline.

    Attributes:
        matmul, attention, other: computation.
        tp: collectives over tp.
        fsdp: gathers and reductions over the shards, as far as nothing hides them.
        cp: keys and values, likewise.
        dp: reductions over replicas, likewise.
        copies: out of gathered buffers, and of gradients into the buffers that are reduced.
        bubble: the pipeline's idle time.
        optimizer: clipping and AdamW's step.
        moved: bytes that the rank receives over each axis.
    """

    matmul: float
    attention: float
    other: float
    tp: float
    fsdp: float
    cp: float
    dp: float
    copies: float
    bubble: float
    optimizer: float
    moved: dict[str, float]

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by name."""
        return {name: value for name, value in vars(self).items() if name != "moved"}

    @property
    def total(self) -> float:
        """The sum."""
        return (
            self.matmul
            + self.attention
            + self.other
            + self.tp
            + self.fsdp
            + self.cp
            + self.dp
            + self.copies
            + self.bubble
            + self.optimizer
        )


@dataclass(frozen=True)
class _Pass:
    """One microbatch of a unit in one direction: seconds of each kind, and bytes received."""

    matmul: float = 0
    attention: float = 0
    other: float = 0
    tp: float = 0
    cp: float = 0
    tp_bytes: float = 0
    cp_bytes: float = 0

    @property
    def seconds(self) -> float:
        return self.matmul + self.attention + self.other + self.tp + self.cp

    def plus(self, other: _Pass, factor: float = 1) -> _Pass:
        """Return `self + factor * other`."""
        return _Pass(
            self.matmul + factor * other.matmul,
            self.attention + factor * other.attention,
            self.other + factor * other.other,
            self.tp + factor * other.tp,
            self.cp + factor * other.cp,
            self.tp_bytes + factor * other.tp_bytes,
            self.cp_bytes + factor * other.cp_bytes,
        )


@dataclass(frozen=True)
class _Units:
    """A block and the edges, forward and backward."""

    block_forward: _Pass
    block_backward: _Pass
    edge_forward: _Pass
    edge_backward: _Pass


class StepTimes:
    """StepTimes(model, prices): the time of a step in each form."""

    def __init__(self, model: Description, prices: Prices) -> None:
        self._model, self._prices = model, prices
        self._units: dict[Any, _Units] = {}

    def of(self, form: Form, *, simulate: bool = False) -> StepTime:
        """Return the time of a step.

        Args:
            simulate: run the pipeline's schedule, in place of the formula of its bubble.
        """
        model, prices = self._model, self._prices
        costs = model.costs(form.tp, form.sequence_parallel, form.compiled)
        units = self._units_of(form)
        split = model.stages(form.tp, form.sequence_parallel, form.pp * form.stages)
        shards = form.group("shards", prices.node)
        replicas = form.group("dp", prices.node)
        share = (shards.size - 1) / shards.size
        pieces = 2 * (replicas.size - 1) / replicas.size / form.shards

        def gather(parameters: float) -> float:
            return prices.seconds("all_gather", _IN_USE * parameters * share, shards)

        def reduction(parameters: float) -> float:
            return prices.seconds("reduce_scatter", _REDUCED * parameters * share, shards)

        # what is exposed in a block, and in a stage for one microbatch or for the step
        per_microbatch = form.gather == "microbatch"
        frees = per_microbatch and form.zero == 3
        block = costs.block.parameters
        block_gather, block_reduction = gather(block), reduction(block)
        backward_shards = block_reduction + (block_gather if frees else 0.0)
        exposed_forward = max(0.0, block_gather - units.block_forward.seconds)
        exposed_backward = max(0.0, backward_shards - units.block_backward.seconds)
        last = len(split.layers) - 1
        forwards, backwards, shard_times = [], [], []
        for stage, count in enumerate(split.layers):
            forward = count * units.block_forward.seconds
            backward = count * units.block_backward.seconds
            edge = split.parameters[stage] - count * block
            shard_forward = count * exposed_forward + gather(edge)
            edge_reduction = reduction(edge)
            if stage == last:
                forward += units.edge_forward.seconds
                backward += units.edge_backward.seconds
                edge_reduction = max(0.0, edge_reduction - units.edge_backward.seconds)
            shard_backward = count * exposed_backward + edge_reduction
            forwards.append(forward + (shard_forward if per_microbatch else 0.0))
            backwards.append(backward + (shard_backward if per_microbatch else 0.0))
            shard_times.append(form.gathers * shard_forward + form.reductions * shard_backward)

        own = max(
            (stages_of_rank(form, rank) for rank in range(form.pp)),
            key=lambda stages: sum(forwards[s] + backwards[s] for s in stages),
        )
        m = form.microbatches
        blocks = sum(split.layers[stage] for stage in own)
        total = units.block_forward.plus(units.block_backward)
        total = _Pass().plus(total, blocks * m)
        if last in own:
            total = total.plus(units.edge_forward, m).plus(units.edge_backward, m)
        held = sum(split.parameters[stage] for stage in own)
        # blocks are gathered once more for backward; the outermost unit is not freed until then
        again = blocks * block if frees else 0.0
        gathered = form.gathers * (held + again)
        dp = prices.seconds("all_reduce", _OWN * held * pieces, replicas)
        if m == 1 and form.pp == 1:  # behind backward, next to what the shards send there
            slack = units.block_backward.seconds - backward_shards
            dp = max(0.0, dp - blocks * max(0.0, slack))
        stream = costs.stream * form.rows / form.cp
        bubble = 0.0
        if form.pp > 1:
            hop = prices.seconds("permute", stream, form.group("pp", prices.node))
            bubble_of = _simulated_bubble if simulate else _bubble
            bubble = bubble_of(form, forwards, backwards, hop)
        device = prices.device
        copied = form.reductions * _COPY_IN * held if form.devices > form.pp * form.tp else 0.0
        if form.shards > 1:
            copied += _COPY_OUT * gathered
        moved = {
            "tp": total.tp_bytes,
            "cp": total.cp_bytes,
            "fsdp": share * (_IN_USE * gathered + form.reductions * _REDUCED * held),
            "dp": _OWN * held * pieces,
            "pp": 2 * m * stream * form.stages if form.pp > 1 else 0.0,
        }
        return StepTime(
            matmul=total.matmul,
            attention=total.attention,
            other=total.other,
            tp=total.tp,
            fsdp=sum(shard_times[stage] for stage in own),
            cp=total.cp,
            dp=dp,
            copies=copied / (device.bandwidth * device.traffic),
            bubble=bubble,
            optimizer=_STEP * held / form.shards / (device.bandwidth * device.traffic),
            moved={axis: count for axis, count in moved.items() if count},
        )

    def _units_of(self, form: Form) -> _Units:
        node = self._prices.node
        groups = form.group("tp", node), form.group("cp", node)
        options = form.sequence_parallel, form.recompute, form.compiled, form.regather
        key = (*groups, form.rows, *options, form.balanced)
        units = self._units.get(key)
        if units is None:
            costs = self._model.costs(form.tp, form.sequence_parallel, form.compiled)
            forward = self._pass(costs.block.forward, costs.block, form, sends=1)
            backward = self._pass(costs.block.backward, costs.block, form, sends=3)
            if form.regather:
                use = costs.block.forward.communication.get("all_gather", (0.0, 0.0))
                gathers = Phase(communication={"all_gather": use})
                backward = backward.plus(self._pass(gathers, costs.block, form, sends=0))
            if form.recompute == "full":
                again = self._pass(costs.block.again_whole, costs.block, form, sends=1)
                backward = backward.plus(again)
            elif form.recompute == "selective":
                again = self._pass(costs.block.again, costs.block, form, sends=0)
                backward = backward.plus(again)
            units = _Units(
                forward,
                backward,
                self._pass(costs.edges.forward, costs.edges, form, sends=1),
                self._pass(costs.edges.backward, costs.edges, form, sends=3),
            )
            self._units[key] = units
        return units

    def _pass(self, phase: Phase, costs: Costs, form: Form, *, sends: int) -> _Pass:
        """Return one microbatch of a unit in one direction.

        Args:
            sends: how often the bytes of keys and values go round the ring; in backward also those
                of their gradients, in float32.
        """
        prices, device = self._prices, self._prices.device
        scale = form.rows / form.cp
        # The last rank of cp has the last queries, which see all keys, unless sequences are
        # balanced; without a causal mask all ranks do.
        unseen = 0.0 if form.balanced else phase.whole_attention - phase.attention
        attention = scale * (phase.attention + unseen * (1 - 1 / form.cp))
        attention /= device.flops * device.attention
        tp_group = form.group("tp", prices.node)
        tp = sum(
            prices.seconds(op, received * scale, tp_group, launches)
            for op, (launches, received) in phase.communication.items()
        )
        rounds = (form.cp - 1) * sends
        ring_bytes = rounds * scale * costs.keys_and_values
        ring = 0.0
        if ring_bytes:
            cp_group = form.group("cp", prices.node)
            ring = prices.seconds("permute", ring_bytes, cp_group, rounds)
        matmul = other = 0.0
        for kernel, count in phase.kernels.items():
            moving = (kernel.moved * scale + kernel.fixed) / (device.bandwidth * device.traffic)
            computing = kernel.flops * scale / (device.flops * device.matmul)
            seconds = count * max(moving, computing, device.launch)
            if kernel.kind == "matmul":
                matmul += seconds
            else:
                other += seconds
        return _Pass(
            matmul=matmul,
            attention=attention,
            other=other,
            tp=tp,
            cp=max(0.0, ring - attention),
            tp_bytes=scale * sum(received for _, received in phase.communication.values()),
            cp_bytes=ring_bytes,
        )


def _bubble(form: Form, forwards: list[float], backwards: list[float], hop: float) -> float:
    """Return the bubble by the formulas of the schedules, with the hops of the first microbatch."""
    stages = len(forwards)
    forward, backward = sum(forwards) / stages, sum(backwards) / stages
    if form.schedule == "zb_h1":  # half of a backward is for weights
        return (form.pp - 1) * (forward + 2 * hop)
    return (form.pp - 1) * (forward + backward + 2 * hop)


def _simulated_bubble(
    form: Form, forwards: list[float], backwards: list[float], hop: float
) -> float:
    schedule = make_schedule(
        form.schedule,
        form.pp,
        form.microbatches,
        stages_per_rank=form.stages if form.schedule in ("interleaved", "zb_h1") else None,
    )
    half = [value / 2 for value in backwards]
    timeline = schedule.simulate(
        forward=forwards, backward_input=half, backward_weight=half, latency=hop
    )
    return timeline.bubble


def model_flops(model: Description) -> float:
    """Return the flops of a step as publications count them for MFU.

    Three times those of forward, with attention as if it were not causal; recomputation and what a
    fused backward of attention computes again do not count. For a causal language model that is
    6 (parameters - embedding) + 12 layers x width x sequence per token.
    """
    costs = model.costs(1)
    forward = costs.block.forward
    row = model.layers * (forward.matmul + forward.whole_attention) + costs.edges.forward.matmul
    return 3 * row * model.rows
