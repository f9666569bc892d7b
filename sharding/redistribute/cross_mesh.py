"""Redistribution of local tensors from one mesh to another, with gradients.

Every rank of the two meshes takes part, forward and backward. A rank outside a mesh holds an empty
tensor of shape (0,) in place of its part, and that empty tensor is in the autograd graph like any
other. Whether a tensor requires grad is the same on all ranks, so that backward runs the same
collectives in the same order everywhere.

    forward    rank 0 (source)        [a b] --- all_to_all_v --> [ ]     its gradient is [ ] as well
               rank 1 (destination)   [ ]   --- all_to_all_v --> [a b]
    backward   rank 0                 [c d] <-- all_to_all_v --- [ ]
               rank 1                 [ ]   <-- all_to_all_v --- [c d]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.box import box_origin, box_shape, intersect, slices
from ..layout.bounded_cache import HEAVY_LIMIT, LayoutCache
from ..layout.layout import Layout
from .all_to_all import AllToAllV, TensorShare
from .autograd import redistribute_local
from .plan.cross_mesh import CrossMeshPlan, box_on, plan_cross_mesh
from .step_collectives import device_mesh

_exchanges: LayoutCache[Layout, CrossMeshExchange] = LayoutCache(HEAVY_LIMIT)


def redistribute_cross_mesh(
    local: Tensor, src: Layout, dst: Layout, *, backward_dtype: torch.dtype | None = None
) -> Tensor:
    """redistribute_cross_mesh(local, src, dst) -> this rank's part under `dst`.

    `dst` is a layout on any mesh of the same world.

        src on ranks 0 1          dst on ranks 1 2 3
        rank 0   [a b c]          [ ]
        rank 1   [d e f]     ->   [a b]
        rank 2   [ ]              [c d]
        rank 3   [ ]              [e f]

    The gradient goes the same way back, from dual(dst) to dual(src); differentiable any number of
    times. Every rank of both meshes calls this, and backward through its result, including ranks
    whose result is empty. The local tensors of all ranks require grad, or none does. The result may
    share memory with `local` if nothing has to move.

    Args:
        local: this rank's box under `src`; on a rank outside its mesh an empty tensor of shape
            (0,).
        src: the layout of `local`.
        dst: the wanted layout: same global shape and dtype.
        backward_dtype: dtype in which the gradient is sent; by default the gradient's own.

    Returns:
        This rank's box under `dst`; on a rank outside its mesh an empty tensor of shape (0,).

    Raises:
        ValueError: as `plan_cross_mesh`, on every rank, before any communication.
        TypeError: a mesh is abstract.

    Communication: pending axes of `src` are reduced, then one all_to_all over the ranks of both
        meshes, in which each rank receives each element that it lacks once; none if nothing has to
        move.

    Example:
        >>> pair = DeviceMesh("cpu", [2, 0], axis_names=("x",))
        >>> four = DeviceMesh("cpu", [0, 1, 2, 3], axis_names=("y",))
        >>> src, dst = Layout.of(pair, P("x"), (8, 2)), Layout.of(four, P("y"), (8, 2))
        >>> part = redistribute_cross_mesh(torch.ones(src.local_shape), src, dst)  # [2, 2]
    """
    if src.mesh is dst.mesh:
        return redistribute_local(local, src, dst, backward_dtype=backward_dtype)
    exchange = _exchanges.get(src, dst)
    if exchange is None:
        exchange = _exchanges.keep(src, dst, CrossMeshExchange(plan_cross_mesh(src, dst)))
    local = redistribute_local(local, src, exchange.source, backward_dtype=backward_dtype)
    if local.requires_grad and torch.is_grad_enabled():
        local = _CrossMeshRedistribute.apply(local, exchange, backward_dtype)  # type: ignore[assignment]
    else:
        local = exchange(local)
    return redistribute_local(local, exchange.target, dst, backward_dtype=backward_dtype)


class _CrossMeshRedistribute(torch.autograd.Function):
    """The all_to_all_v between two meshes; its backward is the one between the duals."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, exchange: CrossMeshExchange, backward_dtype: torch.dtype | None
    ) -> Tensor:
        ctx.exchange, ctx.backward_dtype, ctx.dtype = exchange, backward_dtype, local.dtype
        return exchange(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        comm_dtype = grad.dtype if ctx.backward_dtype is None else ctx.backward_dtype
        src, dst = (
            layout.dual.replace(dtype=comm_dtype)
            for layout in (ctx.exchange.target, ctx.exchange.source)
        )
        return redistribute_cross_mesh(grad.to(comm_dtype), src, dst).to(ctx.dtype), None, None


class CrossMeshExchange:
    """A plan compiled for this rank: `exchange(local)` runs its all_to_all_v.

    Attributes:
        source: the layout before, on the source mesh.
        target: the layout after, on the destination mesh.
    """

    __slots__ = ("_exchange", "_have", "_keep", "_shape", "source", "target")

    def __init__(self, plan: CrossMeshPlan) -> None:
        self.source, self.target = plan.source, plan.target
        world, _ = (device_mesh(layout).world for layout in (plan.src, plan.dst))
        share = _share(plan, world.rank)
        self._have = box_shape(share.have)
        self._shape = self.target.local_shape
        takes_part = plan.transfers and world.rank in plan.ranks
        self._exchange = (
            AllToAllV(world.group(plan.ranks), plan.src.dtype, [share]).start
            if takes_part
            else None
        )
        self._keep = _keep_local(share)

    def __call__(self, local: Tensor) -> Tensor:
        local = local.reshape(self._have)
        moved: Any = self._keep(local) if self._exchange is None else self._exchange([local])[0]  # type: ignore[index]
        return moved.reshape(self._shape)


def _share(plan: CrossMeshPlan, rank: int) -> TensorShare:
    """Return the boxes that this rank sends, receives and keeps."""
    sends, recvs = ([[] for _ in plan.ranks] for _ in range(2))
    for sender, receiver, box in plan.transfers:
        if plan.ranks[sender] == rank:
            sends[receiver].append(box)
        elif plan.ranks[receiver] == rank:
            recvs[sender].append(box)
    have, want = box_on(plan.source, rank), box_on(plan.target, rank)
    return TensorShare(have, want, sends, recvs, intersect(have, want))


def _keep_local(share: TensorShare) -> Any:
    """Return a function that takes a rank's part from its local tensor, without communication."""
    if share.keep is None:
        return lambda local: local.new_empty(box_shape(share.want))
    index = slices(share.keep, box_origin(share.have))
    return lambda local: local[index]
