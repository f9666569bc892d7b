"""A unit: the parameters of a module that are gathered together before its forward and freed after
it.

    forward     all_gather -> set the unsharded parameters -> module -> set the sharded ones -> free
    backward    autograd unpacks a saved parameter -> all_gather -> ... -> reduce the gradients ->
                free

The first saved parameter that autograd unpacks triggers the gather, whatever reaches the unit and
when. Hooks on the outputs of the model only launch the first gather earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....mesh.comm.dispatch_modes import not_recomputed
from ....mesh.comm.thread_context import thread_context
from ....mesh.device_mesh import DeviceMesh
from ...autograd import engine_hooks
from ...layout.layout import Layout
from ...lineage import comm_context, mixed, seed_of
from ...ops.torch_compile import refuse_jit_trace
from ...replicas.bit_hash import bit_hash
from ...replicas.compare import compare
from ...replicas.leaves import replica_leaves
from ...tensor.autograd import leaf_grads
from ...tensor.sharded_tensor import ShardedTensor
from .buffers import BuffersInUse, any_sharded
from .controls import UnitControls
from .grads.grad_bucketing import UnitGrads
from .grads.grad_places import ContiguousGrads, GradBuffer, GradBufferSource, GradWriter
from .grads.grad_reduction import (
    Bucket,
    accumulate_later,
    differentiable,
    merge_parts,
    reduction_tag,
)
from .grads.held_grads import HeldGrads, refuse_recording
from .inputs import gradient_scale, mesh_of_inputs, mesh_of_parameter
from .module_calls import CallInterception
from .params_in_use import ParamsInUse, Use, replaced_values
from .schedule import Schedule, own_modules, running_schedule, set_unit, unit_of
from .slot import Slot, UnitOptions, check_parameters
from .storage.flat import FlatBucket
from .storage.gather_op import GatherOp, Grads
from .storage.gather_values import gather_values
from .storage.param_storage import ParamStorage
from .storage.saved_tensors import GatheredBuffer, note_in_checkpoint, saved_param_hooks

_GATHERING = seed_of("gather a unit")
_REDUCING = seed_of("sum gradients of a unit")
_COMPARED_FORWARDS = frozenset(
    16**k for k in range(16)
)  # in which the host waits for a comparison of hashes


class UnitModules(nn.ModuleList):
    """The modules of a unit that has several."""


class Unit:
    """Parameters of a module that are gathered together.

    Attributes:
        name: the path of the module, used in messages.
        module: the module, or a list of the modules that are one unit.
        roots: the module, or those of the list: gathered before the first one's forward, freed
            after the last one's.
        controls: what the program may change between steps.
        parts: the units of those of its parameters that are on other meshes.
        slots: its parameters, without those of nested units.
        shared_modules: modules whose calls belong to the unit although only nested units have them.
        outer_units: the units that own parameters which modules of this unit share with modules of
            others.
        calls: interception of its modules' calls, which become calls of `call`.
        computes_on: during forward, the mesh of its sharded inputs; None for plain ones.
        saved: how many views of gathered buffers autograd has saved since the last backward.
    """

    def __init__(
        self, name: str, module: nn.Module, options: UnitOptions, keep: str | None
    ) -> None:
        self.name, self.module, self.options = name, module, options
        self.roots = tuple(module) if isinstance(module, UnitModules) else (module,)
        self.controls = UnitControls()
        self.parts: tuple[Unit, ...] = ()
        self._keep = keep if options.stage.parameter else "all"
        self.slots: list[Slot] = []
        self.calls = CallInterception(())
        self.schedule = Schedule(self)
        self.computes_on: DeviceMesh | None = None
        self.saved = 0
        self._buckets: list[Bucket] = []
        self._in_order: tuple[Any, dict[int, tuple[GradBufferSource, int]]] = (None, {})
        self.shared_modules: list[nn.Module] = []  # modules of the unit that only nested units have
        self.outer_units: list[
            Unit
        ] = []  # units that own parameters which this unit's modules share with others
        self._in_use = ParamsInUse()
        self._unsharded: tuple[GatherOp, tuple[Tensor, ...]] | None = (
            None  # the unsharded values; at most until the model's forward ends
        )
        self._with_graph = False
        self._prefetched: tuple[GatherOp, list[Tensor], tuple[Tensor, ...]] | None = None
        self._still_to_run: set[nn.Module] = (
            set()
        )  # the other roots, once one has run in the model's forward
        self._held = HeldGrads()
        self._forwards = 0
        self._hashes: list[
            tuple[Use, Tensor]
        ] = []  # copies in use as they were put in, in forwards that compare them
        self._buffers, self._saving = BuffersInUse(), None
        self._projects_buffers = False

    @property
    def keep(self) -> str:
        """What to keep between forward and backward: "all", only the shard ("rest"), or the axis
        over which to keep them split.

        By default the outermost unit keeps all, since backward begins with it.
        """
        return self._keep or ("all" if self.schedule.units[0] is self else "rest")

    def __repr__(self) -> str:
        return f"Unit({self.name or 'the root'}, {len(self.slots)} parameters)"

    # -- sharding ----------------------------------------------------------------------------------

    @property
    def tensor_axes(self) -> set[str]:
        """The axes that split parameters in use (tensor parallelism)."""
        return {axis for slot in self.slots for axis in slot.base.spec.axes}

    def shard_params(
        self, slots: list[Slot], at_rest: Callable[[Any, Layout, Layout], ShardedTensor]
    ) -> None:
        """Shard parameters and set the sharded ones in their modules.

        Args:
            slots: the parameters, with their layouts in use.
            at_rest: `(parameter, layout at rest, layout in use)` -> the sharded tensor.
        """
        self.slots = slots
        alike: dict[tuple[torch.dtype, bool], list[int]] = {}
        for i, slot in enumerate(slots):
            if self.options.stage.optimizer and slot.base.shape:
                alike.setdefault((slot.base.dtype, slot.value.requires_grad), []).append(i)
        self._buckets = [self._bucket(dtype, numbers) for (dtype, _), numbers in alike.items()]
        for slot in slots:
            old = slot.value
            slot.replace(
                nn.Parameter(at_rest(old, slot.rest, slot.base), requires_grad=old.requires_grad)
            )
        self._projects_buffers = any_sharded(own_modules(self))
        self.flatten_params()

    def _bucket(self, dtype: torch.dtype, numbers: list[int]) -> Bucket:
        options, slots = self.options, [self.slots[i] for i in numbers]
        bases, dims = [slot.base for slot in slots], [slot.dim for slot in slots]
        flat = FlatBucket(options.mesh, options.stage.optimizer, bases, options.transport, dims)
        for slot, layout in zip(slots, flat.layouts, strict=True):
            slot.rest = layout
        return Bucket(
            numbers, ParamStorage(flat, dtype, options, self.display_name), options.policy
        )

    @property
    def display_name(self) -> str:
        """The name of the unit in messages."""
        return self.name or " + ".join(type(root).__name__ for root in self.roots)

    def flatten_params(self) -> None:
        """Make the local parts views of the flat shards, so that an all_gather copies nothing
        first.
        """
        self.adopt_parameters()
        for bucket in self._buckets:
            parameters = [self.slots[i].value for i in bucket.numbers]
            if not any(x._local.is_meta for x in parameters):
                bucket.storage.move_to_shard(parameters)

    def adopt_parameters(self) -> None:
        """Take over parameters that replace the unit's for good."""
        for slot in self.slots:
            slot.adopt()

    def param_devices(self) -> Iterator[tuple[int, torch.device]]:
        """Yield the id of each parameter and the device of its shard."""
        yield from (
            (id(self.slots[i].value), bucket.storage.shard.device)
            for bucket in self._buckets
            for i in bucket.numbers
        )

    # -- forward -----------------------------------------------------------------------------------

    def intercept(self) -> None:
        """Redirect calls of the unit's module, and of submodules that own its parameters, to
        `call`.
        """
        own = list(own_modules(self))
        for module in own:
            set_unit(module, self)
        intercepted = [
            x for x in own if x in self.roots or any(p is not None for p in x._parameters.values())
        ]
        for module in intercepted:
            module.register_load_state_dict_post_hook(_adopt_loaded)
        self.calls = CallInterception(intercepted)

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
        for outer in self.outer_units:
            if not outer._in_use.uses:
                return outer.call(
                    module,
                    args,
                    kwargs,
                    lambda inner, *args, **kwargs: self.call(inner, args, kwargs, forward),
                )
        policy = self.options.policy
        self.calls.stop()
        try:
            self._pre_forward(args, kwargs)
            if module not in self.roots:
                outputs = forward(module, *args, **kwargs)
            else:
                args, kwargs = policy.inputs((args, kwargs))
                outputs = policy.outputs(forward(module, *args, **kwargs))
            self._keep_writes()
            return self.schedule.before_backward(self, outputs) if module in self.roots else outputs
        finally:
            self._post_forward(module)
            self.calls.start()

    @not_recomputed
    def _pre_forward(self, args: Any, kwargs: Any) -> None:
        if self._in_use.uses:  # by `unshard`
            self._keep_writes()
            self._in_use.restore()
            self.gather()  # if parameters were written since
            if not all(bucket.storage.is_gathered for bucket in self._buckets):
                self._unsharded = None
        self.controls.wait_for_optimizer()
        schedule = running_schedule(self)
        self.computes_on = mesh_of_inputs(
            (args, kwargs), self.options.mesh, self.display_name
        ) or schedule.enclosing_mesh(self)
        schedule.enter(self)
        self._put_unsharded()
        if self.computes_on is not None:
            self._buffers.wrap(own_modules(self), self.computes_on)
        elif self._projects_buffers:
            self._buffers.project(own_modules(self), self._plain_input_mesh)
        schedule.prefetch(self)
        if torch.is_grad_enabled() and self.keep != "all":
            self._saving = saved_param_hooks(self._find_buffer, self._regather)
            self._saving.__enter__()

    def _put_unsharded(self) -> None:
        """Set the unsharded parameters in the modules, or what is made of values that replace them.
        Communication: as `gather`.
        """
        replaced, meshes = replaced_values(self.slots), self._param_meshes()
        in_place_of = self._prepare_replaced(replaced, meshes)
        values: list[Any] = [None] * len(self.slots)
        if not replaced or len(replaced) < sum(len(slot.places) for slot in self.slots):
            if self._unsharded is None or self._with_graph != torch.is_grad_enabled():
                self._unsharded, self._with_graph = self._gather_params(), torch.is_grad_enabled()
            self._unsharded[0].set_grad_scale(self._grad_scales(meshes))
            values = [
                self._wrap_value(mesh, slot.base, slot.value._lineage, value)
                for slot, value, mesh in zip(self.slots, self._unsharded[1], meshes, strict=True)
            ]
        for i, (slot, value) in enumerate(zip(self.slots, values, strict=True)):
            for k in range(len(slot.places)):
                self._in_use.put(i, slot, k, in_place_of.get((i, k), value))
        self._hashes = self._hash_copies()

    def unshard(self) -> None:
        """Gather the parameters and leave them in the modules, until `reshard` or the end of a
        forward. Communication: as `gather`.
        """
        if not self._in_use.uses:
            self.computes_on = None
            self._put_unsharded()

    def hide_unsharded(self) -> None:
        """Set the sharded parameters in the modules, except during a forward."""
        if not self.schedule.is_running(self):
            self._keep_writes()
            self._in_use.restore()

    def reshard(self) -> None:
        """Set the sharded parameters in the modules and free the gathered ones.

        Raises:
            RuntimeError: a forward of the unit is running.
        """
        if self.schedule.is_running(self):
            raise RuntimeError(
                f"reshard() inside of a forward of {self.display_name}, which uses the parameters"
            )
        self._keep_writes()
        self._in_use.restore()
        self._unsharded = self._prefetched = None
        for bucket in self._buckets:
            bucket.storage.drop_pending()
            bucket.storage.after_backward()

    def reshard_after_forward(self, reshard: bool) -> None:
        """Change what the unit keeps between forward and backward."""
        if self.options.stage.parameter:
            self._keep = "rest" if reshard else "all"

    def _param_meshes(self) -> list[DeviceMesh | None]:
        """Return the mesh on which each parameter is used, None for a plain tensor."""
        if self.computes_on is not None or all(slot.own is None for slot in self.slots):
            return [self.computes_on] * len(self.slots)
        return [self._plain_input_mesh(slot.own) for slot in self.slots]

    def _plain_input_mesh(self, own: DeviceMesh | None) -> DeviceMesh | None:
        """Return the mesh on which a parameter or buffer of mesh `own` is used when inputs are
        plain.
        """
        return mesh_of_parameter(
            own,
            self.options.mesh,
            self.options.stage.optimizer,
            self.schedule.tensor_axes(self.options.mesh),
        )

    def _grad_scales(self, meshes: Sequence[DeviceMesh | None]) -> list[float]:
        """Return the factor for each parameter's gradient."""
        data, factor = self.options.data_axes, self.controls.divide_factor
        by_mesh = {
            mesh: gradient_scale(self.options.mesh, mesh, data, factor) for mesh in set(meshes)
        }
        return [by_mesh[mesh] for mesh in meshes]

    @not_recomputed
    def _post_forward(self, module: nn.Module) -> None:
        if self._saving is not None:
            self._saving.__exit__()
        self._saving = None
        self._in_use.restore()  # nothing if `_pre_forward` raised
        self._hashes = []
        self._buffers.unwrap()
        if self.keep != "all" and not self._awaits_another(module):
            self._free_after_forward()
        self.schedule.leave(self)

    def _awaits_another(self, module: nn.Module) -> bool:
        """Return whether other modules of the unit are to run in the model's forward, after this
        one.
        """
        if len(self.roots) == 1 or engine_hooks.current_backward() != -1:
            return False
        self._still_to_run = (self._still_to_run or set(self.roots)) - {module}
        return bool(self._still_to_run)

    def _free_after_forward(self) -> None:
        self._unsharded = None
        self._still_to_run = set()
        if engine_hooks.current_backward() == -1:
            for bucket in self._buckets:
                bucket.storage.after_forward(self.keep)

    # -- gathering ---------------------------------------------------------------------------------

    def _sharded_parameters(self) -> list[ShardedTensor]:
        """Return the sharded parameters."""
        return [slot.value for slot in self.slots]

    def gather(self) -> None:
        """Launch the all_gathers.

        Communication: one all_gather per dtype; none if the parameters are whole already.
        """
        if not self._in_use.uses:
            check_parameters(
                self.slots, [bucket.numbers for bucket in self._buckets], self.display_name
            )
        parameters = self._sharded_parameters()
        with torch.no_grad(), comm_context(self.options.mesh.world, mixed(_GATHERING, parameters)):
            for bucket in self._buckets:
                bucket.storage.start_gather([parameters[i] for i in bucket.numbers])

    @not_recomputed
    def prefetch(self) -> None:
        """Launch the all_gathers for the next forward. Communication: as `gather`; none if other
        values replace all parameters.
        """
        if all(
            owner._parameters.get(name) is not slot.value
            for slot in self.slots
            for owner, name in slot.places
        ):
            return
        self.gather()
        if (
            self._buckets
            and self._unsharded is None
            and self._prefetched is None
            and torch.is_grad_enabled()
        ):
            op, parts = self._gather_op(), [x._local for x in self._sharded_parameters()]
            self._prefetched = op, parts, op.enter(parts)

    def drop_prefetched(self) -> None:
        """Drop prefetched parameters: a forward has ended."""
        self._unsharded = self._prefetched = None
        if engine_hooks.current_backward() == -1:
            for bucket in self._buckets:
                bucket.storage.drop_pending()
        if self._still_to_run:
            self._free_after_forward()

    def _gather_params(self) -> tuple[GatherOp, tuple[Tensor, ...]]:
        """Return the unsharded values and the autograd op that made them."""
        self.gather()
        parts, prefetched = [x._local for x in self._sharded_parameters()], self._prefetched
        self._prefetched = None
        if prefetched is not None and all(
            one is other for one, other in zip(prefetched[1], parts, strict=True)
        ):
            op, entered = prefetched[0], prefetched[2]
        else:
            op = self._gather_op()
            entered = op.enter(parts)
        return op, op.gather(entered)

    def _is_copy(self, i: int) -> bool:
        """Return whether a parameter in use has other memory than the parameter."""
        return self.options.policy.param_dtype is not None or (
            bool(self.options.stage.optimizer) and bool(self.slots[i].base.shape)
        )

    def _gather_op(self) -> GatherOp:
        half = None if self.options.find_unused else self.schedule.at_half_of_backward
        writer = GradWriter(
            self._grad_buffers(),
            self._is_deferred,
            at_end=bool(self.options.stage.parameter),
            on_half=half,
        )
        return GatherOp(
            self._gathered_values,
            self._reduce_grads,
            self._reduce_differentiably,
            writer,
            overlaps=bool(self._buckets),
        )

    def _gathered_values(self) -> list[Tensor]:
        """Return the parameters as views of the gathered buffers; unsharded ones unchanged."""
        as_is, used_as = self.options.policy.param_dtype is None, self.options.policy.used_as
        wholes = [b.flat.wholes_in(b.storage.whole()) for b in self._buckets]
        # `.data`: a version of its own for each, so that a write to one is none to the others
        values = {
            i: x.data
            for b, views in zip(self._buckets, wholes, strict=True)
            for i, x in zip(b.numbers, views, strict=True)
        }
        parts = [x._local for x in self._sharded_parameters()]
        if as_is:
            return [values[i] if i in values else x.detach() for i, x in enumerate(parts)]
        return [
            values[i] if i in values else x.detach().to(used_as(x.dtype))
            for i, x in enumerate(parts)
        ]

    def _wrap_value(
        self, mesh: DeviceMesh | None, base: Layout, lineage: int, value: Tensor
    ) -> Tensor:
        """Return a value as the module sees it: plain, or a sharded tensor on the mesh of the
        activations.
        """
        if mesh is None:
            return value
        layout = (
            base.replace(dtype=value.dtype)
            if mesh is self.options.mesh
            else Layout.of(mesh, base.spec, base.shape, value.dtype)
        )
        out = ShardedTensor._make(value, layout)
        out._lineage = lineage
        return out

    # -- values that replace parameters for a call -------------------------------------------------

    def _prepare_replaced(
        self, replaced: dict[tuple[int, int], Tensor], meshes: Sequence[DeviceMesh | None]
    ) -> dict[tuple[int, int], Any]:
        """Return what modules see of values that replace parameters for this call, as those of
        `torch.func.functional_call`.

        A sharded one is a value of all ranks, whose gradient is averaged as a parameter's is. A
        plain one is this rank's.

        Communication: one redistribution of all sharded ones.
        """
        if not replaced:
            return {}
        note_in_checkpoint(replaced)
        sharded = {id(x): (i, x) for (i, _), x in replaced.items() if isinstance(x, ShardedTensor)}
        values = [x for _, x in sharded.values()]
        bases = [self.slots[i].base.replace(dtype=x.dtype) for i, x in sharded.values()]
        all_scales = self._grad_scales(meshes)
        scales = [all_scales[i] for i, _ in sharded.values()]
        wholes = gather_values(values, bases, scales, self.options.mesh.world)
        in_use: dict[int, Any] = {}
        for (i, x), whole in zip(sharded.values(), wholes, strict=True):
            used = whole.to(self.options.policy.used_as(whole.dtype))
            in_use[id(x)] = self._wrap_value(meshes[i], self.slots[i].base, x._lineage, used)
        return {
            place: in_use[id(x)] if id(x) in in_use else x.to(self.options.policy.used_as(x.dtype))
            for place, x in replaced.items()
        }

    # -- writes in forward -------------------------------------------------------------------------

    @not_recomputed
    def _keep_writes(self) -> None:
        """Carry over what forward has written to parameters in use.

        Writes to `.data` of a copy leave no trace: the first, 16th, 256th, ... forward compares
        hashes of the values. Where copies last until the next step (ZeRO-1, ZeRO-2), this rank's
        rows are copied to the parameter after the others.

        Raises:
            RuntimeError: a written value is one that forward frees, or one in another dtype.
            ReplicaError: with sharded optimizer state, ranks have written different values.

        Communication: none if nothing is written; else with sharded optimizer state one comparison,
        see `assert_replicated`.
        """
        if not self._in_use.uses:
            return
        uses = list({(use.number, id(use.in_use)): use for use in self._in_use.written()}.values())
        uses += self._written_by_data({use.number for use in uses})
        if not uses:
            if not self.options.stage.parameter and self.options.policy.param_dtype is None:
                for bucket in self._buckets:
                    bucket.storage.copy_whole_to_shard(
                        [self.slots[i].value for i in bucket.numbers]
                    )
            return
        for use in uses:
            self._check_write(use)
        uses = [use for use in uses if not use.is_replaced]
        for use in uses:
            if not self._is_copy(use.number):
                parameter = use.slot.value
                parameter._local.data = use.local.data
                parameter._data_accesses += 1
        copies = [use for use in uses if self._is_copy(use.number)]
        if copies:
            self._write_copies(copies)

    def _hash_copies(self) -> list[tuple[Use, Tensor]]:
        """Return each copy in use with a hash of its values; none if this forward does not compare
        them.
        """
        self._forwards += 1
        is_due = self._forwards in _COMPARED_FORWARDS and engine_hooks.current_backward() == -1
        if not is_due or thread_context.recorder is not None:
            return []
        return [
            (use, bit_hash(use.local))
            for use in self._in_use.uses
            if not use.local.is_meta
            and (use.is_copy if use.is_replaced else self._is_copy(use.number))
        ]

    def _written_by_data(self, known: Collection[int]) -> list[Use]:
        """Return the uses whose values have changed since they were hashed, without those of known
        numbers.
        """
        hashed = [(use, before) for use, before in self._hashes if use.number not in known]
        self._hashes = []
        if not hashed:
            return []
        before = torch.stack([one for _, one in hashed])
        now = torch.stack([bit_hash(use.local) for use, _ in hashed])
        return [
            use
            for (use, _), is_changed in zip(hashed, (before != now).tolist(), strict=True)
            if is_changed
        ]

    def _check_write(self, use: Use) -> None:
        why = self._why_lost(use)
        if why is None:
            return
        for bucket in self._buckets:
            bucket.storage.drop_copies()
        self._unsharded, self._forwards = None, 0  # the next forward compares again
        path = use.slot.path
        raise RuntimeError(
            f"{path} was written in forward, and the write would be lost: {why}. Write to {path} "
            "outside of forward, where it is a ShardedTensor, or keep it in a buffer; with "
            "data_parallel(model, mesh), without a precision policy, parameters are whole and "
            "forward may write to them"
        )

    def _why_lost(self, use: Use) -> str | None:
        """Return why a write to a parameter in use cannot be kept; None if it can."""
        local, layout, policy = use.local, use.slot.base, self.options.policy
        if use.is_replaced:
            return "the value that replaces it is used from a copy" if use.is_copy else None
        is_copy = self._is_copy(use.number)
        if policy.param_dtype is not None and is_copy:
            return f"forward uses a copy in {policy.used_as(layout.dtype)}, by its precision policy"
        if self.options.stage.parameter and is_copy:
            return "forward uses gathered values, which are freed after it"
        if type(use.in_use) is ShardedTensor and (
            use.in_use.spec != layout.spec or use.in_use.shape != layout.shape
        ):
            return f"it is {use.in_use._layout} now; assign values laid out as {layout.spec}"
        if local.shape != layout.local_shape or local.dtype is not layout.dtype:
            return (
                f"its values have shape {list(local.shape)} and dtype {local.dtype} now; assign "
                "values of the same shape and dtype"
            )
        if local._base is not None and type(local._base.grad_fn).__name__ == "CopySlices":
            return "autograd records it; write under torch.no_grad()"
        return None

    def _write_copies(self, uses: list[Use]) -> None:
        """Write whole values to the sharded parameters."""
        values = {
            use.slot.path: ShardedTensor._make(use.local.detach(), use.slot.base) for use in uses
        }
        group = self.options.mesh.group()
        compare(
            f"{self.display_name}: written in forward: ",
            replica_leaves(list(values.items()), group.ranks),
            group,
        )
        for bucket in self._buckets:
            mine = {
                bucket.numbers.index(use.number): use
                for use in uses
                if use.number in bucket.numbers
            }
            if mine:
                parameters = [self.slots[i].value for i in bucket.numbers]
                is_in_whole = not any(use.is_assigned for use in mine.values())
                bucket.storage.update_shard(
                    parameters, {k: use.local for k, use in mine.items()}, is_in_whole=is_in_whole
                )

    # -- backward ----------------------------------------------------------------------------------

    def _find_buffer(self, address: int) -> GatheredBuffer | None:
        """Return the gathered buffer at a storage address."""
        for i, bucket in enumerate(self._buckets):
            if bucket.storage.address == address:
                self.saved += 1
                return GatheredBuffer(i, bucket.storage.versions)
        return None

    @not_recomputed
    def _regather(self, buffer: GatheredBuffer, offset: int) -> Tensor:
        """Return a gathered buffer for backward; gather it if it was freed.

        Raises:
            RuntimeError: a saved parameter was written since the forward.
        """
        bucket = self._buckets[buffer.number]
        if not bucket.storage.is_gathered:
            self.gather()
            self.schedule.prefetch_backward(self)
        whole = bucket.storage.whole()
        if bucket.storage.versions != buffer.versions:
            self._check_unwritten(bucket, buffer, bucket.flat.param_at(offset))
        return whole

    def _check_unwritten(self, bucket: Bucket, buffer: GatheredBuffer, i: int) -> None:
        before, now = buffer.versions[i][1], bucket.storage.versions[i][1]
        if before != now:
            raise RuntimeError(
                f"{self.slots[bucket.numbers[i]].path} was written between forward and backward "
                f"(version {now}, expected {before}), but backward needs the values of the "
                "forward; step the optimizer after backward, or run the forward again"
            )

    def release(self) -> None:
        """Free the gathered parameters: backward is done with the unit."""
        self.saved = 0
        self._unsharded = None
        for bucket in self._buckets:
            bucket.storage.drop_pending()
            if self.controls.reshards_after_backward:
                bucket.storage.after_backward()

    def _is_deferred(self) -> bool:
        """Return whether the running backward defers the reduction: to a later one, or to the end
        of `accumulate_grads()`.
        """
        if not self.controls.reduces_grads:
            return True
        return self.options.stage.defers_reduction and leaf_grads.is_accumulating(
            self.options.mesh.world
        )

    def _grad_buffers(self) -> dict[int, tuple[GradBufferSource, int]]:
        """Return the buffer, and the index in it, that each parameter's gradient is written to, by
        the parameter's number.
        """
        if self.options.stage.optimizer:
            return {
                i: (bucket, k) for bucket in self._buckets for k, i in enumerate(bucket.numbers)
            }
        parameters = self._sharded_parameters()
        now = [
            x._layout if x.requires_grad and x._local.is_contiguous() else None for x in parameters
        ]
        if self._in_order[0] != now:
            self._in_order = now, {}
            alike: dict[Any, list[int]] = {}  # gradients that one collective can reduce
            for i, layout in enumerate(now):
                if layout is not None:
                    alike.setdefault((layout.replicated_axes, layout.dtype), []).append(i)
            for numbers in alike.values():
                source = ContiguousGrads([now[i] for i in numbers], self._allocate_grads)  # type: ignore[misc]
                self._in_order[1].update({i: (source, k) for k, i in enumerate(numbers)})
        return self._in_order[1]

    def _allocate_grads(self, source: ContiguousGrads) -> Tensor:
        """Allocate a buffer for gradients of unsharded parameters."""
        return self.schedule.bucketer.buffer(source)

    def _reduce_grads(self, grads: Grads, scale: float, writer: GradWriter) -> Callable[[], Grads]:
        """Launch the reduction of gradients; the returned function waits and gives the gradients of
        the local parts.

        Communication: one reduce_scatter per dtype; if gradients stay whole, none inside
        `accumulate_grads()` and one at its end.
        """
        self.schedule.on_backward()
        self.release()
        if not self.controls.reduces_grads:
            return self._hold(grads, scale)
        if self._is_deferred():
            return self._defer(grads, scale)
        filled = {bucket: writer.buffers.pop(bucket, None) for bucket in self._buckets}
        for bucket in self._buckets:
            if bucket in self._held.buckets:
                filled[bucket] = self._with_held(bucket, grads)
        with comm_context(self.options.mesh.world, mixed(_REDUCING, self._sharded_parameters())):
            waits = [
                (bucket, self._start_reduce(bucket, grads, scale, filled[bucket]))
                for bucket in self._buckets
            ]
        unsharded = self._unsharded_grads(
            grads, scale, writer
        )  # not in `wait`, which would keep all gradients alive
        if not waits:
            found = self._accumulate(unsharded, writer)
            return lambda: found
        self.schedule.at_half_of_backward()  # if it was not called before
        ended = self.schedule.reduction_started()

        def wait() -> Grads:
            ended()
            return self._accumulate(merge_parts(unsharded, waits), writer)

        return wait

    def _start_reduce(
        self, bucket: Bucket, grads: Grads, scale: float, filled: GradBuffer | None
    ) -> Callable[[], Grads]:
        parameters = self._sharded_parameters()
        trained = {i: self.slots[i].path for i in bucket.numbers if parameters[i].requires_grad}
        missing = [path for i, path in trained.items() if grads[i] is None]
        mine, fill = [grads[i] for i in bucket.numbers], self.options.find_unused
        return bucket.start(
            self.display_name, mine, scale, missing, fill, filled, self.controls.reduce_hook
        )

    def _unsharded_grads(
        self, grads: Grads, scale: float, writer: GradWriter | None = None
    ) -> Grads:
        """Return the gradients of unsharded parameters, None for the others."""
        in_buckets = {i for bucket in self._buckets for i in bucket.numbers}
        pairs = enumerate(zip(grads, self._sharded_parameters(), strict=True))
        scaled = {} if writer is None else writer.written
        return [
            None
            if i in in_buckets
            else scaled[i]
            if i in scaled
            else self._scaled_grad(grad, x, scale)
            for i, (grad, x) in pairs
        ]

    def _scaled_grad(
        self, grad: Tensor | None, parameter: ShardedTensor, scale: float
    ) -> Tensor | None:
        if grad is not None:
            return (grad if scale == 1 else grad * scale).to(parameter.dtype)
        return (
            torch.zeros_like(parameter._local)
            if self.options.find_unused and parameter.requires_grad
            else None
        )

    def _accumulate(self, parts: Grads, writer: GradWriter) -> Grads:
        """Return what autograd adds to `.grad`, None for gradients that are added later.

        Those are gradients of replicated parameters: they are reduced over more axes while other
        units continue their backward.

        Communication: where parameters are replicated, one all_reduce per dtype; for units without
        sharded parameters see `GradBucketer`.
        """
        parameters, nodes = self._sharded_parameters(), writer.leaves
        parts = self._held.exchange(parts, parameters, keep=not self.controls.all_reduces_grads)
        if self.options.offloaded is not None:
            parts = self.options.offloaded.defer(parameters, parts, nodes)
        numbers = [i for i in self._reduced_per_unit() if parts[i] is not None]
        mine = [
            i
            for i in numbers
            if not parts[i].requires_grad and leaf_grads.may_start(parameters[i], nodes[i])  # type: ignore[union-attr]
        ]
        if not mine:
            return parts
        missing = [
            self.slots[i].path
            for i in self._reduced_per_unit()
            if i not in mine and parameters[i].requires_grad
        ]
        own = bool(self.options.stage.optimizer) or all(
            parts[i] is writer.written.get(i) for i in mine
        )
        if not self._buckets:
            sources = list(writer.buffers) if own else []
            source: Any = sources[0] if len(sources) == 1 else None
            leaves, grads = [parameters[i] for i in mine], [parts[i] for i in mine]
            alone = self.schedule.units[0] is self
            self.schedule.bucketer.add(
                UnitGrads(self.display_name, leaves, grads, missing, own, source, alone)  # type: ignore[arg-type]
            )
            return [None if i in mine else part for i, part in enumerate(parts)]
        tag = reduction_tag(self.display_name, len(mine), missing)
        # Not the lineage of the loss: with plain inputs each rank along the data-parallel axes has
        # its own loss.
        with comm_context(self.options.mesh.world, mixed(_REDUCING, parameters)):
            leaf_grads.start(
                [parameters[i] for i in mine],
                [parts[i] for i in mine],  # type: ignore[misc]
                tag,
                donate=own,
            )
        return [None if i in mine else part for i, part in enumerate(parts)]

    def _reduced_per_unit(self) -> list[int]:
        """Return the parameters whose gradients are reduced unit by unit; the others are reduced
        together at the end of backward.
        """
        if self.options.stage.optimizer:
            return [i for bucket in self._buckets for i in bucket.numbers]
        return [] if self.options.find_unused else list(range(len(self.slots)))

    def fill_unused(self) -> None:
        """Give parameters without a gradient a gradient of zeros, with `find_unused_parameters` and
        unsharded parameters.
        """
        if (
            self.options.find_unused
            and not self.options.stage.optimizer
            and self.controls.reduces_grads
        ):
            for x in self._sharded_parameters():
                if x.requires_grad and x._local.grad is None:
                    leaf_grads.add(x, torch.zeros_like(x._local))

    def _defer(self, grads: Grads, scale: float) -> Callable[[], Grads]:
        """Accumulate unreduced gradients until the end of `accumulate_grads()`."""
        if not any(bucket.used for bucket in self._buckets):
            leaf_grads.before_reduction(
                self.options.mesh.world, lambda: self._reduce_deferred(scale), self._drop_deferred
            )
        for bucket in self._buckets:
            bucket.defer([grads[i] for i in bucket.numbers])
        found = self._unsharded_grads(grads, scale)
        return lambda: found

    def _hold(self, grads: Grads, scale: float) -> Callable[[], Grads]:
        """Accumulate unreduced gradients until a backward that reduces them."""
        refuse_recording()
        for bucket in self._buckets:
            bucket.defer([grads[i] for i in bucket.numbers])
            self._held.buckets[bucket] = scale
        nothing: Grads = [None] * len(grads)
        self._held.add(dict(enumerate(self._unsharded_grads(grads, scale))))
        return lambda: nothing

    def _with_held(self, bucket: Bucket, grads: Grads) -> GradBuffer:
        """Add a bucket's held gradients to those in `grads`; return the buffer that has the
        sums.
        """
        refuse_recording()
        del self._held.buckets[bucket]
        bucket.defer([grads[i] for i in bucket.numbers])
        whole = bucket.deferred
        if whole is None:
            return bucket.make()
        for i, grad in zip(bucket.numbers, bucket.take_deferred(), strict=True):
            grads[i] = grad
        return GradBuffer(whole, bucket.flat.wholes_in(whole))

    def reduce_held(self) -> None:
        """Reduce held gradients of parameters that the ended backward did not reach, once gradients
        are to be reduced.

        Communication: as a backward of the unit, or none.
        """
        if not self.controls.reduces_grads:
            return
        parameters = self._sharded_parameters()
        with torch.no_grad(), comm_context(self.options.mesh.world, mixed(_REDUCING, parameters)):
            for bucket, scale in list(self._held.buckets.items()):
                grads: Grads = [None] * len(self.slots)
                filled = self._with_held(bucket, grads)
                parts = self._start_reduce(bucket, grads, scale, filled)()
                if self.options.offloaded is not None:
                    self.options.offloaded.synchronize()
                self._held.add(dict(zip(bucket.numbers, parts, strict=True)))
        if self.controls.all_reduces_grads:
            rest = self._held.exchange([None] * len(self.slots), parameters, keep=False)
            accumulate_later(parameters, rest)

    def drop_held(self) -> None:
        """Drop held gradients."""
        self._held = HeldGrads()
        self._drop_deferred()

    def _reduce_deferred(self, scale: float) -> None:
        """Reduce the accumulated gradients and add them to `.grad`. Communication: one
        reduce_scatter per dtype.
        """
        parameters = self._sharded_parameters()
        with torch.no_grad(), comm_context(self.options.mesh.world, mixed(_REDUCING, parameters)):
            for bucket in self._buckets:
                deferred: Grads = [None] * len(self.slots)
                whole = bucket.deferred
                filled = None if whole is None else GradBuffer(whole, bucket.flat.wholes_in(whole))
                for i, grad in zip(bucket.numbers, bucket.take_deferred(), strict=True):
                    deferred[i] = grad
                accumulate_later(
                    [parameters[i] for i in bucket.numbers],
                    self._start_reduce(bucket, deferred, scale, filled)(),
                )

    def _drop_deferred(self) -> None:
        for bucket in self._buckets:
            bucket.drop_deferred()

    def _reduce_differentiably(self, grads: Grads, scale: float) -> Grads:
        self.release()
        with comm_context(self.options.mesh.world, mixed(_REDUCING, self._sharded_parameters())):
            bases, rests = [slot.base for slot in self.slots], [slot.rest for slot in self.slots]
            return differentiable(grads, bases, rests, [scale] * len(bases))


def _adopt_loaded(module: nn.Module, _: Any) -> None:
    """Take over the parameters that `load_state_dict(assign=True)` has set."""
    unit = unit_of(module)
    if unit is not None:
        for one in (unit, *unit.outer_units):
            one.adopt_parameters()
