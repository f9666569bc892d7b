"""Data parallelism: whose parameters are units, and how the units of a model are split."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from ....mesh.context import given_or_current
from ....mesh.device_mesh import DeviceMesh, common_mesh
from ...tensor.sharded_tensor import ShardedTensor
from .precision import CPUOffloadPolicy, MixedPrecisionPolicy, offload_of, precision_of
from .schedule import units_in
from .slot import Options
from .wrap import Units, split
from .zero_stage import Axes, Form, form_of


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    axes: Axes | None = None,
    units: Units | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: CPUOffloadPolicy | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    find_unused_parameters: bool = False,
    transport: str | None = None,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """fully_shard(module, mesh) -> the module, its parameters, gradients and optimizer state split over the ranks (FSDP, ZeRO-3).

        at rest   rank 0 [w_0 rows 0:5]  rank 1 [w_0 rows 5:8, w_1]      cut so that gathering and summing copy nothing
        in use    all_gather -> w_0, w_1 -> forward -> let go            again before backward
        backward  gradients of w_0, w_1 -> reduce_scatter -> `.grad`, split as the parameters are

    As with torch's `fully_shard`, call it on the blocks of a model first and on the model last; each call makes one unit of the parameters
    that no call before has taken. Or name the blocks: `fully_shard(model, mesh, units=Block)`.

    Inputs may be plain tensors, other ones on each rank: gradients are averaged over the ranks, and the module computes with plain
    parameters. Or they may be sharded tensors: the loss is that of the global batch, and so are the gradients. Parameters that
    `parallelize` has split over other axes of the mesh stay split while they are used.

    Args:
        module: a module; its parameters may be on "meta" (see `materialize`).
        mesh: the mesh, by default that of `with mesh:`; torch's `DeviceMesh` is taken, too. Parameters may already be split over other
            axes of the mesh, or over another slice of the mesh that this one is a slice of.
        axes: the axes that split parameters. By default all axes that split no parameter yet, but of two such axes only the second, as
            in torch: over the first, parameters are replicated (HSDP).
        units: what becomes a unit of its own: module classes, names of classes such as "LlamaDecoderLayer", patterns of paths such as
            "blocks.*", functions of path and module, or several of these; `model._no_split_modules` of Hugging Face as it is.
        reshard_after_forward: True to let whole parameters go after forward and gather them again for backward; False to keep them, which
            saves an all_gather; a number to keep them split over an axis of that size. By default True, and False for the outermost unit.
        mp_policy: dtypes; torch's own policy is taken, too.
        offload_policy: `CPUOffloadPolicy()` to keep parameters at rest on the host. The process group needs a backend for both devices.
        ignored_params: parameters that stay as they are.
        find_unused_parameters: parameters may take part in the loss on some ranks and not on others; those that do not on a rank count
            as having a gradient of zeros there. Without it that is an error, which names them. Each unit has to run on all ranks; those
            of `data_parallel` whose parameters and optimizer are not split may be left out on some.
        transport: "int8" or "fp8" to gather parameters and sum gradients in 8 bits, see `redistribute`.
        src_data_rank: as in `distribute_tensor`: values are those of this rank; None if all ranks have the same already.

    Returns:
        the module itself.

    Raises:
        ValueError: axes that the mesh lacks or that split a parameter already; a parameter tied to one of a unit made before; a number
            that is the size of no axis; offloading where parameters are replicated over an axis.

    Communication: one all_to_all per parameter, none if `src_data_rank` is None. Then for each unit and step all_gathers of its parameters
        (one in forward and one in backward; with reshard_after_forward=False one) and one reduce_scatter of its gradients.

    Example:
        >>> for block in model.blocks:
        ...     sm.fully_shard(block, mesh)
        >>> sm.fully_shard(model, mesh)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    given = _mesh_of("fully_shard", "axes", mesh)
    names, mesh = _axes(module, given, axes), _with_tensor_axes(module, given)
    form, offload = form_of(mesh, names, names, names), offload_of(offload_policy)
    if offload:
        _check_offload(module, mesh, form)
    options = Options(mesh, form, precision_of(mp_policy), transport, find_unused_parameters, offload)
    kept = _kept(mesh, form, reshard_after_forward)
    return split(module, options, units, kept, ignored_params, src_data_rank)


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
    """data_parallel(module, mesh, parameter=axes, gradient=axes, optimizer=axes) -> the module, in any form of data parallelism.

        DDP      ()       ()       ()          ZeRO-2   ()       "dp"     "dp"         HSDP on a mesh (dp, fsdp):
        ZeRO-1   ()       ()       "dp"        FSDP     "dp"     "dp"     "dp"         "fsdp"   "fsdp"   "fsdp"

    Args:
        parameter: the axes over which parameters are split between steps.
        gradient: the axes over which gradients are split while they accumulate inside `accumulate_grads()`: those of the optimizer, for a
            reduce_scatter per micro-batch, or none, for whole gradients in memory and one reduce_scatter at the end.
        optimizer: the axes over which the optimizer's state is split, and what `module.parameters()` gives it to step.
        module, mesh, units, mp_policy, ignored_params, find_unused_parameters, transport, src_data_rank: as in `fully_shard`.

    Raises:
        ValueError: as `fully_shard`; parameters split over axes over which the optimizer is not; gradients over others than it.

    Communication: as the table in `docs/parallel.md` says.

    Example:
        >>> sm.data_parallel(model, mesh, optimizer="dp")       # ZeRO-1
    """
    mesh = _with_tensor_axes(module, _mesh_of("data_parallel", "parameter", mesh))
    form = form_of(mesh, parameter, gradient, optimizer)
    options = Options(mesh, form, precision_of(mp_policy), transport, find_unused_parameters)
    return split(module, options, units, None, ignored_params, src_data_rank)


