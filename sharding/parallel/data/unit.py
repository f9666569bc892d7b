"""A unit: the parameters of a module that are gathered together before its forward, and let go after it.

    forward     gather -> put whole parameters in place -> module -> put those at rest back -> let go
    backward    what autograd saved of them is asked for -> gather -> ... -> sum gradients over ranks -> let go

Nothing depends on when backward comes to the unit, or whether its outputs are used: the first saved parameter that is asked for gathers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ....mesh.device_mesh import DeviceMesh
from ... import engine_hooks, gradients
from ...layout import Layout, told_apart
from ...lineage import carrying, mixed, seed_of
from ...tensor import ShardedTensor
from .buffers import ReplicatedBuffers
from .flat import FlatBucket
from .form import Form
from .levels import Levels
from .nodes import Grads, Passage
from .precision import MixedPrecisionPolicy
from .saved import saving_places
from .schedule import Schedule, running_schedule, unit_of
from .sums import Bucket, add_later, differentiable

Place = tuple[nn.Module, str]  # a module, and the name of one of its parameters
_GATHERING = seed_of("gather a unit")
_SUMMING = seed_of("sum gradients of a unit")


@dataclass
class Slot:
    """A parameter of a unit.

    Attributes:
        path: its name in the module that was sharded.
        places: where it stands; several if it is tied.
        base: its layout while it is used.
        rest: its layout at rest.
        before: what stood there before, as long as it stands somewhere else.
    """

    path: str
    places: list[Place]
    base: Layout
    rest: Layout
    before: Callable[[], Any]

    @property
    def value(self) -> Any:
        """What stands there now."""
        owner, name = self.places[0]
        return owner._parameters[name]

    def put(self, value: Any) -> None:
        for owner, name in self.places:
            owner._parameters[name] = value


@dataclass(frozen=True)
class Options:
    """What the units of a model have in common.

    Attributes:
        mesh: every axis there is, those of tensor parallelism too.
        form: over which axes what is split.
        policy: dtypes.
        transport: see `redistribute`.
        unused_differ: whether a parameter may get a gradient on some ranks only.
    """

    mesh: DeviceMesh
    form: Form
    policy: MixedPrecisionPolicy
    transport: str | None = None
    unused_differ: bool = False


class Unit:
    """The parameters of a module that are gathered together.

    Attributes:
        name: the module's path, as messages name it.
        module: what is called.
        slots: its parameters that belong to no unit inside it.
        computes_on: while it runs, the mesh of the sharded tensors that it computes with; None for plain ones.
        saved: how many parameters autograd has saved, as places, since the last backward.
    """

    def __init__(self, name: str, module: nn.Module, options: Options, keep: str | None) -> None:
        self.name, self.module, self.options = name, module, options
        self._kept = keep if options.form.parameter else "all"
        self.slots: list[Slot] = []
        self.schedule = Schedule(self)
        self.computes_on: DeviceMesh | None = None
        self.saved = 0
        self._buckets: list[Bucket] = []
        self._calls = 0  # of its modules, that are running
        self._rest: list[ShardedTensor] = []  # the parameters, while whole ones stand in their places
        self._use: tuple[Passage, tuple[Tensor, ...]] | None = None  # what it computes with, at most until the model's forward ends
        self._with_graph = False
        self._prepared: tuple[Passage, list[Tensor], tuple[Tensor, ...]] | None = None
        self._buffers, self._saving = ReplicatedBuffers(), None

    @property
    def keep(self) -> str:
        """What stays between forward and backward: "all" of the parameters, what there is at "rest", or the axis over which they are split.

        By default the outermost unit keeps all, since backward begins with it.
        """
        return self._kept or ("all" if self.schedule.units[0] is self else "rest")

    def __repr__(self) -> str:
        return f"Unit({self.name or 'the root'}, {len(self.slots)} parameters)"

    # -- making --------------------------------------------------------------------------------------------------------

    def adopt(self, slots: list[Slot], at_rest: Callable[[Any, Layout, Layout], ShardedTensor]) -> None:
        """Take over parameters: each becomes one at rest.

        Args:
            slots: where they stand, and their layouts while they are used.
            at_rest: from a parameter, its layout at rest and the one while it is used to a sharded tensor at rest.
        """
        self.slots = slots
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, slot in enumerate(slots):
            if self.options.form.optimizer and slot.base.shape:
                by_dtype.setdefault(slot.base.dtype, []).append(i)
        self._buckets = [self._bucket(dtype, numbers) for dtype, numbers in by_dtype.items()]
        for slot in slots:
            old = slot.value
            slot.put(nn.Parameter(at_rest(old, slot.rest, slot.base), requires_grad=old.requires_grad))
        self.settle()

    def _bucket(self, dtype: torch.dtype, numbers: list[int]) -> Bucket:
        options, slots = self.options, [self.slots[i] for i in numbers]
        flat = FlatBucket(options.mesh, options.form.optimizer, [slot.base for slot in slots], options.transport)
        for slot, layout in zip(slots, flat.layouts, strict=True):
            slot.rest = layout
        levels = Levels(flat, options.form, dtype, options.policy.used_as(dtype), self._said_name)
        return Bucket(numbers, levels, options.policy.reduced_as(dtype))

    @property
    def _said_name(self) -> str:
        return self.name or type(self.module).__name__

    def settle(self) -> None:
        """Have the parameters' local parts lie in the buffers from which they are gathered, so that nothing is copied then."""
        for bucket in self._buckets:
            parts = [self.slots[i].value for i in bucket.numbers]
            if not any(x._local.is_meta for x in parts):
                bucket.levels.take([x._local for x in parts])
                for x, here in zip(parts, bucket.levels.places(), strict=True):
                    if here.is_contiguous():
                        x._local.data = here

    # -- forward -------------------------------------------------------------------------------------------------------

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs before any module of the unit does."""
        self._calls += 1
        if self._calls == 1:
            self._open(args, kwargs)
        if module is self.module and self.options.policy.param_dtype is not None:
            return self.options.policy.inputs((args, kwargs))
        return None

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Runs after it, also where it raised."""
        self._calls = max(0, self._calls - 1)
        if self._calls == 0:
            self._close()
        return self.options.policy.outputs(output) if module is self.module and self.options.policy.output_dtype is not None else None

    def _open(self, args: Any, kwargs: Any) -> None:
        self._check_parameters()
        schedule = running_schedule(self)
        self.computes_on = self._mesh_of(args, kwargs)
        schedule.enter(self)
        if self._use is None or self._with_graph != torch.is_grad_enabled():
            self._use, self._with_graph = self._gathered(), torch.is_grad_enabled()
        self._use[0].scale = self._scale()
        self._rest = [slot.value for slot in self.slots]
        for slot, kept, value in zip(self.slots, self._rest, self._use[1], strict=True):
            slot.put(self._as_used(slot.base, kept, value))
        if self.computes_on is not None:
            self._buffers.wrap(own_modules(self), self.computes_on)
        schedule.prefetch(self)
        if torch.is_grad_enabled() and self.keep != "all":
            self._saving = saving_places(self._find, self._gathered_again)
            self._saving.__enter__()

    def _close(self) -> None:
        if self._saving is not None:
            self._saving.__exit__()
        self._saving = None
        for slot, kept in zip(self.slots, self._rest, strict=False):  # none where opening has failed
            slot.put(kept)
        self._rest = []
        self._buffers.unwrap()
        if self.keep != "all":
            self._use = None
            if engine_hooks.current_backward() == -1:
                for bucket in self._buckets:
                    bucket.levels.after_forward(self.keep)
        self.schedule.leave(self)

    def _check_parameters(self) -> None:
        """Raises: TypeError, ValueError for a parameter that somebody has replaced by one that lies otherwise."""
        for slot in self.slots:
            x = slot.value
            if not isinstance(x, ShardedTensor):
                raise TypeError(f"{slot.path} was replaced by a plain tensor; copy the values into the parameter, or place them as {slot.rest.spec}")
            if x._layout is not slot.rest and x._layout is not slot.rest.replace(dtype=x.dtype):
                raise ValueError(f"parameter {slot.path} was replaced by {x._layout}; redistribute it to {slot.rest.spec}")

    # -- what it computes with -----------------------------------------------------------------------------------------

    def _parameters(self) -> list[ShardedTensor]:
        """The parameters at rest."""
        return self._rest or [slot.value for slot in self.slots]

    def gather(self) -> None:
        """Launch the all_gathers.

        Communication: one all_gather per dtype, or none where the parameters are whole.
        """
        parameters = self._parameters()
        with torch.no_grad(), carrying(self.options.mesh.world, mixed(_GATHERING, parameters)):
            for bucket in self._buckets:
                bucket.levels.start([parameters[i] for i in bucket.numbers])

    def prepare(self) -> None:
        """Launch them for the next forward. Communication: as `gather`."""
        self.gather()
        if self._use is None and self._prepared is None and torch.is_grad_enabled():
            passage, parts = self._passage(), [x._local for x in self._parameters()]
            self._prepared = passage, parts, passage.enter(parts)

    def forget_prepared(self) -> None:
        """A forward has ended."""
        self._use = self._prepared = None
        if engine_hooks.current_backward() == -1:
            for bucket in self._buckets:
                bucket.levels.drop()

    def _gathered(self) -> tuple[Passage, tuple[Tensor, ...]]:
        """What the unit computes with, and the autograd nodes behind it."""
        self.gather()
        parts, prepared = [x._local for x in self._parameters()], self._prepared
        self._prepared = None
        if prepared is not None and all(one is other for one, other in zip(prepared[1], parts, strict=True)):
            return prepared[0], prepared[0].gathered(prepared[2])
        passage = self._passage()
        return passage, passage.gathered(passage.enter(parts))

    def _passage(self) -> Passage:
        return Passage(self._values, self._sum, self._sum_differentiably)

    def _values(self) -> list[Tensor]:
        """The parameters as views of the gathered buffers; those that are not cut, as they are."""
        used_as = self.options.policy.used_as
        values = {i: x for b in self._buckets for i, x in zip(b.numbers, b.flat.wholes_in(b.levels.whole()), strict=True)}
        parts = [x._local for x in self._parameters()]
        return [values[i] if i in values else x.view_as(x).to(used_as(x.dtype)) for i, x in enumerate(parts)]

    def _as_used(self, base: Layout, kept: ShardedTensor, value: Tensor) -> Tensor:
        """A parameter as the module finds it: plain, or a sharded tensor on the mesh of the activations."""
        mesh = self.computes_on
        if mesh is None:
            return value
        layout = base.replace(dtype=value.dtype) if mesh is self.options.mesh else Layout.of(mesh, base.spec, base.shape, value.dtype)
        out = ShardedTensor._make(value, layout)
        out._lineage = kept._lineage
        return out

    # -- on which mesh -------------------------------------------------------------------------------------------------

    def _mesh_of(self, args: Any, kwargs: Any) -> DeviceMesh | None:
        """The mesh of the inputs; where they are plain, that of the units around, or the part of the mesh that splits parameters in use."""
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, ShardedTensor):
                return self._checked_mesh(x.mesh)
        axes = self.schedule.tensor_axes
        return self.schedule.around(self) or (self.options.mesh[axes] if axes else None)

    def _checked_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        whole = self.options.mesh
        if mesh is whole or (set(mesh.axis_names) <= set(whole.axis_names) and whole[mesh.axis_names] == mesh):
            return mesh
        here, there = told_apart(mesh, whole)
        raise ValueError(
            f"an input of {self._said_name} lies on {here}, and its parameters on {there}; redistribute the input to that mesh, "
            "or a part of it"
        )

    def _scale(self) -> float:
        """Gradients are summed over the axes of the mesh that activations lie on, and averaged over all others."""
        mesh, on = self.options.mesh, self.computes_on
        return 1 / math.prod(mesh.size(axis) for axis in mesh.axis_names if on is None or axis not in on.axis_names)

    @property
    def tensor_axes(self) -> set[str]:
        """The axes that split parameters while they are used."""
        return {axis for slot in self.slots for axis in slot.base.spec.axes}

    # -- backward ------------------------------------------------------------------------------------------------------

    def _find(self, address: int) -> int | None:
        """The number of the gathered buffer that is there."""
        for i, bucket in enumerate(self._buckets):
            if bucket.levels.address == address:
                self.saved += 1
                return i
        return None

    def _gathered_again(self, i: int) -> Tensor:
        """A gathered buffer; autograd asks for it with the first parameter that it has saved."""
        levels = self._buckets[i].levels
        if not levels.is_there:
            self.gather()
            self.schedule.prefetch_backward(self)
        return levels.whole()

    def let_go(self) -> None:
        """Backward is done with the unit."""
        self.saved = 0
        self._use = None
        for bucket in self._buckets:
            bucket.levels.drop()
            bucket.levels.after_backward()

    def _of(self, bucket: Bucket, grads: Grads) -> Grads:
        return [grads[i] for i in bucket.numbers]

    def _sum(self, grads: Grads, scale: float) -> Callable[[], Grads]:
        """Launch the sums over the ranks; call what comes back for the gradients of the parts.

        Communication: one reduce_scatter per dtype; with gradients that stay whole none inside `accumulate_grads()`, and one at its end.
        """
        self.let_go()
        world = self.options.mesh.world
        if self.options.form.gradients_wait and gradients.is_accumulating(world):
            return self._hold(grads, scale)
        with carrying(world, mixed(_SUMMING, self._parameters())):
            waits = [(bucket, self._start(bucket, grads, scale)) for bucket in self._buckets]
        return lambda: self._put_together(self._uncut(grads, scale), waits)

    def _start(self, bucket: Bucket, grads: Grads, scale: float) -> Callable[[], Grads]:
        mine, paths = [grads[i] for i in bucket.numbers], [self.slots[i].path for i in bucket.numbers]
        return bucket.start(self._said_name, paths, mine, scale, self.options.unused_differ)

    def _uncut(self, grads: Grads, scale: float) -> Grads:
        """The gradients of the parameters that are not cut."""
        cut = {i for bucket in self._buckets for i in bucket.numbers}
        dtypes = [slot.base.dtype for slot in self.slots]
        return [None if grad is None or i in cut else (grad * scale).to(dtypes[i]) for i, grad in enumerate(grads)]

    @staticmethod
    def _put_together(found: Grads, waits: Sequence[tuple[Bucket, Callable[[], Grads]]]) -> Grads:
        for bucket, wait in waits:
            for i, part in zip(bucket.numbers, wait(), strict=True):
                found[i] = part
        return found

    def _hold(self, grads: Grads, scale: float) -> Callable[[], Grads]:
        """Keep whole gradients until the end of `accumulate_grads()`."""
        if not any(bucket.used for bucket in self._buckets):
            gradients.before_reduction(self.options.mesh.world, lambda: self._sum_kept(scale))
        for bucket in self._buckets:
            bucket.keep([grads[i] for i in bucket.numbers])
        found = self._uncut(grads, scale)
        return lambda: found

    def _sum_kept(self, scale: float) -> None:
        """Sum what was kept and add it to `.grad`. Communication: one reduce_scatter per dtype."""
        parameters = self._parameters()
        with torch.no_grad(), carrying(self.options.mesh.world, mixed(_SUMMING, parameters)):
            for bucket in self._buckets:
                kept: Grads = [None] * len(self.slots)
                for i, grad in zip(bucket.numbers, bucket.kept(), strict=True):
                    kept[i] = grad
                add_later([parameters[i] for i in bucket.numbers], self._start(bucket, kept, scale)())

    def _sum_differentiably(self, grads: Grads, scale: float) -> Grads:
        self.let_go()
        return differentiable(grads, [slot.base for slot in self.slots], [slot.rest for slot in self.slots], scale)


def own_modules(unit: Unit) -> Iterator[nn.Module]:
    """The modules whose parameters are the unit's: its module, and those inside that are in no unit of their own."""
    todo = [unit.module]
    while todo:
        module = todo.pop()
        yield module
        todo += [child for child in module.children() if unit_of(child) in (None, unit)]
