"""Convert between plain and sharded tensors: `from_local`, `to_local`, `distribute_tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.box import box_shape, box_size, slices
from ...mesh.comm.call_site import call_path
from ...mesh.device_mesh import DeviceMesh
from ..autograd.engine_hooks import is_transformed, transforming
from ..autograd.named_axes import current_captures
from ..autograd.transforms import refuse_foreign, under_transforms
from ..layout.layout import Layout, dtype_name
from ..layout.spec import EACH, P, SpecLike
from ..lineage import backward_comm_context
from ..redistribute.autograd import redistribute_local
from ..redistribute.linear import redistribute_grad
from ..redistribute.redistribution_map import LinearRedistribution
from ..replicas.gradients import CHECKS, check_replicas_agree
from . import from_dtensor
from .autograd.local_part import known_local
from .global_shape import describes, global_shape
from .mesh_arguments import mesh_and_spec
from .part_shapes import part_shapes
from .redistribute import redistribute
from .sharded_tensor import ShardedTensor

# -- local tensors in ------------------------------------------------------------------------------


def from_local(
    local_tensor: Tensor,
    device_mesh: DeviceMesh | SpecLike = None,
    placements: SpecLike = None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: SpecLike = None,
    shape_check: bool | str = True,
) -> ShardedTensor:
    """from_local(x) -> ShardedTensor: declare how all local tensors make up one global tensor.

    A replicated local tensor counts as one logical value: its gradient is the sum over the
    replicas, the same on every rank.

    Args:
        local_tensor: this rank's part; moved to the mesh's device type if it is on another one,
            except for "meta".
        device_mesh: the mesh; by default that of `with mesh:` or `set_mesh`, and then a `P` may
            take its place.
        placements: a `P` or one placement per axis; `None` for replicated.
        run_check: compare dtypes and shapes of all ranks with the placements, also along replicated
            axes and with `shape`, and give all replicas the values of the first one.
        shape: the global shape. Without it, the ranks along the axes that split something exchange
            their local shapes, so that uneven parts are handled (see `shape_check`); parts other
            than those of `torch.chunk` need placements with `sizes`. (A rank outside the mesh does
            not exchange; it assumes parts like its own tensor, or uses the sizes.)
        stride: the global strides, accepted with `shape` for compatibility with torch. They have no
            effect: each part has its own.
        grad_placements: layout of the local tensor's gradient; by default this layout, reduced.
        shape_check: when ranks exchange shapes, without `shape`. True: the first time that this
            call is reached over these lines of the program, with these placements, dtype and sizes
            of the other dims; again when a rank's part has another shape than the previous time;
            and at every call if parts were uneven. So parts that were equal must either all change
            or all stay: otherwise only some ranks exchange shapes, and the mismatch of collectives
            is an error. "always": at every call, for parts that are sometimes equal. False: never;
            all parts are assumed equal, as in torch.

    Raises:
        ValueError: the parts do not make up the tensor that the placements describe: on every rank
            that exchanged shapes, or with `shape`, on the ranks whose part does not fit it. Strides
            without a shape, or not one per dim. Another `shape_check`.

    Communication: none if nothing is split or `shape` is given; else one small all_gather of the
        shapes when `shape_check` requires it. With `run_check` another one, and a broadcast over
        the replicated axes.
    """
    if isinstance(local_tensor, ShardedTensor):
        raise TypeError(
            "from_local takes this rank's part as a plain tensor, got a ShardedTensor "
            f"{local_tensor._layout}"
        )
    if from_dtensor.is_dtensor(local_tensor):
        raise TypeError(
            "from_local takes this rank's part as a plain tensor, got torch's DTensor; use "
            "redistribute"
        )
    if stride is not None and (shape is None or len(stride) != len(shape)):
        raise ValueError(
            f"stride={tuple(stride)} with shape={shape}: give the global shape and one stride per "
            "dim, or no strides"
        )
    if shape_check not in CHECKS:
        raise ValueError(
            f"from_local(shape_check={shape_check!r}): write one of {', '.join(map(repr, CHECKS))}"
        )
    if transforming():
        refuse_foreign("from_local")
    device_mesh, placements = mesh_and_spec(device_mesh, placements)
    local_tensor = _on_device(local_tensor, device_mesh)
    shape = (
        global_shape(local_tensor, device_mesh, placements, shape_check)
        if shape is None
        else tuple(shape)
    )
    if device_mesh.coordinate is None:
        local_tensor = local_tensor.reshape(-1)[:0]  # part of the graph, as on other ranks
    layout = Layout.of(device_mesh, placements, shape, local_tensor.dtype)
    if run_check and device_mesh.coordinate is not None:
        local_tensor = _checked_part(local_tensor, layout)
    if local_tensor.shape != layout.local_shape:
        raise ValueError(
            f"the local tensor has shape {list(local_tensor.shape)}, but under {layout} this rank "
            f"holds {list(layout.local_shape)}"
        )
    if transforming():
        entered = LinearRedistribution(
            layout,
            layout,
            layout.grad if grad_placements is None else layout.replace(grad_placements),
        )
        return ShardedTensor._make_guarded(under_transforms(local_tensor, entered), layout)
    if not (local_tensor.requires_grad and torch.is_grad_enabled()):
        return ShardedTensor._make_guarded(local_tensor.detach(), layout)
    grad_layout = layout.grad if grad_placements is None else layout.replace(grad_placements)
    # the gradient passes through unchanged
    if grad_layout is layout.dual and not local_tensor.is_leaf:
        return ShardedTensor._make_guarded(local_tensor.view_as(local_tensor), layout)
    return ShardedTensor._make_guarded(_FromLocal.apply(local_tensor, layout, grad_layout), layout)  # type: ignore[arg-type]


def from_part(part: Tensor, mesh: DeviceMesh, dim: int, lengths: Sequence[int]) -> ShardedTensor:
    """Return the tensor that has this local part.

    It is split along one dim over all axes of the mesh into parts of these lengths.
    """
    spec = P(*[None] * dim, mesh.axis_names, sizes={mesh.axis_names: tuple(lengths)})
    whole = (*part.shape[:dim], sum(lengths), *part.shape[dim + 1 :])
    return from_local(part, mesh, spec, shape=whole)


class _FromLocal(torch.autograd.Function):
    """From local to sharded: identity forward, reduction of the gradient backward.

    The output is not a view for autograd, so it may be written in place even if the local tensor is
    a leaf, as in torch.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, grad_layout: Layout) -> Tensor:
        ctx.layout, ctx.grad_layout = layout, grad_layout
        return local.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, dtype = grads[0], grads[0].dtype
        layout, grad_layout = ctx.layout.replace(dtype=dtype), ctx.grad_layout.replace(dtype=dtype)
        with backward_comm_context(0, layout.mesh):
            of_local = redistribute_grad(
                grad, layout.dual, grad_layout, dst_grad=_of_gradient(layout)
            )
        return of_local, None, None


