"""Redistributions whose backward is that between the duals, and redistribution of gradients.

Backward calls the same differentiable functions, so it can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...mesh.comm.call_site import call_path
from ...mesh.comm.pending import Pending
from ..autograd.engine_hooks import transforming, with_memory
from ..autograd.grad_origin import Origin, note_origin, origin_of
from ..autograd.transforms import under_transforms
from ..layout.layout import Layout
from ..lineage import backward_comm_context
from ..replicas.gradients import USED_DIFFERENTLY, check_replicas_agree
from .executor import Pair, executor, executor_of_many
from .redistribution_map import LinearRedistribution

# (src, dst, src_grad, dst_grad): the layouts of a tensor before and after, and those of its
# gradients, None for the duals
Ends: TypeAlias = tuple[Layout, Layout, Layout | None, Layout | None]


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x.to(dtype)`, without calling it for the same dtype, which takes a microsecond."""
    return x if x.dtype is dtype else x.to(dtype)


def is_linear(src: Layout, dst: Layout) -> bool:
    """Return whether the redistribution changes no pending kind other than sum."""
    if src.only_sums and dst.only_sums:
        return True
    changed = set(src.spec.unreduced) ^ set(dst.spec.unreduced)
    return all(kind == "sum" for _, kind in changed)


def redistribute_linear(
    local: Tensor, src: Layout, dst: Layout, backward_dtype: torch.dtype | None = None
) -> Tensor:
    """Take this rank's part from `src` to `dst`, another layout. Communication: the plan's."""
    if transforming():
        return under_transforms(
            cast(local, dst.dtype), LinearRedistribution(src, dst), backward_dtype
        )
    if local.requires_grad and torch.is_grad_enabled():
        (out,) = apply_node([(src, dst, None, None)], backward_dtype, None, [local])
        return out
    return executor(src, dst)(local)


def start_linear(
    tensors: list[Tensor],
    pairs: Sequence[Pair],
    backward_dtype: torch.dtype | None = None,
    *,
    donate: bool = False,
    outs: Sequence[Tensor] | None = None,
    **options: Any,
) -> Pending[list[Tensor]]:
    """Launch linear redistributions outside of transforms, see `autograd.start_redistribute`.

    Communication: the plans'.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return executor_of_many(pairs, **options).start(tensors, donate=donate, outs=outs)
    inputs = list(tensors)
    tensors.clear()
    ready = executor_of_many(pairs, **options).start([x.detach() for x in inputs])

    def finish() -> list[Tensor]:
        # one node for all: those that did not require grad before do not after
        results = apply_node([(*pair, None, None) for pair in pairs], backward_dtype, ready, inputs)
        return [
            out if x.requires_grad else out.detach() for x, out in zip(inputs, results, strict=True)
        ]

    return Pending(finish, ready)


# -- gradients -------------------------------------------------------------------------------------


def redistribute_grad(
    grad: Tensor,
    src: Layout,
    dst: Layout,
    src_grad: Layout | None = None,
    dst_grad: Layout | None = None,
) -> Tensor:
    """Redistribute a gradient, starting from its origin if that is known (see `grad_origin`).

    Args:
        src_grad, dst_grad: the layouts of the gradients of `grad` and of the result; by default the
            duals of theirs.

    Returns:
        This rank's box under `dst`: a new tensor, or the whole tensor that `grad` was made from,
        but not a part of that.

    Communication: the plan's, from the layout in which the value is known.
    """
    if src is dst and src_grad is dst_grad:
        return cast(grad, dst.dtype)
    if transforming():
        return under_transforms(
            cast(grad, src.dtype), LinearRedistribution(src, dst, src_grad, dst_grad)
        )
    origin = origin_of(grad, src, src_grad)
    back = _from_origin(origin, dst, dst_grad)
    return note_origin(back if origin.tensor is grad else _whole(back, origin.tensor), dst, origin)


def _from_origin(origin: Origin, dst: Layout, dst_grad: Layout | None) -> Tensor:
    local, src, src_grad = origin
    src_grad = None if src_grad is src.dual else src_grad
    dst_grad = None if dst_grad is dst.dual else dst_grad
    if (src_grad is None and dst_grad is None) or not (
        local.requires_grad and torch.is_grad_enabled()
    ):
        return cast(local, dst.dtype) if src is dst else redistribute_linear(local, src, dst)
    if src is dst and src_grad is dst_grad:
        return local
    (out,) = apply_node([(src, dst, src_grad, dst_grad)], None, None, [local])
    return out


def redistribute_grads(grads: Sequence[Tensor], pairs: Sequence[Pair]) -> list[Tensor]:
    """Call `redistribute_grad` for several gradients at once, in one bucket per group and dtype.

    Communication: the plans'.
    """
    origins = (
        []
        if transforming()
        else [origin_of(grad, src) for grad, (src, _) in zip(grads, pairs, strict=True)]
    )
    has_layouts = any(
        origin.grad_layout is not None and origin.tensor.requires_grad for origin in origins
    )
    if not origins or (has_layouts and torch.is_grad_enabled()):
        return [redistribute_grad(grad, *pair) for grad, pair in zip(grads, pairs, strict=True)]
    moved = start_linear(
        [o.tensor for o in origins],
        [(o.layout, dst) for o, (_, dst) in zip(origins, pairs, strict=True)],
    ).wait()
    return [
        note_origin(back if o.tensor is grad else _whole(back, o.tensor), dst, o)
        for grad, back, o, (_, dst) in zip(grads, moved, origins, pairs, strict=True)
    ]


def _whole(part: Tensor, origin: Tensor) -> Tensor:
    """Return the part; a copy if it is a view of its origin, whose memory it would keep alive."""
    is_piece = (
        part.numel() < origin.numel()
        and part.untyped_storage()._cdata == origin.untyped_storage()._cdata
    )
    return part.clone(memory_format=torch.contiguous_format) if is_piece else part


# -- the autograd node -----------------------------------------------------------------------------


def apply_node(
    ends: Sequence[Ends],
    backward_dtype: torch.dtype | None,
    ready: Pending[list[Tensor]] | None,
    locals_: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Redistribute in one autograd node.

    `ready` is the results if the redistribution was launched already.

    Communication: the plans', if `ready` is None (then there must be one tensor); backward, those
    between the duals.
    """
    return _Redistribute.apply(ends, backward_dtype, ready, *locals_)  # type: ignore[return-value]


