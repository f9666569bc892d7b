"""The plan of a unit: its modules, parameters and their storage, which stay while it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import Layout
from ...lineage import comm_context, mixed, seed_of
from ...tensor.sharded_tensor import ShardedTensor
from .grads.grad_reduction import Bucket
from .slot import Slot, UnitOptions, check_parameters
from .storage.flat import FlatBucket
from .storage.param_storage import ParamStorage
from .storage.saved_tensors import GatheredBuffer

_GATHERING = seed_of("gather a unit")
_REDUCING = seed_of("sum gradients of a unit")


class UnitModules(nn.ModuleList):
    """The modules of a unit that has several."""


@dataclass(frozen=True, eq=False)
class UnitPlan:
    """What a unit is made of.

    Attributes:
        name: the path of the module, used in messages.
        module: the module, or a list of the modules that are one unit.
        options: those that all units of the model share.
        slots: its parameters, without those of nested units.
        buckets: the parameters that are split between uses, by dtype.
        shared_modules: modules whose calls belong to the unit although only nested units have them.
    """

    name: str
    module: nn.Module
    options: UnitOptions
    slots: Sequence[Slot]
    buckets: Sequence[Bucket]
    shared_modules: Sequence[nn.Module]

    @cached_property
    def roots(self) -> tuple[nn.Module, ...]:
        """The module, or those of the list: one gather before the first, freed after the last."""
        return roots_of(self.module)

    @property
    def display_name(self) -> str:
        """The name of the unit in messages."""
        return _display_name(self.name, self.module)

    @property
    def tensor_axes(self) -> set[str]:
        """The axes that split parameters in use (tensor parallelism)."""
        return {axis for slot in self.slots for axis in slot.base.spec.axes}

    @property
    def parameters(self) -> list[ShardedTensor]:
        """The sharded parameters."""
        return [slot.value for slot in self.slots]

    @cached_property
    def unsharded(self) -> list[int]:
        """The parameters that are in no bucket."""
        in_buckets = {i for bucket in self.buckets for i in bucket.numbers}
        return [i for i in range(len(self.slots)) if i not in in_buckets]

    @property
    def grad_sources(self) -> dict[int, tuple[Bucket, int]] | None:
        """The bucket of each parameter and its index there; None if gradients are not split."""
        if not self.options.stage.optimizer:
            return None
        return {i: (bucket, k) for bucket in self.buckets for k, i in enumerate(bucket.numbers)}

    def parameter_devices(self) -> Iterator[tuple[int, torch.device]]:
        """Yield the id of each parameter and the device of its shard."""
        for bucket in self.buckets:
            yield from ((id(x), bucket.storage.shard.device) for x in bucket.parameters)

    def is_copy(self, i: int) -> bool:
        """Return whether a parameter in use has other memory than the parameter."""
        return self.options.policy.param_dtype is not None or (
            bool(self.options.stage.optimizer) and bool(self.slots[i].base.shape)
        )

    # -- storage -----------------------------------------------------------------------------------

    def adopt_parameters(self) -> None:
        """Take over parameters that replace the unit's for good."""
        for slot in self.slots:
            slot.adopt()

    def adopt_materialized(self) -> None:
        """Take over the parameters with which `to_empty` has replaced those on "meta"."""
        for slot in self.slots:
            x = slot.value
            if type(x) is ShardedTensor and x._local.is_meta:
                slot.adopt()

    def flatten_parameters(self) -> None:
        """Make the local parts views of the flat shards, so that an all_gather copies nothing."""
        self.adopt_parameters()
        for bucket in self.buckets:
            if not any(x._local.is_meta for x in bucket.parameters):
                bucket.storage.move_to_shard(bucket.parameters)

    def gather(self, *, check: bool) -> None:
        """Launch the all_gathers; `check` the parameters before.

        Communication: one all_gather per dtype; none if the parameters are whole already.
        """
        if check:
            check_parameters(
                self.slots, [bucket.numbers for bucket in self.buckets], self.display_name
            )
        with torch.no_grad(), comm_context(self._world, mixed(_GATHERING, self.parameters)):
            for bucket in self.buckets:
                bucket.storage.start_gather(bucket.parameters)

    @property
    def is_gathered(self) -> bool:
        """Whether all parameters are whole."""
        return all(bucket.storage.is_gathered for bucket in self.buckets)

    def gathered_values(self) -> list[Tensor]:
        """Return the parameters as views of the gathered buffers; unsharded ones unchanged."""
        values: list[Any] = [None] * len(self.slots)
        for bucket in self.buckets:
            wholes = bucket.flat.wholes_in(bucket.storage.whole())
            for i, x in zip(bucket.numbers, wholes, strict=True):
                values[i] = x.data  # has its own version: a write to one is none to the others
        policy = self.options.policy
        for i, slot in enumerate(self.slots):
            if values[i] is None:
                x = slot.value._local.detach()
                values[i] = x if policy.param_dtype is None else x.to(policy.used_as(x.dtype))
        return values

    def value_on(self, mesh: DeviceMesh | None, i: int, value: Tensor, lineage: int) -> Tensor:
        """Return a value as the module sees it: plain, or on the mesh of the activations."""
        if mesh is None:
            return value
        base = self.slots[i].base
        layout = (
            base.replace(dtype=value.dtype)
            if mesh is self.options.mesh
            else Layout.of(mesh, base.spec, base.shape, value.dtype)
        )
        out = ShardedTensor._make(value, layout)
        out._lineage = lineage
        return out

    def buffer_at(self, address: int) -> GatheredBuffer | None:
        """Return the gathered buffer at a storage address."""
        for i, bucket in enumerate(self.buckets):
            if bucket.storage.address == address:
                return GatheredBuffer(i, bucket.storage.versions)
        return None

    def whole_buffer(self, buffer: GatheredBuffer, offset: int) -> Tensor:
        """Return a gathered buffer, a view of which at this offset was saved.

        Raises:
            RuntimeError: the parameter there was written since.
        """
        bucket = self.buckets[buffer.number]
        whole, versions = bucket.storage.whole(), bucket.storage.versions
        if versions != buffer.versions:
            i = bucket.flat.param_at(offset)
            before, now = buffer.versions[i][1], versions[i][1]
            if before != now:
                raise RuntimeError(
                    f"{bucket.slots[i].path} was written between forward and backward (version "
                    f"{now}, expected {before}), but backward needs the values of the forward; "
                    "step the optimizer after backward, or run the forward again"
                )
        return whole

    # -- gradients ---------------------------------------------------------------------------------

    def summing_grads(self) -> AbstractContextManager[Any]:
        """Return the context of collectives that sum gradients.

        Their lineage is not that of the loss: with plain inputs each rank along the data-parallel
        axes has a loss of its own.
        """
        return comm_context(self._world, mixed(_REDUCING, self.parameters))

    @property
    def _world(self) -> Any:
        return self.options.mesh.world