def _of_gradient(layout: Layout) -> Layout:
    """Return the layout of the gradient of a part's gradient.

    The part's own, except that pending kinds other than sum are per rank.
    """
    if layout.only_sums:
        return layout
    return layout.replace(
        layout.spec.with_unreduced(
            {axis: kind if kind == "sum" else EACH for axis, kind in layout.spec.unreduced}
        )
    )


def _checked_part(local: Tensor, layout: Layout) -> Tensor:
    """Return this rank's part with the values of the first replica.

    The parts of all ranks are compared with the layout.

    Raises:
        ValueError: on every rank, if a part has another dtype or shape.
    """
    mesh: Any = layout.mesh
    group = mesh.group(mesh.axis_names)
    parts = part_shapes(group, local)
    shapes = {mesh.coordinate_of(r): tuple(shape) for r, (_, *shape) in parts.items()}
    if len({dtype for dtype, *_ in parts.values()}) > 1 or not describes(layout, shapes):
        held = {
            r: [dtype_name(layout.dtype), *box_shape(layout.box_at(mesh.coordinate_of(r)))]
            for r in group.ranks
        }
        by_rank = {r: list(part) for r, part in parts.items()}
        raise ValueError(
            f"run_check: by rank the parts are {by_rank}, and {layout.spec} of "
            f"{list(layout.shape)} requires {held}"
        )
    return _FirstReplica.apply(local, layout) if layout.replicated_axes else local  # type: ignore[return-value]


