"""A unit: parameters that are gathered together.

They are those of a module, gathered before its forward and freed after it.

    gather     all_gather, by the unit that ran before: `prefetch`
    forward    set the unsharded parameters -> module -> set the sharded ones again
    free
    gather     autograd unpacks a saved parameter, or the unit whose backward came before
    backward   write the gradients to the buffer of their reduction
    reduce     reduce_scatter -> `.grad`, while other units continue their backward

A `Unit` has a plan, which stays, and a `UnitStep` for each use of its parameters: made when they
are gathered for a forward, and referred to by autograd's nodes until their gradients are reduced.
`Unit.call` is the forward; its backward begins with the nodes that `UnitStep` puts in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ....mesh.comm.dispatch_modes import not_recomputed
from ....mesh.comm.thread_context import thread_context
from ....mesh.device_mesh import DeviceMesh
from ...autograd import engine_hooks
from ...ops.torch_compile import refuse_jit_trace
from ...tensor.autograd import leaf_grads
from ...tensor.sharded_tensor import ShardedTensor
from ...trees import tensors_in
from .buffers import BuffersInUse, any_sharded
from .controls import UnitControls
from .grads.averaging import Grads, average, scale_gradient
from .grads.grad_bucketing import UnitGrads
from .grads.grad_places import ContiguousGrads, GradPlaces, GradWriter
from .grads.grad_reduction import reduction_tag
from .grads.held_grads import HeldGrads
from .inputs import gradient_scale, mesh_of_inputs
from .module_calls import CallInterception
from .params_in_use import ParamsInUse
from .plan import UnitPlan
from .schedule import Schedule
from .storage.saved_tensors import GatheredBuffer, saved_param_hooks
from .substitutes import find_substitutes, substitutes_in_use

_UNIT = "_shardmesh_unit"  # the attribute of a module that holds its unit


class Unit:
    """Parameters of a module that are gathered together.

    Attributes:
        plan: its modules, parameters and their storage.
        controls: what the program may change between steps.
        schedule: the order of the units of its model.
        other_mesh_units: the units of those of its parameters that are on other meshes.
        outer_units: the units that own parameters which modules of this unit share with modules of
            others.
        in_use: what its modules have in place of parameters.
        held: gradients that wait for a later reduction.
        step: the step whose values calls use; at most until the model's forward ends.
        saved: how many views of gathered buffers autograd has saved since the last backward.
        grad_places: where gradients are written, in the buffers of their reduction.
    """

    def __init__(self, plan: UnitPlan, keep: str | None) -> None:
        self.plan = plan
        self.controls = UnitControls(keep=keep, allows_unused=plan.options.find_unused)
        self.schedule = Schedule(self)
        self.other_mesh_units: tuple[Unit, ...] = ()
        self.outer_units: list[Unit] = []
        self.in_use = ParamsInUse(plan)
        self.held = HeldGrads(plan, self.controls)
        self.step: UnitStep | None = None
        self.saved = 0
        self.grad_places = GradPlaces(plan.grad_sources, self._allocate_grads)
        self._interception: CallInterception  # by `intercept`
        self._projects_buffers = False  # likewise

    def __repr__(self) -> str:
        return f"Unit({self.plan.name or 'the root'}, {len(self.plan.slots)} parameters)"

    def intercept(self) -> None:
        """Redirect calls to `call`: of the unit's module, and of those with parameters of the unit.

        Also of those with sharded buffers, such as rotary embeddings: the program may call a module
        inside of the unit's own, as `generate` of peft's models does.
        """
        modules, roots = list(own_modules(self)), self.plan.roots
        for module in modules:
            set_unit(module, self)
        intercepted = [x for x in modules if x in roots or _uses_parameters(x) or any_sharded([x])]
        for module in intercepted:
            module.register_load_state_dict_post_hook(_adopt_loaded_parameters)
        self._interception = CallInterception(intercepted, self.call)
        self._projects_buffers = any_sharded(modules)

    @property
    def keep(self) -> str:
        """What to keep between forward and backward, see `UnitControls`."""
        if not self.plan.options.stage.parameter:
            return "all"
        return self.controls.keep or ("all" if self.schedule.units[0] is self else "rest")

    # -- gather ------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Launch the all_gathers.

        Communication: one all_gather per dtype; none if the parameters are whole already.
        """
        self.plan.gather(check=not self.in_use.uses)

    @not_recomputed
    def prefetch(self) -> None:
        """Launch the all_gathers for the next forward.

        Communication: as `gather`; none if other values replace all parameters.
        """
        if all(
            owner._parameters.get(name) is not slot.value
            for slot in self.plan.slots
            for owner, name in slot.places
        ):
            return
        self.gather()
        if self.plan.buckets and self.step is None and torch.is_grad_enabled():
            self.step = UnitStep(self)

    # -- forward -----------------------------------------------------------------------------------

    def call(
        self,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        forward: Callable[..., Any] = nn.Module.__call__,
    ) -> Any:
        """Call a module of the unit, or another function of it, with the unsharded parameters set.

        Raises:
            RuntimeError: under `torch.jit.trace`.
        """
        refuse_jit_trace()
        if thread_context.runs_opaque:
            # sm.jit runs this function as it is, on parameters that it was passed: there is
            # nothing to gather
            self._interception.stop()
            try:
                return forward(module, *args, **kwargs)
            finally:
                self._interception.start()
        for outer in self.outer_units:
            if not outer.in_use.uses:
                return outer.call(
                    module,
                    args,
                    kwargs,
                    lambda inner, *args, **kwargs: self.call(inner, args, kwargs, forward),
                )
        policy = self.plan.options.policy
        buffers = BuffersInUse()
        hooks = None
        is_root = module in self.plan.roots
        self._interception.stop()
        try:
            hooks = self._begin_forward(args, kwargs, buffers)
            if is_root:
                args, kwargs = policy.inputs((args, kwargs))
                if thread_context.weights is not None:
                    # the backward will be split: its first half does not reach the parameters
                    self._release_after(tensors_in((args, kwargs)))
            outputs = forward(module, *args, **kwargs)
            if is_root:
                outputs = policy.outputs(outputs)
            self._keep_writes()
            return self.schedule.before_backward(self, outputs) if is_root else outputs
        finally:
            self._end_forward(module, buffers, hooks)
            self._interception.start()

    @not_recomputed
    def _begin_forward(
        self, args: Any, kwargs: Any, buffers: BuffersInUse
    ) -> saved_param_hooks | None:
        """Set the unsharded parameters, and gather the next unit's."""
        if self.in_use.uses:
            # `unshard` has set values, which this forward sets again, unless parameters were
            # written since: then the gather below is a new one, and the values are made anew.
            self._keep_writes()
            self.in_use.restore()
            self.gather()
            if not self.plan.is_gathered:
                self._end_step()
        self.controls.wait_for_optimizer()
        schedule = self._running_schedule()
        mesh = mesh_of_inputs(
            (args, kwargs), self.plan.options.mesh, self.plan.display_name
        ) or schedule.enclosing_mesh(self)
        schedule.enter(self, mesh)
        self._put_values(mesh)
        if mesh is not None:
            buffers.wrap(own_modules(self), mesh)
        elif self._projects_buffers:
            buffers.project(own_modules(self), self._mesh_of_plain_inputs)
        schedule.prefetch(self)
        if not torch.is_grad_enabled() or self.keep == "all":
            return None
        hooks = saved_param_hooks(self._find_saved, self._gather_saved)
        hooks.__enter__()
        return hooks

    def _running_schedule(self) -> Schedule:
        """Return the schedule of the running model; begin the unit's own if none is running."""
        schedule = thread_context.schedule
        if schedule is None:
            schedule = self.schedule
            schedule.begin(lambda: units_in(self.plan.module))
            if engine_hooks.current_backward() == -1:  # else a recomputation: forward has done it
                for unit in schedule.units:
                    unit.plan.adopt_materialized()
        return schedule

    def _put_values(self, mesh: DeviceMesh | None) -> None:
        """Set the unsharded parameters in the modules, or what is made of values that replace them.

        Args:
            mesh: of the activations; None if they are plain.

        Communication: as `gather`.
        """
        slots = self.plan.slots
        substitutes = find_substitutes(slots)
        if mesh is None:
            meshes = [self._mesh_of_plain_inputs(slot.own) for slot in slots]
        else:
            meshes = [mesh] * len(slots)
        scales = self._grad_scales(meshes)
        in_place = substitutes_in_use(self.plan, substitutes, meshes, scales)
        values: list[Any] = [None] * len(slots)
        places = sum(len(slot.places) for slot in slots)
        if not substitutes or len(substitutes) < places:  # else no parameter itself is used
            values = [
                self.plan.value_on(own_mesh, i, value, slots[i].value._lineage)
                for i, (value, own_mesh) in enumerate(
                    zip(self._unsharded_values(scales), meshes, strict=True)
                )
            ]
        self.in_use.put(values, in_place)

    def _unsharded_values(self, grad_scales: Sequence[float]) -> tuple[Tensor, ...]:
        """Return the values of the running step, of the prefetched one or of a new one."""
        step = self.step
        if (
            step is not None
            and step.values is not None
            and step.has_graph == torch.is_grad_enabled()
        ):
            values = step.values  # the parameters were used before in this forward
        else:
            self.gather()
            if step is None or not step.is_prefetched:
                self._end_step()
                step = self.step = UnitStep(self)
            values = step.set_values()
        step.set_grad_scales(grad_scales)
        return values

    def _mesh_of_plain_inputs(self, own: DeviceMesh | None) -> DeviceMesh | None:
        """Return the mesh on which a parameter or buffer is used; None for a plain tensor."""
        if own is None:
            return None
        whole, split = self.plan.options.mesh, self.plan.options.stage.optimizer
        axes = tuple([axis for axis in own.axis_names if axis not in split])
        if own is whole:
            axes = self.schedule.tensor_axes(whole)
        return whole[axes] if axes else None

    def _grad_scales(self, meshes: Sequence[DeviceMesh | None]) -> list[float]:
        """Return the factor for each parameter's gradient."""
        options, factor = self.plan.options, self.controls.divide_factor
        by_mesh = {
            mesh: gradient_scale(options.mesh, mesh, options.data_axes, factor)
            for mesh in set(meshes)
        }
        return [by_mesh[mesh] for mesh in meshes]

    def _keep_writes(self) -> None:
        """Carry over what forward has written to parameters in use."""
        try:
            self.in_use.keep_writes()
        except RuntimeError:
            self._end_step()  # the written values are not used again
            raise

    # -- free --------------------------------------------------------------------------------------

    @not_recomputed
    def _end_forward(
        self, module: nn.Module, buffers: BuffersInUse, hooks: saved_param_hooks | None
    ) -> None:
        """Set the sharded parameters again and free the gathered ones, unless they are kept."""
        if hooks is not None:
            hooks.__exit__()
        self.in_use.restore()  # nothing if `_begin_forward` raised
        buffers.unwrap()
        if self.keep != "all":
            if engine_hooks.current_backward() != -1:  # a recomputation: backward frees them
                self._end_step()
            elif self.step is None or not self.step.awaits_another(module):
                self._end_step()
                self._free()
        self.schedule.leave(self)

    def _free(self) -> None:
        for bucket in self.plan.buckets:
            bucket.storage.after_forward(self.keep)

    def _end_step(self) -> None:
        """Forget the values; autograd's nodes keep the step until backward."""
        if self.step is not None:
            self.step.forget_values()
            self.step = None

    def end_model_forward(self) -> None:
        """Drop the values, and prefetched parameters that no forward has used."""
        step = self.step
        self._end_step()
        for bucket in self.plan.buckets:
            bucket.storage.drop_pending()
        if step is not None and step.still_to_run:
            self._free()

    # -- gather again ------------------------------------------------------------------------------

    def _find_saved(self, address: int) -> GatheredBuffer | None:
        """Return the gathered buffer at a storage address, a view of which autograd saves."""
        buffer = self.plan.buffer_at(address)
        self.saved += buffer is not None
        return buffer

    @not_recomputed
    def _gather_saved(self, buffer: GatheredBuffer, offset: int) -> Tensor:
        """Return a gathered buffer for backward; gather it if it was freed.

        Raises:
            RuntimeError: a saved parameter was written since the forward.
        """
        if not self.plan.buckets[buffer.number].storage.is_gathered:
            self.gather()
            self.schedule.prefetch_backward(self)
        return self.plan.whole_buffer(buffer, offset)

    # -- after backward ----------------------------------------------------------------------------

    def _release_after(self, inputs: Iterable[Tensor]) -> None:
        """Free the gathered parameters when backward has the gradients of these inputs.

        For a backward in two parts: the first one does not reach the parameters.
        """
        waiting: set[int] = set()

        def on_grad(number: int, _: Tensor) -> None:
            waiting.discard(number)
            if not waiting:
                self.release()

        for x in inputs:
            local = x._local if isinstance(x, ShardedTensor) else x
            if local.requires_grad:
                waiting.add(len(waiting))
                local.register_hook(partial(on_grad, len(waiting) - 1))

    def is_deferred(self) -> bool:
        """Return whether the running backward leaves the reduction to a later time."""
        options = self.plan.options
        return not self.controls.reduces_grads or (
            options.stage.defers_reduction and leaf_grads.is_accumulating(options.mesh.world)
        )

    def _allocate_grads(self, source: ContiguousGrads) -> Tensor:
        """Allocate a buffer for gradients of unsharded parameters."""
        return self.schedule.bucketer.buffer(source)

    def release(self) -> None:
        """Free the gathered parameters: backward is done with the unit."""
        self.saved = 0
        self._end_step()
        for bucket in self.plan.buckets:
            bucket.storage.drop_pending()
            if self.controls.reshards_after_backward:
                bucket.storage.after_backward()

    def end_model_backward(self) -> None:
        """Reduce held gradients that backward did not reach.

        Give unsharded parameters without a gradient zeros, where other ranks may have one.

        Communication: as a backward of the unit, or none.
        """
        if not self.controls.reduces_grads:
            return
        if self.controls.allows_unused and not self.plan.options.stage.optimizer:
            for x in self.plan.parameters:
                if x.requires_grad and x._local.grad is None:
                    leaf_grads.add(x, torch.zeros_like(x._local))
        self.held.reduce()

    # -- by the program ----------------------------------------------------------------------------

    def unshard(self) -> None:
        """Gather the parameters and leave them in the modules. Communication: as `gather`."""
        if not self.in_use.uses:
            self._put_values(None)

    def hide_unsharded(self) -> None:
        """Set the sharded parameters in the modules, except during a forward."""
        if not self.schedule.is_running(self):
            self._keep_writes()
            self.in_use.restore()

    def reshard(self) -> None:
        """Set the sharded parameters in the modules and free the gathered ones.

        Raises:
            RuntimeError: a forward of the unit is running.
        """
        if self.schedule.is_running(self):
            raise RuntimeError(
                f"reshard() inside of a forward of {self.plan.display_name}, which uses the "
                "parameters"
            )
        self.hide_unsharded()
        self._end_step()
        for bucket in self.plan.buckets:
            bucket.storage.drop_pending()
            bucket.storage.after_backward()

    def reset(self) -> None:
        """Drop what a failed step left, held gradients included."""
        self.held.drop()
        self.reshard()


