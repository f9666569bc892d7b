"""The order of events of a training step: what a rank computes, and its collectives in between.

    forward of microbatch 0     all_gather fsdp   parameters outside of blocks
                                all_gather fsdp   parameters of block 0
                                all_gather fsdp   parameters of block 1
                                                  block 0
                                all_gather tp     activations

It is predicted from three things, and no program runs. Which collectives a block needs for its own
products, and when backward uses its parameters and has their gradients, are the marks of
`part_order.py`. When `fully_shard` and `data_parallel` gather and reduce follows from their rules
(`parallel/data/schedule.py`): a unit gathers the next one, in backward the one before, during a
reduction at half of its own gradients; a reduction is waited for when the next is launched. When a
pipeline sends and receives follows from its schedule. It is the order of a step after the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

from ..parallel.data.grads.grad_bucketing import BUCKET_BYTES, FIRST_BUCKET_BYTES
from ..parallel.pipeline.actions import Action, actions_in
from ..parallel.pipeline.executor import with_whole_backwards
from ..parallel.pipeline.gathering import last_backwards
from ..parallel.pipeline.transport import transfers
from .description import Description, stage_layers
from .form import AXES, Form, check_form, why_not
from .memory import stages_of_rank
from .part_order import (
    ALL,
    ATTENTION,
    EXPERTS,
    HALF,
    OUTPUT,
    SAVED,
    WEIGHTS,
    ModelOrder,
    PartOrder,
    model_order,
)
from .program import mesh_axes
from .step_time import schedule_of

Phase = Literal["forward", "backward", "end of step"]


class Event(NamedTuple):
    """An event of a step on one rank.

    Attributes:
        phase: "forward", "backward", or "end of step".
        stage: of the pipeline; 0 without one.
        microbatch: its number; None at the end of a step.
        op: the collective, where it is launched; "send", or "receive" where the receive of the next
            message of the pipeline is posted; "" for what the rank computes.
        axis: mesh axes of the collective, such as "fsdp" or "fsdp,cp".
        of: what is computed or moved, such as "block 3" and "parameters of block 3".
    """

    phase: Phase
    stage: int
    microbatch: int | None
    op: str
    axis: str
    of: str


class StepEvents(tuple[Event, ...]):
    """The events of a step of one rank, in order.

    `print` shows them by phase, and once where they repeat for other microbatches.
    """

    __slots__ = ()

    def __str__(self) -> str:
        parts = [_Part(*key, tuple(events)) for key, events in groupby(self, lambda x: x[:3])]
        has_stages = any(event.stage for event in self)
        lines: list[str] = []
        while parts:
            count, times, step = _repetition(parts)
            shown = [line for part in parts[:count] for line in part.lines(has_stages)]
            if times > 1:
                further = "one microbatch" if step == 1 else f"{step} microbatches"
                lines.append(f"{times} times, each time {further} further")
                shown = [f"    {line}" for line in shown]
            lines += shown
            parts = parts[count * times :]
        return "\n".join(lines)


class _Part(NamedTuple):
    """The events of a phase that follow one another."""

    phase: Phase
    stage: int
    microbatch: int | None
    events: tuple[Event, ...]

    def lines(self, has_stages: bool) -> list[str]:
        of_stage = f"stage {self.stage}, " if has_stages else ""
        at = "" if self.microbatch is None else f" of {of_stage}microbatch {self.microbatch}"
        lines = [f"{self.phase}{at}"]
        for (op, axis, of), same in groupby(self.events, key=lambda event: event[3:]):
            count = sum(1 for _ in same)
            times = f"{count} x " if count > 1 else ""
            lines.append(f"    {times}{op} over {axis}: {of}" if op else f"    {of}")
        return lines

    def relative(self, first: int) -> tuple[Any, ...]:
        """Return what is equal for parts that differ in their microbatches alone."""
        texts = tuple(
            (event.op, event.axis, _MICROBATCH.sub(lambda x: f"{int(x[1]) - first:+d}", event.of))
            for event in self.events
        )
        number = None if self.microbatch is None else self.microbatch - first
        return self.phase, self.stage, number, texts


_MICROBATCH = re.compile(r"(?<=microbatch )(\d+)")
_MOST_PARTS = 64  # that repeat together


def _repetition(parts: Sequence[_Part]) -> tuple[int, int, int]:
    """Return how many parts repeat at the beginning, how often, and by how many microbatches.

    The ones that leave the fewest lines; (1, 1, 0) if none does.
    """
    best, saved = (1, 1, 0), 0
    for count in range(1, min(len(parts) // 2, _MOST_PARTS) + 1):
        first, second = parts[0].microbatch, parts[count].microbatch
        if first is None or second is None or second <= first:
            continue
        step = second - first
        relative = [part.relative(first) for part in parts[:count]]
        times = 1
        while relative == [
            part.relative(first + times * step)
            for part in parts[count * times : count * (times + 1)]
        ]:
            times += 1
        if count * (times - 1) > saved:
            best, saved = (count, times, step), count * (times - 1)
    return best


def step_events(form: Form, model: Description, rank: int = 0) -> StepEvents:
    """Return what a rank does in a step of a form's program, in order.

    Without the sums of a few numbers: the loss, and the norm of gradients.

    Args:
        rank: of the pipeline.

    Raises:
        ValueError: the model cannot take the form; no such rank; or see `why_no_order`.
    """
    check_form("events(form", form)
    reason = why_not(form, model) or why_no_order(form, model)
    if reason is not None:
        raise ValueError(f"events of {form}: {reason}")
    is_number = isinstance(rank, int) and not isinstance(rank, bool)
    if not is_number or not 0 <= rank < form.pp:
        ranks = f"from 0 to {form.pp - 1}" if form.pp > 1 else "0 alone, as the form has none"
        raise ValueError(f"events(rank={rank!r}): a rank of the pipeline, {ranks}")
    order = model_order(model, form.tp, form.sequence_parallel, own_experts=form.ep > 1)
    return StepEvents(_Step(form, model, order, rank).run())


def why_no_order(form: Form, model: Description) -> str | None:
    """Return why the order of a form is not predicted, in words; None if it is."""
    if form.compiled:
        return "compiled blocks have their gradients in an order of their own"
    if form.regather:
        return "the program saves what it gathers"
    if form.tp > 1 and model.experts and form.ep == 1:
        return "programs run experts otherwise than what is counted if tp > 1"
    if form.recompute != "none" and form.ep > 1:
        return "when a block that is computed again gathers its experts is not predicted"
    if form.pp > 1 and model.costs(form.tp, form.sequence_parallel, dispatches=form.ep > 1).tied:
        return "when gradients of tied parameters are summed over stages is not predicted"
    return None


@dataclass(eq=False)
class _Unit:
    """Parameters that are gathered together.

    Attributes:
        name: for events, such as "of block 3".
        axis: over which they are shared; "" if one rank has them.
        elements: that a rank of tp holds, for the size of buckets.
        splits: for each set of axes over which gradients are summed besides, in the order of
            parameters, whether tp splits those parameters.
        is_gathered: whether they are whole now.
        is_saved: whether backward needs them.
    """

    name: str
    axis: str
    elements: float
    splits: tuple[bool, ...]
    is_gathered: bool = False
    is_saved: bool = False


@dataclass
class _Stage:
    """A stage of the pipeline, or the whole model.

    Attributes:
        root: the parameters outside of blocks.
        blocks: index of a block -> its unit, and that of its experts, if they have one.
        order: the units in the order in which they are called.
    """

    root: _Unit
    blocks: dict[int, tuple[_Unit, ...]]
    order: list[_Unit] = field(default_factory=list)
    reducing: list[_Unit] = field(default_factory=list)  # the last one, until it is waited for
    delayed: _Unit | None = None

    def __post_init__(self) -> None:
        self.order = [self.root, *(unit for units in self.blocks.values() for unit in units)]


class _Step:
    """Walks through a step and notes its events."""

    def __init__(self, form: Form, model: Description, order: ModelOrder, rank: int) -> None:
        self._form, self._model, self._order, self._rank = form, model, order, rank
        self._events: list[Event] = []
        self._at: tuple[Phase, int, int | None] = ("forward", 0, 0)
        self._last_stage = form.pp * form.stages - 1
        axes = mesh_axes(form)
        self._expert_axes = ",".join(form.expert_axes)
        self._has_buckets = bool({"fsdp", "cp", "ep"} & axes.keys())
        self._is_deferred = form.microbatches > 1 or form.pp > 1  # what accumulate_grads() defers
        self._frees = form.gather == "microbatch" and form.zero == 3
        self._saves = form.recompute == "none" and self._frees
        self._sums = True  # whether the running backward sums gradients
        self._waiting: list[_Unit] = []  # of a bucket
        self._threshold = FIRST_BUCKET_BYTES
        self._stages = {stage: self._stage(stage) for stage in stages_of_rank(form, rank)}

    def _stage(self, stage: int) -> _Stage:
        form, model = self._form, self._model
        costs = model.costs(form.tp, form.sequence_parallel, dispatches=form.ep > 1)
        counts = stage_layers(model.layers, self._last_stage + 1)
        first = sum(counts[:stage])
        shards = _axes(form, ("fsdp", "cp", "ep"))
        kinds = dict(zip(self._order.blocks, costs.kinds, strict=True))
        blocks: dict[int, tuple[_Unit, ...]] = {}
        for index in range(first, first + counts[stage]):
            kind = kinds[model.block_like(index)]
            has_experts = form.ep > 1 and kind.experts > 0
            own = kind.parameters - kind.experts * has_experts
            splits = self._order.blocks[model.block_like(index)].splits
            units = [_Unit(f"of block {index}", shards, own, splits)]
            if has_experts:
                name, axis = f"of experts of block {index}", _axes(form, ("fsdp", "cp"))
                units.append(_Unit(name, axis, kind.experts / form.ep, (form.tp > 1,)))
            blocks[index] = tuple(units)
        elements = 0.0
        root_splits: list[bool] = []
        if stage == 0:
            elements += costs.first
            root_splits += self._order.before.splits
        if stage == self._last_stage:
            elements += costs.edges.parameters - costs.first
            root_splits += self._order.after.splits
        root = _Unit("outside of blocks", shards, elements, tuple(dict.fromkeys(root_splits)))
        return _Stage(root, blocks)

    def run(self) -> list[Event]:
        """Return the events."""
        if self._form.pp > 1:
            self._run_pipeline()
        else:
            self._balance()
            for number in range(self._form.microbatches):
                self._forward(0, number)
                self._backward(0, number)
        self._at = ("end of step", 0, None)
        self._reduce_deferred()
        self._compute("optimizer")
        return self._events

    def _balance(self) -> None:
        if self._form.balanced:
            for of in ("ids", "labels"):
                self._add("all_to_all", "cp", f"{of} in their balanced order")

    # -- pipeline ----------------------------------------------------------------------------------

    def _run_pipeline(self) -> None:
        form = self._form
        schedule = schedule_of(form, form.microbatches)
        moved = transfers(schedule.rows)
        # what comes from each rank, in order; the next receive is posted as one is waited for
        incoming = {src: list(x) for (src, dst), x in moved.items() if dst == self._rank}
        outgoing = {action for (src, _), x in moved.items() if src == self._rank for action in x}
        row = with_whole_backwards(schedule.rows[self._rank])
        actions = actions_in(row)
        self._at = ("forward", actions[0].stage, actions[0].microbatch)
        self._balance()
        for messages in incoming.values():
            self._receive(messages)
        last = last_backwards(row)
        for action in actions:
            is_forward = action.kind == "F"
            self._at = (
                "forward" if is_forward else "backward",
                action.stage,
                action.microbatch,
            )
            if action.kind != "W":
                for messages in incoming.values():
                    if messages and messages[0] in action.operands(self._last_stage):
                        del messages[0]
                        self._receive(messages)
            reduces = form.gather == "microbatch" or action in last
            if is_forward:
                self._forward(action.stage, action.microbatch)
            elif action.kind == "W":
                self._backward_for_weights(action.stage, reduces=reduces)
            else:
                is_whole = action.kind == "B"
                self._backward(action.stage, action.microbatch, is_whole=is_whole, reduces=reduces)
            if action.result in outgoing:
                self._add("send", "pp", _message(action.result))

    def _receive(self, messages: Sequence[Action]) -> None:
        if messages:
            self._add("receive", "pp", _message(messages[0]))

    # -- forward -----------------------------------------------------------------------------------

    def _forward(self, number: int, microbatch: int) -> None:
        self._at = ("forward", number, microbatch)
        stage = self._stages[number]
        self._begin(stage, stage.root)
        if number == 0:
            self._run_marks(self._order.before.forward)
        for index, (unit, *experts) in stage.blocks.items():
            self._begin(stage, unit)
            self._compute(f"block {index}")
            for mark in self._part(index).forward:
                if mark == EXPERTS and experts:
                    self._begin(stage, experts[0])
                    self._end(experts[0])
                self._run_mark(mark)
            self._end(unit)
        if number == self._last_stage:
            self._run_marks(self._order.after.forward)

    def _begin(self, stage: _Stage, unit: _Unit) -> None:
        """Gather a unit, and the next one."""
        self._gather(unit)
        place = stage.order.index(unit) + 1
        if place < len(stage.order):
            self._gather(stage.order[place])

    def _end(self, unit: _Unit) -> None:
        if self._frees:
            unit.is_gathered = False
            unit.is_saved = self._saves

    # -- backward ----------------------------------------------------------------------------------

    def _backward(
        self, number: int, microbatch: int, *, is_whole: bool = True, reduces: bool = True
    ) -> None:
        """Run a backward of a stage.

        Args:
            is_whole: whether it has the gradients of parameters.
            reduces: whether gradients are summed then.
        """
        self._at = ("backward", number, microbatch)
        self._sums = is_whole and reduces
        stage = self._stages[number]
        is_last = number == self._last_stage
        if is_last:
            for mark in self._order.after.backward:
                if mark == OUTPUT:
                    self._gather_last(stage)
                self._run_mark(mark)
        for place, (index, (unit, *experts)) in enumerate(reversed(stage.blocks.items())):
            self._compute(f"backward of block {index}")
            if place == 0 and not is_last:
                self._gather_last(stage)
            self._backward_of_block(stage, self._part(index), unit, experts)
            if not is_whole:
                self._release(unit)
        if number == 0:
            self._run_marks(self._order.before.backward)
        if is_whole:
            self._reduce(stage, stage.root)
            self._end_backward(stage)
        elif number:
            self._release(stage.root)

    def _backward_of_block(
        self, stage: _Stage, part: PartOrder, unit: _Unit, experts: Sequence[_Unit]
    ) -> None:
        for mark in part.backward:
            if mark == SAVED and self._form.recompute != "none":
                self._gather_again(stage, unit)
                self._run_marks(part.again, is_again=True)  # ring attention is never saved
            elif mark == WEIGHTS and self._saves:
                self._gather_again(stage, unit)
            elif mark == HALF and self._sums:
                self._gather_delayed(stage)
            elif mark == ALL and self._sums:
                self._reduce(stage, unit)
            elif mark == EXPERTS and experts:
                self._add("all_to_all", self._expert_axes, "gradients of rows")
                self._gather_again(stage, experts[0])
                if self._sums:  # their gradients exist before those of rows travel back
                    self._gather_delayed(stage)
                self._add("all_to_all", self._expert_axes, "gradients of rows")
                self._reduce(stage, experts[0])
            else:
                self._run_mark(mark)

    def _backward_for_weights(self, number: int, *, reduces: bool) -> None:
        self._sums = reduces
        stage = self._stages[number]
        for unit in reversed(stage.order):
            self._reduce(stage, unit)
        self._end_backward(stage)

    def _gather_last(self, stage: _Stage) -> None:
        """Gather the unit that ran last: backward begins."""
        saved = next((unit for unit in reversed(stage.order) if unit.is_saved), None)
        if saved is not None:
            self._gather(saved)

    def _gather_again(self, stage: _Stage, unit: _Unit) -> None:
        """Gather a unit for backward, and the one before it, now or at half of its backward."""
        if not self._frees:
            return
        self._gather(unit)
        before = [one for one in stage.order[: stage.order.index(unit)] if one.is_saved]
        if before and stage.reducing:
            stage.delayed = before[-1]
        elif before:
            self._gather(before[-1])

    def _gather_delayed(self, stage: _Stage) -> None:
        unit, stage.delayed = stage.delayed, None
        if unit is not None and unit.is_saved:
            self._gather(unit)

    def _reduce(self, stage: _Stage, unit: _Unit) -> None:
        """Launch the reduction of a unit's gradients, and wait for the one before."""
        if self._has_buckets:
            self._wait(stage)
        self._release(unit)
        if not self._sums or not unit.elements:
            return
        if not self._has_buckets:
            self._add_to_bucket(stage, unit)
            return
        if self._form.zero == 1 and self._form.microbatches > 1:
            return
        if unit.axis:
            self._add("reduce_scatter", unit.axis, f"gradients {unit.name}")
        self._gather_delayed(stage)
        stage.reducing.append(unit)

    def _wait(self, stage: _Stage) -> None:
        waiting, stage.reducing = stage.reducing, []
        if not self._is_deferred:
            for unit in waiting:
                self._sum_whole([unit])

    def _end_backward(self, stage: _Stage) -> None:
        self._wait(stage)
        self._launch_bucket()
        self._threshold = FIRST_BUCKET_BYTES
        stage.delayed = None
        for unit in stage.order:
            self._release(unit)

    def _release(self, unit: _Unit) -> None:
        unit.is_saved = False
        if self._frees or (self._form.gather == "step" and self._sums):
            unit.is_gathered = False

    # -- gradients of parameters that are whole on several ranks -----------------------------------

    def _add_to_bucket(self, stage: _Stage, unit: _Unit) -> None:
        """Sum gradients over replicas as DDP does: those of small units together."""
        if self._is_deferred:
            return
        is_alone = unit is stage.root or len(unit.splits) > 1
        if is_alone:
            self._launch_bucket()
        self._waiting.append(unit)
        size = self._form.kept_bytes * sum(one.elements for one in self._waiting)
        if is_alone or size >= self._threshold:
            self._launch_bucket()

    def _launch_bucket(self) -> None:
        units, self._waiting = self._waiting, []
        if units:
            self._threshold = BUCKET_BYTES
            self._sum_whole(units)

    def _sum_whole(self, units: Sequence[_Unit]) -> None:
        """Sum gradients over dp, and over tp where it does not split parameters."""
        names = ", ".join(unit.name for unit in units)
        if len(units) > 3:
            names = f"{units[0].name}, ..., {units[-1].name}"
        for is_split in dict.fromkeys(split for unit in units for split in unit.splits):
            axis = _axes(self._form, ("dp",) if is_split else ("dp", "tp"))
            if axis:
                self._add("all_reduce", axis, f"gradients {names}")

    def _reduce_deferred(self) -> None:
        """Sum what waits for the end of the step."""
        if not self._is_deferred:
            return
        units = [unit for stage in self._stages.values() for unit in stage.order if unit.elements]
        if self._form.zero == 1:
            for unit in reversed(units):
                if unit.axis:
                    self._add("reduce_scatter", unit.axis, f"gradients {unit.name}")
        self._sum_whole(units)

    # -- events ------------------------------------------------------------------------------------

    def _part(self, index: int) -> PartOrder:
        return self._order.blocks[self._model.block_like(index)]

    def _gather(self, unit: _Unit) -> None:
        if not unit.is_gathered and unit.elements:
            unit.is_gathered = True
            if unit.axis:
                self._add("all_gather", unit.axis, f"parameters {unit.name}")

    def _run_marks(self, marks: Iterable[str], *, is_again: bool = False) -> None:
        for mark in marks:
            self._run_mark(mark, is_again=is_again)

    def _run_mark(self, mark: str, *, is_again: bool = False) -> None:
        """Note the collectives that a mark stands for.

        Args:
            is_again: whether backward computes a forward again.
        """
        is_backward = self._at[0] == "backward" and not is_again
        if mark == ATTENTION:
            self._pass_keys_and_values(is_backward=is_backward)
        elif mark == EXPERTS:
            if self._form.ep > 1:
                self._add("all_gather", self._expert_axes, "counts of rows")
                self._add("all_to_all", self._expert_axes, "rows")
                self._add("all_to_all", self._expert_axes, "rows")
        elif mark not in (OUTPUT, SAVED, WEIGHTS, HALF, ALL):
            self._add(mark, "tp", "gradients" if is_backward else "activations")

    def _pass_keys_and_values(self, *, is_backward: bool) -> None:
        """Note the permutes of ring attention; the next keys and values come during a step.

        In backward each step but the first sends on the gradients of what it has.
        """
        for step in range(self._form.cp):
            if step < self._form.cp - 1:
                self._add("permute", "cp", "keys and values")
            if is_backward and step:
                self._add("permute", "cp", "gradients of keys and values")

    def _compute(self, of: str) -> None:
        self._add("", "", of)

    def _add(self, op: str, axis: str, of: str) -> None:
        self._events.append(Event(*self._at, op, axis, of))


def _axes(form: Form, names: Iterable[str]) -> str:
    """Return those of the axes that have more than one rank."""
    return ",".join(axis for axis in AXES if axis in names and getattr(form, axis) > 1)


def _message(result: Action) -> str:
    """Return what moves: 1F0 is the output of stage 1, and 1I0 the gradient of its input."""
    what = "activations" if result.kind == "F" else "gradients"
    return f"{what} of stage {result.stage}, microbatch {result.microbatch}"
