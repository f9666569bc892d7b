"""Sharded tensors from each rank's data, by JAX's names, and the parts of a tensor that ranks hold.

    whole tensor on one rank    device_put                              each rank is sent its box
    a function of the index     make_array_from_callback                each rank makes its box
    each rank's own data        make_array_from_process_local_data      a loader's part of the batch
    each device's own tensor    make_array_from_single_device_arrays    used without a copy

All are leaves outside any graph: gradients do not flow into the data. For local tensors with
gradients there is `from_local`. A process has one device here, so "this process's data" and "this
device's part" are the same, and lists have one element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.box import slices
from ...mesh.device_mesh import DeviceMesh
from ..autograd.engine_hooks import is_transformed, transforming
from ..layout.layout import Layout
from ..layout.spec import P, SpecLike, as_spec
from .convert import from_local
from .global_shape import describes
from .mesh_arguments import is_placement, mesh_and_spec
from .part_shapes import are_of_one_kind, joined_parts, part_shapes, parts_text
from .sharded_tensor import AddressableShard, Index, ShardedTensor

# -- a tensor made of parts ------------------------------------------------------------------------


def make_array_from_callback(
    shape: Sequence[int],
    mesh: DeviceMesh | SpecLike,
    spec: Any = None,
    data_callback: Callable[[Index], Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> ShardedTensor:
    """make_array_from_callback(shape, mesh, spec, fn) -> ShardedTensor.

    Its part on each rank is fn(index of the part).

        fn = lambda index: data[index]    data: a memory-mapped file of 8 rows, P("dp") over 4 ranks
            rank 0: fn((slice(0, 2),))    rank 1: fn((slice(2, 4),))      ...

    Args:
        shape: the global shape.
        mesh: the mesh; with one set it may be left out:
            `make_array_from_callback(shape, spec, fn)`.
        spec: a `P` or one placement per axis.
        data_callback: called once, with the slice per dim of this rank's box; returns that box as a
            tensor, a numpy array or numbers, which is copied. Ranks with the same box must return
            the same values. It is also called for an empty box, but not on a rank outside the mesh.
        dtype: dtype of the result; by default that of the value that the callback returns.

    Raises:
        ValueError: placements that do not fit or are pending, no dtype on a rank outside the mesh;
            only on the rank concerned, a part that does not have the shape of the box.
        TypeError: no mesh given or set, or the callback returns a `ShardedTensor`.
        RuntimeError: on the rank concerned, the callback returns a tensor that requires grad, whose
            gradient would be lost.

    Communication: none.

    Example:
        >>> x = torch.arange(8)
        >>> sm.make_array_from_callback((8,), mesh, P("dp"), lambda index: x[index] ** 2)
    """
    mesh, spec, function = _mesh_spec_data(mesh, spec, data_callback)
    if not callable(function):
        raise TypeError(
            "make_array_from_callback: expected a function of the index after the spec, got "
            f"{function!r}"
        )
    asked = Layout.of(mesh, spec, shape, dtype or torch.get_default_dtype())
    _check_not_pending("make_array_from_callback", asked.spec)
    if mesh.coordinate is None:
        layout = asked.replace(dtype=_stated_dtype("make_array_from_callback", dtype, mesh))
        return ShardedTensor._make_guarded(torch.empty(0, dtype=dtype, device=mesh.device), layout)
    part = _copy_to_mesh(function(slices(asked.box)), dtype, mesh)
    if part.shape != asked.local_shape:
        index = ", ".join(f"{start}:{stop}" for start, stop in asked.box)
        raise ValueError(
            f"make_array_from_callback: the callback returned shape {list(part.shape)} for index "
            f"[{index}], which is {list(asked.local_shape)} of {list(asked.shape)}; "
            "return the data at that index, as in lambda index: data[index]"
        )
    return ShardedTensor._make_guarded(part, asked.replace(dtype=part.dtype))


def make_array_from_process_local_data(
    mesh: DeviceMesh | SpecLike,
    spec: Any = None,
    local_data: Any = None,
    global_shape: Sequence[int] | None = None,
) -> ShardedTensor:
    """make_array_from_process_local_data(mesh, spec, local) -> ShardedTensor.

    Each rank passes its own part.

        P("dp") on (dp=2, tp=2)    ranks 0 and 1 pass rows [a b c]    global  [a b c d e], in parts
                                   ranks 2 and 3 pass rows [d e]      of 3 and 2 rows

    Args:
        mesh: the mesh; with one set it may be left out:
            `make_array_from_process_local_data(spec, local)`.
        spec: a `P` or one placement per axis.
        local_data: this rank's part, a tensor or a numpy array, which is copied. Ranks that hold
            replicas must pass equal data. With `global_shape`, a dim may also have its global
            length: then the rank's part is sliced out of it.
        global_shape: the global shape. Without it, a split dim is as long as the parts of all ranks
            together, whatever their lengths: if they are not those of `torch.chunk`, the result's
            spec has `sizes`.

    Raises:
        ValueError: placements that do not fit or are pending, data that does not fit
            `global_shape`; on every rank that compared, parts that do not make up a tensor; no
            `global_shape` on a rank outside the mesh.
        TypeError: no mesh given or set, or a `ShardedTensor`.
        RuntimeError: the data require grad, and their gradient would be lost.

    Communication: none with `global_shape` or if nothing is split; else one small all_gather of the
        shapes over the axes that split something.

    Example:
        >>> batch = sm.make_array_from_process_local_data(mesh, P("dp"), loader_batch)
    """
    mesh, spec, data, shape = _mesh_spec_data_shape(mesh, spec, local_data, global_shape)
    part = _copy_to_mesh(data, None, mesh)
    spec = as_spec(spec, mesh.axis_names, part.ndim if shape is None else len(shape))
    _check_not_pending("make_array_from_process_local_data", spec)
    at = (
        _shared_layout(mesh, spec, part)
        if shape is None
        else Layout.of(mesh, spec, shape, part.dtype)
    )
    if mesh.coordinate is None:
        return ShardedTensor._make_guarded(part.new_empty(0), at)
    return ShardedTensor._make_guarded(_cut_out(part, at), at)


def make_array_from_single_device_arrays(
    shape: Sequence[int],
    mesh: DeviceMesh | SpecLike,
    spec: Any = None,
    arrays: Sequence[Tensor] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> ShardedTensor:
    """make_array_from_single_device_arrays(shape, mesh, spec, [x]) -> ShardedTensor.

    Its part on this rank is x, without a copy.

    Args:
        shape: the global shape.
        mesh: the mesh; with one set it may be left out:
            `make_array_from_single_device_arrays(shape, spec, [x])`.
        spec: a `P` or one placement per axis. Pending axes are allowed: then x is this rank's
            contribution.
        arrays: the tensors on this process's devices: one, or none on a rank outside the mesh.
        dtype: dtype of the tensor, for a rank outside the mesh, which passes none.

    Raises:
        ValueError: placements that do not fit, another number of tensors than one, a tensor that
            does not have the shape of the box (only on the rank concerned); no dtype on a rank
            outside the mesh.
        TypeError: no mesh given or set, `arrays` is not a list of plain tensors.

    Communication: none.

    Example:
        >>> x = sm.make_array_from_single_device_arrays((8,), mesh, P("dp"), [torch.ones(2)])
    """
    mesh, spec, parts = _mesh_spec_data(mesh, spec, arrays)
    if not isinstance(parts, (list, tuple)) or any(
        not isinstance(x, Tensor) or isinstance(x, ShardedTensor) for x in parts
    ):
        raise TypeError(
            "make_array_from_single_device_arrays: expected a list with this rank's plain tensor, "
            f"got {type(parts).__name__}"
        )
    if mesh.coordinate is None:
        known = _stated_dtype(
            "make_array_from_single_device_arrays", parts[0].dtype if parts else dtype, mesh
        )
        return from_local(torch.empty(0, dtype=known, device=mesh.device), mesh, spec, shape=shape)
    if len(parts) != 1:
        raise ValueError(
            f"make_array_from_single_device_arrays: a rank has one device, and {len(parts)} "
            "tensors were given; pass [x]"
        )
    return from_local(parts[0].detach(), mesh, spec, shape=shape)


# -- the parts of a tensor -------------------------------------------------------------------------


def addressable_shards(x: ShardedTensor) -> list[AddressableShard]:
    """Return the parts that this rank holds: one, or none outside the mesh. Communication: none."""
    layout, mesh = x._layout, x.mesh
    if mesh.coordinate is None:
        return []
    data = x._local.detach()
    return [
        AddressableShard(
            slices(layout.box),
            data,
            data.device,
            _replica_id(layout, mesh.coordinate),
            mesh.world.rank,
        )
    ]


def global_shards(x: ShardedTensor) -> list[AddressableShard]:
    """Return the part of every rank of the mesh, with this rank's data. Communication: none."""
    layout, mesh = x._layout, x.mesh
    shards = []
    for (coordinate, box), rank in zip(layout.boxes(), mesh.ranks.flatten(), strict=True):
        data = x._local.detach() if coordinate == mesh.coordinate else None
        shards.append(
            AddressableShard(
                slices(box), data, x._local.device, _replica_id(layout, coordinate), int(rank)
            )
        )
    return shards


