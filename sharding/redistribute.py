"""Redistribution of local tensors, with gradients.

    forward    src ------------- plan(src, dst) ------------> dst
    backward   dual(src) <-- plan(dual(dst), dual(src)) --- dual(dst)

The gradient of a tensor laid out as L is laid out as dual(L) (pending sum <-> replicated, sharded <-> itself), so the
backward of a redistribution is the redistribution between the duals: all_gather <-> reduce_scatter, all_reduce <->
all_reduce, a slice <-> a pad with zeros. Backward is made of the same differentiable calls, so it can be differentiated
again. Pending max, min, average and product are not linear in this sense and are composed from parts that are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .execute import Runner, compile_plan
from .layout import Layout
from .plan import plan
from .spec import Cut, P


def redistribute_local(local: Tensor, src: Layout, dst: Layout, *, backward_dtype: torch.dtype | None = None) -> Tensor:
    """Take this rank's part of a tensor from layout `src` to layout `dst`.

    The result may share memory with `local` where nothing but a slice is needed.

    Args:
        local: this rank's box under `src`.
        src: the layout that `local` has now.
        dst: the wanted layout: same mesh, global shape and dtype.
        backward_dtype: dtype in which the gradient travels; by default the gradient's own.

    Returns:
        This rank's box under `dst`.

    Raises:
        ValueError: different meshes, shapes or dtypes.

    Communication: the plan's, over the axes that differ; none if the layouts are equal.
    """
    if src is dst:
        return local
    if local.requires_grad and torch.is_grad_enabled():
        if _is_linear(src, dst):
            return _apply(local, src, dst, backward_dtype)
        return _redistribute_nonlinear(local, src, dst, backward_dtype)
    return runner(src, dst)(local)


def runner(src: Layout, dst: Layout) -> Runner:
    """The compiled plan from `src` to `dst` for this rank, cached on the source layout."""
    found = src.runners.get(dst)
    if found is None:
        found = src.runners[dst] = compile_plan(plan(src, dst))
    return found


def _apply(local: Tensor, src: Layout, dst: Layout, backward_dtype: torch.dtype | None) -> Tensor:
    out = _Redistribute.apply(local, src, dst, backward_dtype)
    return out  # type: ignore[return-value]


class _Redistribute(torch.autograd.Function):
    """A linear redistribution; its backward is the one between the duals."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, src: Layout, dst: Layout, backward_dtype: torch.dtype | None) -> Tensor:
        ctx.src, ctx.dst, ctx.backward_dtype = src, dst, backward_dtype
        out = runner(src, dst)(local)
        return out.view_as(out) if out is local else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        travel = grad.dtype if ctx.backward_dtype is None else ctx.backward_dtype
        src, dst = ctx.dst.dual.replace(dtype=travel), ctx.src.dual.replace(dtype=travel)
        back = redistribute_local(_cast(grad, travel), src, dst)
        return _cast(back, ctx.src.dtype), None, None, None


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)  # `to` costs a microsecond to find out the same


# -- pending kinds other than sum -------------------------------------------------------------------------------------


def _is_linear(src: Layout, dst: Layout) -> bool:
    if src.only_sums and dst.only_sums:
        return True
    changed = set(src.spec.unreduced) ^ set(dst.spec.unreduced)
    return all(kind == "sum" for _, kind in changed)


def _redistribute_nonlinear(local: Tensor, src: Layout, dst: Layout, backward_dtype: torch.dtype | None) -> Tensor:
    """Reduce what is pending with other kinds than sum, move linearly, then call the result pending where wanted."""
    for reduce_kind in (_reduce_average, _reduce_extreme, _reduce_product):
        local, src = reduce_kind(local, src, dst)
    kept = {a: k for a, k in src.spec.unreduced if dst.pending.get(a) == k}
    middle = dst.replace(dst.spec.with_unreduced({**kept, **_only_sums(dst)}))
    local = redistribute_local(local, src, middle, backward_dtype=backward_dtype)
    return _make_product_pending(local, middle, dst)


def _only_sums(layout: Layout) -> dict[str, str]:
    return {a: k for a, k in layout.spec.unreduced if k == "sum"}


def _leaving(src: Layout, dst: Layout, *kinds: str) -> tuple[str, ...]:
    """Axes pending with one of these kinds in `src` and not so in `dst`."""
    return tuple(a for a, k in src.spec.unreduced if k in kinds and dst.pending.get(a) != k)


def _repend(layout: Layout, axes: tuple[str, ...], kind: str | None) -> Layout:
    """`layout` with `axes` pending with another kind, or replicated where kind is None."""
    pending = {a: k for a, k in layout.spec.unreduced if a not in axes}
    return layout.replace(layout.spec.with_unreduced({**pending, **dict.fromkeys(axes if kind else (), kind or "")}))


def _reduce_average(local: Tensor, src: Layout, dst: Layout) -> tuple[Tensor, Layout]:
    axes = _leaving(src, dst, "avg")
    return (local / src.mesh.size(axes), _repend(src, axes, "sum")) if axes else (local, src)


def _reduce_extreme(local: Tensor, src: Layout, dst: Layout) -> tuple[Tensor, Layout]:
    axes = _leaving(src, dst, "max", "min")
    if not axes:
        return local, src
    reduced = _repend(src, axes, None)
    return _Extreme.apply(local, src, reduced), reduced  # type: ignore[return-value]


class _Extreme(torch.autograd.Function):
    """Reduce pending max or min; the gradient goes to the ranks that hold the extreme value, in equal parts."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, src: Layout, reduced: Layout) -> Tensor:
        out = runner(src, reduced)(local)
        ctx.src, ctx.reduced = src, reduced
        mine = (local == out) | (local.isnan() & out.isnan())
        ctx.save_for_backward(mine)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (mine,) = ctx.saved_tensors
        axes = _leaving(ctx.src, ctx.reduced, "max", "min")
        counted = _repend(ctx.src.grad, axes, None)
        holders = redistribute_local(mine.to(ctx.src.dtype), _repend(counted, axes, "sum"), counted)
        dual = ctx.reduced.dual
        grad = redistribute_local(grads[0], dual, _repend(dual, axes, None))
        return torch.where(mine, grad / holders, torch.zeros_like(grad)), None, None


def _reduce_product(local: Tensor, src: Layout, dst: Layout) -> tuple[Tensor, Layout]:
    """Gather the factors along a new leading dim and multiply: exact gradients, also where a factor is zero."""
    axes = _leaving(src, dst, "product")
    if not axes:
        return local, src
    reduced, count = _repend(src, axes, None), src.mesh.size(axes)
    shape, cuts = (count, *src.shape), reduced.spec.cuts
    factors = [Cut((axis,)) for axis in axes]
    stacked = Layout.of(src.mesh, P.of_cuts([factors, *cuts], reduced.pending), shape, src.dtype)
    gathered = redistribute_local(local[None], stacked, stacked.replace(P.of_cuts([(), *cuts], reduced.pending)))
    return gathered.prod(0), reduced


def _make_product_pending(local: Tensor, middle: Layout, dst: Layout) -> Tensor:
    """From replicated to pending: max, min and avg of equal values are the value; a product keeps it on one rank.

    Every rank's copy stays in the graph, since the gradient of a replicated value is the sum over its copies.
    """
    axes = _leaving(dst, middle, "product")
    mesh: Any = dst.mesh
    if not axes or mesh.coordinate is None or all(mesh.coordinate[mesh.axis_index(a)] == 0 for a in axes):
        return local
    return local.masked_fill(torch.ones_like(local, dtype=torch.bool), 1)