# -- options -----------------------------------------------------------------------------------------------------------


def _check_offload(module: nn.Module, mesh: DeviceMesh, form: Form) -> None:
    """Raises: ValueError if gradients would have to be summed on the host."""
    copies = [axis for axis in mesh.axis_names if mesh.size(axis) > 1 and axis not in {*form.optimizer, *_axes_in_use(module)}]
    if copies:
        raise ValueError(
            f"offload_policy with parameters replicated over {copies} of {mesh}: their gradients would be summed on the host; "
            f"split over all axes, axes={(*copies, *form.optimizer)!r}"
        )


def _mesh_of(layer: str, argument: str, mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh that was given, or the current one.

    Raises:
        TypeError: names of axes stand in its place; there is no mesh.
    """
    if isinstance(mesh, str | tuple | list):
        raise TypeError(
            f"{layer}(module, {mesh!r}): the second argument is the mesh; write {layer}(module, mesh, {argument}={mesh!r}), "
            f"or {layer}(module, {argument}={mesh!r}) inside `with mesh:`"
        )
    return given_or_current(mesh)


def _axes(module: nn.Module, mesh: DeviceMesh, axes: Axes | None) -> Axes:
    """The axes over which parameters are to be split."""
    if axes is not None:
        return axes
    used = _axes_in_use(module)
    free = [axis for axis in mesh.axis_names if axis not in used]
    if len(free) not in (1, 2):
        raise ValueError(
            f"of {mesh} the axes {free} split no parameter yet: say by axes=... over which parameters are to be split; over the others "
            "they are replicated"
        )
    return free[-1]


def _with_tensor_axes(module: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh with the axes of sharded parameters as well, if theirs and this one are slices of one mesh, as in torch's recipes."""
    found = {x.mesh for x in module.parameters() if isinstance(x, ShardedTensor)}
    others = [other for other in found if not set(other.axis_names) <= set(mesh.axis_names)]
    return (common_mesh([mesh, *others]) if others else None) or mesh


def _axes_in_use(module: nn.Module) -> set[str]:
    """The axes that split parameters while they are used."""
    units = units_in(module)
    taken = {id(slot.value) for unit in units for slot in unit.slots}
    others = [x for x in module.parameters() if isinstance(x, ShardedTensor) and id(x) not in taken]
    return {axis for unit in units for axis in unit.tensor_axes} | {axis for x in others for axis in x.spec.axes}


def _kept(mesh: DeviceMesh, form: Form, wanted: bool | int | None) -> str | None:
    """What a unit keeps after its forward; None for the default."""
    if wanted is None or isinstance(wanted, bool):
        return {None: None, True: "rest", False: "all"}[wanted]
    sizes = {axis: mesh.size(axis) for axis in form.optimizer}
    if wanted in (1, mesh.size(form.optimizer)):
        return "all" if wanted == 1 else "rest"
    fitting = [axis for axis, size in sizes.items() if size == wanted]
    if not fitting:
        raise ValueError(
            f"reshard_after_forward={wanted} is the size of none of the axes {sizes}; make the mesh with an axis of {wanted} ranks, or say "
            "True or False"
        )
    return fitting[-1]
