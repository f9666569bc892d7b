"""When each action of a schedule starts and ends, given what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, TypeAlias

from .actions import Action, Cell, Overlap, Rows, actions_of, stages_of
from .event import Event, ShardCommunication
from .proof import prove
from .timeline import Timeline

Cost: TypeAlias = float | Sequence[float]
GatherPer: TypeAlias = Literal["microbatch", "step"]
GradientCheck: TypeAlias = Literal["before", "after"]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the actions of a schedule cost, in any unit of time.

    Attributes:
        forward: a forward of one stage for one microbatch; or one value for each stage, as for
            the other costs of stages.
        backward_input: a backward for the inputs of a stage.
        backward_weight: a backward for its weights.
        backward: a whole backward; by default the sum of the two parts.
        overlap: a forward and a backward that are executed together, as a fraction of the sum of
            the two; 1 if nothing is gained.
        latency: the time from the end of an action to the arrival of its result on another rank.
            It occupies neither of them.
        optimizer: a step of the optimizer, on every rank.
        gather: gathering the parameters of a stage (`fully_shard`), as far as no computation hides
            it.
        reduce: reducing the gradients of a stage, likewise.
    """

    forward: Cost = 1
    backward_input: Cost = 1
    backward_weight: Cost = 1
    backward: Cost | None = None
    overlap: float = 1
    latency: float = 0
    optimizer: float = 0
    gather: Cost = 0
    reduce: Cost = 0

    def check(self, stages: int) -> None:
        """Check that every cost is a number from 0, or one for each stage.

        Raises:
            ValueError: a negative or infinite cost, or a wrong number of values.
        """
        for name, value in vars(self).items():
            if name == "backward" and value is None:
                continue
            values = list(value) if isinstance(value, Sequence) else [value]
            if isinstance(value, Sequence) and len(values) != stages:
                raise ValueError(
                    f"{name} has {len(values)} values, and the schedule has {stages} stages: give "
                    "one number, or one for each stage"
                )
            if not all(_is_finite(number) for number in values):
                raise ValueError(f"{name}={value!r}: a cost is a finite number, 0 or more")

    def of(self, cell: Cell) -> float:
        """Return the duration of an action or an overlap."""
        if isinstance(cell, Overlap):
            both = self.of(cell.forward) + self.of(cell.backward)
            return both * self.overlap
        match cell.kind:
            case "F":
                return _at(self.forward, cell.stage)
            case "I":
                return _at(self.backward_input, cell.stage)
            case "W":
                return _at(self.backward_weight, cell.stage)
        if self.backward is not None:
            return _at(self.backward, cell.stage)
        return _at(self.backward_input, cell.stage) + _at(self.backward_weight, cell.stage)

    def of_shards(self, communication: ShardCommunication) -> float:
        """Return the duration of a gather or a reduction."""
        cost = self.gather if communication.kind == "G" else self.reduce
        return _at(cost, communication.stage)


def _is_finite(number: object) -> bool:
    return isinstance(number, Real) and 0 <= float(number) < math.inf


def _at(cost: Cost, stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost


def simulate(
    rows: Rows,
    costs: Costs,
    steps: int = 1,
    gradient_check: GradientCheck = "after",
    gather_per: GatherPer = "microbatch",
) -> Timeline:
    """Return when each action starts and ends.

    A rank runs its row from left to right; an action starts when the rank has finished the one
    before and the results that it uses have arrived.

    Args:
        steps: the number of training steps, one after the other.
        gradient_check, gather_per: see `Schedule.simulate`.

    Raises:
        ValueError: the table is no valid schedule, or costs are wrong.
    """
    order = prove(rows)
    rank_of = stages_of(rows)
    costs.check(len(rank_of))
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}: the number of steps is 1 or more")
    if gradient_check not in ("before", "after"):
        raise ValueError(
            f"gradient_check={gradient_check!r}: write 'before' or 'after' the optimizer's step"
        )
    if gather_per not in ("microbatch", "step"):
        raise ValueError(f"gather_per={gather_per!r}: write 'microbatch' or 'step'")
    shards = [_ShardsOfRow(row, gather_per) for row in rows]
    free: list[float] = [0] * len(rows)
    events: list[list[Event]] = [[] for _ in rows]
    for _ in range(steps):
        ends: dict[Action, float] = {}
        for rank, slot in order:
            cell = rows[rank][slot]
            start = max(free[rank], _arrival(rank, cell, ends, rank_of, costs.latency))
            before, after = shards[rank].communication_around(slot)
            for item in (*before, cell, *after):
                is_cell = isinstance(item, Action | Overlap)
                duration = costs.of(item) if is_cell else costs.of_shards(item)
                if is_cell or duration:
                    events[rank].append(Event(item, start, start + duration))
                start += duration
            free[rank] = start
            for action in actions_of(cell):
                ends[action.result] = free[rank]
        if gradient_check == "before":
            free = [max(free) + costs.latency] * len(rows)
        if costs.optimizer:
            for rank, start in enumerate(free):
                events[rank].append(Event(None, start, start + costs.optimizer))
            free = [start + costs.optimizer for start in free]
    stages_per_rank = [0] * len(rows)
    for rank in rank_of.values():
        stages_per_rank[rank] += 1
    return Timeline(
        tuple(map(tuple, events)),
        tuple(map(live_activations, rows)),
        tuple(stages_per_rank),
        tuple(row.peak for row in shards),
    )