def _replica_id(layout: Layout, coordinate: Sequence[int]) -> int:
    place = 0
    for axis in layout.replicated_axes:
        place = place * layout.mesh.size(axis) + coordinate[layout.mesh.axis_index(axis)]
    return place


# --------------------------------------------------------------------------------------------------


def _mesh_spec_data(mesh: Any, spec: Any, data: Any) -> tuple[DeviceMesh, SpecLike, Any]:
    """Return (mesh, spec, data); the arguments may also be (spec, data), with a mesh set."""
    if is_placement(mesh):
        mesh, spec, data = None, mesh, spec if data is None else data
    return (*mesh_and_spec(mesh, spec), data)


def _mesh_spec_data_shape(
    mesh: Any, spec: Any, data: Any, shape: Any
) -> tuple[DeviceMesh, SpecLike, Any, Any]:
    """Return (mesh, spec, data, shape); if a mesh is set, arguments may be (spec, data, shape)."""
    if is_placement(mesh):
        mesh, spec, data, shape = (
            (None, mesh, spec, shape if data is None else data)
            if spec is not None
            else (None, mesh, data, shape)
        )
    return (*mesh_and_spec(mesh, spec), data, shape)


def _check_not_pending(function: str, spec: P) -> None:
    if spec.unreduced:
        raise ValueError(
            f"{function}: {spec} leaves values pending, but the data holds whole values; leave "
            "those axes replicated, or declare what each rank contributes with "
            "ShardedTensor.from_local"
        )


