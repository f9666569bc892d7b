"""The names of `torch.distributed.fsdp` (FSDP2), and `replicate`.

    fully_shard([norm, head], mesh=mesh)      one unit, gathered before `norm`, freed after `head`
    isinstance(norm, FSDPModule)              its class is made here, with FSDPModule's methods
    norm.set_requires_gradient_sync(False)    a switch of the unit: `UnitControls`

They make the units of `sm.parallel.fully_shard`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard as TorchShard

from ...mesh.comm.thread_context import thread_context
from ...mesh.context import get_mesh, given_or_current
from ...mesh.device_mesh import DeviceMesh, init_device_mesh
from ...mesh.launch.process_groups import start_processes
from ..layout.spec import Shard
from ..parallel.data.fully_shard import fully_shard_options, what_to_keep
from ..parallel.data.module_calls import intercept_method
from ..parallel.data.plan import UnitModules, roots_of
from ..parallel.data.precision import MixedPrecisionPolicy, OffloadPolicy, offload_of
from ..parallel.data.slot import UnitOptions
from ..parallel.data.unit import is_unit_root, unit_of, units_in
from ..parallel.data.wrap import wrap
from .fsdp_module import FSDPModule, ReplicateModule, check_modules, set_class

Modules = nn.Module | Sequence[nn.Module]


# -- where parameters are split --------------------------------------------------------------------


@dataclass
class DataParallelMeshDims:
    """DataParallelMeshDims(shard="dp_shard"): which axes of a mesh are data-parallel.

    Args:
        shard: names of the axes that split parameters.
        replicate: names of the axes over which they are replicated.

    Raises:
        ValueError: both are None.

    Source: `torch.distributed.fsdp.DataParallelMeshDims`.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims needs at least one of shard= and replicate=")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes of `shard` as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes of `replicate` as a tuple."""
        return _names(self.replicate)


@dataclass
class FSDPMeshInfo:
    """FSDPMeshInfo(mesh, shard_mesh_dim=0): the mesh of a `ShardPlacementResult`.

    Args:
        mesh: the mesh of data parallelism.
        shard_mesh_dim: the number of the axis that splits parameters.
        replicate_mesh_dim: the number of the axis over which they are replicated (HSDP).
        dp_mesh_dims: the axes by name, of `spmd_mesh`, instead of the above.

    Source: `FSDPMeshInfo` and `HSDPMeshInfo` in `torch.distributed.fsdp._fully_shard`, which
        are accepted as well.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = None


HSDPMeshInfo = FSDPMeshInfo


@dataclass
class ShardPlacementResult:
    """ShardPlacementResult(placement, mesh_info): a dim to split, and the mesh to split it over.

    `shard_placement_fn` returns it for parameters with a mesh of their own.

    Args:
        placement: `Shard(dim)`; None for `Shard(0)`.
        mesh_info: the mesh.

    Source: `torch.distributed.fsdp._fully_shard._fsdp_common.ShardPlacementResult`.
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo


@dataclass(frozen=True)
class _DataMesh:
    """A mesh, its axes that split parameters, and all its data-parallel axes; None for defaults."""

    mesh: DeviceMesh
    shard: tuple[str, ...] | None = None
    axes: tuple[str, ...] | None = None


def _data_mesh(mesh: Any, dims: Any, default_name: str) -> _DataMesh:
    """Return the mesh of an argument `mesh=` with `dp_mesh_dims=`.

    Raises:
        TypeError: `mesh` is something else.
        ValueError: a name that is not an axis of the mesh, or no name at all.
    """
    mesh = _default_mesh(default_name) if mesh is None else given_or_current(mesh)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, as init_device_mesh makes it, got {mesh!r}")
    if dims is None:
        return _DataMesh(mesh)
    shard, copies = _names(dims.shard), _names(dims.replicate)
    if not shard and not copies:
        raise ValueError("dp_mesh_dims needs at least one of shard= and replicate=")
    unknown = [name for name in (*shard, *copies) if name not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"dp_mesh_dims names {unknown}, but the axes of {mesh} are {list(mesh.axis_names)}"
        )
    return _DataMesh(mesh, shard, (*copies, *shard))


def _default_mesh(name: str) -> DeviceMesh:
    """Return the current mesh, by default all ranks along one axis."""
    current = get_mesh()
    if current is not None:
        return current
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    device_type = "cpu" if accelerator is None else accelerator.type
    world = thread_context.world or start_processes(device_type)
    return init_device_mesh(device_type, (world.size,), axis_names=(name,))