def makespan_on_shared_cores(rows: Rows, costs: Costs, speed: Callable[[int], float]) -> float:
    """Return when the last action ends, if ranks that wait leave their cores to the others.

    Args:
        costs: of actions at speed 1, as if all ranks computed all the time; gathers, reductions and
            the optimizer are left out.
        speed: how fast each rank computes while so many compute.
    """
    prove(rows)
    rank_of = stages_of(rows)
    costs.check(len(rank_of))
    ends: dict[Action, float] = {}
    slots = [0] * len(rows)
    remaining: dict[int, float] = {}  # of the actions that run, by rank
    now = 0.0
    while True:
        arrivals: list[float] = []
        for rank, row in enumerate(rows):
            if rank in remaining or slots[rank] == len(row):
                continue
            cell = row[slots[rank]]
            arrival = _arrival(rank, cell, ends, rank_of, costs.latency)
            if arrival <= now:
                remaining[rank] = costs.of(cell)
            else:
                arrivals.append(arrival)
        if not remaining and not arrivals:
            return now
        rate = speed(len(remaining)) if remaining else 1.0
        shortest = min(remaining.values(), default=math.inf)
        first_end = now + shortest / rate
        next_time = min([first_end, *arrivals])
        done = shortest if next_time == first_end else (next_time - now) * rate
        finished = [rank for rank, rest in remaining.items() if rest <= done]
        remaining = {rank: rest - done for rank, rest in remaining.items() if rest > done}
        now = next_time
        for rank in finished:
            for action in actions_of(rows[rank][slots[rank]]):
                ends[action.result] = now
            slots[rank] += 1


def _arrival(
    rank: int,
    cell: Cell,
    ends: Mapping[Action, float],
    rank_of: Mapping[int, int],
    latency: float,
) -> float:
    """Return when the operands of a rank's cell are there; infinity if one is not computed yet."""
    last_stage = len(rank_of) - 1
    return max(
        (
            ends.get(operand, math.inf) + (latency if rank_of[operand.stage] != rank else 0)
            for action in actions_of(cell)
            for operand in action.operands(last_stage)
        ),
        default=0,
    )


class _ShardsOfRow:
    """The gathers and reductions of `fully_shard` units in a row, as `gathering.py` does them.

    Attributes:
        peak: the largest number of stages whose parameters are gathered at one time.
    """

    def __init__(self, row: Sequence[Cell], gather_per: GatherPer) -> None:
        self._row = row
        self._gather_per = gather_per
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        for slot, cell in enumerate(row):
            for action in actions_of(cell):
                self._first.setdefault(action.stage, slot)
                self._last[action.stage] = slot
        self.peak = 0
        for slot, cell in enumerate(row):
            stages = {action.stage for action in actions_of(cell)}
            if gather_per == "step":
                stages = {s for s in self._first if self._first[s] <= slot <= self._last[s]}
            self.peak = max(self.peak, len(stages))

    def communication_around(
        self, slot: int
    ) -> tuple[list[ShardCommunication], list[ShardCommunication]]:
        """Return what comes before the cell in a slot, and what after it.

        A backward for weights has its operands, and gathers nothing.
        """
        actions = actions_of(self._row[slot])
        before = [action.stage for action in actions if action.kind != "W"]
        after = [action.stage for action in actions if action.kind in "BW"]
        if self._gather_per == "step":
            before = [stage for stage in before if self._first[stage] == slot]
            after = [stage for stage in after if self._last[stage] == slot]
        return (
            [ShardCommunication(stage, "G") for stage in dict.fromkeys(before)],
            [ShardCommunication(stage, "R") for stage in dict.fromkeys(after)],
        )


def live_activations(row: Sequence[Cell]) -> int:
    """Return the largest number of activations that a rank holds; see `Timeline.live`.

    In an overlap the backward ends after the forward has begun, so the activations of both count.
    """
    live = peak = 0
    for cell in row:
        kinds = [action.kind for action in actions_of(cell)]
        live += kinds.count("F")
        peak = max(peak, live)
        live -= kinds.count("B") + kinds.count("W")
    return peak