def make_plan(
    name: str,
    module: nn.Module,
    options: UnitOptions,
    slots: Sequence[Slot],
    shared_modules: Sequence[nn.Module],
    at_rest: Callable[[Any, Layout, Layout], ShardedTensor],
) -> UnitPlan:
    """Shard a unit's parameters, set the sharded ones in their modules and return the plan.

    Args:
        name, module, options, shared_modules: of the plan.
        slots: the parameters, with their layouts in use.
        at_rest: `(parameter, layout at rest, layout in use)` -> the sharded tensor.
    """
    alike: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i, slot in enumerate(slots):
        if options.stage.optimizer and slot.base.shape:
            alike.setdefault((slot.base.dtype, slot.value.requires_grad), []).append(i)
    title = _display_name(name, module)
    buckets = [
        _make_bucket(title, options, dtype, numbers, [slots[i] for i in numbers])
        for (dtype, _), numbers in alike.items()
    ]
    for slot in slots:
        old = slot.value
        slot.replace(
            nn.Parameter(at_rest(old, slot.rest, slot.base), requires_grad=old.requires_grad)
        )
    plan = UnitPlan(name, module, options, slots, buckets, shared_modules)
    plan.flatten_parameters()
    return plan


def _make_bucket(
    title: str,
    options: UnitOptions,
    dtype: torch.dtype,
    numbers: list[int],
    slots: list[Slot],
) -> Bucket:
    bases, dims = [slot.base for slot in slots], [slot.dim for slot in slots]
    flat = FlatBucket(options.mesh, options.stage.optimizer, bases, options.transport, dims)
    for slot, layout in zip(slots, flat.layouts, strict=True):
        slot.rest = layout
    storage = ParamStorage(flat, dtype, options, title)
    return Bucket(title, numbers, slots, storage, options.policy)


def roots_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules of a unit: the module, or those of a `UnitModules`."""
    return tuple(module) if isinstance(module, UnitModules) else (module,)


def _display_name(name: str, module: nn.Module) -> str:
    return name or " + ".join(type(root).__name__ for root in roots_of(module))
