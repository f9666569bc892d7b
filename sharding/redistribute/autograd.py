"""Redistribution of local tensors, with gradients.

    forward    src ------------- plan(src, dst) ------------> dst
    backward   dual(src) <-- plan(dual(dst), dual(src)) --- dual(dst)

The gradient of a tensor laid out as L is laid out as dual(L) (pending sum <-> replicated, sharded <-> itself), so the
backward of a redistribution is the redistribution between the duals: all_gather <-> reduce_scatter, all_reduce <->
all_reduce, a slice <-> a pad with zeros. Backward is made of the same differentiable calls, so it can be differentiated
again. Pending max, min, average and product are not linear in this sense and are composed from parts that are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...mesh.comm.call_site import call_path
from ..debug.replicas.gradients import USED_DIFFERENTLY, check_replicas_agree
from ..layout.layout import Layout
from ..layout.spec import Cut, P
from ..ops.lineage import backward_comm_context
from ..tensor.autograd.engine_hooks import transforming, with_memory, with_tangents
from ..tensor.autograd.grad_origin import Origin, note_origin, origin_of
from ..tensor.transforms import batched_layout, under_transforms
from .bucket import Pair, many_runner
from .plan import check_transport
from .redistribution_map import Moved, runner


def redistribute_local(local: Tensor, src: Layout, dst: Layout, *, backward_dtype: torch.dtype | None = None) -> Tensor:
    """Take this rank's part of a tensor from layout `src` to layout `dst`.

    The result may share memory with `local` where nothing but a slice is needed.

    Args:
        local: this rank's box under `src`; in another dtype than that, it is cast on the way (and its gradient back).
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
        return _cast(local, dst.dtype)
    if transforming():
        return _under_transforms(local, src, dst, backward_dtype)
    if local.requires_grad and torch.is_grad_enabled():
        if _is_linear(src, dst):
            return _apply(local, src, dst, backward_dtype)
        return _redistribute_nonlinear(local, src, dst, backward_dtype)
    return runner(src, dst)(local)


def start_redistribute(
    tensors: list[Tensor],
    src: Layout,
    dst: Layout,
    *,
    backward_dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    transport: str | None = None,
    own: bool = False,
    out: Tensor | None = None,
) -> Callable[[], Tensor]:
    """`redistribute_local` in two halves: launches its collectives, and returns what waits for them and gives the result.

    Args:
        tensors: a list of this rank's part, which is emptied.
        max_bytes, accumulate_dtype, transport: see `plan`.
        own: the part may be overwritten, and the result may share its memory.
        out: a contiguous tensor for the result.

    Communication: the plan's; what is pending with other kinds than sum and requires grad is waited for at once.
    """
    (local,) = tensors
    if transforming():
        done = _under_transforms(tensors.pop(), src, dst, backward_dtype)
        return lambda: done
    if not (local.requires_grad and torch.is_grad_enabled()):
        del local
        return runner(src, dst, max_bytes, accumulate_dtype, transport).start(tensors, own=own, out=out)
    if not _is_linear(src, dst):
        done = _redistribute_nonlinear(tensors.pop(), src, dst, backward_dtype, accumulate_dtype, transport)
        return lambda: done
    ready = runner(src, dst, max_bytes, accumulate_dtype, transport).start([tensors.pop().detach()])
    return lambda: _apply(local, src, dst, backward_dtype, ready)


