"""`redistribute` and its variants: move `ShardedTensor`s to other layouts, now or asynchronous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...mesh.comm.current_world import current_world
from ...mesh.comm.pending import Pending
from ...mesh.comm.work import DONE
from ...mesh.device_mesh import DeviceMesh, as_device_mesh, is_mesh
from ..autograd.engine_hooks import any_requires_grad, transforming, transforms_active
from ..autograd.named_axes import current_captures
from ..layout.layout import Layout, distinct_mesh_names
from ..layout.spec import P, Sharding, SpecLike
from ..lineage import comm_context, mixed_of_meshes
from ..redistribute.autograd import redistribute_local, start_redistribute
from ..redistribute.cross_mesh import redistribute_cross_mesh
from ..redistribute.executor import executor
from . import from_dtensor
from .autograd.local_part import known_local
from .mesh_arguments import mesh_and_spec
from .resharding import Resharding
from .sharded_tensor import DonatedTensor, ShardedTensor

# as the only positional argument: placements on the tensor's own mesh
_PLACEMENTS = frozenset({P, list, tuple})


def redistribute(
    x: ShardedTensor,
    *where: Any,
    placements: SpecLike = None,
    device_mesh: DeviceMesh | None = None,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    transport: str | None = None,
    donate: bool = False,
    out: ShardedTensor | None = None,
) -> Any:
    """redistribute(x, placements) -> x laid out as `placements`; differentiable at any order.

    Args:
        x: a sharded tensor; a DTensor of torch's is converted first.
        where: `placements`, or `device_mesh, placements` as in torch; placements may be a `P`, or a
            `NamedSharding`, which has its own mesh.
        placements: the same by name.
        device_mesh: the tensor's own mesh, by default, or another one of the same world: with other
            axes, other ranks or the same ranks in another order. Then all ranks of both meshes call
            this, and backward; ranks outside a mesh hold empty parts.
        async_op: return a handle while the (last) collective is in flight; its `wait()` returns the
            tensor, and using the handle as a tensor waits.
        forward_dtype: cast to this dtype before communicating; the result has it.
        backward_dtype: dtype in which the gradient is communicated; the gradient of `x` has the
            dtype of `x`.
        max_bytes: upper limit of the bytes that a rank holds at a time (its part before, its part
            after, buffers); exchanges are split into rounds until they fit. Backward is not
            limited.
        accumulate_dtype: torch.float32 to sum 16-bit floats in fp32 and round once, while they are
            communicated in 16 bits: half the bytes of casting first. No effect on other dtypes.
        transport: "int8" or "fp8" to communicate 16- and 32-bit floats in 8 bits, in blocks of 128
            with a scale each, and sum in fp32: 1.03 bytes per element. In each communicating step
            of the plan, the error of an element x of a block with maximum m is at most m / 252
            ("int8"), or the larger of x / 16 and m / 425,984 ("fp8"); inf and NaN are kept.
            Replicas are equal, bit for bit. Gradients are communicated unquantized.
        donate: `x` is not used any more: its memory is reused where that saves a copy (a reduction
            in place, a reduce_scatter into its own input) and freed otherwise. Using `x` afterwards
            raises.
        out: a contiguous tensor of the target layout that receives the result and is returned. An
            all_gather of consecutive parts writes into it directly, and a part that is already a
            view of its place in `out` is not copied.

    Returns:
        The tensor in its new layout; it shares no memory with `x` unless donated. With `async_op`,
        a `Resharding`.

    Raises:
        TypeError: `x` is not a sharded tensor.
        ValueError: the placements do not fit, no plan fits into `max_bytes`, `out` has another
            layout, the dtype or the pending reduction cannot be quantized, a tensor that requires
            grad is donated or has `out`, or an option other than the dtypes is given for another
            mesh.

    Communication: the plan's; `explain(typeof(x), placements)` prints it. To another mesh: a
        reduction of pending values, and one all_to_all over the ranks of both.

    Example:
        >>> y = x.redistribute([Replicate(), Shard(1)])
        >>> z = x.redistribute(P(None, ("dp", "tp")))
        >>> coming = x.redistribute(P(), async_op=True)
        >>> whole = coming.wait()
        >>> elsewhere = x.redistribute(other_mesh, [Shard(0)])
    """
    if type(x) is not ShardedTensor:
        x = _as_sharded(x)
    if (captures := current_captures()) is not None:
        captures.check_inside(x, "redistribute")
    local, layout = x._local, x._layout
    if not local.requires_grad and any_requires_grad(x):
        local = known_local(x)
    mesh = layout.mesh
    spec = where[0] if len(where) == 1 else None
    if type(spec) not in _PLACEMENTS or device_mesh is not None:
        mesh, spec = _mesh_and_placements(x, where, device_mesh, placements)
    src = layout if forward_dtype is None else layout.replace(dtype=forward_dtype)
    target = Layout.of(mesh, spec, layout.shape, src.dtype)
    if target.mesh is not layout.mesh:
        _check_plain(
            src, target, async_op=async_op, max_bytes=max_bytes, accumulate_dtype=accumulate_dtype,
            transport=transport, donate=donate, out=out,
        )  # fmt: skip
        moved = redistribute_cross_mesh(
            local.to(src.dtype), src, target, backward_dtype=backward_dtype
        )
    elif target is layout and out is None:
        return Resharding(lambda: x, DONE) if async_op else x
    elif (
        async_op
        or donate
        or max_bytes is not None
        or accumulate_dtype
        or transport
        or out is not None
    ):
        start = partial(
            start_redistribute,
            pairs=[(src, target)],
            backward_dtype=backward_dtype,
            max_bytes=max_bytes,
            accumulate_dtype=accumulate_dtype,
            transport=transport,
        )
        tensors = [local]
        # with `donate` the list has the only reference, so that memory is freed as soon as it is
        # not needed
        del local
        result = _start(x, tensors, target, start, donate, out)
        return result if async_op else result.wait()
    else:
        with comm_context(mesh.world, x._lineage):  # type: ignore[union-attr]
            if src is target or local.requires_grad or transforming():
                moved = redistribute_local(local, src, target, backward_dtype=backward_dtype)
            else:
                moved = executor(src, target)(local)
    result = ShardedTensor._make(_copy_if_shared(moved, local), target)
    result._lineage = x._lineage
    return result


def _start(
    x: ShardedTensor,
    tensors: list[Tensor],
    target: Layout,
    start: Callable[..., Pending[list[Tensor]]],
    donate: bool,
    out: ShardedTensor | None,
) -> Resharding:
    """Launch the collectives of a redistribution with options."""
    _check_writable(x, target, donate, out)
    source = None if donate else tensors[0]
    lineage = x._lineage
    into = None if out is None else [known_local(out)]
    if donate:
        DonatedTensor.take(x)
    with comm_context(target.mesh.world, lineage):  # type: ignore[attr-defined]
        parts = start(tensors, donate=donate, outs=into)

    def finish() -> ShardedTensor:
        (moved,) = parts.wait()
        result = (
            out if out is not None else ShardedTensor._make(_copy_if_shared(moved, source), target)
        )
        result._lineage = lineage
        return result

    return Resharding(finish, parts)


def reshard(x: ShardedTensor, spec: SpecLike) -> ShardedTensor:
    """reshard(x, P(...)) -> x laid out as the spec, by JAX's name. Communication: the plan's."""
    return redistribute(x, spec)


def redistribute_many(
    tensors: Sequence[ShardedTensor],
    placements: Sequence[SpecLike],
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    donate: bool = False,
) -> Any:
    """redistribute_many(xs, placements) -> [each x laid out], in as few collectives as possible.

        x: dp reduce_scatter   \
        y: dp reduce_scatter    >   one reduce_scatter over dp, one all_gather over tp
        z: tp all_gather       /

    Collectives over the same ranks, of the same kind and dtype, become one, in backward too. The
    tensors may be on different meshes of one world (each stays on its own).

    Args:
        tensors: sharded tensors.
        placements: one `P` or list of placements for each.
        async_op, forward_dtype, backward_dtype, donate: as for `redistribute`, for all of them.

    Returns:
        The tensors in their new layouts, in order. With `async_op`, a `Resharding` whose `wait()`
        gives the list.

    Raises:
        ValueError: another number of placements than tensors, or as for `redistribute`.

    Communication: one collective per group, kind of collective, reduction and dtype, for each stage
    of the plans.

    Example:
        >>> params = sm.redistribute_many(shards, [P()] * len(shards))
    """
    if len(tensors) != len(placements):
        raise ValueError(
            f"{len(tensors)} tensors and {len(placements)} placements; give one P or list of "
            "placements for each tensor"
        )
    locals_, pairs = [], []
    for x, spec in zip(tensors, placements, strict=True):
        src = x._layout.replace(dtype=forward_dtype)
        target = Layout.of(*_mesh_and_placements(x, (spec,), None, None), src.shape, src.dtype)
        locals_.append(known_local(x))
        pairs.append((src, target))
    for x, (_, target) in zip(tensors, pairs, strict=True):
        _check_writable(x, target, donate, None)
    if donate and len({id(x) for x in tensors}) < len(tensors):
        raise ValueError("a tensor that is donated appears twice among the tensors; pass each once")
    sources = [None if donate else local for local in locals_]
    lineages = [x._lineage for x in tensors]
    with comm_context(current_world(), mixed_of_meshes(tensors)):
        for x in tensors if donate else ():
            DonatedTensor.take(x)
        parts = start_redistribute(locals_, pairs, backward_dtype=backward_dtype, donate=donate)

    def finish() -> list[ShardedTensor]:
        results = []
        for moved, local, lineage, (_, target) in zip(
            parts.wait(), sources, lineages, pairs, strict=True
        ):
            results.append(ShardedTensor._make(_copy_if_shared(moved, local), target))
            results[-1]._lineage = lineage
        return results

    return Resharding(finish, parts) if async_op else finish()


# --------------------------------------------------------------------------------------------------


def _as_sharded(x: Any) -> ShardedTensor:
    """Convert a DTensor of torch's.

    Raises:
        TypeError: no sharded tensor.
        RuntimeError: a donated one.
    """
    if from_dtensor.is_dtensor(x):
        return from_dtensor.from_dtensor(x)
    if isinstance(x, DonatedTensor):
        x.clone()  # raises, as every use does
    raise TypeError(
        f"redistribute takes a ShardedTensor, got {type(x).__name__}; place a plain tensor with "
        "distribute_tensor first"
    )


def _mesh_and_placements(
    x: ShardedTensor, where: Sequence[Any], mesh: DeviceMesh | None, placements: SpecLike
) -> tuple[DeviceMesh, SpecLike]:
    """Return the mesh and the placements that the arguments of `redistribute` name.

    Raises:
        TypeError: too many arguments.
        ValueError: for another mesh, without placements.
    """
    rest = list(where)
    if rest and is_mesh(rest[0]):
        mesh = rest.pop(0)
    elif len(rest) == 2 and rest[0] is None:
        rest.pop(0)
    if rest:
        placements = rest.pop(0)
    if isinstance(placements, Sharding):
        mesh, placements = mesh_and_spec(mesh, placements)
    if rest:
        raise TypeError(f"redistribute takes placements, or a mesh and placements; got {where!r}")
    to: DeviceMesh = x.mesh if mesh is None else as_device_mesh(mesh)
    if placements is None and to is not x.mesh:
        src_mesh, dst_mesh = distinct_mesh_names(x.mesh, to)
        raise ValueError(
            f"{x._layout} on {src_mesh} has no placements on {dst_mesh}; write "
            "x.redistribute(mesh, placements)"
        )
    return to, x._layout.spec if placements is None else placements


def _check_plain(layout: Layout, target: Layout, **options: Any) -> None:
    """Raise a ValueError for an option that a redistribution to another mesh does not support."""
    option_names = [
        name for name, value in options.items() if value is not None and value is not False
    ]
    if option_names:
        src_mesh, dst_mesh = distinct_mesh_names(layout.mesh, target.mesh)
        raise ValueError(
            f"{option_names[0]}= is for a redistribution on one mesh, and {layout} goes from "
            f"{src_mesh} to {dst_mesh}; leave it out, and redistribute on one of the meshes with it"
        )


def _copy_if_shared(moved: Tensor, local: Tensor | None) -> Tensor:
    """Return the result of a move, copied if it shares memory with the part before.

    That part is `local`, None if it was donated.

    Of donated memory it is copied if it is a piece that would keep the rest alive.
    """
    if transforms_active():
        return moved  # a new tensor
    storage = moved.untyped_storage()
    if local is None:
        shared = storage.nbytes() > moved.nbytes and not moved.is_contiguous()
    else:
        # a storage without memory (empty, or on "meta") is known by its object
        before = local.untyped_storage()
        shared = (storage.data_ptr() or storage._cdata) == (before.data_ptr() or before._cdata)
    return moved.clone(memory_format=torch.contiguous_format) if shared else moved


def _check_writable(
    x: ShardedTensor, target: Layout, donate: bool, out: ShardedTensor | None
) -> None:
    """Raise a ValueError for `donate` or `out` where gradients or layouts forbid them."""
    if donate and x._local.requires_grad:
        raise ValueError(
            f"{x._layout} requires grad and cannot be donated, since backward may need it; donate "
            "x.detach()"
        )
    if out is None:
        return
    if out._layout is not target:
        raise ValueError(
            f"out is {out._layout}, and the result is {target}; pass sm.empty of that layout"
        )
    if out._local.requires_grad or (x._local.requires_grad and torch.is_grad_enabled()):
        raise ValueError(
            f"out= does not support autograd, and {x._layout} or out requires grad; use "
            "torch.no_grad()"
        )
    if not out._local.is_contiguous():
        raise ValueError(
            f"out= needs a contiguous local tensor, and this one has strides {out._local.stride()}"
        )
