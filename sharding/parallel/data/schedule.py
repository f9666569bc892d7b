"""In which order the units of a model run, so that each next one is gathered while this one computes.

The order of the last forward is that of the next; before the first it is that of the modules. Backward goes the other way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from ....mesh.device_mesh import DeviceMesh
from ...tensor.autograd import engine_hooks, leaf_grads
from .grads.joint import Joint

if TYPE_CHECKING:
    from .unit import Unit

_UNIT = "_shardmesh_unit"  # under this name a module has its unit
_numbers = count()
_running = threading.local()  # simulated ranks are threads


def unit_of(module: nn.Module) -> Unit | None:
    """The unit whose parameters are gathered for this module."""
    return module.__dict__.get(_UNIT)


def set_unit(module: nn.Module, unit: Unit) -> None:
    module.__dict__[_UNIT] = unit


def units_in(module: nn.Module) -> list[Unit]:
    """The units of a module and of the modules inside, the outermost first."""
    return [unit for inner in module.modules() if (unit := unit_of(inner)) is not None and unit.module is inner]


def own_modules(unit: Unit) -> Iterator[nn.Module]:
    """The modules whose parameters are the unit's: its module, and those inside that are in no unit of their own."""
    todo = [unit.module]
    while todo:
        module = todo.pop()
        yield module
        todo += [child for child in module.children() if unit_of(child) in (None, unit)]


def running_schedule(unit: Unit) -> Schedule:
    """The schedule of the model that is running, or else the unit's own."""
    found = getattr(_running, "schedule", None)
    if found is None:
        found = unit.schedule
        found.begin(unit)
    return found


class Schedule:
    """The units of a model.

    Attributes:
        units: in the order of the modules, the outermost first.
        joint: gradients of small units, which are summed together.
    """

    _made: ClassVar[int] = 0

    def __init__(self, root: Unit) -> None:
        self.units: list[Unit] = [root]
        self._order: list[Unit] = []  # of the forward that is running
        self._last: list[Unit] = []  # of the one before
        self._open: list[Unit] = []
        self._backward = self._scanned = -1
        self._sums: set[int] = set()  # under way
        self.joint = Joint()
        self._put_off: Unit | None = None  # to be gathered half way through a unit's backward
        Schedule._made += 1

    def begin(self, root: Unit) -> None:
        """A forward of the outermost unit begins."""
        if self._scanned != Schedule._made:  # there are new units somewhere
            self.take(units_in(root.module))
            self._scanned = Schedule._made
        _running.schedule = self
        if engine_hooks.current_backward() == -1:
            self._recover()

    def take(self, units: list[Unit]) -> None:
        """These are the units of the model, if they are more than were known."""
        if len(units) > len(self.units):
            self.units = units
            for unit in units:
                unit.schedule = self

    def _recover(self) -> None:
        """Let go what a backward that failed has left."""
        leaf_grads.drop_started(self.units[0].options.mesh.world)
        self.joint.forget()
        if self._backward != -1:
            self._let_go()

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """The axes that split parameters while they are used, in the order of the mesh."""
        found = {axis for unit in self.units for axis in unit.tensor_axes}
        return tuple(axis for axis in self.units[0].options.mesh.axis_names if axis in found)

    def enter(self, unit: Unit) -> None:
        self._open.append(unit)
        if engine_hooks.current_backward() == -1:
            self._order.append(unit)

    def leave(self, unit: Unit) -> None:
        """The unit is done; with the outermost one, the forward is."""
        if unit in self._open:
            self._open.remove(unit)
        if not self._open:
            _running.schedule = None
            if engine_hooks.current_backward() == -1:
                self._last, self._order = self._order or self._last, []
                for other in self.units:
                    other.forget_prepared()

    def around(self, unit: Unit) -> DeviceMesh | None:
        """The mesh that the unit around this one computes on."""
        around = [other for other in self._open if other is not unit]
        return around[-1].computes_on if around else None

    # -- what comes next -----------------------------------------------------------------------------------------------

    def prefetch(self, unit: Unit) -> None:
        """Have the next unit gathered: in forward the one that came next the last time, in backward the one before.

        Communication: one all_gather per dtype, or none.
        """
        if engine_hooks.current_backward() != -1:
            return self.prefetch_backward(unit)
        following = self._following(len(self._order))
        if following is not None and following is not unit:
            following.prepare()
        return None

    def _following(self, place: int) -> Unit | None:
        order = self._last if self._last[:place] == self._order else [] if self._last else self.units
        return order[place] if place < len(order) else None

    def prefetch_backward(self, unit: Unit) -> None:
        """Have the unit gathered that ran before this one; while a sum is under way, half way through this one's backward.

        Communication: as `prefetch`.
        """
        self.backward_runs()
        before = [other for other in self._last[: _last_index(self._last, unit)] if other.saved]
        if not before:
            return
        if self._sums and not unit.options.unused_differ:
            self._put_off = before[-1]
        else:
            before[-1].gather()

    def half_way(self) -> None:
        """Half of the gradients of the unit that backward is in are there: gather what was put off while a sum is under way.

        The gather would have to share the links with that sum, and what the two hold would be in memory together, when the unit's
        activations still are. Communication: as `prefetch`.
        """
        unit, self._put_off = self._put_off, None
        if unit is not None and unit.saved:
            unit.gather()

    def sum_begins(self) -> Callable[[], None]:
        """The sum of a unit's gradients is under way; call what comes back before it is waited for."""
        mine = self._sums
        mine.add(number := next(_numbers))
        return lambda: mine.discard(number)

    def backward_runs(self) -> None:
        """Something of a unit happens in backward."""
        backward = engine_hooks.current_backward()
        if backward != self._backward and backward != -1:
            self._backward = backward
            engine_hooks.at_end_of_backward(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._let_go()
        for unit in self.units:
            unit.fill_unused()

    def _let_go(self) -> None:
        self._backward, self._put_off = -1, None
        self._sums.clear()
        for unit in self.units:
            unit.let_go()


def _last_index(units: list[Unit], unit: Unit) -> int:
    return max((i for i, other in enumerate(units) if other is unit), default=0)
