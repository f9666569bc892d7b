"""Values for a module that was made on "meta", each rank making those that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import Layout
from ...layout.spec import P
from ...tensor.sharded_tensor import ShardedTensor
from ..replaced import mark_replaced
from .schedule import units_in
from .unit import Unit

_NAMED = 4  # so many modules are named in a message


def materialize(module: nn.Module, init: Callable[[nn.Module], object] | None = None) -> nn.Module:
    """materialize(module) -> the module, its tensors on "meta" given memory and initial values.

        with torch.device("meta"): model = Model()      no memory
        fully_shard(model, mesh, units=Block)           it is known which rows lie where
        materialize(model)                              each rank makes its rows: the same numbers on every mesh

    Each module that owns tensors on "meta" is initialised by its `reset_parameters()`, inner modules first, as in construction; inside
    a model of Hugging Face by the model's `_init_weights(module)`, which computes buffers such as `inv_freq`, too. Random numbers are
    those of `manual_seed`, and do not depend on the mesh.

    Args:
        module: after `fully_shard` or `parallelize`; make the optimizer after this call, which replaces parameters.
        init: called on each such module instead; its parameters are sharded tensors.

    Raises:
        ValueError: no parameter lies on a mesh; modules that own tensors on "meta" have nothing to initialise them, or it leaves some
            of these tensors as they are.

    Communication: none for initialisers that work element by element.

    Example:
        >>> sm.manual_seed(0)
        >>> sm.materialize(model)
        >>> sm.load_safetensors("llama/", like=model)       # or keep the initial values
    """
    owners = {name: inner for name, inner in _inner_first(module, "") if any(_is_meta(x) for x in _tensors(inner))}
    if not owners:
        return module
    mesh, steps = _mesh_of(module), _steps(module, owners, init)
    with torch.no_grad():
        memory = _Memory(mesh, units_in(module))
        for inner in owners.values():
            memory.give(inner)
        before = {name: _versions(inner) for name, inner in owners.items()}
        for initialise, inner in steps:
            _initialised(initialise, inner)
        if init is None:
            _check_written(owners, before)
        for inner in owners.values():
            memory.lay_plain(inner)
        memory.lay_buffers_plain()
    for unit in units_in(module):
        unit.settle()
    return module


def _inner_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _inner_first(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (x for table in (module._parameters, module._buffers) for x in table.values() if x is not None)


def _is_meta(x: Tensor) -> bool:
    return (x._local if isinstance(x, ShardedTensor) else x).is_meta


def _mesh_of(module: nn.Module) -> DeviceMesh:
    """The mesh with every axis.

    Raises:
        ValueError: no tensor lies on one.
    """
    units = units_in(module)
    meshes = [x.mesh for inner in module.modules() for x in _tensors(inner) if isinstance(x, ShardedTensor)]
    if not units and not meshes:
        raise ValueError(f"{type(module).__name__} has no unit, so it is not known which rank holds what; call fully_shard first")
    return units[0].options.mesh if units else max(meshes, key=lambda mesh: mesh.ndim)


# -- initial values ----------------------------------------------------------------------------------------------------

_Step = tuple[Callable[[nn.Module], object], nn.Module]


def _steps(module: nn.Module, owners: dict[str, nn.Module], init: Callable[[nn.Module], object] | None) -> list[_Step]:
    """What initialises which module, in order.

    Raises:
        ValueError: there is nothing that does for some.
    """
    if init is not None:
        return [(init, inner) for inner in owners.values()]
    of_model = dict(_by_model(module, None))
    without = [name for name, inner in owners.items() if id(inner) not in of_model and _own_reset(inner) is None]
    if without:
        said = [f"{name or 'the module itself'} ({type(owners[name]).__name__})" for name in without]
        raise ValueError(f"no reset_parameters() to give values to the tensors on meta of {_some(said)}; define it, or pass init=")
    owned = {id(inner) for inner in owners.values()}
    found: list[_Step] = []
    for _, inner in _inner_first(module, ""):
        if id(inner) in of_model and all(_is_meta(x) for part in inner.modules() for x in _tensors(part)):
            found.append((of_model[id(inner)], inner))  # also where it owns nothing: it may rescale what is inside
        elif id(inner) in owned:
            found.append((of_model.get(id(inner), _reset), inner))
    return found


def _by_model(module: nn.Module, around: Callable[[nn.Module], object] | None) -> Iterator[tuple[int, Callable[[nn.Module], object]]]:
    """By the number of each module inside a model of Hugging Face: what the innermost such model initialises modules with."""
    initialise = getattr(module, "_init_weights", around)
    if initialise is not None:
        yield id(module), initialise  # type: ignore[misc]
    for child in module.children():
        yield from _by_model(child, initialise)  # type: ignore[arg-type]


def _own_reset(module: nn.Module) -> Callable[[], object] | None:
    """What gives a module its initial values; some of torch's own have it under the second name."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _reset(module: nn.Module) -> object:
    reset: Any = _own_reset(module)
    return reset()