def _stated_dtype(function: str, dtype: torch.dtype | None, mesh: DeviceMesh) -> torch.dtype:
    if dtype is None:
        raise ValueError(
            f"{function}: a rank outside {mesh} has no data with a dtype; pass dtype= on every rank"
        )
    return dtype


def _copy_to_mesh(data: Any, dtype: torch.dtype | None, mesh: DeviceMesh) -> Tensor:
    """Return a copy of the data as a tensor on the mesh's device.

    Raises:
        TypeError: a ShardedTensor.
        RuntimeError: a tensor that is being differentiated: its gradient would be zero.
    """
    if isinstance(data, ShardedTensor):
        raise TypeError(
            "expected this rank's part as a plain tensor or array, got a ShardedTensor "
            f"{data._layout}"
        )
    if isinstance(data, Tensor):
        is_differentiated = data.requires_grad and torch.is_grad_enabled()
        if is_differentiated or (transforming() and is_transformed(data)):
            raise RuntimeError(
                f"the data, a tensor of shape {list(data.shape)}, is being differentiated, and its "
                "gradient would be lost: data of ranks become a new leaf. To stay in the graph use "
                "ShardedTensor.from_local(part, mesh, spec), or device_put for the whole tensor; "
                "else pass data.detach()"
            )
    if isinstance(data, Tensor):
        return data.detach().to(
            mesh.device, dtype, copy=True, memory_format=torch.contiguous_format
        )
    if hasattr(data, "__array__"):
        return torch.from_numpy(np.array(data, order="C")).to(mesh.device, dtype)
    return torch.tensor(data, dtype=dtype, device=mesh.device)


def _cut_out(part: Tensor, layout: Layout) -> Tensor:
    """Return this rank's box of data whose dims have either the box's length or the global one.

    Raises:
        ValueError: a dim has neither.
    """
    local_shape, whole = layout.local_shape, layout.shape
    if part.ndim != len(whole) or any(
        n not in lengths for n, *lengths in zip(part.shape, local_shape, whole, strict=True)
    ):
        raise ValueError(
            f"make_array_from_process_local_data: the local data has shape {list(part.shape)}; "
            f"under {layout} this rank holds {list(local_shape)}; pass that, or {list(whole)} to "
            "have it sliced"
        )
    cut = [
        slice(None) if n == own else slice(*box)
        for n, own, box in zip(part.shape, local_shape, layout.box, strict=True)
    ]
    return part[tuple(cut)].contiguous()


def _shared_layout(mesh: DeviceMesh, where: P, part: Tensor) -> Layout:
    """Return the layout of the tensor that the parts of all ranks make up.

    Split dims are as long as their parts together.

    Raises:
        ValueError: on every rank that compared, parts that do not make up a tensor; on a rank
            outside the mesh.
    """
    if mesh.coordinate is None:
        raise ValueError(
            f"a rank outside {mesh} does not know the parts of the others; pass global_shape= on "
            "every rank"
        )
    split = tuple(axis for axes in where.dims for axis in axes if mesh.size(axis) > 1)
    if where.sizes or not split:
        return from_local(part, mesh, where)._layout
    group = mesh.group(split)
    parts = part_shapes(group, part)
    if not are_of_one_kind(parts):
        raise ValueError(f"the local data differ in dtype or number of dims ({parts_text(parts)})")
    shapes: Any = {mesh.coordinate_of(r): tuple(shape) for r, (_, *shape) in parts.items()}
    sizes, whole = joined_parts(mesh, where.dims, shapes)
    # a layout drops sizes that are those of torch.chunk
    layout = Layout.of(mesh, P(*where.dims, sizes=sizes), whole, part.dtype)
    if not describes(layout, shapes):
        raise ValueError(
            f"the local data ({parts_text(parts)}) are not parts of one tensor under {where}: "
            "along a dim, ranks with the same index on the axes that split it must have the same "
            "length"
        )
    return layout
