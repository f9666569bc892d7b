"""Values that a program has put in place of parameters for one call.

As `torch.func.functional_call` does.

A sharded one is a value of all ranks, whose gradient is averaged as a parameter's is. A plain one
is this rank's. Nothing is kept for the next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....mesh.comm.world import World
from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import Layout
from ...lineage import comm_context, mixed, seed_of
from ...redistribute.autograd import redistribute_locals
from ...tensor.sharded_tensor import ShardedTensor
from .grads.averaging import average
from .plan import UnitPlan
from .slot import Slot
from .storage.saved_tensors import note_in_checkpoint

_GATHERING = seed_of("gather values in place of parameters")
_REDUCING = seed_of("sum gradients of values in place of parameters")
Substitutes = dict[tuple[int, int], Any]  # by the numbers of slot and place


def find_substitutes(slots: Sequence[Slot]) -> Substitutes:
    """Return the values that modules have in place of parameters.

    Raises:
        TypeError: a plain `nn.Parameter` replaces a parameter; its gradient would not be averaged.
        ValueError: a value of another shape, or on another mesh.
    """
    substitutes: Substitutes = {}
    for i, slot in enumerate(slots):
        parameter = slot.value
        for k, (owner, name) in enumerate(slot.places):
            x: Any = owner._parameters.get(name)
            if x is not parameter:
                _check(slot, x)
                substitutes[i, k] = x
    return substitutes


def _check(slot: Slot, x: Any) -> None:
    if isinstance(x, ShardedTensor):
        if x.shape != slot.base.shape:
            raise ValueError(
                f"{slot.path} of shape {list(slot.base.shape)} was replaced by {x._layout}; pass a "
                "value of the same shape"
            )
        if x.mesh != slot.base.mesh:
            raise ValueError(
                f"{slot.path} was replaced by {x._layout}; pass a value on {slot.base.mesh}, where "
                "the parameter is"
            )
    elif isinstance(x, nn.Parameter):
        raise TypeError(
            f"{slot.path} was replaced by a plain tensor that is an nn.Parameter, whose gradient "
            "would not be averaged over the ranks; copy the values into the parameter, or shard "
            f"them as {slot.rest.spec}. For torch.func.functional_call pass ShardedTensors, or "
            "plain tensors that are no nn.Parameter, such as x.detach().requires_grad_(): each "
            "rank then uses its own, and its gradient is this rank's"
        )
    elif not isinstance(x, Tensor):
        raise TypeError(f"{slot.path} was replaced by {type(x).__name__}; assign a tensor")


def substitutes_in_use(
    plan: UnitPlan,
    substitutes: Substitutes,
    meshes: Sequence[DeviceMesh | None],
    scales: Sequence[float],
) -> Substitutes:
    """Return what modules see of these values.

    Args:
        meshes: for each parameter, the mesh on which it is used; None for a plain tensor.
        scales: for each parameter, the factor of its gradient.

    Communication: one redistribution of all sharded ones, and in backward one of their gradients.
    """
    if not substitutes:
        return {}
    note_in_checkpoint(substitutes)
    sharded = {id(x): (i, x) for (i, _), x in substitutes.items() if isinstance(x, ShardedTensor)}
    wholes = _gather(
        [x for _, x in sharded.values()],
        [plan.slots[i].base.replace(dtype=x.dtype) for i, x in sharded.values()],
        [scales[i] for i, _ in sharded.values()],
        plan.options.mesh.world,
    )
    used_as = plan.options.policy.used_as
    in_use: dict[int, Any] = {}
    for (i, x), whole in zip(sharded.values(), wholes, strict=True):
        value = whole.to(used_as(whole.dtype))
        in_use[id(x)] = plan.value_on(meshes[i], i, value, x._lineage)
    return {
        place: in_use[id(x)] if id(x) in in_use else x.to(used_as(x.dtype))
        for place, x in substitutes.items()
    }


def _gather(
    values: Sequence[ShardedTensor],
    bases: Sequence[Layout],
    scales: Sequence[float],
    world: World,
) -> list[Tensor]:
    """Return the parts of values in these layouts; their gradients can be differentiated."""
    if not values:
        return []
    op = _Op(values, bases, scales, world)
    parts = [x._local for x in values]
    if torch.is_grad_enabled() and any(x.requires_grad for x in parts):
        return list(_GatherValues.apply(op, *parts))  # type: ignore[arg-type]
    return op.gather(parts)


class _Op:
    def __init__(
        self,
        values: Sequence[ShardedTensor],
        bases: Sequence[Layout],
        scales: Sequence[float],
        world: World,
    ) -> None:
        self._layouts = [x._layout for x in values]
        self._bases, self._scales, self._world = bases, scales, world
        self._gathering = mixed(_GATHERING, values)
        self._reducing = mixed(_REDUCING, values)

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        # not the lineage of the loss: with plain inputs each rank has a loss of its own
        with comm_context(self._world, self._gathering):
            return redistribute_locals(parts, list(zip(self._layouts, self._bases, strict=True)))

    def reduce(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        with comm_context(self._world, self._reducing):
            return average(grads, self._bases, self._layouts, self._scales)


class _GatherValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: _Op, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        ctx.set_materialize_grads(False)
        wholes = tuple([whole.view_as(whole) for whole in op.gather(parts)])
        needed = zip(wholes, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*[whole for whole, needs_grad in needed if not needs_grad])
        return wholes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.op.reduce(grads)