class UnitStep:
    """One use of a unit's parameters, from their gather to the reduction of their gradients.

        parameter --- _WaitForGrads -------- _GatherParams ------- a view per parameter ---> values
                        |                      |                     |
        backward:     wait for the       <-- launch the        <-- write the gradient
                      reduction              reduction             to its buffer

    `_WaitForGrads` is created before the nodes of later units, so autograd runs it after their
    backward: the reduction overlaps with them. It is left out if nothing is to be waited for, as
    with DDP. Autograd runs the views' nodes as soon as they are ready, as it does leaves: the
    gradient is still in cache, and the next one may reuse its memory. They are nodes of torch with
    a hook, which take a third of the time of an `autograd.Function`.

    Attributes:
        values: the unsharded parameters; None before and after.
        has_graph: whether autograd recorded them.
        still_to_run: the roots of the unit that have not run in the model's forward, once one has.
        waits_late: whether backward waits for the reduction only after that of other units.
        writer: writes gradients to their buffers as they are computed.
        wait: waits for the reduction under way and returns the gradients of the local parts.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.has_graph = False
        self.values: tuple[Tensor, ...] | None = None
        self.still_to_run: set[nn.Module] = set()
        self.wait: Callable[[], Grads] | None = None
        # each gradient is multiplied by `_scale`, and where they differ by its own factor as well
        self._scale = 1.0
        self._factors: tuple[float, ...] = ()
        self._hooked: set[int] = set()  # the gradients that `_write_grad` has had
        may_be_unused = unit.controls.allows_unused  # then half of them may never exist
        self.writer = GradWriter(
            unit.grad_places.sources(unit.plan.parameters),
            unit.is_deferred,
            at_end=bool(unit.plan.buckets),
            on_half=None if may_be_unused else unit.schedule.at_half_of_backward,
        )
        self.waits_late = bool(unit.plan.buckets)
        # until there are values: the local parts of the parameters, and what `_GatherParams` takes
        self._parts = tuple([x._local for x in unit.plan.parameters])
        self._entered = self._parts
        if self.waits_late:
            self._entered = _WaitForGrads.apply(self, *self._parts)
            self._find_leaves(self._entered)

    # -- forward -----------------------------------------------------------------------------------

    @property
    def is_prefetched(self) -> bool:
        """Whether the step waits for its values, which are those of the current parameters."""
        if self.values is not None:
            return False
        pairs = zip(self._parts, self.unit.plan.parameters, strict=True)
        return all(part is x._local for part, x in pairs)

    def set_values(self) -> tuple[Tensor, ...]:
        """Make the unsharded values of the gathered buffers, and return them."""
        values: Any = _GatherParams.apply(self, *self._entered)
        if not self.waits_late:
            self._find_leaves(values)
        self.values = tuple(
            [self._view_with_hook(i, x) if x.requires_grad else x for i, x in enumerate(values)]
        )
        self.has_graph = torch.is_grad_enabled()
        self._parts = ()
        self._entered = ()
        return self.values

    def _find_leaves(self, outputs: Sequence[Tensor]) -> None:
        """Store the nodes that add gradients to `.grad`, before the node of these outputs."""
        node = next((x.grad_fn for x in outputs if x.grad_fn is not None), None)
        self.writer.leaves = [] if node is None else [leaf for leaf, _ in node.next_functions]

    def _view_with_hook(self, number: int, value: Tensor) -> Tensor:
        """Return a view of a value whose gradient is written to its buffer."""
        view = value.view_as(value)
        node: Any = view.grad_fn
        if node is not None:  # grad mode is on
            node.register_prehook(partial(self._write_grad, number))
            engine_hooks.run_as_soon_as_ready(node)
        return view

    def set_grad_scales(self, scales: Sequence[float]) -> None:
        """Set the factor for each parameter's gradient."""
        self._scale = max(scales, default=1.0)
        is_same = min(scales, default=1.0) == self._scale
        self._factors = () if is_same else tuple([scale / self._scale for scale in scales])

    def awaits_another(self, module: nn.Module) -> bool:
        """Return whether other roots are to run in the model's forward, after this one."""
        roots = self.unit.plan.roots
        if len(roots) > 1:
            self.still_to_run = (self.still_to_run or set(roots)) - {module}
        return bool(self.still_to_run)

    def forget_values(self) -> None:
        """Drop the values, which refer to autograd's nodes, and these to the step."""
        self.values = None
        self._parts = ()
        self._entered = ()

    # -- backward ----------------------------------------------------------------------------------

    def _write_grad(self, number: int, grads: tuple[Tensor | None]) -> tuple[Tensor] | None:
        """Write a gradient to its buffer, and put a placeholder in its place."""
        (grad,) = grads
        if grad is None:
            return None
        self.writer.discard(number)
        self._hooked.add(number)
        grad = self._scale_gradient(number, grad)
        if (
            torch.is_grad_enabled()
            or torch.is_anomaly_enabled()
            or not self.writer.write(number, grad, self._scale)
        ):
            return (grad,)
        return (_placeholder(grad.shape, grad.dtype, grad.device),)

    def _scale_gradient(self, number: int, grad: Tensor) -> Tensor:
        return scale_gradient(grad, self._factors[number]) if self._factors else grad

    def take_grads(self, grads: Sequence[Tensor | None]) -> tuple[Grads, GradWriter]:
        """Return the gradients of all values, and the buffers that some of them are in.

        The next backward through the same graph starts with new buffers.
        """
        writer = self.writer.take(self._scale)
        hooked, self._hooked = self._hooked, set()
        whole = list(grads)
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            if i in hooked:
                whole[i] = writer.written.get(i, grad)
            else:  # a write in forward has replaced the node of the view, and its hook
                whole[i] = self._scale_gradient(i, grad)
        return whole, writer

    # -- reduce ------------------------------------------------------------------------------------

    def reduce(self, grads: Grads, writer: GradWriter) -> Callable[[], Grads]:
        """Launch the reduction; the returned function waits and gives the local gradients.

        Communication: one reduce_scatter per dtype; if gradients stay whole, none inside
        `accumulate_grads()` and one at its end.
        """
        unit, scale = self.unit, self._scale
        unit.schedule.on_backward()
        if not unit.controls.reduces_grads:
            unit.held.hold(grads, self._unsharded_grads(grads, writer), scale)
            nothing: Grads = [None] * len(grads)
            return lambda: nothing
        if unit.is_deferred():
            unit.held.defer(grads, scale)
            parts = self._unsharded_grads(grads, writer)
            return lambda: parts
        waits = []
        with unit.plan.summing_grads():
            for bucket in unit.plan.buckets:
                buffer = writer.buffers.pop(bucket, None)
                own_grads, buffer = unit.held.join(bucket, bucket.own(grads), buffer)
                waits.append((bucket, bucket.start(own_grads, scale, buffer, unit.controls)))
        parts = self._unsharded_grads(grads, writer)  # `wait` would keep all gradients alive
        if not waits:
            summed = self._accumulate(parts, writer)
            return lambda: summed
        unit.schedule.at_half_of_backward()  # if it was not called before
        end_reduction = unit.schedule.reduction_started()

        def wait() -> Grads:
            end_reduction()
            for bucket, reduced in waits:
                bucket.put(reduced(), parts)
            return self._accumulate(parts, writer)

        return wait

    def _unsharded_grads(self, grads: Grads, writer: GradWriter) -> Grads:
        """Return the scaled gradients of unsharded parameters, None for the others."""
        plan, fills = self.unit.plan, self.unit.controls.allows_unused
        parts: Grads = [None] * len(grads)
        for i in plan.unsharded:
            grad, parameter = grads[i], plan.slots[i].value
            if i in writer.written:
                parts[i] = writer.written[i]
            elif grad is not None:
                parts[i] = (grad if self._scale == 1 else grad * self._scale).to(parameter.dtype)
            elif fills and parameter.requires_grad:
                parts[i] = torch.zeros_like(parameter._local)
        return parts

    def _accumulate(self, parts: Grads, writer: GradWriter) -> Grads:
        """Return what autograd adds to `.grad`, None for gradients that are added later.

        Those are gradients of replicated parameters: they are reduced over more axes while other
        units continue their backward.

        Communication: where parameters are replicated, one all_reduce per dtype; for units without
        sharded parameters see `GradBucketer`.
        """
        unit, plan = self.unit, self.unit.plan
        parts = unit.held.exchange(parts)
        if plan.options.offloaded is not None:
            parts = plan.options.offloaded.defer(plan.parameters, parts, writer.leaves)
        later, unused = self._replicated_grads(parts, writer)
        if not later:
            return parts
        leaves = [plan.slots[i].value for i in later]
        grads = list(later.values())
        donate = bool(plan.options.stage.optimizer) or all(
            part is writer.written.get(i) for i, part in later.items()
        )
        if plan.buckets:
            tag = reduction_tag(plan.display_name, len(later), unused)
            with plan.summing_grads():
                leaf_grads.start(leaves, grads, tag, donate=donate)
        else:
            sources: list[Any] = list(writer.buffers) if donate else []
            source = sources[0] if len(sources) == 1 else None
            is_alone = unit.schedule.units[0] is unit
            unit.schedule.bucketer.add(
                UnitGrads(plan.display_name, leaves, grads, unused, donate, source, is_alone)
            )
        return [None if i in later else part for i, part in enumerate(parts)]

    def _replicated_grads(
        self, parts: Grads, writer: GradWriter
    ) -> tuple[dict[int, Tensor], list[str]]:
        """Return by number the gradients to reduce over more axes, and the paths of the others."""
        plan = self.unit.plan
        numbers: Sequence[int] = [i for bucket in plan.buckets for i in bucket.numbers]
        if not plan.options.stage.optimizer and not self.unit.controls.allows_unused:
            numbers = range(len(parts))  # else they are reduced together, after backward
        later: dict[int, Tensor] = {}
        unused: list[str] = []
        for i in numbers:
            part = parts[i]
            parameter = plan.slots[i].value
            if (
                part is not None
                and not part.requires_grad
                and leaf_grads.may_start(parameter, writer.leaves[i])
            ):
                later[i] = part
            elif parameter.requires_grad:
                unused.append(plan.slots[i].path)
        return later, unused

    def reduce_differentiably(self, grads: Grads) -> Grads:
        """Return the gradients of the local parts, for gradients of gradients.

        Communication: that of redistributing the gradients.
        """
        plan = self.unit.plan
        bases = [slot.base for slot in plan.slots]
        rests = [slot.rest for slot in plan.slots]
        with plan.summing_grads():
            return average(grads, bases, rests, [self._scale] * len(bases))


