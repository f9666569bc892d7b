"""How often the stages' FSDP units gather parameters: for each microbatch, or once a step.

    "microbatch"   as the units are set: gather, forward, free, gather, backward, reduce, free
    "step"         gather in the first forward, keep, reduce and free in the last backward

"step" holds the parameters and gradients of a rank's stages whole during the step, and moves a
share of 1/m of the bytes.
"""

from __future__ import annotations

import copy
import itertools
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
        self._units: dict[int, list[Unit]] = {}
        if gather == "step":
            self._units = {number: units_of(stage) for number, stage in stages.items()}
        self._last_backward = _last_backwards(row)

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Keep parameters and gradients whole in the block, until the last backwards.

        Communication: at the end, the reductions of stages that are compiled as a whole.
        """
        units = dict.fromkeys(itertools.chain.from_iterable(self._units.values()))
        before = [(unit, copy.copy(unit.controls)) for unit in units]
        for unit, _ in before:
            unit.controls.keep = "all"
            unit.controls.reshards_after_backward = False
            unit.controls.reduces_grads = False
        try:
            yield
            self._reduce_held(units)
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
        """Let the units of a stage reduce and free if this is its last backward."""
        if action in self._last_backward:
            for unit in self._units.get(action.stage, ()):
                unit.controls.reduces_grads = True
                unit.controls.reshards_after_backward = True


def _last_backwards(row: Row) -> set[Action]:
    """Return the action of each stage after which its gradients are complete."""
    last: dict[int, Action] = {}
    for action in actions_in(row):
        if action.kind in "BW":
            last[action.stage] = action
    return set(last.values())
