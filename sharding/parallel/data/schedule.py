"""The order in which the units of a model run, so that the next one is gathered while the current
one computes.

A forward is expected to have the order of the last one, the first forward that of the modules.
Backward goes in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ....mesh.comm.thread_context import thread_context
from ....mesh.device_mesh import DeviceMesh
from ...autograd import engine_hooks
from ...layout.layout import distinct_mesh_names
from ...tensor.autograd import leaf_grads
from ...tensor.sharded_tensor import ShardedTensor
from .grads.grad_bucketing import GradBucketer
from .grads.offloaded_grads import OffloadedGrads
from .inputs import is_slice

if TYPE_CHECKING:
    from .unit import Unit

_UNIT = "_shardmesh_unit"  # the attribute of a module that holds its unit
_numbers = count()


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that gathers this module's parameters."""
    return module.__dict__.get(_UNIT)


def set_unit(module: nn.Module, unit: Unit) -> None:
    module.__dict__[_UNIT] = unit


def units_in(module: nn.Module) -> list[Unit]:
    """Return the units of a module and its submodules, the outermost first."""
    roots = (
        inner
        for inner in module.modules()
        if (unit := unit_of(inner)) is not None and inner in unit.roots
    )
    return list(dict.fromkeys(unit_of(inner) for inner in roots))  # type: ignore[arg-type]


def units_of(module: nn.Module) -> list[Unit]:
    """Return the units that gather parameters of a module and its submodules, also units around
    them.
    """
    units = [unit_of(inner) for inner in module.modules()]
    return list(dict.fromkeys(unit for unit in units if unit is not None))


def own_modules(unit: Unit) -> Iterator[nn.Module]:
    """Yield the modules whose calls belong to the unit, each once: its module, submodules outside
    nested units, and those that nested units share."""
    todo: list[nn.Module] = [*unit.shared_modules, unit.module]
    visited: set[nn.Module] = set()
    while todo:
        module = todo.pop()
        if module not in visited:
            visited.add(module)
            yield module
            todo += [child for child in module.children() if unit_of(child) in (None, unit)]


def running_schedule(unit: Unit) -> Schedule:
    """Return the schedule of the running model; begin the unit's own if none is running."""
    found = thread_context.schedule
    if found is None:
        found = unit.schedule
        found.begin(unit)
    return found