def redistribute_locals(
    locals_: Sequence[Tensor], pairs: Sequence[Pair], *, backward_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """`redistribute_local` for several tensors at once, in one bucket per group and dtype; so is the way back.

    Communication: as `many_runner`; tensors that are pending with other kinds than sum and require grad go alone.
    """
    return start_redistribute_many(list(locals_), pairs, backward_dtype=backward_dtype)()


def with_gradient_of_redistribute(local: Tensor, src: Layout, dst: Layout, result: Tensor) -> Tensor:
    """Return `result`, which is `redistribute_local(local, src, dst)` obtained in another way, with the gradient that this has.

    Communication: none forward; backward, the plan's between the duals.
    """
    return _apply(local, src, dst, None, lambda: result) if local.requires_grad and torch.is_grad_enabled() else result


def start_redistribute_many(
    tensors: list[Tensor], pairs: Sequence[Pair], *, backward_dtype: torch.dtype | None = None, own: bool = False
) -> Callable[[], list[Tensor]]:
    """`redistribute_locals` in two halves, see `start_redistribute`."""
    if transforming():
        moved = [redistribute_local(x, *pair, backward_dtype=backward_dtype) for x, pair in zip(tensors, pairs, strict=True)]
        return lambda: moved
    alone = [i for i, (x, pair) in enumerate(zip(tensors, pairs, strict=True)) if _goes_alone(x, pair)]
    together = [i for i in range(len(tensors)) if i not in set(alone)]
    results = {i: redistribute_local(tensors[i], *pairs[i], backward_dtype=backward_dtype) for i in alone}
    given, chosen = [tensors[i] for i in together], tuple(pairs[i] for i in together)
    tensors.clear()
    if not given:
        return lambda: list(results.values())
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    ready = many_runner(chosen).start([x.detach() for x in given] if differentiable else given, own=own)

    def wait() -> list[Tensor]:
        if differentiable:  # one node for all: those that had no gradient before have none after
            outs = _RedistributeMany.apply(chosen, backward_dtype, ready, *given)
            found = [out if x.requires_grad else out.detach() for x, out in zip(given, outs, strict=True)]
        else:
            found = ready()
        results.update(zip(together, found, strict=True))
        return [results[i] for i in sorted(results)]

    return wait


def redistribute_grad(
    grad: Tensor, src: Layout, dst: Layout, src_grad: Layout | None = None, dst_grad: Layout | None = None
) -> Tensor:
    """`redistribute_local` of a gradient, from what it was made from where that is known (see `grad_origin`).

    Args:
        src_grad, dst_grad: the layouts in which the gradients of `grad` and of the result flow; by default the duals of theirs.

    Returns:
        This rank's box under `dst`; perhaps the tensor that `grad` was made from, but no piece of it.

    Communication: the plan's, from the layout in which the value is known.
    """
    if src is dst and src_grad is dst_grad:
        return _cast(grad, dst.dtype)
    if transforming():
        return under_transforms(_cast(grad, src.dtype), Moved(src, dst, src_grad, dst_grad))
    origin = origin_of(grad, src, src_grad)
    back = _converted(origin, dst, dst_grad)
    return note_origin(back if origin.tensor is grad else _whole(back, origin.tensor), dst, origin)


def _converted(origin: Origin, dst: Layout, dst_grad: Layout | None) -> Tensor:
    local, src, src_grad = origin
    src_grad, dst_grad = _unless_dual(src, src_grad), _unless_dual(dst, dst_grad)
    if (src_grad is None and dst_grad is None) or not (local.requires_grad and torch.is_grad_enabled()):
        return redistribute_local(local, src, dst)
    return local if src is dst and src_grad is dst_grad else _apply(local, src, dst, None, None, src_grad, dst_grad)


def _unless_dual(layout: Layout, grad_layout: Layout | None) -> Layout | None:
    return None if grad_layout is layout.dual else grad_layout


def redistribute_grads(grads: Sequence[Tensor], pairs: Sequence[Pair]) -> list[Tensor]:
    """`redistribute_grad` for several gradients at once, in one bucket per group and dtype."""
    if transforming():
        return [redistribute_grad(grad, *pair) for grad, pair in zip(grads, pairs, strict=True)]
    origins = [origin_of(grad, src) for grad, (src, _) in zip(grads, pairs, strict=True)]
    if torch.is_grad_enabled() and any(origin.grad_layout is not None and origin.tensor.requires_grad for origin in origins):
        return [redistribute_grad(grad, *pair) for grad, pair in zip(grads, pairs, strict=True)]
    moved = redistribute_locals([o.tensor for o in origins], [(o.layout, dst) for o, (_, dst) in zip(origins, pairs, strict=True)])
    return [
        note_origin(back if o.tensor is grad else _whole(back, o.tensor), dst, o)
        for grad, back, o, (_, dst) in zip(grads, moved, origins, pairs, strict=True)
    ]


def _whole(part: Tensor, origin: Tensor) -> Tensor:
    """The part, copied if it is a piece of the memory of its origin, which it would keep alive."""
    is_piece = part.numel() < origin.numel() and part.untyped_storage()._cdata == origin.untyped_storage()._cdata
    return part.clone(memory_format=torch.contiguous_format) if is_piece else part


def _goes_alone(x: Tensor, pair: Pair) -> bool:
    return x.requires_grad and torch.is_grad_enabled() and not _is_linear(*pair)


def _apply(
    local: Tensor,
    src: Layout,
    dst: Layout,
    backward_dtype: torch.dtype | None,
    ready: Callable[[], Tensor] | None = None,
    src_grad: Layout | None = None,
    dst_grad: Layout | None = None,
) -> Tensor:
    out = _Redistribute.apply(local, src, dst, backward_dtype, ready, src_grad, dst_grad)
    return out  # type: ignore[return-value]


class _Redistribute(torch.autograd.Function):
    """A linear redistribution; its backward is the one between the duals.

    An end that is plain has its gradient in a layout of its own: what is plain and replicated is one value, and so is its gradient. The
    gradient of that lies as the value again, so that derivatives of every order go to and fro between the two.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        src: Layout,
        dst: Layout,
        backward_dtype: torch.dtype | None,
        ready: Callable[[], Tensor] | None,
        src_grad: Layout | None,
        dst_grad: Layout | None,
    ) -> Tensor:
        ctx.src_grad, ctx.dst_grad = src_grad, dst_grad
        ctx.path = call_path() if dst_grad is not None and not src.has_empty_part else None
        ctx.src, ctx.dst, ctx.dtype, ctx.backward_dtype = src, dst, local.dtype, backward_dtype
        ctx.lineage = src.mesh.world.comm_context.lineage  # type: ignore[attr-defined]
        out = runner(src, dst)(local) if ready is None else ready()
        return out.view_as(out) if out is local else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        travel = grad.dtype if ctx.backward_dtype is None else ctx.backward_dtype
        come, to = (_gradient_end(*end, travel) for end in ((ctx.dst, ctx.dst_grad), (ctx.src, ctx.src_grad)))
        src, dst = come[0], to[0]
        if ctx.path is not None and src.replicated_axes == ctx.dst.replicated_axes and not transforming():
            check_replicas_agree(grad, src, ctx.path, USED_DIFFERENTLY)
        with backward_comm_context(src.mesh.world, ctx.lineage):  # type: ignore[attr-defined]
            back = redistribute_grad(with_memory(grad), src, dst, come[1], to[1])
        return _cast(back, ctx.dtype), None, None, None, None, None, None


def _gradient_end(layout: Layout, grad_layout: Layout | None, dtype: torch.dtype) -> tuple[Layout, Layout | None]:
    """How the gradient of an end of a redistribution lies, and how the gradient of that does where it is not the dual."""
    if grad_layout is None:
        return layout.dual.replace(dtype=dtype), None
    return grad_layout.replace(dtype=dtype), layout.replace(dtype=dtype)


class _RedistributeMany(torch.autograd.Function):
    """Several linear redistributions in buckets; backward is those between the duals, in buckets."""

    @staticmethod
    def forward(
        ctx: Any,
        pairs: Sequence[Pair],
        backward_dtype: torch.dtype | None,
        ready: Callable[[], list[Tensor]],
        *locals_: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.pairs, ctx.dtypes, ctx.backward_dtype = pairs, [x.dtype for x in locals_], backward_dtype
        ctx.set_materialize_grads(False)
        same = {x.untyped_storage().data_ptr() for x in locals_}
        return tuple(out.view_as(out) if out.untyped_storage().data_ptr() in same else out for out in ready())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        there = [(i, grad, *ctx.pairs[i]) for i, grad in enumerate(grads) if grad is not None and ctx.needs_input_grad[i + 3]]
        found: list[Tensor | None] = [None] * len(grads)
        if there:
            travel = [grad.dtype if ctx.backward_dtype is None else ctx.backward_dtype for _, grad, _, _ in there]
            pairs = [
                (dst.dual.replace(dtype=t), src.dual.replace(dtype=t)) for (_, _, src, dst), t in zip(there, travel, strict=True)
            ]
            back = redistribute_grads([with_memory(grad) for _, grad, _, _ in there], pairs)
            for (i, *_), grad in zip(there, back, strict=True):
                found[i] = _cast(grad, ctx.dtypes[i])
        return None, None, None, *found


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)  # `to` costs a microsecond to find out the same


# -- under transforms of torch.func -----------------------------------------------------------------------------------


def _under_transforms(local: Tensor, src: Layout, dst: Layout, backward_dtype: torch.dtype | None) -> Tensor:
    if not _is_linear(src, dst):
        return _redistribute_nonlinear(local, src, dst, backward_dtype)
    return under_transforms(_cast(local, dst.dtype), Moved(src, dst), backward_dtype)


# -- pending kinds other than sum -------------------------------------------------------------------------------------


def _is_linear(src: Layout, dst: Layout) -> bool:
    if src.only_sums and dst.only_sums:
        return True
    changed = set(src.spec.unreduced) ^ set(dst.spec.unreduced)
    return all(kind == "sum" for _, kind in changed)


def _redistribute_nonlinear(
    local: Tensor,
    src: Layout,
    dst: Layout,
    backward_dtype: torch.dtype | None,
    accumulate_dtype: torch.dtype | None = None,
    transport: str | None = None,
) -> Tensor:
    """Reduce what is pending with other kinds than sum, move linearly, then call the result pending where wanted."""
    if transport is not None:
        check_transport(transport, src, dst)
    local = _cast(local, src.dtype)
    for reduce_kind in (_reduce_average, _reduce_extreme, _reduce_product):
        local, src = reduce_kind(local, src, dst)
    kept = {a: k for a, k in src.spec.unreduced if dst.pending.get(a) == k}
    middle = dst.replace(dst.spec.with_unreduced({**kept, **_only_sums(dst)}))
    how: dict[str, Any] = {"accumulate_dtype": accumulate_dtype, "transport": transport}
    local = start_redistribute([local], src, middle, backward_dtype=backward_dtype, **how)()
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
    function = _ExtremeTransformed if transforming() else _Extreme
    return function.apply(local, src, reduced), reduced  # type: ignore[return-value]


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
        grad = redistribute_grad(grads[0], dual, _repend(dual, axes, None))
        return torch.where(mine, grad / holders, torch.zeros_like(grad)), None, None


def _shares(mine: Tensor, src: Layout, reduced: Layout) -> Tensor:
    """How much of the extreme's gradient each element of this part gets: 1 / number of holders, or 0."""
    axes = _leaving(src, reduced, "max", "min")
    counted = _repend(src.grad, axes, None)
    mine = mine.to(src.dtype)
    return mine / redistribute_local(mine, _repend(counted, axes, "sum"), counted)


class _ExtremeTransformed(torch.autograd.Function):
    """The same in the form that torch.func asks for."""

    @staticmethod
    def forward(local: Tensor, src: Layout, reduced: Layout) -> Tensor:
        return runner(src, reduced)(with_memory(local)).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        local, ctx.src, ctx.reduced = inputs
        mine = (local == output) | (local.isnan() & output.isnan())
        ctx.save_for_backward(mine)
        ctx.save_for_forward(mine)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dual = ctx.reduced.dual
        grad = redistribute_grad(grads[0], dual, _repend(dual, _leaving(ctx.src, ctx.reduced, "max", "min"), None))
        return grad * _shares(ctx.saved_tensors[0], ctx.src, ctx.reduced), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        axes = _leaving(ctx.src, ctx.reduced, "max", "min")
        with with_tangents():
            shared = tangents[0] * _shares(ctx.saved_tensors[0], ctx.src, ctx.reduced)
            return redistribute_local(shared, _repend(ctx.src, axes, "sum"), ctx.reduced)

    @staticmethod
    def vmap(info: Any, in_dims: Any, local: Tensor, src: Layout, reduced: Layout) -> tuple[Tensor, int]:
        layouts = (batched_layout(layout, info.batch_size) for layout in (src, reduced))
        return _ExtremeTransformed.apply(local.movedim(in_dims[0], -1), *layouts), -1  # type: ignore[return-value]


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
