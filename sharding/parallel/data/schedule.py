"""The order in which the units of a model run.

So the next one is gathered while the current one computes.

A forward is expected to have the order of the last one, the first forward that of the modules.
Backward goes in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch.utils import _pytree as pytree

from ....mesh.comm.thread_context import thread_context
from ....mesh.device_mesh import DeviceMesh
from ...autograd import engine_hooks
from ...layout.layout import distinct_mesh_names
from ...tensor.autograd import leaf_grads
from ...tensor.sharded_tensor import ShardedTensor
from .controls import UnitControls
from .grads.grad_bucketing import GradBucketer
from .grads.offloaded_grads import OffloadedGrads
from .inputs import is_slice
from .plan import UnitPlan

_numbers = count()


class ScheduledUnit(Protocol):
    """What a schedule asks of a unit; its phases are in `unit.py`.

    Attributes:
        saved: how many views of its gathered buffers backward still needs.
        schedule: the unit's schedule, set by it.
    """

    plan: UnitPlan
    controls: UnitControls
    saved: int
    schedule: Schedule

    def gather(self) -> None:
        """Launch the all_gathers."""

    def prefetch(self) -> None:
        """Launch the all_gathers for the next forward."""

    def end_model_forward(self) -> None:
        """The forward of the outermost unit has ended."""

    def release(self) -> None:
        """Backward is done with the unit."""

    def end_model_backward(self) -> None:
        """The running backward has ended."""

    def reset(self) -> None:
        """A forward or backward has failed."""


class _Running(NamedTuple):
    """A unit's call, and the mesh of its sharded inputs; None for plain ones."""

    unit: ScheduledUnit
    mesh: DeviceMesh | None