class Schedule:
    """The units of a model and the order in which they run.

    Attributes:
        units: in the order of the modules, the outermost first.
        bucketer: reduces the gradients of small units together.
    """

    _made: ClassVar[int] = 0

    def __init__(self, root: Unit) -> None:
        self.units: list[Unit] = [root]
        self._order: list[Unit] = []  # of the running forward
        self._last_order: list[Unit] = []  # of the last forward
        self._running_units: list[Unit] = []  # nested calls, innermost last
        self._backward = self._scanned = -1
        self._reductions: set[int] = set()  # under way
        self.bucketer = GradBucketer()
        self._delayed: Unit | None = None  # to be gathered at half of another unit's backward
        Schedule._made += 1

    def begin(self, root: Unit) -> None:
        """Begin a forward of the outermost unit."""
        if self._scanned != Schedule._made:  # new units were made
            self.set_units(units_in(root.module))
            self._scanned = Schedule._made
        thread_context.schedule = self
        if engine_hooks.current_backward() == -1:
            self._recover()

    def set_units(self, units: list[Unit]) -> None:
        """Set the units of the model, if there are more than before."""
        if len(units) > len(self.units):
            self.units = units
            for unit in units:
                unit.schedule = self

    def reset(self) -> None:
        """Drop all state of the running step, accumulated gradients included: a forward or backward
        has failed.
        """
        thread_context.schedule = None
        self._running_units.clear()
        self._order = []
        self._recover()
        self._release()
        for unit in self.units:
            unit.drop_held()
            unit.reshard()

    def _recover(self) -> None:
        """Release the state that a failed backward left."""
        leaf_grads.drop_started(self.units[0].options.mesh.world)
        self.bucketer.drop()
        if self._backward != -1:
            self._release()

    def tensor_axes(self, mesh: DeviceMesh) -> tuple[str, ...]:
        """Return the axes of a mesh that split parameters in use (tensor parallelism), in mesh
        order.
        """
        found = {
            axis for unit in self.units if unit.options.mesh is mesh for axis in unit.tensor_axes
        }
        return tuple(axis for axis in mesh.axis_names if axis in found)

    def is_running(self, unit: Unit) -> bool:
        """Return whether a call of the unit is running."""
        return any(other is unit for other in self._running_units)

    def enter(self, unit: Unit) -> None:
        self._running_units.append(unit)
        if engine_hooks.current_backward() == -1:
            self._order.append(unit)

    def leave(self, unit: Unit) -> None:
        """End a unit's forward; with the outermost unit, that of the model."""
        if unit in self._running_units:
            self._running_units.remove(unit)
        if not self._running_units:
            thread_context.schedule = None
            if engine_hooks.current_backward() == -1:
                order, self._order = self._order or self._last_order, []
                if order and (order[0] is self.units[0] or self._last_order[:1] != self.units[:1]):
                    # not that of an inner unit called alone, as in a loss computed in chunks
                    self._last_order = order
                for other in self.units:
                    other.drop_prefetched()

    def enclosing_mesh(self, unit: Unit) -> DeviceMesh | None:
        """Return the mesh that the enclosing unit computes on; None if this unit's parameters are
        on another one.

        Raises:
            ValueError: the enclosing unit computes the loss of a global batch, and this unit's
                parameters are on another mesh, so that the scale of its gradients is unknown.
        """
        enclosing = [other for other in self._running_units if other is not unit]
        mesh = enclosing[-1].computes_on if enclosing else None
        if mesh is None or is_slice(mesh, unit.options.mesh):
            return mesh
        is_global = not set(enclosing[-1].options.data_axes).isdisjoint(mesh.axis_names)
        if is_global and unit.controls.divide_factor is None:
            here, there = distinct_mesh_names(mesh, unit.options.mesh)
            raise ValueError(
                f"{unit.display_name} was called with plain tensors inside of "
                f"{enclosing[-1].display_name}, which computes on {here}, but its parameters are "
                f"on {there}: it is unknown which ranks have the same inputs. Pass sharded tensors "
                "on its mesh, or say by set_gradient_divide_factor what to divide its gradients by"
            )
        return None

    # -- prefetching -------------------------------------------------------------------------------

    def prefetch(self, unit: Unit) -> None:
        """Gather the next unit: in forward the one that followed the last time, in backward the
        previous one.

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

    def _next_unit(self, place: int) -> Unit | None:
        order = (
            self._last_order
            if self._last_order[:place] == self._order
            else []
            if self._last_order
            else self.units
        )
        return order[place] if place < len(order) else None

    def before_backward(self, unit: Unit, outputs: Any) -> Any:
        """Return the outputs of a unit; backward from those of the outermost one begins with the
        gather of the unit that ran last.

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
                node: Any = getattr(
                    x._local if isinstance(x, ShardedTensor) else x, "grad_fn", None
                )
                if node is not None:
                    node.register_prehook(self._on_first_gradient)
        return outputs

    def _on_first_gradient(self, _: Any) -> None:
        for unit in reversed(self._last_order):
            explicit = unit.controls.backward_prefetch
            if unit.saved and unit.controls.prefetched_in_backward:
                unit.gather()
                return
            if (
                explicit is not None and unit is not self.units[0]
            ):  # its backward gathers nothing: it kept its parameters
                self._gather_saved(explicit)
                return

    def _gather_saved(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit.saved and unit.controls.prefetched_in_backward:
                unit.gather()

    def prefetch_backward(self, unit: Unit) -> None:
        """Gather the unit that ran before this one; if a reduction is under way, at half of this
        unit's backward.

        Communication: as `prefetch`.
        """
        self.on_backward()
        if unit.controls.backward_prefetch is not None:
            self._gather_saved(unit.controls.backward_prefetch)
            return
        order = self._last_order[: _last_index(self._last_order, unit)]
        before = [
            other
            for other in order
            if other.saved and other is not unit and other.controls.prefetched_in_backward
        ]
        if not before:
            return
        if self._reductions and not unit.options.find_unused:
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
        mine = self._reductions
        mine.add(number := next(_numbers))
        return lambda: mine.discard(number)

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
            unit.fill_unused()
            unit.reduce_held()

    @property
    def _offloaded(self) -> list[OffloadedGrads]:
        return list(
            dict.fromkeys(
                unit.options.offloaded for unit in self.units if unit.options.offloaded is not None
            )
        )

    def _release(self) -> None:
        self._backward, self._delayed = -1, None
        for offloaded in self._offloaded:
            offloaded.drop()
        self._reductions.clear()
        for unit in self.units:
            unit.release()


def _last_index(units: list[Unit], unit: Unit) -> int:
    return max((i for i, other in enumerate(units) if other is unit), default=0)
