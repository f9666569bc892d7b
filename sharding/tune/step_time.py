"""Seconds of a training step, by part.

A block takes its matrix products, attention and other operators one after the other, and its
collectives over tp, which nothing hides. Behind it run

    over fsdp    the gather of the next block, and in backward the reduction of the one before
    over cp      the keys and values of the next step of the ring, behind attention
    over dp      the all_reduce of gradients, behind backward if there is one microbatch

and what is longer than the block is exposed. Next to them a block is slower, as collectives occupy
multiprocessors. The gather before the first block, and the reduction after it in backward, have no
block to run behind.

Rows that go to experts of other ranks of ep and back are not hidden either, and the busiest rank
decides: it computes `Description.imbalance` times the mean, one of its experts after the other, as
`moe` does. A pipeline adds its bubble, by `Schedule.simulate` or, in the search, by formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..parallel.pipeline.make_schedule import make_schedule
from ..parallel.pipeline.schedule import Schedule
from ..parallel.pipeline.simulation import Costs as ActionCosts
from ..parallel.pipeline.simulation import makespan_on_shared_cores
from .counts import Phase
from .description import Costs, Description
from .form import Form, Group
from .memory import forwards_before_backward, stages_of_rank
from .prices import Prices

# Elements read and written for one of a gradient: its norm, clipping, and the eight operators
# of torch.optim.AdamW on lists of tensors (torch/optim/adamw.py, _multi_tensor_adamw), which is its
# default on GPUs: decay, both moments, and the root, corrections and quotient of the update.
_STEP = 1 + 2 + (2 + 3 + 2 + 3 + 2 + 2 + 2 + 4)
_STEADY = 4, 6  # microbatches for each rank of a pipeline that are simulated for more of them


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, on the busiest rank of the pipeline.

    Attributes:
        matmul, attention, other: computation.
        tp: collectives over tp.
        ep: rows of experts, out and back, over ep and tp.
        fsdp: gathers and reductions over the shards, as far as nothing hides them.
        cp: keys and values, likewise.
        dp: reductions over replicas, likewise.
        pp: what messages of the pipeline, and backwards in two parts, take of the host.
        copies: out of gathered buffers, and of gradients into the buffers that are reduced.
        bubble: the pipeline's idle time.
        optimizer: clipping and AdamW's step.
        rank: of the pipeline.
        moved: bytes that the rank receives over each axis.
        launches: collectives over each axis, and messages sent and received over pp, without sums
            of a few numbers (the loss, the norm of gradients) and without those of gradients over
            dp, which come in buckets.
    """

    matmul: float
    attention: float
    other: float
    tp: float
    ep: float
    fsdp: float
    cp: float
    dp: float
    pp: float
    copies: float
    bubble: float
    optimizer: float
    rank: int
    moved: dict[str, float]
    launches: dict[str, float]

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by name."""
        counts = ("rank", "moved", "launches")
        return {name: value for name, value in vars(self).items() if name not in counts}

    @property
    def total(self) -> float:
        """The sum of `parts`, written out: the search asks for it for each form."""
        return (
            self.matmul
            + self.attention
            + self.other
            + self.tp
            + self.ep
            + self.fsdp
            + self.cp
            + self.dp
            + self.pp
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
    ep: float = 0
    tp_bytes: float = 0
    cp_bytes: float = 0
    ep_bytes: float = 0
    tp_launches: float = 0
    cp_launches: float = 0
    ep_launches: float = 0

    @property
    def seconds(self) -> float:
        return self.matmul + self.attention + self.other + self.tp + self.cp + self.ep

    def plus(self, other: _Pass, factor: float = 1) -> _Pass:
        """Return `self + factor * other`."""
        return _Pass(
            self.matmul + factor * other.matmul,
            self.attention + factor * other.attention,
            self.other + factor * other.other,
            self.tp + factor * other.tp,
            self.cp + factor * other.cp,
            self.ep + factor * other.ep,
            self.tp_bytes + factor * other.tp_bytes,
            self.cp_bytes + factor * other.cp_bytes,
            self.ep_bytes + factor * other.ep_bytes,
            self.tp_launches + factor * other.tp_launches,
            self.cp_launches + factor * other.cp_launches,
            self.ep_launches + factor * other.ep_launches,
        )


@dataclass(frozen=True)
class _Units:
    """A block, and what is before and after the blocks, forward and backward.

    Of what is before them that is communication: an embedding computes next to nothing.
    """

    block_forward: _Pass
    block_backward: _Pass
    first_forward: _Pass
    first_backward: _Pass
    last_forward: _Pass
    last_backward: _Pass


@dataclass(frozen=True)
class _Elements:
    """Elements of parameters in use: those that all shards have a part of, and those of experts.

    If ep is 1, experts count as others.
    """

    others: float = 0
    experts: float = 0

    @property
    def total(self) -> float:
        return self.others + self.experts

    def plus(self, other: _Elements, factor: float = 1) -> _Elements:
        """Return `self + factor * other`."""
        return _Elements(self.others + factor * other.others, self.experts + factor * other.experts)


class _Sharing:
    """The ranks that share parameters: of experts, if ep > 1, those of fsdp and cp alone."""

    def __init__(self, form: Form, prices: Prices) -> None:
        self._ep, self._prices = form.ep, prices
        slower = prices.device.summing("reduce_scatter", form.reduce_dtype)
        self._used, self._reduced = form.used_bytes, slower * form.reduced_bytes
        names = "shards", "expert_shards"
        self._groups = tuple(form.group(name, prices.node) for name in names)

    def used(self, block: Costs) -> _Elements:
        """Return what a rank uses of a block."""
        if self._ep == 1:
            return _Elements(block.parameters)
        return _Elements(block.parameters - block.experts, block.experts / self._ep)

    def gather(self, elements: _Elements) -> float:
        """Return the seconds of an all_gather."""
        return self._seconds("all_gather", self._used, elements)

    def reduction(self, elements: _Elements) -> float:
        """Return the seconds of a reduce_scatter."""
        return self._seconds("reduce_scatter", self._reduced, elements)

    def shared(self, elements: _Elements) -> _Elements:
        """Return those elements that more than one rank share."""
        is_shared = [group.size > 1 for group in self._groups]
        return _Elements(is_shared[0] * elements.others, is_shared[1] * elements.experts)

    def units(self, elements: _Elements) -> int:
        """Return how many collectives gather them."""
        shared = self.shared(elements)
        return (shared.others > 0) + (shared.experts > 0)

    def received(self, elements: _Elements) -> float:
        """Return the elements that a rank receives if they are gathered, or reduced."""
        return sum(
            count * (group.size - 1) / group.size for count, group in self._by_group(elements)
        )

    def _seconds(self, op: str, size: float, elements: _Elements) -> float:
        return sum(
            self._prices.seconds(op, size * count * (group.size - 1) / group.size, group)
            for count, group in self._by_group(elements)
            if count
        )

    def _by_group(self, elements: _Elements) -> list[tuple[float, Group]]:
        return list(zip((elements.others, elements.experts), self._groups, strict=True))


class StepTimes:
    """StepTimes(model, prices): the time of a step in each form."""

    def __init__(self, model: Description, prices: Prices) -> None:
        self._model, self._prices = model, prices
        self._units: dict[Any, _Units] = {}

    def of(self, form: Form, *, simulate: bool = False, rank: int | None = None) -> StepTime:
        """Return the time of a step.

        Args:
            simulate: run the pipeline's schedule, in place of the formula of its bubble.
            rank: of the pipeline; by default the busiest.
        """
        model, prices = self._model.computing_in(form.param_dtype), self._prices
        costs = model.costs(form.tp, form.sequence_parallel, form.compiled, form.ep > 1)
        units = self._units_of(form)
        split = model.stages(form.tp, form.sequence_parallel, form.pp * form.stages, form.ep > 1)
        sharing = _Sharing(form, prices)
        replicas = form.group("dp", prices.node)
        dp_share = 2 * (replicas.size - 1) / replicas.size / form.shards  # of the held bytes

        # what is exposed in a block, and in a stage for one microbatch or for the step
        per_microbatch = form.gather == "microbatch"
        frees = per_microbatch and form.zero == 3
        block = costs.block.parameters
        used = sharing.used(costs.block)
        block_gather, block_reduction = sharing.gather(used), sharing.reduction(used)
        backward_shards = block_reduction + (block_gather if frees else 0.0)
        exposed_forward = self._beside(units.block_forward.seconds, block_gather)
        exposed_backward = self._beside(units.block_backward.seconds, backward_shards)
        last = len(split.layers) - 1
        forwards, backwards, shard_times, edge_gather_times, host_times = [], [], [], [], []
        # from the stage before each, and from the one after it
        messages = [(stage > 0) + (stage < last) for stage in range(last + 1)]
        for stage, count in enumerate(split.layers):
            forward = count * units.block_forward.seconds
            backward = count * units.block_backward.seconds
            edge = _Elements(split.parameters[stage] - count * block)
            edge_gather, edge_reduction = sharing.gather(edge), sharing.reduction(edge)
            shard_forward = (count - 1) * exposed_forward + block_gather
            if stage == 0:
                forward += units.first_forward.seconds
                backward += units.first_backward.seconds
            if stage == last:
                forward += units.last_forward.seconds
                backward += units.last_backward.seconds
                edge_reduction = self._beside(units.last_backward.seconds, edge_reduction)
            shard_backward = (count - 1) * exposed_backward + block_reduction + edge_reduction
            passing = prices.device.message * messages[stage]
            splitting = 0.0
            if form.schedule == "zb_h1":
                operators = count * sum(costs.block.backward.kernels.values())
                splitting = prices.device.split_backward * operators
            forward += passing
            backward += passing + splitting
            host_times.append(2 * passing + splitting)
            forwards.append(forward + (shard_forward + edge_gather if per_microbatch else 0.0))
            backwards.append(backward + (shard_backward if per_microbatch else 0.0))
            shard_times.append(form.gathers * shard_forward + form.reductions * shard_backward)
            edge_gather_times.append(edge_gather)

        if rank is None:
            rank = max(
                range(form.pp),
                key=lambda one: sum(forwards[s] + backwards[s] for s in stages_of_rank(form, one)),
            )
        own = stages_of_rank(form, rank)
        m = form.microbatches
        blocks = sum(split.layers[stage] for stage in own)
        total = units.block_forward.plus(units.block_backward)
        total = _Pass().plus(total, blocks * m)
        if 0 in own:
            total = total.plus(units.first_forward, m).plus(units.first_backward, m)
        if last in own:
            total = total.plus(units.last_forward, m).plus(units.last_backward, m)
        held = sum(split.parameters[stage] for stage in own)
        # Of parameters in use. Blocks are gathered once more for backward; the outermost unit is
        # not freed until then, by zb_h1 at the backward for inputs, so that forwards before the
        # first backward gather it once.
        of_edges = _Elements(held - blocks * block)
        in_use = of_edges.plus(used, blocks)
        edge_gathers = form.gathers
        if frees and form.pp > 1:
            edge_gathers -= forwards_before_backward(form, rank) - 1
        gathered = _Elements().plus(of_edges, edge_gathers).plus(used, form.gathers * blocks)
        if frees:
            gathered = gathered.plus(used, form.gathers * blocks)
        reduced = _Elements().plus(in_use, form.reductions)
        slower = prices.device.summing("all_reduce", form.dtype)
        dp = prices.seconds("all_reduce", slower * form.kept_bytes * held * dp_share, replicas)
        if m == 1 and form.pp == 1:  # behind backward, next to what the shards send there
            slack = units.block_backward.seconds - backward_shards
            dp = self._beside(blocks * max(0.0, slack), dp)
        stream = costs.stream * form.rows / form.cp
        bubble = 0.0
        if form.pp > 1:
            hop = prices.seconds("permute", stream, form.group("pp", prices.node))
            bubble = self._bubble(form, forwards, backwards, rank, hop, simulate=simulate)
        own_messages = sum(messages[stage] for stage in own)
        device = prices.device
        # copies of FSDP: out of the gathered buffer, and of gradients into the one that is reduced
        used_bytes, reduced_bytes = form.used_bytes, form.reduced_bytes
        copied = 2 * used_bytes * sharing.shared(gathered).total
        if form.devices > form.pp * form.tp:
            copied += (used_bytes + reduced_bytes) * reduced.total
        moved = {
            "tp": total.tp_bytes,
            "cp": total.cp_bytes,
            "ep": total.ep_bytes,
            "fsdp": used_bytes * sharing.received(gathered)
            + reduced_bytes * sharing.received(reduced),
            "dp": form.kept_bytes * held * dp_share,
            "pp": m * stream * own_messages,
        }
        stages_with_edges = sum(
            split.parameters[stage] > split.layers[stage] * block for stage in own
        )
        block_gathers = blocks * sharing.units(used)
        again = block_gathers if frees else 0
        launches = {
            "tp": total.tp_launches,
            "cp": total.cp_launches,
            "ep": total.ep_launches,
            "fsdp": edge_gathers * stages_with_edges
            + form.gathers * (block_gathers + again)
            + form.reductions * (stages_with_edges + block_gathers),
            "pp": 2 * m * own_messages,
        }
        return StepTime(
            matmul=total.matmul,
            attention=total.attention,
            other=total.other,
            tp=total.tp,
            ep=total.ep,
            fsdp=sum(shard_times[stage] + edge_gathers * edge_gather_times[stage] for stage in own),
            cp=total.cp,
            dp=dp,
            pp=m * sum(host_times[stage] for stage in own),
            copies=copied / (device.bandwidth * device.traffic),
            bubble=bubble,
            rank=rank,
            optimizer=_STEP
            * form.kept_bytes
            * held
            / form.shards
            / (device.bandwidth * device.traffic),
            moved={axis: count for axis, count in moved.items() if count},
            launches={axis: count for axis, count in launches.items() if moved[axis]},
        )

    def _bubble(
        self,
        form: Form,
        forwards: list[float],
        backwards: list[float],
        rank: int,
        hop: float,
        *,
        simulate: bool,
    ) -> float:
        """Return by how much a step is longer than the work of a rank.

        If ranks share cores, those that compute are faster while others wait, which no formula
        tells: the schedule is simulated then. The bubble may be negative, as the busiest rank gets
        more than its share.
        """
        sharing = self._prices.device.sharing
        if sharing == 1 and not simulate:
            return _bubble_by_formula(form, forwards, backwards, hop)
        half = [value / 2 for value in backwards]
        costs: dict[str, Any] = {
            "forward": forwards,
            "backward_input": half,
            "backward_weight": half,
            "latency": hop,
        }
        if sharing == 1:
            return _simulated_bubble(form, costs)
        schedule = schedule_of(form, form.microbatches)
        step = makespan_on_shared_cores(
            schedule.rows, ActionCosts(**costs), lambda ranks: min(sharing, form.pp / ranks)
        )
        own = sum(forwards[s] + backwards[s] for s in stages_of_rank(form, rank))
        return step - form.microbatches * own

    def _beside(self, computing: float, moving: float) -> float:
        """Return by how much a collective next to computation makes it longer.

        Either it occupies multiprocessors as long as it runs, or it outlasts the computation.
        """
        occupied = self._prices.device.occupied
        if moving * (1 - occupied) <= computing:
            return occupied * moving
        return moving - computing

    def _units_of(self, form: Form) -> _Units:
        node = self._prices.node
        groups = form.group("tp", node), form.group("cp", node), form.group("ep", node)
        options = form.sequence_parallel, form.recompute, form.compiled, form.regather
        key = (*groups, form.rows, *options, form.balanced, form.param_dtype)
        units = self._units.get(key)
        if units is None:
            model = self._model.computing_in(form.param_dtype)
            costs = model.costs(form.tp, form.sequence_parallel, form.compiled, form.ep > 1)
            in_backward = 1 + 4 / form.used_bytes  # gradients of keys and values in float32
            forward = self._pass(costs.block.forward, costs.block, form, sends=1)
            backward = self._pass(
                costs.block.backward, costs.block, form, sends=in_backward, is_backward=True
            )
            if form.regather:
                use = costs.block.forward.communication.get("all_gather", (0.0, 0.0))
                gathers = Phase(communication={"all_gather": use})
                backward = backward.plus(self._pass(gathers, costs.block, form, sends=0))
            if form.ep > 1 and costs.block.dispatched:
                rows, counts = self._dispatch(costs.block, form)
                forward = forward.plus(rows).plus(counts)
                backward = backward.plus(rows)
                if form.recompute != "none":
                    backward = backward.plus(rows).plus(counts)
            if form.recompute != "none":
                is_full = form.recompute == "full"
                phase = costs.block.again_whole if is_full else costs.block.again
                launch = self._prices.device.again.get(form.recompute)
                # what ring attention computes may be saved; keys and values go round again
                again = self._pass(phase, costs.block, form, sends=1, launch=launch)
                backward = backward.plus(again)
            first_forward, first_backward = (
                self._pass(phase, costs.edges, form, sends=0) for phase in costs.before
            )
            edge_forward = self._pass(costs.edges.forward, costs.edges, form, sends=1)
            edge_backward = self._pass(
                costs.edges.backward, costs.edges, form, sends=in_backward, is_backward=True
            )
            units = _Units(
                forward,
                backward,
                first_forward,
                first_backward,
                edge_forward.plus(first_forward, -1),
                edge_backward.plus(first_backward, -1),
            )
            self._units[key] = units
        return units

    def _dispatch(self, costs: Costs, form: Form) -> tuple[_Pass, _Pass]:
        """Return the exchange of a microbatch's rows, out and back, and that of their counts."""
        prices, busiest = self._prices, self._model.imbalance
        group = form.group("expert_ranks", prices.node)
        rows = form.rows / form.cp * costs.dispatched * (group.size - 1) / group.size
        counts = 8 * (self._model.experts + 1) * (group.size - 1)  # of the rows for each, int64
        exchange = _Pass(
            ep=prices.waited_for("all_to_all", 2 * busiest * rows, group, launches=2),
            ep_bytes=(busiest + 1) * rows,
            ep_launches=2,
        )
        numbers = _Pass(
            ep=prices.waited_for("all_gather", counts, group), ep_bytes=counts, ep_launches=1
        )
        return exchange, numbers

    def _pass(
        self,
        phase: Phase,
        costs: Costs,
        form: Form,
        *,
        sends: float,
        is_backward: bool = False,
        launch: float | None = None,
    ) -> _Pass:
        """Return one microbatch of a unit in one direction.

        Args:
            sends: how often the bytes of keys and values go round the ring; in backward also those
                of their gradients, in float32, by permutes of their own.
            is_backward: whether attention runs backward.
            launch: seconds of the shortest kernel, by default the device's.
        """
        prices, device = self._prices, self._prices.device
        scale = form.rows / form.cp
        # The last rank of cp has the last queries, which see all keys, unless sequences are
        # balanced; without a causal mask all ranks do.
        unseen = 0.0 if form.balanced else phase.whole_attention - phase.attention
        busiest = phase.attention + unseen * (1 - 1 / form.cp)
        fraction = device.attention_backward if is_backward else device.attention
        attention = scale * max(phase.attention, busiest / device.sharing)
        attention /= device.peak(form.param_dtype) * fraction
        tp_group = form.group("tp", prices.node)
        tp = sum(
            prices.waited_for(
                op, received * scale * device.summing(op, form.param_dtype), tp_group, launches
            )
            for op, (launches, received) in phase.communication.items()
        )
        ring_bytes = (form.cp - 1) * sends * scale * costs.keys_and_values
        launches_of_ring = (form.cp - 1) * min(round(sends), 2) if ring_bytes else 0
        ring = 0.0
        if ring_bytes:
            cp_group = form.group("cp", prices.node)
            ring = prices.seconds("permute", ring_bytes, cp_group, launches_of_ring)
        matmul = other = 0.0
        peak = device.peak(form.param_dtype)
        for kernel, count in phase.kernels.items():
            rows, launches, fixed = scale, 1.0, kernel.fixed
            if kernel.of_experts and form.ep > 1:
                rows, fixed = scale * self._model.imbalance, fixed / form.ep
                launches = self._model.experts / form.expert_ranks
            moving = (kernel.moved * rows + fixed) / (device.bandwidth * device.traffic)
            computing = kernel.flops * rows / (peak * device.matmul)
            launching = launches * (device.launch if launch is None else launch)
            seconds = max(moving, computing)
            seconds = count * (seconds + launching if device.is_host else max(seconds, launching))
            if kernel.kind == "matmul":
                matmul += seconds
            else:
                other += seconds
        return _Pass(
            matmul=matmul,
            attention=attention,
            other=other,
            tp=tp,
            cp=self._beside(attention, ring),
            tp_bytes=scale * sum(received for _, received in phase.communication.values()),
            cp_bytes=ring_bytes,
            tp_launches=sum(launches for launches, _ in phase.communication.values()),
            cp_launches=launches_of_ring,
        )


