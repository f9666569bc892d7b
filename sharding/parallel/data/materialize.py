"""Values for a module that was made on "meta", each rank making those that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...layout import Layout
from ...replaced import mark_replaced
from ...spec import P
from ...tensor import ShardedTensor
from .schedule import units_in
from .unit import Unit

_NAMED = 4  # so many modules are named in a message


def materialize(module: nn.Module, init: Callable[[nn.Module], object] | None = None) -> nn.Module:
    """materialize(module) -> the module, its tensors on "meta" given memory and initial values.

        with torch.device("meta"): model = Model()      no memory
        fully_shard(model, mesh, units=Block)           it is known which rows lie where
        materialize(model)                              each rank makes its rows: the same numbers on every mesh

    Each module that owns tensors on "meta" is initialised by its `reset_parameters()`, inner modules first, as in construction. Random
    numbers are those of `manual_seed`, and do not depend on the mesh.

    Args:
        module: with units inside; make the optimizer after this call, which replaces parameters.
        init: called on each such module in place of `reset_parameters`; its parameters are sharded tensors.

    Raises:
        ValueError: there is no unit; modules that own tensors on "meta" have no `reset_parameters`.

    Communication: none for initialisers that work element by element.

    Example:
        >>> sm.manual_seed(0)
        >>> sm.materialize(model)
    """
    owners = {name: inner for name, inner in _inner_first(module, "") if any(_is_meta(x) for x in _tensors(inner))}
    _check(module, owners, init)
    with torch.no_grad():
        memory = _Memory(units_in(module))
        for inner in owners.values():
            memory.give(inner)
        for inner in owners.values():
            (init or _reset)(inner)
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


def _check(module: nn.Module, owners: dict[str, nn.Module], init: Callable[[nn.Module], object] | None) -> None:
    if not units_in(module):
        raise ValueError(f"{type(module).__name__} has no unit, so it is not known which rank holds what; call fully_shard first")
    without = [f"{name or 'the module itself'} ({type(inner).__name__})" for name, inner in owners.items() if _own_reset(inner) is None]
    if init is None and without:
        said = ", ".join(without[:_NAMED]) + (f" and {len(without) - _NAMED} more" if len(without) > _NAMED else "")
        raise ValueError(f"no reset_parameters() to give values to the tensors on meta of {said}; define it, or pass init=")


def _own_reset(module: nn.Module) -> Callable[[], object] | None:
    """What gives a module its initial values; some of torch's own have it under the second name."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _reset(module: nn.Module) -> object:
    reset: Any = _own_reset(module)
    padding = getattr(module, "padding_idx", None) if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else None
    if padding is None:
        return reset()
    module.padding_idx = None  # type: ignore[assignment]  # its row is one of a view, which has no rule: it is written where it lies
    try:
        reset()
    finally:
        module.padding_idx = padding
    _clear_row(module.weight, padding)  # type: ignore[arg-type]
    return None


def _clear_row(x: ShardedTensor, row: int) -> None:
    start, stop = x._layout.box[0]
    if start <= row < stop:
        x._local[row - start] = 0


class _Memory:
    """Gives tensors on "meta" memory: tied ones the same."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._mesh = units[0].options.mesh
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