class _WaitForGrads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: UnitStep, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        return _mark_frozen(ctx, [x.view_as(x) for x in parts])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        wait, ctx.step.wait = ctx.step.wait, None
        return None, *(grads if wait is None else wait())


class _GatherParams(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: UnitStep, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.step, ctx.parts = step, [(x.shape, x.dtype, x.device) for x in parts]
        ctx.set_materialize_grads(False)
        return _mark_frozen(ctx, step.unit.plan.gathered_values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        step: UnitStep = ctx.step
        step.unit.release()  # before the gradients are written to a buffer, which takes its memory
        needed = zip(grads, ctx.needs_input_grad[1:], strict=True)
        whole, writer = step.take_grads([grad if needs else None for grad, needs in needed])
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in whole):
            return None, *step.reduce_differentiably(whole)
        wait = step.reduce(whole, writer)
        if not step.waits_late or torch.is_anomaly_enabled():  # it reads values between nodes
            return None, *wait()
        step.wait = wait
        return None, *[
            None if grad is None else _placeholder(*part)
            for grad, part in zip(whole, ctx.parts, strict=True)
        ]


def _uses_parameters(module: nn.Module) -> bool:
    """Return whether a module's own code uses parameters.

    Its own, or those of modules inside of it, as `Experts` does. A recomputation calls it outside
    of its unit's forward.
    """
    has_own = any(p is not None for p in module._parameters.values())
    return has_own or getattr(module, "_reads_inner_parameters", False)


def _mark_frozen(ctx: Any, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a node's outputs; mark those of frozen parameters as non-differentiable."""
    ctx.mark_non_differentiable(
        *[x for x, needed in zip(values, ctx.needs_input_grad[1:], strict=True) if not needed]
    )
    return tuple(values)


@lru_cache(4096)
def _placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor without memory that stands for a gradient until the next node."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


# -- units of modules ------------------------------------------------------------------------------


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that gathers this module's parameters."""
    return module.__dict__.get(_UNIT)


def set_unit(module: nn.Module, unit: Unit) -> None:
    module.__dict__[_UNIT] = unit


def is_unit_root(module: nn.Module) -> bool:
    """Return whether a module is one that a unit was made of."""
    unit = unit_of(module)
    return unit is not None and module in unit.plan.roots


def units_in(module: nn.Module) -> list[Unit]:
    """Return the units of a module and its submodules, the outermost first."""
    roots = filter(is_unit_root, module.modules())
    return list(dict.fromkeys(unit_of(root) for root in roots))  # type: ignore[arg-type]


def units_of(module: nn.Module) -> list[Unit]:
    """Return the units that gather parameters in a module, also those around it."""
    units = [unit_of(inner) for inner in module.modules()]
    return list(dict.fromkeys(unit for unit in units if unit is not None))


def own_modules(unit: Unit) -> Iterator[nn.Module]:
    """Yield the modules whose calls belong to the unit, each once, also shared ones."""
    todo: list[nn.Module] = [*unit.plan.shared_modules, unit.plan.module]
    visited: set[nn.Module] = set()
    while todo:
        module = todo.pop()
        if module not in visited:
            visited.add(module)
            yield module
            todo += [child for child in module.children() if unit_of(child) in (None, unit)]


def _adopt_loaded_parameters(module: nn.Module, _: Any) -> None:
    """Take over the parameters that `load_state_dict(assign=True)` has set."""
    unit = unit_of(module)
    if unit is not None:
        for one in (unit, *unit.outer_units):
            one.plan.adopt_parameters()