def _initialised(initialise: Callable[[nn.Module], object], module: nn.Module) -> None:
    padding = getattr(module, "padding_idx", None) if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else None
    if padding is None or not isinstance(module.weight, ShardedTensor):
        initialise(module)
        return
    module.padding_idx = None  # type: ignore[assignment]  # its row is one of a view, which has no rule: it is written where it lies
    try:
        initialise(module)
    finally:
        module.padding_idx = padding
    _clear_row(module.weight, padding)  # type: ignore[arg-type]


def _clear_row(x: ShardedTensor, row: int) -> None:
    start, stop = x._layout.box[0]
    if start <= row < stop:
        x._local[row - start] = 0


def _versions(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """By name, what changes when a tensor of the module is written or replaced."""
    named = {name: x for table in (module._parameters, module._buffers) for name, x in table.items() if x is not None}
    return {name: (id(x), getattr(x, "_local", x)._version, getattr(x, "_data_accesses", 0)) for name, x in named.items()}


def _check_written(owners: dict[str, nn.Module], before: dict[str, dict[str, tuple[int, int, int]]]) -> None:
    """Raises: ValueError for tensors that no initialiser has written; the same on all ranks, as they all run the same ones."""
    left = [
        f"{path}.{name}" if path else name
        for path, inner in owners.items()
        for name, version in _versions(inner).items()
        if before[path].get(name) == version
    ]
    if left:
        raise ValueError(
            f"nothing gives values to {_some(left)}, which were on meta; have reset_parameters() or _init_weights() do so, or pass init="
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


class _Memory:
    """Gives tensors on "meta" memory: tied ones the same."""

    def __init__(self, mesh: DeviceMesh, units: Sequence[Unit]) -> None:
        self._mesh = mesh
        self._homes = {number: device for unit in units for number, device in unit.homes()}
        self._given: dict[int, tuple[Tensor, nn.Parameter]] = {}  # by the number of the old one, which is kept so that it stays its own
        self._plain: dict[int, nn.Parameter] = {}
        self._buffers: list[tuple[nn.Module, str]] = []

    def give(self, module: nn.Module) -> None:
        for name, x in list(module._parameters.items()):
            if x is not None and _is_meta(x):
                setattr(module, name, self._given.setdefault(id(x), (x, self._parameter(x)))[1])
        for name, x in list(module._buffers.items()):
            if x is not None and _is_meta(x):
                module._buffers[name] = self._allocated(x)
                if not isinstance(x, ShardedTensor):
                    self._buffers.append((module, name))

    def _parameter(self, x: Tensor) -> nn.Parameter:
        values = self._allocated(x)
        mark_replaced(x)
        out = nn.Parameter(values, requires_grad=x.requires_grad)
        if not isinstance(x, ShardedTensor):
            self._plain[id(out)] = nn.Parameter(values._local, requires_grad=x.requires_grad)
        return out

    def _allocated(self, x: Tensor) -> ShardedTensor:
        """Memory for a tensor; for a plain one as a replicated one, so that all ranks make the same values."""
        layout = x._layout if isinstance(x, ShardedTensor) else Layout.of(self._mesh, P(), x.shape, x.dtype)
        device = self._homes.get(id(x), layout.mesh.device)  # type: ignore[union-attr]
        return ShardedTensor._make_guarded(torch.empty(layout.local_shape, dtype=x.dtype, device=device), layout)

    def lay_plain(self, module: nn.Module) -> None:
        """Have parameters that belong to no unit be plain tensors again."""
        for name, x in list(module._parameters.items()):
            if id(x) in self._plain:
                setattr(module, name, self._plain[id(x)])

    def lay_buffers_plain(self) -> None:
        for module, name in self._buffers:
            x = module._buffers[name]
            if isinstance(x, ShardedTensor):
                module._buffers[name] = x.full_tensor()