class _FirstReplica(torch.autograd.Function):
    """Broadcast the values of the first replica; the gradient passes through unchanged."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout) -> Tensor:
        mesh: Any = layout.mesh
        group = mesh.group(layout.replicated_axes)
        out = local.clone(memory_format=torch.contiguous_format)
        group.broadcast(out, group.ranks.index(min(group.ranks, key=mesh.coordinate_of)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def _on_device(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the tensor on the mesh's device type, as torch does; one on "meta" stays there."""
    if type(tensor).__name__ == "AsyncCollectiveTensor":  # of torch's functional collectives
        tensor = _Awaited.apply(tensor)  # type: ignore[assignment]
    return (
        tensor
        if tensor.is_meta or tensor.device.type == mesh.device_type
        else tensor.to(mesh.device)
    )


class _Awaited(torch.autograd.Function):
    """From a tensor that torch's functional collectives return to the plain one inside.

    It waits when it is first used.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        return tensor.wait().detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


# -- local tensors out -----------------------------------------------------------------------------


def to_local(
    x: ShardedTensor, *, grad_placements: SpecLike = None, check: bool | str = True
) -> Tensor:
    """to_local(x) -> this rank's part, as a plain tensor that shares memory and graph with `x`.

    On a rank outside of the mesh, as in torch, this is a tensor of shape [0], and 0 of shape [] for
    a 0-d `x`.

    Args:
        x: a sharded tensor.
        grad_placements: how the gradients of the local tensors make up the gradient of `x`. By
            default they are assumed to be laid out as `x`, with equal replicas; if replicas differ
            (each rank uses the value for another part of the work) backward raises, and
            `[Partial()]` on the axis is the right value.
        check: when backward compares the gradients of replicas. True: the first time that a
            signature is seen, which is the lines of the program that lead to this call, the layout,
            and the number of this call in the backward pass. "always": in each backward pass.
            False: never; a gradient that differs between ranks is then used as each rank has it.

    Raises:
        RuntimeError: in backward, on every rank that compared: the gradients of replicas differ.
        ValueError: another `check`.

    Communication: none forward. Backward: for replicated axes, a comparison of 152 bytes when
    `check` requires it.
    """
    if check not in CHECKS:
        raise ValueError(f"to_local(check={check!r}): write one of {', '.join(map(repr, CHECKS))}")
    # a mapped function closes over x
    if (captures := current_captures()) is not None and captures.is_foreign(x):
        return captures.local(x)
    layout = x._layout
    local = known_local(x)
    if not layout.shape and layout.mesh.coordinate is None:  # type: ignore[attr-defined]
        return (
            local.sum() if local.requires_grad and torch.is_grad_enabled() else local.new_zeros(())
        )
    if transforming():
        left = LinearRedistribution(
            layout,
            layout,
            None,
            layout.grad if grad_placements is None else layout.replace(grad_placements),
        )
        return (
            under_transforms(local, left) if local.requires_grad or is_transformed(local) else local
        )
    if not local.requires_grad:
        return local
    if not torch.is_grad_enabled():
        return local.detach()
    grad_layout = layout.grad if grad_placements is None else layout.replace(grad_placements)
    return with_grad_layout(local, layout, grad_layout, check if grad_placements is None else False)


def with_grad_layout(
    local: Tensor, layout: Layout, grad_layout: Layout, check: bool | str = False
) -> Tensor:
    """Return a part laid out as `layout`, whose gradient is laid out as `grad_layout`.

    `check` as in `to_local`.
    """
    if grad_layout is layout.dual:  # the gradient passes through unchanged
        return local.view_as(local)
    path = call_path() if check is True and layout.replicated_axes else None
    precision = autocast_dtype(local.device) if check else None
    return _ToLocal.apply(local, layout, grad_layout, check, path, precision)  # type: ignore[return-value]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype in which autocast computes on a device; None without autocast."""
    kind = device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