def _names(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


# -- functions -------------------------------------------------------------------------------------


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | ShardPlacementResult | None] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """fully_shard(module, mesh=mesh) -> the module, its parameters split over the ranks.

    It is `sm.parallel.fully_shard` with torch's arguments; the class of the module becomes a
    subclass of its own and of `FSDPModule`.

    Args:
        module: a module, or a list of modules that become one unit: gathered before the forward
            of the first that runs and freed after that of the last, or when the model's forward
            ends.
        mesh: 1-D, or 2-D for HSDP, where the first axis replicates; by default the current
            mesh, else all ranks.
        reshard_after_forward: as in `sm.parallel.fully_shard`; a number that divides the ranks
            and is the size of no axis means True.
        shard_placement_fn: parameter -> the dim to split as `Shard(dim)`, a
            `ShardPlacementResult` with a mesh as well, or None for `Shard(0)`. The dim may have
            any size.
        mp_policy, offload_policy: ours or torch's.
        ignored_params: parameters to leave unchanged.
        dp_mesh_dims: which axes of `mesh` are data-parallel; parameters may be split over the
            others.

    Returns:
        `module`.

    Raises:
        AssertionError: it was applied to a module before.
        ValueError: no module; names that are not axes of the mesh; a result of
            `shard_placement_fn` of another type, or a dim that the parameter lacks; and as
            `sm.parallel.fully_shard`.
        NotImplementedError: a module that owns, or contains, parameters on several meshes of
            `shard_placement_fn`; parameters with `fsdp_pre_all_gather`, as torchao's for float8.

    Communication: as `sm.parallel.fully_shard`.

    Source: `torch.distributed.fsdp.fully_shard`.

    Example:
        >>> for block in model.blocks:
        ...     fully_shard(block, mesh=mesh)
        >>> fully_shard([model.norm, model.head], mesh=mesh)
        >>> fully_shard(model, mesh=mesh)
    """
    roots, target = _roots("fully_shard", module)
    ignored = list(ignored_params or ())
    _check_extensions(target, ignored)
    default = _data_mesh(mesh, dp_mesh_dims, "fsdp")
    meshes, dims = _placements(target, ignored, default, shard_placement_fn)

    if len(set(meshes.values())) == 1:
        default = next(iter(meshes.values()))
    owners = _owners_of_other_meshes(target, meshes, default)
    elsewhere = [x for modules in owners.values() for inner in modules for x in inner.parameters()]
    calls: list[tuple[nn.Module, _DataMesh, list[nn.Parameter]]] = []
    calls += [(_several(modules), on, ignored) for on, modules in owners.items()]
    calls.append((target, default, [*ignored, *elsewhere]))
    options = [
        _options(inner, on, left_out, reshard_after_forward, mp_policy, offload_policy)
        for inner, on, left_out in calls
    ]
    for (inner, _, left_out), (unit_options, keep) in zip(calls, options, strict=True):
        wrap(inner, unit_options, None, keep, left_out, 0, dims)
    *others, unit = [unit_of(inner) for inner, _, _ in calls]
    unit.other_mesh_units = tuple(others)  # type: ignore[union-attr]
    set_class(roots, FSDPModule)
    return module


def _check_extensions(module: nn.Module, ignored: Sequence[nn.Parameter]) -> None:
    """Raise NotImplementedError for parameters that say how they are to be gathered."""
    for name, x in module.named_parameters():
        if hasattr(x, "fsdp_pre_all_gather") and not any(x is other for other in ignored):
            raise NotImplementedError(
                f"fully_shard: {name} has fsdp_pre_all_gather, which would not be called; leave it "
                "out (torchao: enable_fsdp_float8_all_gather=False), and for gathers in 8 bits "
                "pass transport= to sm.parallel.fully_shard"
            )