class Schedule:
    """The units of a model and the order in which they run.

    Attributes:
        units: in the order of the modules, the outermost first.
        bucketer: reduces the gradients of small units together.
    """

    _count: ClassVar[int] = 0  # of all schedules: units were made if it has changed

    def __init__(self, root: ScheduledUnit) -> None:
        self.units: list[ScheduledUnit] = [root]
        self._order: list[ScheduledUnit] = []  # of the running forward
        self._last_order: list[ScheduledUnit] = []  # of the last forward
        self._running: list[_Running] = []  # nested calls, innermost last
        self._backward = self._scanned = -1
        self._reductions: set[int] = set()  # under way
        self.bucketer = GradBucketer()
        self._delayed: ScheduledUnit | None = None  # until half of another unit's backward
        Schedule._count += 1

    def set_units(self, units: list[Any]) -> None:
        """Set the units of the model, if there are more than before."""
        if len(units) > len(self.units):
            self.units = units
            for unit in units:
                unit.schedule = self

    def tensor_axes(self, mesh: DeviceMesh) -> tuple[str, ...]:
        """Return the axes of a mesh that split parameters in use (tensor parallelism)."""
        plans = [unit.plan for unit in self.units]
        axes = set().union(*(plan.tensor_axes for plan in plans if plan.options.mesh is mesh))
        return tuple(axis for axis in mesh.axis_names if axis in axes)

    # -- forward -----------------------------------------------------------------------------------

    def begin(self, units: Callable[[], list[Any]]) -> None:
        """Begin a forward of the model; `units` returns those of its modules."""
        if self._scanned != Schedule._count:
            self.set_units(units())
            self._scanned = Schedule._count
        thread_context.schedule = self
        if engine_hooks.current_backward() == -1:
            self._recover()

    def is_running(self, unit: ScheduledUnit) -> bool:
        """Return whether a call of the unit is running."""
        return any(call.unit is unit for call in self._running)

    def enter(self, unit: ScheduledUnit, mesh: DeviceMesh | None) -> None:
        """Begin a unit's forward, with inputs on this mesh; None for plain ones."""
        self._running.append(_Running(unit, mesh))
        if engine_hooks.current_backward() == -1:
            self._order.append(unit)

    def leave(self, unit: ScheduledUnit) -> None:
        """End a unit's forward; with the outermost unit, that of the model."""
        place = next((i for i, call in enumerate(self._running) if call.unit is unit), None)
        if place is not None:
            del self._running[place]
        if self._running:
            return
        thread_context.schedule = None
        if engine_hooks.current_backward() == -1:
            order, self._order = self._order or self._last_order, []
            if order and (order[0] is self.units[0] or self._last_order[:1] != self.units[:1]):
                # not that of an inner unit called alone, as in a loss computed in chunks
                self._last_order = order
            for other in self.units:
                other.end_model_forward()

    def enclosing_mesh(self, unit: ScheduledUnit) -> DeviceMesh | None:
        """Return the mesh of the enclosing unit; None if the parameters of this one are on another.

        Raises:
            ValueError: the enclosing unit computes the loss of a global batch, and this unit's
                parameters are on another mesh, so that the scale of its gradients is unknown.
        """
        calls = [call for call in self._running if call.unit is not unit]
        outer, mesh = calls[-1] if calls else (unit, None)
        own = unit.plan.options.mesh
        if mesh is None or is_slice(mesh, own):
            return mesh
        is_global = not set(outer.plan.options.data_axes).isdisjoint(mesh.axis_names)
        if is_global and unit.controls.divide_factor is None:
            outer_name, own_name = distinct_mesh_names(mesh, own)
            raise ValueError(
                f"{unit.plan.display_name} was called with plain tensors inside of "
                f"{outer.plan.display_name}, which computes on {outer_name}, but its parameters "
                f"are on {own_name}: it is unknown which ranks have the same inputs. Pass sharded "
                "tensors on its mesh, or say by set_gradient_divide_factor what to divide its "
                "gradients by"
            )
        return None

    def prefetch(self, unit: ScheduledUnit) -> None:
        """Gather the next unit: as in the last forward, or in backward the previous one.

        Communication: one all_gather per dtype, or none.
        """
        if engine_hooks.current_backward() != -1:
            return self.prefetch_backward(unit)
        if unit.controls.forward_prefetch is not None:
            for other in unit.controls.forward_prefetch:
                other.prefetch()
            return None
        next_unit = self._next_unit(len(self._order))
        if next_unit is not None and next_unit is not unit:
            next_unit.prefetch()
        return None

    def _next_unit(self, place: int) -> ScheduledUnit | None:
        order = self._last_order or self.units
        if self._last_order and self._last_order[:place] != self._order:
            order = []
        return order[place] if place < len(order) else None

    # -- backward ----------------------------------------------------------------------------------

    def before_backward(self, unit: ScheduledUnit, outputs: Any) -> Any:
        """Return the outputs; with them, backward begins by gathering the unit that ran last.

        Without this, that gather would be launched after the backward of what follows the unit,
        such as the head of a language model, and nothing would be left to overlap with it.
        """
        if (
            unit is self.units[0]
            and len(self.units) > 1
            and torch.is_grad_enabled()
            and engine_hooks.current_backward() == -1
        ):
            for x in pytree.tree_leaves(outputs):
                local = x._local if isinstance(x, ShardedTensor) else x
                node: Any = getattr(local, "grad_fn", None)
                if node is not None:
                    node.register_prehook(self._on_first_gradient)
        return outputs

    def _on_first_gradient(self, _: Any) -> None:
        for unit in reversed(self._last_order):
            explicit = unit.controls.backward_prefetch
            if _is_gathered_ahead(unit):
                unit.gather()
                return
            if explicit is not None and unit is not self.units[0]:
                # The unit kept its parameters, so its backward gathers none.
                _gather_ahead(explicit)
                return

    def prefetch_backward(self, unit: ScheduledUnit) -> None:
        """Gather the unit that ran before; during a reduction, at half of this unit's backward.

        Communication: as `prefetch`.
        """
        self.on_backward()
        if unit.controls.backward_prefetch is not None:
            _gather_ahead(unit.controls.backward_prefetch)
            return
        places = [i for i, other in enumerate(self._last_order) if other is unit]
        order = self._last_order[: places[-1]] if places else []
        before = [other for other in order if other is not unit and _is_gathered_ahead(other)]
        if not before:
            return
        if self._reductions and not unit.controls.allows_unused:
            self._delayed = before[-1]
        else:
            before[-1].gather()

    def at_half_of_backward(self) -> None:
        """Launch a delayed gather: half of the gradients of the unit in backward exist.

        Launched earlier, it would share the links with a reduction, and the buffers of both would
        be in memory together with the unit's activations. Communication: as `prefetch`.
        """
        unit, self._delayed = self._delayed, None
        if unit is not None and unit.saved:
            unit.gather()

    def reduction_started(self) -> Callable[[], None]:
        """Count a reduction as under way, until the returned function is called."""
        reductions, number = self._reductions, next(_numbers)
        reductions.add(number)
        return lambda: reductions.discard(number)

    def on_backward(self) -> None:
        """Register the end of the running backward, once."""
        backward = engine_hooks.current_backward()
        if backward != self._backward and backward != -1:
            self._backward = backward
            engine_hooks.at_end_of_backward(self._end_of_backward)

    def _end_of_backward(self) -> None:
        for offloaded in self._offloaded:
            offloaded.finish()
        self._release()
        for unit in self.units:
            unit.end_model_backward()

    # -- failures ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop all state of a step that has failed, accumulated gradients included."""
        thread_context.schedule = None
        self._running.clear()
        self._order = []
        self._recover()
        self._release()
        for unit in self.units:
            unit.reset()

    def _recover(self) -> None:
        """Release the state that a failed backward left."""
        leaf_grads.drop_started(self.units[0].plan.options.mesh.world)
        self.bucketer.drop()
        if self._backward != -1:
            self._release()

    def _release(self) -> None:
        self._backward, self._delayed = -1, None
        for offloaded in self._offloaded:
            offloaded.drop()
        self._reductions.clear()
        for unit in self.units:
            unit.release()

    @property
    def _offloaded(self) -> Iterable[OffloadedGrads]:
        offloaded = (unit.plan.options.offloaded for unit in self.units)
        return dict.fromkeys(one for one in offloaded if one is not None)


def _is_gathered_ahead(unit: ScheduledUnit) -> bool:
    """Return whether other units gather this one ahead of its backward."""
    return unit.saved > 0 and unit.controls.prefetched_in_backward


def _gather_ahead(units: Iterable[ScheduledUnit]) -> None:
    for unit in units:
        if _is_gathered_ahead(unit):
            unit.gather()