class _ToLocal(torch.autograd.Function):
    """From sharded to local: identity forward; backward declares the layout of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        layout: Layout,
        grad_layout: Layout,
        check: bool | str,
        path: int | None,
        precision: torch.dtype | None,
    ) -> Tensor:
        ctx.layout, ctx.grad_layout = layout, grad_layout
        ctx.check, ctx.path, ctx.precision = check, path, precision
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, dtype = grads[0], grads[0].dtype
        layout, grad_layout = ctx.layout.replace(dtype=dtype), ctx.grad_layout.replace(dtype=dtype)
        with backward_comm_context(0, layout.mesh):
            if ctx.check and not transforming():
                check_replicas_agree(grad, ctx.grad_layout, ctx.path, precision=ctx.precision)
            of_local = redistribute_grad(
                grad, grad_layout, layout.dual, src_grad=_of_gradient(layout)
            )
        return of_local, None, None, None, None, None


# -- whole tensors in ------------------------------------------------------------------------------


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | SpecLike = None,
    placements: SpecLike = None,
    *,
    src_data_rank: int | None = 0,
) -> ShardedTensor:
    """distribute_tensor(t, mesh, placements) -> ShardedTensor: lay a whole tensor out on a mesh.

    Args:
        tensor: the whole tensor. Only the values on rank `src_data_rank` of the mesh are used; all
            ranks give its shape and dtype. A leaf, or without gradient; moved to the mesh's device
            type if it is on another one, except for "meta": then the parts are on "meta" too. A
            DTensor of torch's is converted and redistributed.
        device_mesh: the mesh; by default that of `with mesh:` or `set_mesh`, and then a `P` may
            take its place.
        placements: a `P` or one placement per axis; `None` for replicated.
        src_data_rank: index in the flattened mesh of the rank whose data is used; `None` if every
            rank has the data already, and then nothing is communicated.

    Returns:
        A leaf that requires grad if `tensor` does.

    Raises:
        ValueError: placements that do not fit the mesh or the tensor, a bad `src_data_rank`.
        RuntimeError: a tensor with a gradient history, which would be lost.

    Communication: one all_to_all in which the source sends each rank its box; none if
        `src_data_rank` is None, and none for a tensor on "meta", which must be on "meta" on every
        rank.

    Example:
        >>> x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    """
    if from_dtensor.is_dtensor(tensor):
        tensor = from_dtensor.from_dtensor(tensor)
    device_mesh, placements = mesh_and_spec(device_mesh, placements, tensor)
    if isinstance(tensor, ShardedTensor):
        return redistribute(tensor, device_mesh, placements)
    layout = Layout.of(device_mesh, placements, tensor.shape, tensor.dtype)
    if transforming() and is_transformed(tensor):
        refuse_foreign("distribute_tensor")
        raise NotImplementedError(
            "distribute_tensor of a tensor that sm.vmap, sm.jvp or sm.grad transforms: it makes a "
            "new leaf, with the values of one rank; use ShardedTensor.from_local(t, mesh, P(), "
            "shape=t.shape).redistribute(placements), which uses every rank's own equal values"
        )
    _check_leaf(tensor)
    values = _on_device(tensor.detach(), device_mesh)
    _check_source(src_data_rank, device_mesh)
    with torch.no_grad():
        out = ShardedTensor._make_guarded(_scatter(values, layout, src_data_rank), layout)
    return out.requires_grad_() if tensor.requires_grad else out


def _check_source(rank: int | None, mesh: DeviceMesh) -> None:
    if rank is not None and not 0 <= rank < mesh.size():
        raise ValueError(
            f"src_data_rank {rank} is out of range: {mesh} has {mesh.size()} ranks; give an index "
            f"from 0 to {mesh.size() - 1}, or None"
        )


def _check_leaf(tensor: Tensor) -> None:
    if tensor.grad_fn is not None and torch.is_grad_enabled():
        raise RuntimeError(
            "distribute_tensor makes a new leaf, and this tensor has a gradient history, which "
            "would be lost; use device_put(t, mesh, placements) to stay in the graph, or t.detach()"
        )


def device_put(
    x: Any,
    mesh: DeviceMesh | SpecLike = None,
    spec: SpecLike = None,
    *,
    src_data_rank: int | None = 0,
) -> ShardedTensor:
    """Place one leaf of `shardmesh.device_put`: a tensor, an array or a number."""
    x = as_tensor(x)
    in_graph = (
        x.requires_grad
        and torch.is_grad_enabled()
        and not isinstance(x, ShardedTensor)
        and not from_dtensor.is_dtensor(x)
    )
    if not in_graph:
        return distribute_tensor(x, mesh, spec, src_data_rank=src_data_rank)
    mesh, spec = mesh_and_spec(mesh, spec, x)
    layout = Layout.of(mesh, spec, x.shape, x.dtype)
    _check_source(src_data_rank, mesh)
    whole = layout.replace(layout.spec.with_unreduced({}))
    local: Any = _DevicePut.apply(_on_device(x, mesh), whole, src_data_rank)
    return ShardedTensor._make_guarded(redistribute_local(local, whole, layout), layout)


class _DevicePut(torch.autograd.Function):
    """Send each rank its box of one rank's tensor.

    In backward every rank gets the whole gradient, as of a replicated tensor.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layout: Layout, src: int | None) -> Tensor:
        ctx.layout = layout
        ctx.shape = tensor.shape
        return _scatter(tensor.detach(), layout, src)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layout = ctx.layout.replace(dtype=grads[0].dtype)
        if layout.mesh.coordinate is None:
            return grads[0].new_zeros(ctx.shape), None, None
        with backward_comm_context(0, layout.mesh):
            whole = redistribute_grad(
                grads[0], layout.dual, layout.replicated, dst_grad=layout.replicated
            )
        return whole, None, None


