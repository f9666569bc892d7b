"""Redistribution from one mesh to another, with gradients.

Every rank of the two meshes takes part, forward and backward. A rank outside a mesh holds an empty tensor of shape (0,)
in place of its part, and that empty tensor is in the graph like any other: whether a tensor requires grad is a property
of the whole, the same on all ranks, so that backward runs the same crossings in the same order everywhere.

    forward    rank 0 (source)        [a b] --- exchange --> [ ]        its gradient is [ ] as well
               rank 1 (destination)   [ ]   --- exchange --> [a b]
    backward   rank 0                 [c d] <-- exchange --- [ ]
               rank 1                 [ ]   <-- exchange --- [c d]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.box import box_origin, box_shape, intersect, slices
from ..layout.layout import Layout
from .autograd import redistribute_local
from .executor import device_mesh
from .packed_collectives import Exchange, Share
from .plan.cross_mesh import AcrossPlan, box_on, plan_across


def redistribute_across(
    local: Tensor, src: Layout, dst: Layout, *, backward_dtype: torch.dtype | None = None
) -> Tensor:
    """redistribute_across(local, src, dst) -> this rank's part under `dst`, a layout on any mesh of the same world.

        src on ranks 0 1          dst on ranks 1 2 3
        rank 0   [a b c]          [ ]
        rank 1   [d e f]     ->   [a b]
        rank 2   [ ]              [c d]
        rank 3   [ ]              [e f]

    The gradient goes the same way back: from dual(dst) to dual(src), any number of times. Every rank of both meshes
    calls this, and backward through its result, also a rank whose result is empty; the local tensors of all ranks
    require grad, or none does. The result may share memory with `local` where nothing has to move.

    Args:
        local: this rank's box under `src`; on a rank outside its mesh an empty tensor of shape (0,).
        src: the layout that `local` has now.
        dst: the wanted layout: same global shape and dtype.
        backward_dtype: dtype in which the gradient travels; by default the gradient's own.

    Returns:
        This rank's box under `dst`; on a rank outside its mesh an empty tensor of shape (0,).

    Raises:
        ValueError: as `plan_across`, on every rank, before anything is communicated.
        TypeError: a mesh is abstract.

    Communication: what is pending in `src` is reduced over its axes, then one all_to_all over the ranks of both meshes, in
        which each element that a rank lacks comes to it once; none of it where nothing has to move.

    Example:
        >>> pair, four = DeviceMesh("cpu", [2, 0], axis_names=("x",)), DeviceMesh("cpu", [0, 1, 2, 3], axis_names=("y",))
        >>> src, dst = Layout.of(pair, P("x"), (8, 2)), Layout.of(four, P("y"), (8, 2))
        >>> part = redistribute_across(torch.ones(src.local_shape), src, dst)  # [2, 2]
    """
    if src.mesh is dst.mesh:
        return redistribute_local(local, src, dst, backward_dtype=backward_dtype)
    crossing = _crossing(src, dst)
    local = redistribute_local(local, src, crossing.source, backward_dtype=backward_dtype)
    if local.requires_grad and torch.is_grad_enabled():
        local = _Across.apply(local, crossing, backward_dtype)  # type: ignore[assignment]
    else:
        local = crossing(local)
    return redistribute_local(local, crossing.target, dst, backward_dtype=backward_dtype)


class _Across(torch.autograd.Function):
    """The exchange between two meshes; its backward is the one between the duals."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, crossing: Crossing, backward_dtype: torch.dtype | None) -> Tensor:
        ctx.crossing, ctx.backward_dtype, ctx.dtype = crossing, backward_dtype, local.dtype
        return crossing(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        travel = grad.dtype if ctx.backward_dtype is None else ctx.backward_dtype
        src, dst = (layout.dual.replace(dtype=travel) for layout in (ctx.crossing.target, ctx.crossing.source))
        return redistribute_across(grad.to(travel), src, dst).to(ctx.dtype), None, None


def _crossing(src: Layout, dst: Layout) -> Crossing:
    """The way from `src` to `dst` made ready on this rank, cached on the source layout."""
    found = src.runners.get(dst)
    if found is None:
        found = src.runners[dst] = Crossing(plan_across(src, dst))
    return found


class Crossing:
    """A plan made ready on this rank: `crossing(local)` is its exchange.

    Attributes:
        source: the layout that the exchange starts from, on the source mesh.
        target: the layout that it ends in, on the destination mesh.
    """

    __slots__ = ("_have", "_run", "_shape", "source", "target")

    def __init__(self, plan: AcrossPlan) -> None:
        self.source, self.target = plan.source, plan.target
        world, _ = (device_mesh(layout).world for layout in (plan.src, plan.dst))
        share = _share(plan, world.rank)
        self._have, self._shape = box_shape(share.have), self.target.local_shape
        takes_part = plan.transfers and world.rank in plan.ranks
        self._run = Exchange(world.group(plan.ranks), plan.src.dtype, [share]).run if takes_part else _keeping(share)

    def __call__(self, local: Tensor) -> Tensor:
        return self._run(local.reshape(self._have)).reshape(self._shape)


def _share(plan: AcrossPlan, rank: int) -> Share:
    """What this rank sends, receives and keeps."""
    sends, recvs = ([[] for _ in plan.ranks] for _ in range(2))
    for sender, receiver, box in plan.transfers:
        if plan.ranks[sender] == rank:
            sends[receiver].append(box)
        elif plan.ranks[receiver] == rank:
            recvs[sender].append(box)
    have, want = box_on(plan.source, rank), box_on(plan.target, rank)
    return Share(have, want, sends, recvs, intersect(have, want))


def _keeping(share: Share) -> Any:
    """Where this rank has all that it needs."""
    if share.own is None:
        return lambda local: local.new_empty(box_shape(share.want))
    index = slices(share.own, box_origin(share.have))
    return lambda local: local[index]