def schedule_of(form: Form, microbatches: int) -> Schedule:
    """Return the schedule of a form's pipeline, for so many microbatches."""
    takes_stages = form.schedule in ("interleaved", "zb_h1")
    stages = form.stages if takes_stages else None
    return make_schedule(form.schedule, form.pp, microbatches, stages_per_rank=stages)


def _simulated_bubble(form: Form, costs: Mapping[str, Any]) -> float:
    """Return the bubble of a schedule.

    With many microbatches it follows on a line from two smaller numbers of them, as the steps of
    each rank repeat; for costs of stages that differ by up to 1.7 times within 0.1 % of the step.
    Of several stages on a rank it does not: their rounds are longer.
    """

    def bubble(microbatches: int) -> float:
        return schedule_of(form, microbatches).simulate(**costs).bubble

    few, more = (count * form.pp for count in _STEADY)
    if form.microbatches <= few + more or form.stages > 1:
        return bubble(form.microbatches)
    first, second = bubble(few), bubble(more)
    return first + (form.microbatches - few) / (more - few) * (second - first)


def _bubble_by_formula(
    form: Form, forwards: list[float], backwards: list[float], hop: float
) -> float:
    """Return the bubble by the formulas of the schedules, with the hops of the first microbatch."""
    stages = len(forwards)
    forward, backward = sum(forwards) / stages, sum(backwards) / stages
    if form.schedule == "zb_h1":  # half of a backward is for weights
        return (form.pp - 1) * (forward + 2 * hop)
    return (form.pp - 1) * (forward + backward + 2 * hop)


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