def as_tensor(x: Any, context: str = "device_put", path: str = "") -> Tensor:
    """Return a leaf as a tensor.

    `context` and `path` say in errors who was called and which leaf of a tree it is.

    Raises:
        TypeError: it cannot be converted.
    """
    if isinstance(x, Tensor):
        return x
    try:
        return torch.tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{context} takes tensors, NumPy arrays and numbers, or a tree of them, got "
            f"{type(x).__name__}{path} ({error}); convert it to a tensor first"
        ) from error


def _scatter(tensor: Tensor, layout: Layout, src: int | None) -> Tensor:
    """Return this rank's box of the source's tensor.

    A pending sum has its whole value on one rank and zeros on the others.
    """
    mesh: Any = layout.mesh
    if mesh.coordinate is None:
        return tensor.new_empty(0)
    if tensor.is_meta and mesh.device_type != "meta":
        return tensor.new_empty(layout.local_shape)
    whole = layout.replace(layout.spec.with_unreduced({}))
    if src is None or mesh.size() == 1:
        local = tensor[slices(whole.box)].clone(memory_format=torch.contiguous_format)
    else:
        local = _receive_box(tensor, whole, src)
    return redistribute_local(local, whole, layout)


def _receive_box(tensor: Tensor, layout: Layout, src: int) -> Tensor:
    mesh: Any = layout.mesh
    group = mesh.group(tuple(mesh.axis_names))
    source = int(mesh.ranks.flatten()[src])
    received = [0] * group.size
    received[group.ranks.index(source)] = box_size(layout.box)
    out = tensor.new_empty(layout.local_shape)
    if mesh.world.rank == source:
        boxes = [layout.box_at(mesh.coordinate_of(rank)) for rank in group.ranks]
        sends = torch.cat([tensor[slices(box)].reshape(-1) for box in boxes])
        group.all_to_all(out, sends, received, [box_size(box) for box in boxes])
    else:
        group.all_to_all(out, tensor.new_empty(0), received, [0] * group.size)
    return out