def replicate(
    module: Modules,
    ignored_modules: Iterable[nn.Module] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    **ddp_options: Any,
) -> Any:
    """replicate(module) -> the module, its gradients averaged over the ranks (DDP).

    It is `sm.parallel.data_parallel`; the class of the module becomes a subclass of its own and of
    `ReplicateModule`.

    Args:
        module: a module, or a list of modules that become one unit.
        ignored_modules: modules whose parameters are left unchanged.
        mesh: 1-D; by default the current mesh, else all ranks.
        mp_policy: ours or torch's.
        offload_policy: `OffloadPolicy()`.
        ignored_params: parameters to leave unchanged.
        dp_mesh_dims: which axes of `mesh` are data-parallel, as `replicate=` of
            `DataParallelMeshDims`.
        **ddp_options: options of `DistributedDataParallel`. `device_mesh`,
            `find_unused_parameters` and `init_sync` have their meaning; those about devices,
            buckets and memory have no effect.

    Returns:
        `module`.

    Raises:
        AssertionError: it was applied to a module before.
        RuntimeError: `fully_shard` was applied to the module.
        ValueError: a mesh with several axes; `dp_mesh_dims` with `shard=`.
        TypeError: an option that torch does not have.
        NotImplementedError: offloading, and options that would change results: `process_group`,
            `mixed_precision`, `broadcast_buffers=True`, `delay_all_reduce_named_params`,
            `param_to_hook_all_reduce`.

    Communication: as `sm.parallel.data_parallel`.

    Source: `torch.distributed._composable.replicate` and
        `torch.distributed._composable.replicate_with_fsdp.replicate`.
    """
    for one in (module,) if isinstance(module, nn.Module) else module:
        if isinstance(one, FSDPModule) and not isinstance(one, ReplicateModule):
            raise RuntimeError(
                f"replicate({type(one).__name__}): fully_shard was applied to this module"
            )
    roots, target = _roots("replicate", module)
    _check_ddp_options(ddp_options)
    if offload_of(offload_policy) is not None:
        raise NotImplementedError(
            "replicate with CPUOffloadPolicy: gradients would be reduced on the host; use "
            "fully_shard"
        )
    mesh = ddp_options.get("device_mesh") if mesh is None else mesh
    on = _data_mesh(mesh, dp_mesh_dims, "replicate")
    if on.shard:
        raise ValueError(
            "replicate with dp_mesh_dims takes replicate= only; use fully_shard to split parameters"
        )
    if on.axes is None and on.mesh.ndim != 1:
        raise ValueError(
            f"replicate takes a mesh with one axis, and {on.mesh} has {on.mesh.ndim}; pass a slice "
            "of it"
        )
    ignored = [
        *(ignored_params or ()),
        *(x for inner in ignored_modules or () for x in inner.parameters()),
    ]
    find_unused = bool(ddp_options.get("find_unused_parameters"))
    options, keep = fully_shard_options(
        target,
        on.mesh,
        (),
        mp_policy=mp_policy,
        find_unused_parameters=find_unused,
        ignored=ignored,
    )
    if on.axes is not None:
        options = replace(options, data_axes=on.axes)
    wrap(target, options, None, keep, ignored, 0 if ddp_options.get("init_sync", True) else None)
    set_class(roots, ReplicateModule)
    return module


_DDP_WITH_MEANING = {"device_mesh", "find_unused_parameters", "init_sync"}
_DDP_WITHOUT_EFFECT = {
    "device_id",
    "device_ids",
    "output_device",
    "dim",
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
}
_DDP_REFUSED = {
    "process_group": "pass mesh=",
    "mixed_precision": "pass mp_policy=",
    "broadcast_buffers": "each rank keeps its own buffers; pass False",
    "forward_sync_buffers": "each rank keeps its own buffers; pass False",
    "delay_all_reduce_named_params": "all gradients are reduced in backward",
    "param_to_hook_all_reduce": "all gradients are reduced in backward",
}


def _check_ddp_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name in _DDP_REFUSED and value:
            raise NotImplementedError(
                f"replicate({name}={value!r}) is not supported: {_DDP_REFUSED[name]}"
            )
        if name not in {*_DDP_WITH_MEANING, *_DDP_WITHOUT_EFFECT, *_DDP_REFUSED}:
            raise TypeError(f"replicate() got an unexpected keyword argument {name!r}")


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """register_fsdp_forward_method(module, "encode"): gather parameters for calls of this method.

    Calls of `forward` do so by themselves. Nothing happens if the module is not a unit's.

    Args:
        module: a module of `fully_shard`.
        method_name: the name of a method.

    Raises:
        ValueError: the module has no such method.

    Communication: none; a call of the method communicates as one of `forward`.

    Source: `torch.distributed.fsdp.register_fsdp_forward_method`.
    """
    if not is_unit_root(module):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    intercept_method(module, method_name)


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """share_comm_ctx(modules): accepted without effect, since all units use the same streams.

    Raises:
        ValueError: something that is not an `FSDPModule`.

    Source: `torch.distributed.fsdp.share_comm_ctx`.
    """
    check_modules(modules)


# -- modules and parameters of a call --------------------------------------------------------------


def _roots(function: str, module: Any) -> tuple[tuple[nn.Module, ...], nn.Module]:
    """Return the modules of a call, without those inside others, and the module to wrap.

    Raises:
        TypeError: something that is not a module.
        ValueError: no module.
        AssertionError: one is the root of a unit already.
    """
    modules: tuple[Any, ...] = (module,) if isinstance(module, nn.Module) else tuple(module)
    for one in modules:
        if not isinstance(one, nn.Module):
            raise TypeError(
                f"{function} takes a module or a list of modules, got {type(one).__name__}"
            )
    if not modules:
        raise ValueError(f"{function}([]): the list has no module")
    target = module if isinstance(module, nn.Module) else _several(list(dict.fromkeys(modules)))
    roots = roots_of(target)
    for root in roots:
        if is_unit_root(root):
            raise AssertionError(
                f"{function} or another form of data parallelism was applied to "
                f"{type(root).__name__} before"
            )
    return roots, target


