"""A unit: the parameters of a module that are gathered together before its forward, and let go after it.

    forward     gather -> put whole parameters in place -> module -> put those at rest back -> let go
    backward    what autograd saved of them is asked for -> gather -> ... -> sum gradients over ranks -> let go

Nothing depends on when backward comes to the unit, or whether its outputs are used: the first saved parameter that is asked for gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import Layout
from ...ops.lineage import comm_context, mixed, seed_of
from ...ops.torch_compile import refuse_jit_trace
from ...tensor.autograd import engine_hooks, leaf_grads
from ...tensor.sharded_tensor import ShardedTensor
from .buffers import BuffersInUse, any_sharded
from .grads.grad_places import Filling, InOrder, Places, Placing
from .grads.grad_reduction import Bucket, add_later, differentiable, put_together, summing
from .grads.joint import Part
from .inputs import gradient_scale, mesh_of_inputs, mesh_of_parameter
from .module_calls import Interception
from .schedule import Schedule, own_modules, running_schedule, set_unit
from .slot import Options, Slot, check_parameters
from .storage.flat import FlatBucket
from .storage.gather_op import Grads, Passage
from .storage.param_storage import Levels
from .storage.saved_tensors import Buffer, saving_places

_GATHERING = seed_of("gather a unit")
_SUMMING = seed_of("sum gradients of a unit")


class Unit:
    """The parameters of a module that are gathered together.

    Attributes:
        name: the module's path, as messages name it.
        module: what is called.
        slots: its parameters that belong to no unit inside it.
        calls: those of its modules, which become calls of `call`.
        computes_on: while it runs, the mesh of the sharded tensors that it computes with; None for plain ones.
        saved: how many parameters autograd has saved, as places, since the last backward.
    """

    def __init__(self, name: str, module: nn.Module, options: Options, keep: str | None) -> None:
        self.name, self.module, self.options = name, module, options
        self._kept = keep if options.form.parameter else "all"
        self.slots: list[Slot] = []
        self.calls = Interception(())
        self.schedule = Schedule(self)
        self.computes_on: DeviceMesh | None = None
        self.saved = 0
        self._buckets: list[Bucket] = []
        self._in_order: tuple[Any, dict[int, tuple[Places, int]]] = (None, {})
        self._rest: list[ShardedTensor] = []  # the parameters, while whole ones stand in their places
        self._use: tuple[Passage, tuple[Tensor, ...]] | None = None  # what it computes with, at most until the model's forward ends
        self._with_graph = False
        self._prepared: tuple[Passage, list[Tensor], tuple[Tensor, ...]] | None = None
        self._buffers, self._saving = BuffersInUse(), None
        self._projects_buffers = False

    @property
    def keep(self) -> str:
        """What stays between forward and backward: "all" of the parameters, what there is at "rest", or the axis over which they are split.

        By default the outermost unit keeps all, since backward begins with it.
        """
        return self._kept or ("all" if self.schedule.units[0] is self else "rest")

    def __repr__(self) -> str:
        return f"Unit({self.name or 'the root'}, {len(self.slots)} parameters)"

    # -- making --------------------------------------------------------------------------------------------------------

    @property
    def tensor_axes(self) -> set[str]:
        """The axes that split parameters while they are used."""
        return {axis for slot in self.slots for axis in slot.base.spec.axes}

    def adopt(self, slots: list[Slot], at_rest: Callable[[Any, Layout, Layout], ShardedTensor]) -> None:
        """Take over parameters: each becomes one at rest.

        Args:
            slots: where they stand, and their layouts while they are used.
            at_rest: from a parameter, its layout at rest and the one while it is used to a sharded tensor at rest.
        """
        self.slots = slots
        alike: dict[tuple[torch.dtype, bool], list[int]] = {}
        for i, slot in enumerate(slots):
            if self.options.form.optimizer and slot.base.shape:
                alike.setdefault((slot.base.dtype, slot.value.requires_grad), []).append(i)
        self._buckets = [self._bucket(dtype, numbers) for (dtype, _), numbers in alike.items()]
        for slot in slots:
            old = slot.value
            slot.replace(nn.Parameter(at_rest(old, slot.rest, slot.base), requires_grad=old.requires_grad))
        self._projects_buffers = any_sharded(own_modules(self))
        self.settle()

    def _bucket(self, dtype: torch.dtype, numbers: list[int]) -> Bucket:
        options, slots = self.options, [self.slots[i] for i in numbers]
        flat = FlatBucket(options.mesh, options.form.optimizer, [slot.base for slot in slots], options.transport)
        for slot, layout in zip(slots, flat.layouts, strict=True):
            slot.rest = layout
        return Bucket(numbers, Levels(flat, dtype, options, self._said_name), options.policy)

    @property
    def _said_name(self) -> str:
        return self.name or type(self.module).__name__

    def settle(self) -> None:
        """Have the parameters' local parts lie in the buffers from which they are gathered, so that nothing is copied then."""
        for bucket in self._buckets:
            parameters = [self.slots[i].value for i in bucket.numbers]
            if not any(x._local.is_meta for x in parameters):
                bucket.levels.take(parameters)

    def homes(self) -> Iterator[tuple[int, torch.device]]:
        """Where the parts of parameters lie at rest, by the number of the parameter."""
        yield from ((id(self.slots[i].value), bucket.levels.shard.device) for bucket in self._buckets for i in bucket.numbers)

    # -- forward -------------------------------------------------------------------------------------------------------

    def intercept(self) -> None:
        """Have calls of the unit's module, and of those inside that hold its parameters, become calls of `call`."""
        own = list(own_modules(self))
        for module in own:
            set_unit(module, self)
        self.calls = Interception(x for x in own if x is self.module or any(p is not None for p in x._parameters.values()))

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module of the unit with the unit's parameters in place.

        Raises:
            RuntimeError: under `torch.jit.trace`.
        """
        refuse_jit_trace()
        policy = self.options.policy
        self.calls.stop()
        try:
            self._open(args, kwargs)
            if module is not self.module:
                return nn.Module.__call__(module, *args, **kwargs)
            if policy.param_dtype is not None:
                args, kwargs = policy.inputs((args, kwargs))
            output = nn.Module.__call__(module, *args, **kwargs)
            return output if policy.output_dtype is None else policy.outputs(output)
        finally:
            self._close()
            self.calls.start()

    def _open(self, args: Any, kwargs: Any) -> None:
        schedule = running_schedule(self)
        self.computes_on = mesh_of_inputs((args, kwargs), self.options.mesh, self._said_name) or schedule.around(self)
        schedule.enter(self)
        if self._use is None or self._with_graph != torch.is_grad_enabled():
            self._use, self._with_graph = self._gathered(), torch.is_grad_enabled()
        meshes = self._meshes()
        self._use[0].weigh(self._scales(meshes))
        self._rest = [slot.value for slot in self.slots]
        for slot, kept, value, mesh in zip(self.slots, self._rest, self._use[1], meshes, strict=True):
            slot.put(self._as_used(mesh, slot.base, kept, value))
        if self.computes_on is not None:
            self._buffers.wrap(own_modules(self), self.computes_on)
        elif self._projects_buffers:
            self._buffers.project(own_modules(self), self._mesh_of)
        schedule.prefetch(self)
        if torch.is_grad_enabled() and self.keep != "all":
            self._saving = saving_places(self._find, self._gathered_again)
            self._saving.__enter__()

    def _meshes(self) -> list[DeviceMesh | None]:
        """On which mesh each parameter is used."""
        if self.computes_on is not None or all(slot.own is None for slot in self.slots):
            return [self.computes_on] * len(self.slots)
        return [self._mesh_of(slot.own) for slot in self.slots]

    def _mesh_of(self, own: DeviceMesh | None) -> DeviceMesh | None:
        """Where inputs are plain: on which mesh a parameter or buffer is used that lay on `own`."""
        return mesh_of_parameter(own, self.options.mesh, self.options.form.optimizer, self.schedule.tensor_axes)

    def _scales(self, meshes: Sequence[DeviceMesh | None]) -> list[float]:
        """With what the gradient of each parameter is multiplied."""
        by_mesh = {mesh: gradient_scale(self.options.mesh, mesh) for mesh in set(meshes)}
        return [by_mesh[mesh] for mesh in meshes]

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

    # -- what it computes with -----------------------------------------------------------------------------------------

    def _parameters(self) -> list[ShardedTensor]:
        """The parameters at rest."""
        return self._rest or [slot.value for slot in self.slots]

    def gather(self) -> None:
        """Launch the all_gathers.

        Communication: one all_gather per dtype, or none where the parameters are whole.
        """
        if not self._rest:
            check_parameters(self.slots, [bucket.numbers for bucket in self._buckets], self._said_name)
        parameters = self._parameters()
        with torch.no_grad(), comm_context(self.options.mesh.world, mixed(_GATHERING, parameters)):
            for bucket in self._buckets:
                bucket.levels.start([parameters[i] for i in bucket.numbers])

    def prepare(self) -> None:
        """Launch them for the next forward. Communication: as `gather`."""
        self.gather()
        if self._buckets and self._use is None and self._prepared is None and torch.is_grad_enabled():
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
        half = None if self.options.unused_differ else self.schedule.half_way
        placing = Placing(self._places(), self._gradients_wait, late=bool(self.options.form.parameter), half=half)
        return Passage(self._values, self._sum, self._sum_differentiably, placing, waits=bool(self._buckets))

    def _values(self) -> list[Tensor]:
        """The parameters as views of the gathered buffers; those that are not cut, as they are."""
        as_is, used_as = self.options.policy.param_dtype is None, self.options.policy.used_as
        values = {i: x for b in self._buckets for i, x in zip(b.numbers, b.flat.wholes_in(b.levels.whole()), strict=True)}
        parts = [x._local for x in self._parameters()]
        if as_is:
            return [values[i] if i in values else x.view_as(x) for i, x in enumerate(parts)]
        return [values[i] if i in values else x.view_as(x).to(used_as(x.dtype)) for i, x in enumerate(parts)]

    def _as_used(self, mesh: DeviceMesh | None, base: Layout, kept: ShardedTensor, value: Tensor) -> Tensor:
        """A parameter as the module finds it: plain, or a sharded tensor on the mesh of the activations."""
        if mesh is None:
            return value
        layout = base.replace(dtype=value.dtype) if mesh is self.options.mesh else Layout.of(mesh, base.spec, base.shape, value.dtype)
        out = ShardedTensor._make(value, layout)
        out._lineage = kept._lineage
        return out

    # -- backward ------------------------------------------------------------------------------------------------------

    def _find(self, address: int) -> Buffer | None:
        """The gathered buffer that is there."""
        for i, bucket in enumerate(self._buckets):
            if bucket.levels.address == address:
                self.saved += 1
                return Buffer(i, bucket.levels.made_of)
        return None

    def _gathered_again(self, buffer: Buffer, offset: int) -> Tensor:
        """A gathered buffer; autograd asks for it with the first parameter that it has saved.

        Raises:
            RuntimeError: the parameter has been written since.
        """
        bucket = self._buckets[buffer.number]
        if not bucket.levels.is_there:
            self.gather()
            self.schedule.prefetch_backward(self)
        whole = bucket.levels.whole()
        if bucket.levels.made_of != buffer.made_of:
            self._check_unwritten(bucket, buffer, bucket.flat.at(offset))
        return whole

    def _check_unwritten(self, bucket: Bucket, buffer: Buffer, i: int) -> None:
        before, now = buffer.made_of[i][1], bucket.levels.made_of[i][1]
        if before != now:
            raise RuntimeError(
                f"{self.slots[bucket.numbers[i]].path} was written between forward and backward (version {now}, expected {before}), and "
                "backward needs the values of the forward; step the optimizer after backward, or run the forward again"
            )

    def let_go(self) -> None:
        """Backward is done with the unit."""
        self.saved = 0
        self._use = None
        for bucket in self._buckets:
            bucket.levels.drop()
            bucket.levels.after_backward()

    def _gradients_wait(self) -> bool:
        """Whether the running backward leaves the sums over the ranks to the end of `accumulate_grads()`."""
        return self.options.form.gradients_wait and leaf_grads.is_accumulating(self.options.mesh.world)

    def _places(self) -> dict[int, tuple[Places, int]]:
        """Where gradients are put as they are made, by the number of the parameter."""
        if self.options.form.optimizer:
            return {i: (bucket, k) for bucket in self._buckets for k, i in enumerate(bucket.numbers)}
        parameters = self._parameters()
        now = [x._layout if x.requires_grad and x._local.is_contiguous() else None for x in parameters]
        if self._in_order[0] != now:
            self._in_order = now, {}
            alike: dict[Any, list[int]] = {}  # what is summed in one collective
            for i, layout in enumerate(now):
                if layout is not None:
                    alike.setdefault((layout.replicated_axes, layout.dtype), []).append(i)
            for numbers in alike.values():
                places = InOrder([now[i] for i in numbers], self._memory)  # type: ignore[misc]
                self._in_order[1].update({i: (places, k) for k, i in enumerate(numbers)})
        return self._in_order[1]

    def _memory(self, places: InOrder) -> Tensor:
        """Where gradients that are not cut are put."""
        return self.schedule.joint.buffer(places)

    def _sum(self, grads: Grads, scale: float, placing: Placing) -> Callable[[], Grads]:
        """Launch the sums over the ranks; call what comes back for the gradients of the parts.

        Communication: one reduce_scatter per dtype; with gradients that stay whole none inside `accumulate_grads()`, and one at its end.
        """
        self.schedule.backward_runs()
        self.let_go()
        if self._gradients_wait():
            return self._hold(grads, scale)
        with comm_context(self.options.mesh.world, mixed(_SUMMING, self._parameters())):
            waits = [(bucket, self._start(bucket, grads, scale, placing.buffers.pop(bucket, None))) for bucket in self._buckets]
        uncut = self._uncut(grads, scale, placing)  # now: what waits would hold on to all gradients
        if not waits:
            found = self._deliver(uncut, placing)
            return lambda: found
        self.schedule.half_way()  # if it has not been called
        ended = self.schedule.sum_begins()

        def wait() -> Grads:
            ended()
            return self._deliver(put_together(uncut, waits), placing)

        return wait

    def _start(self, bucket: Bucket, grads: Grads, scale: float, filled: Filling | None) -> Callable[[], Grads]:
        parameters = self._parameters()
        trained = {i: self.slots[i].path for i in bucket.numbers if parameters[i].requires_grad}
        missing = [path for i, path in trained.items() if grads[i] is None]
        return bucket.start(self._said_name, [grads[i] for i in bucket.numbers], scale, missing, self.options.unused_differ, filled)

    def _uncut(self, grads: Grads, scale: float, placing: Placing | None = None) -> Grads:
        """The gradients of the parameters that are not cut."""
        cut = {i for bucket in self._buckets for i in bucket.numbers}
        pairs = enumerate(zip(grads, self._parameters(), strict=True))
        scaled = {} if placing is None else placing.placed
        return [None if i in cut else scaled[i] if i in scaled else self._scaled(grad, x, scale) for i, (grad, x) in pairs]

    def _scaled(self, grad: Tensor | None, parameter: ShardedTensor, scale: float) -> Tensor | None:
        if grad is not None:
            return (grad if scale == 1 else grad * scale).to(parameter.dtype)
        return torch.zeros_like(parameter._local) if self.options.unused_differ and parameter.requires_grad else None

    def _deliver(self, parts: Grads, placing: Placing) -> Grads:
        """What autograd is to add to `.grad`: parts that are to be summed over more axes, on which parameters are replicated, go there by
        themselves, while other units go on with their backward.

        Communication: where parameters are replicated, one all_reduce per dtype; for units of which nothing is cut over ranks, see `Joint`.
        """
        parameters, numbers = self._parameters(), [i for i in self._travelling() if parts[i] is not None]
        nodes = placing.leaves
        mine = [i for i in numbers if not parts[i].requires_grad and leaf_grads.may_start(parameters[i], nodes[i])]  # type: ignore[union-attr]
        if not mine:
            return parts
        missing = [self.slots[i].path for i in self._travelling() if i not in mine and parameters[i].requires_grad]
        own = bool(self.options.form.optimizer) or all(parts[i] is placing.placed.get(i) for i in mine)
        if not self._buckets:
            homes = list(placing.buffers) if own else []
            places: Any = homes[0] if len(homes) == 1 else None
            leaves, grads = [parameters[i] for i in mine], [parts[i] for i in mine]
            alone = self.schedule.units[0] is self
            self.schedule.joint.add(Part(self._said_name, leaves, grads, missing, own, places, alone))  # type: ignore[arg-type]
            return [None if i in mine else part for i, part in enumerate(parts)]
        note = summing(self._said_name, len(mine), missing)
        # Not the lineage of the loss: with plain inputs each rank along the axes of data parallelism has a loss of its own.
        with comm_context(self.options.mesh.world, mixed(_SUMMING, parameters)):
            leaf_grads.start([parameters[i] for i in mine], [parts[i] for i in mine], note, own=own)  # type: ignore[misc]
        return [None if i in mine else part for i, part in enumerate(parts)]

    def _travelling(self) -> list[int]:
        """The parameters whose gradients are summed unit by unit; those of all units that are not are summed together, at the end."""
        if self.options.form.optimizer:
            return [i for bucket in self._buckets for i in bucket.numbers]
        return [] if self.options.unused_differ else list(range(len(self.slots)))

    def fill_unused(self) -> None:
        """Where parameters may take part in the loss on some ranks only, and are whole: gradients of zeros for those of units that no
        gradient has come to."""
        if self.options.unused_differ and not self.options.form.optimizer:
            for x in self._parameters():
                if x.requires_grad and x._local.grad is None:
                    leaf_grads.add(x, torch.zeros_like(x._local))

    def _hold(self, grads: Grads, scale: float) -> Callable[[], Grads]:
        """Keep whole gradients until the end of `accumulate_grads()`."""
        if not any(bucket.used for bucket in self._buckets):
            leaf_grads.before_reduction(self.options.mesh.world, lambda: self._sum_kept(scale), self._forget_kept)
        for bucket in self._buckets:
            bucket.keep([grads[i] for i in bucket.numbers])
        found = self._uncut(grads, scale)
        return lambda: found

    def _sum_kept(self, scale: float) -> None:
        """Sum what was kept and add it to `.grad`. Communication: one reduce_scatter per dtype."""
        parameters = self._parameters()
        with torch.no_grad(), comm_context(self.options.mesh.world, mixed(_SUMMING, parameters)):
            for bucket in self._buckets:
                kept: Grads = [None] * len(self.slots)
                waiting = bucket.waiting
                filled = None if waiting is None else Filling(waiting, bucket.flat.wholes_in(waiting))
                for i, grad in zip(bucket.numbers, bucket.kept(), strict=True):
                    kept[i] = grad
                add_later([parameters[i] for i in bucket.numbers], self._start(bucket, kept, scale, filled)())

    def _forget_kept(self) -> None:
        for bucket in self._buckets:
            bucket.forget()

    def _sum_differentiably(self, grads: Grads, scale: float) -> Grads:
        self.let_go()
        return differentiable(grads, [slot.base for slot in self.slots], [slot.rest for slot in self.slots], scale)
