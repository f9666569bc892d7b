"""`materialize`: memory and initial values for a module made on "meta".

Each rank makes the values that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ....mesh.comm.current_world import current_world
from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import Layout
from ...layout.spec import P
from ...tensor.random import RandomStream, TorchGenerators, hash_numbers
from ...tensor.sharded_tensor import ShardedTensor
from ..replaced import mark_replaced
from .unit import Unit, units_in

_NAMED = 4  # modules listed in a message
_DRAWS = 2**20  # numbers of random tensors that are set aside for an initialiser


def materialize(module: nn.Module, init: Callable[[nn.Module], object] | None = None) -> nn.Module:
    """materialize(module) -> the module, with memory and initial values for its tensors on "meta".

        with torch.device("meta"): model = Model()    no memory
        fully_shard(model, mesh, units=Block)         assigns rows to ranks
        materialize(model)                            makes its rows: the same values on every mesh

    Each module that owns tensors on "meta" is initialised by its `reset_parameters()`, inner
    modules first, as in construction; within a Hugging Face model by the model's
    `_init_weights(module)`, which also computes buffers such as `inv_freq`. Random numbers are
    those of `manual_seed` and do not depend on the mesh; torch's generators, of which plain tensors
    in initialisers are drawn, are seeded by them, and are afterwards as before.

    Args:
        module: after `fully_shard` or `parallelize`; make the optimizer after this call, which
            replaces parameters.
        init: called on each such module instead; its parameters are sharded tensors.

    Raises:
        ValueError: no parameter is on a mesh; a module that owns tensors on "meta" has no
            initialiser, or its initialiser does not write some of them.

    Communication: none for initialisers that work element by element.

    Example:
        >>> sm.random.manual_seed(0)
        >>> sm.parallel.materialize(model)
        >>> sm.checkpoint.load_safetensors("llama/", like=model)       # or keep the initial values
    """
    if any(_is_meta(x) for inner in module.modules() for x in _tensors(inner)):
        units = units_in(module)
        write_initial_values(module, _mesh_of(module), units, init)
        for unit in units:
            unit.plan.flatten_parameters()
    return module


def write_initial_values(
    module: nn.Module,
    mesh: DeviceMesh,
    units: Sequence[Unit],
    init: Callable[[nn.Module], object] | None,
) -> None:
    """Replace the tensors on "meta" of a module, and write their initial values: see `materialize`.

    Args:
        module: in it, a `ShardedTensor` on a mesh that this rank is no part of stands for a tensor
            of other ranks. It is initialised as well, without memory, so that random numbers are
            those of the whole module.
        mesh: of plain tensors, which are equal on its ranks.
        units: of the parameters, which say on which devices these are.
        init: as in `materialize`.

    Raises:
        ValueError: as `materialize`.
    """
    owners = {
        name: inner
        for name, inner in _post_order(module, "")
        if any(_is_meta(x) for x in _tensors(inner))
    }
    steps = _steps(module, owners, init)
    generators = TorchGenerators(torch.device(mesh.device_type))
    stream = current_world().state(RandomStream)
    first_draw = stream.drawn
    with torch.no_grad(), generators.restored(), _NoElementsElsewhere():
        memory = _Memory(mesh, units)
        for inner in owners.values():
            memory.allocate(inner)
        before = {name: _versions(inner) for name, inner in owners.items()}
        for number, (initialise, inner) in enumerate(steps):
            # how often the one before has drawn may depend on values that other ranks do not have
            stream.drawn = first_draw + number * _DRAWS
            # for what is drawn as plain tensors, which are one value on all ranks
            generators.seed(hash_numbers(stream.seed, stream.drawn, number))
            _initialise(initialise, inner)
        stream.drawn = first_draw + len(steps) * _DRAWS
        if init is None:
            _check_written(owners, before)
        for inner in owners.values():
            memory.restore_plain_params(inner)
        memory.restore_plain_buffers()


class _NoElementsElsewhere(TorchFunctionMode):
    """Inside, `any()` and `all()` of a tensor on other ranks are those of no elements.

    Some initialisers ask whether they have to draw again, such as `nn.init.trunc_normal_`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_any, is_all = func in (Tensor.any, torch.any), func in (Tensor.all, torch.all)
        if (is_any or is_all) and len(args) == 1 and not kwargs:
            x = args[0]
            if isinstance(x, ShardedTensor) and x.mesh.coordinate is None:
                return torch.tensor(is_all)
        return func(*args, **(kwargs or {}))


