"""`fully_shard` and `data_parallel`: FSDP, DDP and ZeRO."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from ....kernels.transfer.host_copies import is_asynchronous
from ....mesh.context import given_or_current
from ....mesh.device_mesh import DeviceMesh, common_mesh
from ...tensor.sharded_tensor import ShardedTensor
from .grads.offloaded_grads import OffloadedGrads
from .inputs import is_slice
from .precision import MixedPrecisionPolicy, OffloadPolicy, offload_of, precision_of
from .slot import UnitOptions
from .unit import units_of
from .wrap import Units, wrap
from .zero_stage import Axes, ZeroStage, axes_of, make_zero_stage


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    axes: Axes | None = None,
    units: Units | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    find_unused_parameters: bool = False,
    transport: str | None = None,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """fully_shard(module, mesh) -> the module, split over the ranks (FSDP, ZeRO-3).

    Its parameters, gradients and optimizer state are split.

        sharded   rank 0 [w_0 rows 0:5]  rank 1 [w_0 rows 5:8, w_1]   so that nothing is copied for
                                                                      all_gather and reduce_scatter
        in use    all_gather -> w_0, w_1 -> forward -> free              again before backward
        backward  gradients of w_0, w_1 -> reduce_scatter -> `.grad`, split as the parameters are

    As with torch's `fully_shard`, call it on the blocks of a model first and on the model last;
    each call makes a unit of the parameters that are in no unit yet. Or name the blocks:
    `fully_shard(model, mesh, units=Block)`.

    Inputs may be plain tensors, different on each rank: gradients are averaged over the ranks, and
    the module computes with plain parameters. Or they may be sharded tensors: loss and gradients
    are those of the global batch. Parameters that `parallelize` has split over other axes of the
    mesh stay split in use.

    Args:
        module: a module; its parameters may be on "meta" (see `materialize`).
        mesh: the mesh, by default that of `with mesh:`; ours or torch's `DeviceMesh`. Parameters
            may already be split over other axes of the mesh, or over another slice of the mesh that
            this one is a slice of.
        axes: the axes that split parameters. By default all axes that split no parameter yet, but
            of two such axes only the second, as in torch: they are replicated over the first
            (HSDP).
        units: the modules that become units: classes, names of classes such as "LlamaDecoderLayer",
            patterns of paths such as "blocks.*", functions of path and module, or several of these.
            "auto" for the model's own blocks: the classes that a model of Hugging Face names in
            `_no_split_modules`, else the entries of each ModuleList of modules of one class.
        reshard_after_forward: True to free whole parameters after forward and gather them again for
            backward; False to keep them, which saves an all_gather; a number to keep them split
            over an axis of that size. By default True, and False for the outermost unit.
        mp_policy: dtypes; our policy or torch's.
        offload_policy: `CPUOffloadPolicy()` to keep sharded parameters on the host. The process
            group needs a backend for both devices.
        ignored_params: parameters to leave unchanged.
        find_unused_parameters: allow parameters that contribute to the loss on some ranks only; on
            the other ranks their gradient counts as zeros. Without it that is an error, which names
            them. Each unit must run on all ranks, except units of `data_parallel` whose parameters
            and optimizer state are not split.
        transport: "int8" or "fp8" to gather parameters and reduce gradients in 8 bits, see
            `redistribute`.
        src_data_rank: as in `distribute_tensor`: the rank whose values are used; None if all ranks
            have the same values already.

    Returns:
        The module itself.

    Raises:
        TypeError: several modules, or none.
        ValueError: axes that the mesh lacks or that split a parameter already; a parameter tied to
            one of an earlier unit; a number that is the size of no axis; offloading with parameters
            that are replicated over an axis.

    Communication: one all_to_all per parameter, none if `src_data_rank` is None. Then for each unit
        and step all_gathers of its parameters (one in forward and one in backward; with
        reshard_after_forward=False one) and one reduce_scatter of its gradients.

    Example:
        >>> for block in model.blocks:
        ...     sm.parallel.fully_shard(block, mesh)
        >>> sm.parallel.fully_shard(model, mesh)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    _check_module("fully_shard", module)
    options, keep = fully_shard_options(
        module,
        mesh,
        axes,
        reshard_after_forward,
        mp_policy,
        offload_policy,
        find_unused_parameters,
        transport,
        ignored_params,
    )
    return wrap(module, options, units, keep, ignored_params, src_data_rank)