def _several(modules: Sequence[nn.Module]) -> UnitModules:
    inner = {id(x) for one in modules for x in one.modules() if x is not one}
    return UnitModules([one for one in modules if id(one) not in inner])


def _options(
    module: nn.Module,
    on: _DataMesh,
    ignored: Collection[nn.Parameter],
    reshard_after_forward: bool | int | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
) -> tuple[UnitOptions, str | None]:
    options, keep = fully_shard_options(
        module, on.mesh, on.shard, None, mp_policy, offload_policy, ignored=ignored
    )
    keep = _what_to_keep(options, reshard_after_forward)
    return options if on.axes is None else replace(options, data_axes=on.axes), keep


def _what_to_keep(options: UnitOptions, reshard: bool | int | None) -> str | None:
    """Return what the units keep after forward.

    Raises:
        ValueError: a number that does not divide the number of ranks.
    """
    sizes = [options.mesh.size(axis) for axis in options.stage.optimizer]
    size = math.prod(sizes)
    if isinstance(reshard, int) and not isinstance(reshard, bool):
        if reshard < 1 or size % reshard:
            raise ValueError(
                f"reshard_after_forward={reshard} does not divide the {size} ranks that parameters "
                "are split over"
            )
        if reshard not in {1, size, *sizes}:
            return what_to_keep(options.mesh, options.stage, True)
    return what_to_keep(options.mesh, options.stage, reshard)


def _placements(
    target: nn.Module,
    ignored: Collection[nn.Parameter],
    default: _DataMesh,
    function: Callable[[Any], Any] | None,
) -> tuple[dict[int, _DataMesh], dict[int, int]]:
    """Return by id the mesh of each parameter that is in no unit yet, and the dim to split.

    Dims that are the first are left out.

    Raises:
        ValueError: the function returns something else, or a dim that the parameter lacks.
    """
    meshes: dict[int, _DataMesh] = {}
    dims: dict[int, int] = {}
    if function is None:
        return meshes, dims
    left_out = {id(x) for x in ignored} | {
        id(slot.value) for unit in units_in(target) for slot in unit.plan.slots
    }
    for name, x in target.named_parameters():
        if id(x) in left_out:
            continue
        result, on = function(x), default
        if hasattr(result, "mesh_info"):  # ShardPlacementResult, ours or torch's
            result, on = result.placement, _mesh_of_info(result.mesh_info)
        if result is not None and not isinstance(result, Shard | TorchShard):
            raise ValueError(
                f"shard_placement_fn returned {result!r} for {name}: return Shard(dim), a "
                "ShardPlacementResult, or None"
            )
        dim = 0 if result is None else result.dim
        if not -x.ndim <= dim < max(x.ndim, 1):
            raise ValueError(
                f"shard_placement_fn returned Shard({dim}) for {name} of shape {list(x.shape)}"
            )
        meshes[id(x)] = on
        if x.ndim and dim % x.ndim:
            dims[id(x)] = dim % x.ndim
    return meshes, dims


def _mesh_of_info(info: Any) -> _DataMesh:
    if info.dp_mesh_dims is not None:
        return _data_mesh(info.spmd_mesh, info.dp_mesh_dims, "fsdp")
    mesh = given_or_current(info.mesh)
    numbers = [info.replicate_mesh_dim, info.shard_mesh_dim]
    copies, shard = ([] if i is None else [mesh.axis_names[i]] for i in numbers)
    return _DataMesh(mesh, tuple(shard), (*copies, *shard))


def _owners_of_other_meshes(
    target: nn.Module, meshes: Mapping[int, _DataMesh], default: _DataMesh
) -> dict[_DataMesh, list[nn.Module]]:
    """Return the modules that own the parameters of each mesh but the default one.

    Raises:
        NotImplementedError: one of them owns or contains parameters on another mesh.
    """
    owners: dict[_DataMesh, list[nn.Module]] = {}
    for path, inner in target.named_modules():
        own = {meshes[id(x)] for x in inner.parameters(recurse=False) if id(x) in meshes}
        own.discard(default)
        inside = {meshes[id(x)] for x in inner.parameters() if id(x) in meshes}
        if own and len(inside) > 1:
            raise NotImplementedError(
                "shard_placement_fn returned several meshes for parameters of "
                f"{path or type(inner).__name__}: {[str(on.mesh) for on in inside]}; the "
                "parameters of one mesh must be those of whole modules"
            )
        for on in own:
            owners.setdefault(on, []).append(inner)
    return owners