def _post_order(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _post_order(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (
        x
        for table in (module._parameters, module._buffers)
        for x in table.values()
        if x is not None
    )


def _is_meta(x: Tensor) -> bool:
    return (x._local if isinstance(x, ShardedTensor) else x).is_meta


def _mesh_of(module: nn.Module) -> DeviceMesh:
    """Return the mesh with all axes.

    Raises:
        ValueError: no tensor is on a mesh.
    """
    units = units_in(module)
    meshes = [
        x.mesh
        for inner in module.modules()
        for x in _tensors(inner)
        if isinstance(x, ShardedTensor)
    ]
    if not units and not meshes:
        raise ValueError(
            f"{type(module).__name__} is not sharded, so it is not known which rank holds what; "
            "call fully_shard first"
        )
    return units[0].plan.options.mesh if units else max(meshes, key=lambda mesh: mesh.ndim)


# -- initial values --------------------------------------------------------------------------------

Init = Callable[[nn.Module], object]


def _steps(
    module: nn.Module, owners: dict[str, nn.Module], init: Init | None
) -> list[tuple[Init, nn.Module]]:
    """Return each initialiser with its module, in order.

    Raises:
        ValueError: a module has no initialiser.
    """
    if init is not None:
        return [(init, inner) for inner in owners.values()]
    of_model = dict(_by_model(module, None))
    missing = [
        name
        for name, inner in owners.items()
        if id(inner) not in of_model and _own_reset(inner) is None
    ]
    if missing:
        listed = [
            f"{name or 'the module itself'} ({type(owners[name]).__name__})" for name in missing
        ]
        raise ValueError(
            f"no reset_parameters() to initialise the tensors on meta of {_some(listed)}; define "
            "it, or pass init="
        )
    owned = {id(inner) for inner in owners.values()}
    steps: list[tuple[Init, nn.Module]] = []
    for _, inner in _post_order(module, ""):
        if id(inner) in of_model and all(
            _is_meta(x) for part in inner.modules() for x in _tensors(part)
        ):
            # Also without its own tensors: it may rescale those of submodules.
            steps.append((of_model[id(inner)], inner))
        elif id(inner) in owned:
            steps.append((of_model.get(id(inner), _reset), inner))
    return steps


def _by_model(module: nn.Module, outer: Init | None) -> Iterator[tuple[int, Init]]:
    """Yield the id of each module and the `_init_weights` of the innermost model around it."""
    initialise = getattr(module, "_init_weights", outer)
    if initialise is not None:
        yield id(module), initialise  # type: ignore[misc]
    for child in module.children():
        yield from _by_model(child, initialise)  # type: ignore[arg-type]


def _own_reset(module: nn.Module) -> Callable[[], object] | None:
    """Return a module's reset method; some modules of torch have it under the second name."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _reset(module: nn.Module) -> object:
    reset: Any = _own_reset(module)
    return reset()


def _initialise(initialise: Init, module: nn.Module) -> None:
    padding = (
        getattr(module, "padding_idx", None)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        else None
    )
    if padding is None or not isinstance(module.weight, ShardedTensor):
        initialise(module)
        return
    # the initialiser would write a row of a view, which has no rule
    module.padding_idx = None  # type: ignore[assignment]
    try:
        initialise(module)
    finally:
        module.padding_idx = padding
    start, stop = module.weight._layout.box[0]
    if start <= padding < stop:
        module.weight._local[padding - start] = 0


def _versions(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Return by name a version token of each tensor; writing or replacing the tensor changes it.

    What is on "meta" has none: it has no values, and some initialisers do nothing there.
    """
    named = {
        name: x
        for table in (module._parameters, module._buffers)
        for name, x in table.items()
        if x is not None and not _is_meta(x)
    }
    return {
        name: (id(x), getattr(x, "_local", x)._version, getattr(x, "_data_accesses", 0))
        for name, x in named.items()
    }


def _check_written(
    owners: dict[str, nn.Module], before: dict[str, dict[str, tuple[int, int, int]]]
) -> None:
    """Raise a ValueError, the same on all ranks, for tensors that no initialiser has written."""
    left = [
        f"{path}.{name}" if path else name
        for path, inner in owners.items()
        for name, version in _versions(inner).items()
        if before[path].get(name) == version
    ]
    if left:
        raise ValueError(
            f"no initialiser writes {_some(left)}, which were on meta; set them in "
            "reset_parameters() or _init_weights(), or pass init="
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (
        f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    )


class _Memory:
    """Allocates memory for tensors on "meta"; tied ones share it."""

    def __init__(self, mesh: DeviceMesh, units: Sequence[Unit]) -> None:
        self._mesh = mesh
        self._devices = {
            number: device for unit in units for number, device in unit.plan.parameter_devices()
        }
        # by id of the old one, which is kept alive
        self._allocated_params: dict[int, tuple[Tensor, nn.Parameter]] = {}
        self._plain: dict[int, nn.Parameter] = {}
        self._buffers: list[tuple[nn.Module, str]] = []

    def allocate(self, module: nn.Module) -> None:
        for name, x in list(module._parameters.items()):
            if x is not None and _is_meta(x):
                setattr(
                    module,
                    name,
                    self._allocated_params.setdefault(id(x), (x, self._parameter(x)))[1],
                )
        for name, x in list(module._buffers.items()):
            if x is not None and _is_meta(x):
                module._buffers[name] = self._allocate(x)
                if not isinstance(x, ShardedTensor):
                    self._buffers.append((module, name))

    def _parameter(self, x: Tensor) -> nn.Parameter:
        values = self._allocate(x)
        mark_replaced(x)
        out = nn.Parameter(values, requires_grad=x.requires_grad)
        if not isinstance(x, ShardedTensor):
            self._plain[id(out)] = nn.Parameter(values._local, requires_grad=x.requires_grad)
        return out

    def _allocate(self, x: Tensor) -> ShardedTensor:
        """Allocate a tensor; a replicated one for a plain tensor, equal on all ranks."""
        layout = (
            x._layout
            if isinstance(x, ShardedTensor)
            else Layout.of(self._mesh, P(), x.shape, x.dtype)
        )
        device = self._devices.get(id(x), layout.mesh.device)  # type: ignore[union-attr]
        return ShardedTensor._make_guarded(
            torch.empty(layout.local_shape, dtype=x.dtype, device=device), layout
        )

    def restore_plain_params(self, module: nn.Module) -> None:
        """Make parameters that are in no unit plain tensors again."""
        for name, x in list(module._parameters.items()):
            if id(x) in self._plain:
                setattr(module, name, self._plain[id(x)])

    def restore_plain_buffers(self) -> None:
        for module, name in self._buffers:
            x = module._buffers[name]
            if isinstance(x, ShardedTensor):
                module._buffers[name] = x.full_tensor()
