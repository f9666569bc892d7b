"""How often the stages' FSDP units gather parameters: for each microbatch, or once a step.

    "microbatch"   as the units are set: gather, forward, free, gather, backward, reduce, free
    "step"         gather in the first forward, keep, reduce and free in the last backward

"step" holds the parameters and gradients of a rank's stages whole during the step, and moves a
share of 1/m of the bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeAlias

from ..data.unit import Unit, units_of
from .actions import Action, Row, actions_in
from .stages.stage import Stage

Gather: TypeAlias = Literal["microbatch", "step"]


class StepGathers:
    """The gathers of one step.

    Args:
        stages: this rank's stages.
        row: what the rank does in the step.
        gather: how often parameters are gathered.
    """

    def __init__(self, stages: Mapping[int, Stage], row: Row, gather: Gather) -> None:
        self._units: dict[Unit, list[int]] = {}  # -> the stages that have it
        if gather == "step":
            for number, stage in stages.items():
                for unit in units_of(stage):
                    self._units.setdefault(unit, []).append(number)
        last = last_backwards(row)
        self._ending: dict[Action, list[Unit]] = {}  # the last backward -> the units that end then
        for unit, numbers in self._units.items():
            actions = [action for action in last if action.stage in numbers]
            if actions:
                self._ending.setdefault(actions[-1], []).append(unit)

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Keep parameters and gradients whole in the block, until the last backwards.

        Communication: at the end, the reductions of stages that are compiled as a whole.
        """
        before = [(unit, copy.copy(unit.controls)) for unit in self._units]
        for unit, _ in before:
            unit.controls.keep = "all"
            unit.controls.reshards_after_backward = False
            unit.controls.reduces_grads = False
        try:
            yield
            self._reduce_held(self._units)
        finally:
            for unit, controls in before:
                unit.controls = controls

    def _reduce_held(self, units: Iterable[Unit]) -> None:
        """Reduce what no last backward has reduced, and free what none has freed.

        A stage that is compiled as a whole has its backward in I, so its W runs none.
        """
        for unit in units:
            unit.controls.reduces_grads = True
            unit.controls.reshards_after_backward = True
            unit.release()
            unit.end_model_backward()

    def before(self, action: Action) -> None:
        """Let the units reduce and free that have their last backward now.

        A unit that several stages have does in the last backward of all of them.
        """
        for unit in self._ending.get(action, ()):
            unit.controls.reduces_grads = True
            unit.controls.reshards_after_backward = True


def last_backwards(row: Row) -> list[Action]:
    """Return the actions after which gradients of stages are complete, in order."""
    actions = [action for action in actions_in(row) if action.kind in "BW"]
    last = {action.stage: action for action in actions}
    return [action for action in actions if last[action.stage] == action]