class _Redistribute(torch.autograd.Function):
    """Linear redistributions of tensors; backward redistributes between the duals, in buckets.

    A plain tensor at either end has its gradient in a different layout: a plain, replicated tensor
    is one value, and so is its gradient. The gradient of that is laid out as the value again, so
    derivatives of every order alternate between the two.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ends: Sequence[Ends],
        backward_dtype: torch.dtype | None,
        ready: Pending[list[Tensor]] | None,
        *locals_: Tensor,
    ) -> tuple[Tensor, ...]:
        src, dst, _, dst_grad = ends[0]
        ctx.ends = ends
        ctx.dtypes = [x.dtype for x in locals_]
        ctx.backward_dtype = backward_dtype
        ctx.path = call_path() if dst_grad is not None and not src.has_empty_part else None
        ctx.lineage = src.mesh.world.comm_context.lineage  # type: ignore[attr-defined]
        if len(locals_) == 1:
            (local,) = locals_
            out = executor(src, dst)(local) if ready is None else ready.wait()[0]
            return (_result(out, locals_),)
        ctx.set_materialize_grads(False)
        outs = ready.wait() if ready is not None else []
        return tuple(_result(out, locals_) for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        indexed_grads = [
            (i, grad)
            for i, grad in enumerate(grads)
            if grad is not None and ctx.needs_input_grad[i + 3]
        ]
        input_grads: list[Tensor | None] = [None] * len(grads)
        moves = [
            _backward_ends(ctx.ends[i], ctx.backward_dtype or grad.dtype)
            for i, grad in indexed_grads
        ]
        if len(indexed_grads) == 1:
            (_, grad), (src, dst, src_grad, dst_grad) = indexed_grads[0], moves[0]
            with backward_comm_context(ctx.lineage, src.mesh):
                if (
                    ctx.path is not None
                    and src.replicated_axes == ctx.ends[0][1].replicated_axes
                    and not transforming()
                ):
                    check_replicas_agree(grad, src, ctx.path, USED_DIFFERENTLY)
                moved = [redistribute_grad(with_memory(grad), src, dst, src_grad, dst_grad)]
        elif indexed_grads:
            meshes = {src.mesh for src, *_ in moves}
            with backward_comm_context(ctx.lineage, *meshes):
                moved = redistribute_grads(
                    [with_memory(grad) for _, grad in indexed_grads],
                    [(src, dst) for src, dst, *_ in moves],
                )
        else:
            moved = []
        for (i, _), grad in zip(indexed_grads, moved, strict=True):
            input_grads[i] = cast(grad, ctx.dtypes[i])
        return None, None, None, *input_grads


def _result(out: Tensor, locals_: Sequence[Tensor]) -> Tensor:
    """Return the result of a node: a view of an operand, or a tensor that may be written in place.

    What collectives have received may be a view of their buffer, which torch would not let programs
    write.
    """
    if any(out.untyped_storage()._cdata == x.untyped_storage()._cdata for x in locals_):
        return out.view_as(out)
    return out.detach() if out._is_view() else out


def _backward_ends(ends: Ends, comm_dtype: torch.dtype) -> Ends:
    """Return the ends of the redistribution of the gradient."""
    src, dst, src_grad, dst_grad = ends
    before, before_grad = _gradient_end(dst, dst_grad, comm_dtype)
    after, after_grad = _gradient_end(src, src_grad, comm_dtype)
    return before, after, before_grad, after_grad


def _gradient_end(
    layout: Layout, grad_layout: Layout | None, dtype: torch.dtype
) -> tuple[Layout, Layout | None]:
    """Return the layouts of an end's gradient, and of that one's gradient if not the dual."""
    if grad_layout is None:
        return layout.dual.replace(dtype=dtype), None
    return grad_layout.replace(dtype=dtype), layout.replace(dtype=dtype)
