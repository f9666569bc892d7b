"""Redistribution of values that are pending with another kind than sum, with gradients.

It is composed of operations whose gradients are known: an average is a sum after a local division;
the gradient of a max or min goes to the ranks that hold it, in equal parts; a product is computed
from gathered factors; all else is linear.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autograd.engine_hooks import transforming, with_memory, with_tangents
from ..autograd.transforms import batched_layout
from ..layout.layout import Layout
from ..layout.spec import Cut, P
from .executor import executor
from .linear import cast, redistribute_grad, redistribute_linear, start_linear
from .plan import check_transport


def redistribute_nonlinear(
    local: Tensor,
    src: Layout,
    dst: Layout,
    backward_dtype: torch.dtype | None,
    accumulate_dtype: torch.dtype | None = None,
    transport: str | None = None,
    max_bytes: int | None = None,
) -> Tensor:
    """Redistribute a value that is pending with kinds other than sum, before or after.

    Reduce axes with such kinds, redistribute linearly, then make the result pending if wanted.

    Communication: the plans' of these parts; `max_bytes` is ignored.
    """
    if transport is not None:
        check_transport(transport, src, dst)
    local = cast(local, src.dtype)
    for reduce_kind in (_reduce_average, _reduce_extreme, _reduce_product):
        local, src = reduce_kind(local, src, dst)
    unchanged = {a: k for a, k in src.spec.unreduced if dst.pending.get(a) == k}
    sums = {a: k for a, k in dst.spec.unreduced if k == "sum"}
    middle = dst.replace(dst.spec.with_unreduced({**unchanged, **sums}))
    if transforming():
        local = (
            cast(local, middle.dtype)
            if src is middle
            else redistribute_linear(local, src, middle, backward_dtype)
        )
    else:
        options: dict[str, Any] = {"accumulate_dtype": accumulate_dtype, "transport": transport}
        (local,) = start_linear([local], [(src, middle)], backward_dtype, **options).wait()
    return _make_product_pending(local, middle, dst)


def _leaving(src: Layout, dst: Layout, *kinds: str) -> tuple[str, ...]:
    """Return the axes that are pending with one of these kinds in `src` and not in `dst`."""
    return tuple(a for a, k in src.spec.unreduced if k in kinds and dst.pending.get(a) != k)


def _with_kind(layout: Layout, axes: tuple[str, ...], kind: str | None) -> Layout:
    """Return the layout with `axes` pending with another kind, or replicated if `kind` is None."""
    pending = {a: k for a, k in layout.spec.unreduced if a not in axes}
    return layout.replace(
        layout.spec.with_unreduced({**pending, **dict.fromkeys(axes if kind else (), kind or "")})
    )


def _reduce_average(local: Tensor, src: Layout, dst: Layout) -> tuple[Tensor, Layout]:
    axes = _leaving(src, dst, "avg")
    return (local / src.mesh.size(axes), _with_kind(src, axes, "sum")) if axes else (local, src)


def _reduce_extreme(local: Tensor, src: Layout, dst: Layout) -> tuple[Tensor, Layout]:
    axes = _leaving(src, dst, "max", "min")
    if not axes:
        return local, src
    reduced = _with_kind(src, axes, None)
    function = _ExtremeTransformed if transforming() else _Extreme
    return function.apply(local, src, reduced), reduced  # type: ignore[return-value]


class _Extreme(torch.autograd.Function):
    """Reduction of a pending max or min.

    The gradient goes to the ranks that hold the extreme value, in equal parts.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, src: Layout, reduced: Layout) -> Tensor:
        out = executor(src, reduced)(local)
        ctx.src, ctx.reduced = src, reduced
        is_extreme = (local == out) | (local.isnan() & out.isnan())
        ctx.save_for_backward(is_extreme)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (is_extreme,) = ctx.saved_tensors
        axes = _leaving(ctx.src, ctx.reduced, "max", "min")
        dual = ctx.reduced.dual
        holders = _count_holders(is_extreme, ctx.src, axes)
        grad = redistribute_grad(grads[0], dual, _with_kind(dual, axes, None))
        return torch.where(is_extreme, grad / holders, torch.zeros_like(grad)), None, None


def _count_holders(is_extreme: Tensor, src: Layout, axes: tuple[str, ...]) -> Tensor:
    """Return how many ranks hold the extreme of each element. Communication: an all_reduce."""
    counted = _with_kind(src.grad, axes, None)
    return redistribute_linear(is_extreme.to(src.dtype), _with_kind(counted, axes, "sum"), counted)


def _shares(is_extreme: Tensor, src: Layout, reduced: Layout) -> Tensor:
    """Return each element's share of the extreme's gradient: 1 / number of holders, or 0."""
    return is_extreme.to(src.dtype) / _count_holders(
        is_extreme, src, _leaving(src, reduced, "max", "min")
    )


class _ExtremeTransformed(torch.autograd.Function):
    """The same in the form that torch.func requires."""

    @staticmethod
    def forward(local: Tensor, src: Layout, reduced: Layout) -> Tensor:
        return executor(src, reduced)(with_memory(local)).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        local, ctx.src, ctx.reduced = inputs
        is_extreme = (local == output) | (local.isnan() & output.isnan())
        ctx.save_for_backward(is_extreme)
        ctx.save_for_forward(is_extreme)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dual = ctx.reduced.dual
        grad = redistribute_grad(
            grads[0], dual, _with_kind(dual, _leaving(ctx.src, ctx.reduced, "max", "min"), None)
        )
        return grad * _shares(ctx.saved_tensors[0], ctx.src, ctx.reduced), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        axes = _leaving(ctx.src, ctx.reduced, "max", "min")
        with with_tangents():
            shared = tangents[0] * _shares(ctx.saved_tensors[0], ctx.src, ctx.reduced)
            return redistribute_linear(shared, _with_kind(ctx.src, axes, "sum"), ctx.reduced)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, local: Tensor, src: Layout, reduced: Layout
    ) -> tuple[Tensor, int]:
        layouts = (batched_layout(layout, info.batch_size) for layout in (src, reduced))
        return _ExtremeTransformed.apply(local.movedim(in_dims[0], -1), *layouts), -1  # type: ignore[return-value]


def _reduce_product(local: Tensor, src: Layout, dst: Layout) -> tuple[Tensor, Layout]:
    """Gather the factors and multiply: gradients are exact even if a factor is zero."""
    axes = _leaving(src, dst, "product")
    if not axes:
        return local, src
    reduced = _with_kind(src, axes, None)
    count = src.mesh.size(axes)
    shape, cuts = (count, *src.shape), reduced.spec.cuts
    factors = [Cut((axis,)) for axis in axes]
    stacked = Layout.of(src.mesh, P.of_cuts([factors, *cuts], reduced.pending), shape, src.dtype)
    gathered = redistribute_linear(
        local[None], stacked, stacked.replace(P.of_cuts([(), *cuts], reduced.pending))
    )
    return gathered.prod(0), reduced


def _make_product_pending(local: Tensor, middle: Layout, dst: Layout) -> Tensor:
    """Make a replicated value pending.

    A product keeps it on one rank; the max, min and avg of equal values is the value itself.

    Every rank's copy stays in the autograd graph, since the gradient of a replicated value is the
    sum over its copies.
    """
    axes = _leaving(dst, middle, "product")
    mesh: Any = dst.mesh
    if (
        not axes
        or mesh.coordinate is None
        or all(mesh.coordinate[mesh.axis_index(a)] == 0 for a in axes)
    ):
        return local
    return local.masked_fill(torch.ones_like(local, dtype=torch.bool), 1)