def fully_shard_options(
    module: nn.Module,
    mesh: DeviceMesh | None,
    axes: Axes | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    find_unused_parameters: bool = False,
    transport: str | None = None,
    ignored: Collection[nn.Parameter] = (),
) -> tuple[UnitOptions, str | None]:
    """Return the units' options and what they keep after forward; arguments are `fully_shard`'s."""
    base_mesh = _mesh_of("fully_shard", "axes", mesh)
    used = _axes_in_use(module, ignored)
    mesh = _with_tensor_axes(module, base_mesh, ignored)
    names = axes_of("fully_shard: axes", _axes(used, base_mesh, axes), mesh)
    stage, offload = make_zero_stage(mesh, names, names, names), offload_of(offload_policy)
    if offload:
        _check_offload(used, mesh, stage)
    pinned = offload is not None and offload.pin_memory and is_asynchronous(mesh.device_type)
    offloaded = OffloadedGrads(mesh.device) if pinned else None
    data = _data_axes(used, base_mesh, stage)
    options = UnitOptions(
        mesh,
        stage,
        precision_of(mp_policy),
        transport,
        find_unused_parameters,
        offload,
        offloaded,
        data,
    )
    return options, what_to_keep(mesh, stage, reshard_after_forward)


def data_parallel(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    parameter: Axes = (),
    gradient: Axes = (),
    optimizer: Axes = (),
    units: Units | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    find_unused_parameters: bool = False,
    transport: str | None = None,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """data_parallel(module, mesh, parameter=, gradient=, optimizer=) -> the module.

    In any stage from DDP to FSDP: each keyword names the axes that split these.

        DDP      ()    ()    ()      ZeRO-2   ()      "dp"    "dp"        HSDP on a mesh (dp, fsdp):
        ZeRO-1   ()    ()    "dp"    FSDP     "dp"    "dp"    "dp"        "fsdp"   "fsdp"   "fsdp"

    Args:
        parameter: the axes over which parameters are split between steps.
        gradient: the axes over which gradients are split while they accumulate in
            `accumulate_grads()`: those of the optimizer, for a reduce_scatter per microbatch, or
            none, for whole gradients in memory and one reduce_scatter at the end.
        optimizer: the axes over which optimizer state is split, and the parameters in
            `module.parameters()`.
        module, mesh, units, mp_policy, ignored_params: as in `fully_shard`.
        find_unused_parameters, transport, src_data_rank: as in `fully_shard`.

    Raises:
        TypeError, ValueError: as `fully_shard`; parameters split over axes that do not split the
            optimizer; gradients split over other axes than it.

    With plain inputs, buffers that forward writes (the running statistics of batch norm) are each
    rank's own: unlike DDP, nothing broadcasts rank 0's. See `docs/parallel.md`.

    Communication: as the table in `docs/parallel.md` says.

    Example:
        >>> sm.parallel.data_parallel(model, mesh, optimizer="dp")       # ZeRO-1
    """
    _check_module("data_parallel", module)
    base_mesh = _mesh_of("data_parallel", "parameter", mesh)
    mesh = _with_tensor_axes(module, base_mesh, ignored_params)
    stage = make_zero_stage(mesh, parameter, gradient, optimizer)
    data = _data_axes(_axes_in_use(module, ignored_params), base_mesh, stage)
    options = UnitOptions(
        mesh, stage, precision_of(mp_policy), transport, find_unused_parameters, data_axes=data
    )
    return wrap(module, options, units, None, ignored_params, src_data_rank)


# -- options ---------------------------------------------------------------------------------------


def _check_module(layer: str, module: object) -> None:
    """Raise a TypeError for what is no module, such as a list of modules."""
    if isinstance(module, nn.Module):
        return
    several = isinstance(module, (list, tuple))
    remedy = "; sm.compat.fully_shard makes one unit of several modules" if several else ""
    raise TypeError(f"{layer} takes one module, got a {type(module).__name__}{remedy}")


def _check_offload(used: set[str], mesh: DeviceMesh, stage: ZeroStage) -> None:
    """Raise a ValueError if gradients would have to be reduced on the host."""
    copies = [
        axis
        for axis in mesh.axis_names
        if mesh.size(axis) > 1 and axis not in {*stage.optimizer, *used}
    ]
    if copies:
        raise ValueError(
            f"offload_policy with parameters replicated over {copies} of {mesh}: their gradients "
            "would be reduced on the host; split over all axes, "
            f"axes={(*copies, *stage.optimizer)!r}"
        )


def _mesh_of(layer: str, argument: str, mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the given mesh, or the current one.

    Raises:
        TypeError: names of axes are given instead of a mesh; there is no current mesh.
    """
    if isinstance(mesh, str | tuple | list):
        raise TypeError(
            f"{layer}(module, {mesh!r}): the second argument is the mesh; write {layer}(module, "
            f"mesh, {argument}={mesh!r}), or {layer}(module, {argument}={mesh!r}) inside `with "
            "mesh:`"
        )
    return given_or_current(mesh)


def _axes(used: set[str], mesh: DeviceMesh, axes: Axes | None) -> Axes:
    """Return the axes over which to split parameters."""
    if axes is not None:
        return axes
    free = [axis for axis in mesh.axis_names if axis not in used]
    if len(free) not in (1, 2):
        raise ValueError(
            f"{mesh} has the axes {free} that split no parameter yet; give axes=..., the ones over "
            "which to split parameters: over the others they are replicated"
        )
    return free[-1]


def _with_tensor_axes(
    module: nn.Module, mesh: DeviceMesh, ignored: Collection[nn.Parameter]
) -> DeviceMesh:
    """Return the mesh extended by the axes of parameters that are on a slice of the same one.

    Nested units extend it if their mesh contains this one: others have their parameters on a mesh
    of their own, as experts do.
    """
    of_units = {unit.plan.options.mesh for unit in units_of(module)}
    meshes = {x.mesh for x in _sharded_outside_units(module, ignored)}
    meshes |= {other for other in of_units if is_slice(mesh, other)}
    others = [other for other in meshes if not set(other.axis_names) <= set(mesh.axis_names)]
    return (common_mesh([mesh, *others]) if others else None) or mesh


def _sharded_outside_units(
    module: nn.Module, ignored: Collection[nn.Parameter]
) -> list[ShardedTensor]:
    """Return the sharded parameters that are in no unit yet, without the ignored ones."""
    taken = {id(slot.value) for unit in units_of(module) for slot in unit.plan.slots} | {
        id(x) for x in ignored
    }
    return [x for x in module.parameters() if isinstance(x, ShardedTensor) and id(x) not in taken]


def _axes_in_use(module: nn.Module, ignored: Collection[nn.Parameter]) -> set[str]:
    """Return the axes that split parameters in use (tensor parallelism)."""
    outside = {axis for x in _sharded_outside_units(module, ignored) for axis in x.spec.axes}
    return outside.union(*(unit.plan.tensor_axes for unit in units_of(module)))


def _data_axes(used: set[str], mesh: DeviceMesh, stage: ZeroStage) -> tuple[str, ...]:
    """Return the axes along which plain inputs may differ.

    Those that split parameters, and others without tensor parallelism.
    """
    return tuple(axis for axis in mesh.axis_names if axis in stage.optimizer or axis not in used)


def what_to_keep(mesh: DeviceMesh, stage: ZeroStage, reshard: bool | int | None) -> str | None:
    """Return which parameters a unit keeps after its forward, None for the default."""
    if reshard is None or isinstance(reshard, bool):
        return {None: None, True: "rest", False: "all"}[reshard]
    sizes = {axis: mesh.size(axis) for axis in stage.optimizer}
    if reshard in (1, mesh.size(stage.optimizer)):
        return "all" if reshard == 1 else "rest"
    fitting = [axis for axis, size in sizes.items() if size == reshard]
    if not fitting:
        raise ValueError(
            f"reshard_after_forward={reshard} is not the size of any of the axes {sizes}; make the "
            f"mesh with an axis of {reshard} ranks or pass True or False"
        )
    return fitting[-1]
