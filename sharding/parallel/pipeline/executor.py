"""The executor: what one rank does in a step, by its row of the schedule.

row        0F0    0F1    0B0    0B1
forward    take activations, run the stage, pass on what later stages need; keep the graph
backward   take gradients, run the graph, pass on the gradients of the stage's inputs
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ....mesh.comm.group import Group
from ....mesh.comm.recording.recorder import CommTag
from ....mesh.comm.world import World
from ....mesh.errors import WatchError
from ...tensor.convert import autocast_dtype
from ...tensor.sharded_tensor import ShardedTensor, local_of
from ..tensor.plain_calls import whole_outputs_plain
from .actions import Action, Cell, Row, actions_in
from .gathering import StepGathers
from .losses import MicrobatchLoss, Scales
from .microbatches import Microbatch
from .random_numbers import StepRandom
from .split_backward import SplitBackward
from .stages.stage import Stages
from .transport import Transport


@dataclass(frozen=True)
class DataRanks:
    """The ranks with other rows of the same batch.

    Attributes:
        group: None if there is one rank.
        size: their number, by which layers average gradients.
    """

    group: Group | None = None
    size: int = 1

    def sum(self, x: Tensor, tag: CommTag) -> Tensor:
        """Sum over these ranks, in place. Communication: one all_reduce."""
        if self.group is not None:
            self.group.all_reduce(x, tag=tag)
        return x


@dataclass
class RunningStage:
    """What a stage keeps of a microbatch between its actions.

    Attributes:
        inputs: the stage's inputs, leaves of its graph.
        roots: where backward begins: outputs that later stages use, and losses.
        losses: how many of the roots are losses, whose gradient is 1; they come last.
        added: what the stage that runs has passed to `add_loss`.
        split: the backward in two parts, if the schedule has it in two parts.
    """

    inputs: list[Tensor]
    roots: list[GradientEdge] = field(default_factory=list)
    losses: int = 0
    added: list[Tensor] = field(default_factory=list)
    split: SplitBackward | None = None


def with_whole_backwards(row: Row) -> Row:
    """Return a row in which I and W are one backward where that delays no other rank.

    That is where W follows I directly, and what I computes goes to no stage, or to one of this
    rank, which runs after W in any case. A whole backward gives the same bits at less cost.

        stages 0, 4     4I0 4W0 0I0 0W0    ->    4I0 4W0 0B0      stage 3, on another rank, uses 4I0
    """
    own = {action.stage for action in actions_in(row)}
    merged: list[Cell] = []
    for cell in row:
        before = merged[-1] if merged else None
        is_next = (
            isinstance(cell, Action)
            and cell.kind == "W"
            and before == cell._replace(kind="I")
            and (cell.stage == 0 or cell.stage - 1 in own)
        )
        if is_next:
            merged[-1] = cell._replace(kind="B")
        else:
            merged.append(cell)
    return tuple(merged)


class StepRun:
    """One step, or one evaluation, of one rank.

    Args:
        stages: this rank's stages.
        last_stage: the last one of the pipeline.
        microbatches: all of them, with their signatures.
        transport: begun.
        loss: None for outputs only.
        scales: for each microbatch the factors of its losses; empty if there are no targets.
        data: the ranks with other rows of the same batch.
        random: the random numbers of the step; None to draw from the generators as they are.
        world: this rank's.

    Attributes:
        total: this rank's part of the loss, summed in float64; None if it has none.
        loss_dtype: that of the losses in it.
        outputs: results of the last stage, by microbatch, if there is no loss.
    """

    def __init__(
        self,
        stages: Stages,
        last_stage: int,
        microbatches: Sequence[Microbatch],
        signatures: Sequence[Hashable],
        transport: Transport,
        loss: MicrobatchLoss | None,
        scales: Sequence[Scales],
        data: DataRanks,
        random: StepRandom | None,
        world: World,
    ) -> None:
        self._stages = stages
        self._last_stage = last_stage
        self._microbatches = microbatches
        self.signatures = signatures
        self.data = data
        self._random = random
        self._world = world
        self._transport = transport
        self._loss = loss
        self._scales = scales
        self._running: dict[tuple[int, int], RunningStage] = {}
        self._current: RunningStage | None = None
        self.total: Tensor | None = None
        self.loss_dtype: torch.dtype | None = None
        self.outputs: dict[int, Any] = {}

    def run(self, row: Row, gathers: StepGathers | None = None) -> None:
        """Run the actions of a row, in order.

        Args:
            gathers: of a step.

        Communication: the messages of the transport; what the stages do.
        """
        in_two_parts = {
            (action.stage, action.microbatch) for action in actions_in(row) if action.kind == "W"
        }
        for action in actions_in(row):
            if gathers is not None:
                gathers.before(action)
            with self._publish(action):
                match action.kind:
                    case "F":
                        self._forward(action, (action.stage, action.microbatch) in in_two_parts)
                    case "B" | "I":
                        self._backward(action)
                    case "W":
                        self._backward_weight(action)
        self._transport.finish()

    @contextmanager
    def _publish(self, action: Action) -> Iterator[None]:
        """Let the monitor's verdicts, and errors of the model, say that this action was running."""
        buffer = self._world.trace_buffer
        buffer.set_doing(f"in {action.description}")
        try:
            yield
        except WatchError:  # which says what each rank did
            raise
        except Exception as error:
            error.add_note(f"raised in {action.description}, of a pipeline")
            raise
        finally:
            buffer.set_doing("")

    def add_loss(self, value: Tensor) -> None:
        """Add a loss of the stage and microbatch that run; recomputation in backward adds none."""
        if self._current is None:
            return
        if not self._scales:
            raise RuntimeError(
                "add_loss: pass targets to `step` on every rank, which weigh the loss"
            )
        self._current.added.append(value)

    def _forward(self, action: Action, in_two_parts: bool) -> None:
        stage, _, number = action
        microbatch = self._microbatches[number]
        signature = self.signatures[number]
        inputs: list[Tensor] = []
        carried: list[Tensor] = []
        if stage:
            inputs, carried = self._transport.take_activations(stage, number, signature)
        if any(autocast_dtype(x.device) for x in inputs):
            # autocast caches the casts of leaves, and adds up their gradients in the lower dtype
            carried = [x.view_as(x) if x.requires_grad else x for x in carried]
        running = RunningStage(inputs, split=SplitBackward() if in_two_parts else None)
        recording = nullcontext() if running.split is None else running.split.recording()
        seeded = nullcontext() if self._random is None else self._random.microbatch(number)
        self._current = running
        try:
            with seeded, recording:
                call = self._stages.calls[stage]
                result = call(tuple(carried), microbatch.args, microbatch.kwargs)
                for value in running.added:  # here, outside of what a unit recomputes
                    self._add_root(running, value, self._scales[number].mean)
                if stage == self._last_stage:
                    if self._random is not None:
                        self._random.before_loss()
                    self._finish_forward(running, number, result)
        finally:
            self._current = None
            running.added = []
        if stage < self._last_stage:
            passed_on = self._transport.put_activations(action, signature, result)
            roots = [local_of(value) for value in passed_on if value.requires_grad]
            running.roots[:0] = [get_gradient_edge(root) for root in roots]
        if torch.is_grad_enabled():
            self._running[stage, number] = running

    def _finish_forward(self, running: RunningStage, number: int, result: Any) -> None:
        """Compute the loss, or keep the result."""
        microbatch = self._microbatches[number]
        # by the model's inputs, and not by what is carried into the last stage
        result = whole_outputs_plain((microbatch.args, microbatch.kwargs), result)
        if self._loss is None:
            self.outputs[number] = result
            return
        loss = self._loss.function(result, microbatch.target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                f"loss_fn returned {loss!r:.80}, not a tensor with one element, for microbatch "
                f"{number}"
            )
        self._add_root(running, loss, self._scales[number].loss)

    def _add_root(self, running: RunningStage, loss: Tensor, scale: Tensor) -> None:
        """Add a loss, scaled, to those of the step and to the roots of backward.

        One that counts nothing is 0, also if it is a mean over nothing, which is NaN.
        """
        whole = loss.full_tensor() if isinstance(loss, ShardedTensor) else loss
        counted = whole.reshape(()).where(scale != 0, 0)
        value = counted * scale.to(whole.dtype)
        part = counted.detach().double() * scale
        self.total = part if self.total is None else self.total + part
        dtype = whole.dtype
        self.loss_dtype = torch.promote_types(self.loss_dtype or dtype, dtype)
        if value.requires_grad:
            running.losses += 1
            running.roots.append(get_gradient_edge(value))

    def _backward(self, action: Action) -> None:
        """Run the backward of a stage, as a whole or for its inputs."""
        stage, kind, number = action
        running = self._running[stage, number]
        grads: list[Tensor | None] = []
        if stage < self._last_stage:
            grads.extend(self._transport.take_gradients(stage, number))
        grads.extend([None] * running.losses)
        roots, running.roots = running.roots, []
        if kind == "I" and running.split is not None:
            running.split.backward_input(roots, grads)
        elif roots:
            torch.autograd.backward(roots, grads)
        if kind == "B":
            del self._running[stage, number]
        if stage:
            inputs = [local_of(x) for x in running.inputs if x.requires_grad]
            running.inputs = []
            passed_on = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
            self._transport.put_gradients(action.result, passed_on)

    def _backward_weight(self, action: Action) -> None:
        running = self._running.pop((action.stage, action.microbatch))
        if running.split is not None:
            running.split.backward_weight()
