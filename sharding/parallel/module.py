"""Modules with sharded parameters."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...mesh.context import given_or_current
from ...mesh.device_mesh import DeviceMesh
from ..ops.prepared_modules import prepare
from ..tensor.convert import distribute_tensor
from ..tensor.resharding import settled
from ..tensor.sharded_tensor import ShardedTensor
from .module_repr import show_layouts_in_repr
from .replaced import mark_replaced

PartitionFn = Callable[[str, nn.Module, DeviceMesh], None]


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: PartitionFn | None = None,
    input_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """distribute_module(module, mesh, partition_fn) -> the module, parameters and buffers sharded.

    From then on its `repr` shows their layouts.

    Args:
        module: any module.
        device_mesh: the mesh; by default that of `with mesh:`.
        partition_fn: `(name, submodule, mesh)`, called for every submodule to replace parameters by
            sharded ones, for instance with `shard_parameter`. Parameters that it leaves plain
            become replicated; tied parameters stay tied.
        input_fn: `(module, inputs, mesh) -> inputs`, run before the module's forward.
        output_fn: `(module, outputs, mesh) -> outputs`, run after it.
        src_data_rank: as in `distribute_tensor`.

    Raises:
        ValueError: `partition_fn` gave a tied parameter two layouts.

    Communication: one all_to_all per parameter and buffer; none if `src_data_rank` is None.

    Example:
        >>> def shard_rows(name, module, mesh):
        ...     if isinstance(module, nn.Linear):
        ...         shard_parameter(module, "weight", mesh, P("tp"))
        >>> model = distribute_module(nn.Linear(4, 8), mesh, shard_rows)
    """
    mesh = given_or_current(device_mesh)
    tied = _tied_places(module)
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
    _tie(tied)
    for submodule in module.modules():
        _replicate_rest(submodule, mesh, src_data_rank)
        show_layouts_in_repr(submodule)
    _tie(tied)
    prepare(module)
    if input_fn is not None:
        prepare_input = _with_module(input_fn, "input_fn")
        module.register_forward_pre_hook(lambda m, inputs: settled(prepare_input(m, inputs, mesh)))
    if output_fn is not None:
        prepare_output = _with_module(output_fn, "output_fn")
        module.register_forward_hook(
            lambda m, inputs, outputs: settled(prepare_output(m, outputs, mesh))
        )
    return module


def _with_module(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return a hook that takes the module first; torch's older `(values, mesh)` gets a warning.

    Raises:
        ValueError: a function of another number of arguments.
    """
    taken = inspect.signature(function).parameters.values()
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in taken)
    if count >= 3 or any(p.kind is p.VAR_POSITIONAL for p in taken):
        return function
    if count != 2:
        raise ValueError(
            f"distribute_module: {what} takes {count} arguments; it is called with (module, "
            "values, device_mesh)"
        )
    text = (
        f"distribute_module: {what} without the module is deprecated; write (module, values, "
        "device_mesh)"
    )
    warnings.warn(text, FutureWarning, stacklevel=3)
    return lambda module, values, mesh: function(values, mesh)


def shard_parameter(
    module: nn.Module,
    name: str,
    device_mesh: DeviceMesh,
    placements: Any = None,
    *,
    src_data_rank: int | None = 0,
) -> None:
    """Replace the parameter or buffer `name` of a module by a sharded one.

    Raises:
        AttributeError: the module has no parameter or buffer of that name.

    Communication: as `distribute_tensor`.
    """
    if module._parameters.get(name) is not None:
        module.register_parameter(
            name,
            sharded_parameter(module._parameters[name], device_mesh, placements, src_data_rank),
        )
    elif (buffer := module._buffers.get(name)) is not None:
        module._buffers[name] = distribute_tensor(
            buffer, device_mesh, placements, src_data_rank=src_data_rank
        )
    else:
        known = [*module._parameters, *module._buffers]
        raise AttributeError(
            f"{type(module).__name__} has no parameter or buffer {name!r}; it has {known}"
        )


def sharded_parameter(
    tensor: Tensor | None, mesh: DeviceMesh, placements: Any, src_data_rank: int | None
) -> nn.Parameter:
    """Return a parameter with the values of `tensor`, sharded over the mesh."""
    if tensor is None:
        raise TypeError("expected a tensor, got None")
    value = distribute_tensor(tensor.detach(), mesh, placements, src_data_rank=src_data_rank)
    mark_replaced(tensor)
    return nn.Parameter(value, requires_grad=tensor.requires_grad)


def _replicate_rest(module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None and not isinstance(tensor, ShardedTensor):
                shard_parameter(module, name, mesh, src_data_rank=src_data_rank)


# modules' dicts of parameters or buffers, and names in them
Places = list[tuple[dict[str, Any], str]]


def _tied_places(module: nn.Module) -> list[Places]:
    """Return the places of each parameter or buffer that has several."""
    places: dict[int, Places] = {}
    for submodule in module.modules():
        for table in (submodule._parameters, submodule._buffers):
            for name, tensor in table.items():
                places.setdefault(id(tensor), []).append((table, name))
    return [
        tensor_places
        for tensor_places in places.values()
        if len(tensor_places) > 1 and tensor_places[0][0][tensor_places[0][1]] is not None
    ]


def _tie(tied: list[Places]) -> None:
    """Set the same sharded tensor in all places that shared one tensor."""
    for places in tied:
        sharded = [table[name] for table, name in places if isinstance(table[name], ShardedTensor)]
        layouts = {x._layout for x in sharded}
        if len(layouts) > 1:
            names = [name for _, name in places]
            raise ValueError(
                f"a tensor that {names} share was sharded as "
                f"{' and '.join(sorted(map(str, layouts)))}; shard it once"
            )
        for table, name in places if sharded else ():
            table[name] = sharded[0]
