"""From a module with parameters to units with parameters at rest."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....mesh.device_mesh import DeviceMesh
from ...debug.module_repr import show_layouts_in_repr
from ...layout.layout import Layout, distinct_mesh_names
from ...layout.spec import P
from ...ops.prepared_modules import prepare
from ...redistribute.autograd import redistribute_local
from ...tensor.convert import distribute_tensor
from ...tensor.sharded_tensor import ShardedTensor
from .schedule import unit_of, units_in
from .slot import Options, Place, Slot, took
from .unit import Unit

OneKind = type[nn.Module] | str | Callable[[str, nn.Module], bool]
Units = OneKind | Iterable[OneKind]  # classes, names of classes, patterns of paths, functions of path and module
_NAMED = 8  # so many modules are named in a message
Found = tuple[str, list[Place]]  # a parameter's path, and where it stands


def split(
    module: nn.Module,
    options: Options,
    units: Units | None,
    keep: str | None,
    ignored: Collection[nn.Parameter],
    src: int | None,
) -> nn.Module:
    """Make units of a module and of the modules inside that are named."""
    if unit_of(module) is not None and unit_of(module).module is module:  # type: ignore[union-attr]
        raise ValueError(f"{type(module).__name__} is a unit already; call fully_shard on each module once, on the inner ones first")
    modules = {"": module} | dict(_chosen(module, units))
    found = _parameters(module, ignored)
    bases = [_base(one, options.mesh) for one in found]  # all are checked before anything moves
    made = {name: Unit(name, inner, options if inner is module else options.inside, keep) for name, inner in modules.items()}
    belongs = [_unit_for(one, made) for one in found]
    for name, unit in reversed(made.items()):  # inner ones first
        mine = [(one, base) for one, base, whose in zip(found, bases, belongs, strict=True) if whose == name]
        slots = [Slot(path, places, base, base, getattr(_value(places), "mesh", None)) for (path, places), base in mine]
        unit.adopt(slots, partial(_at_rest, src=src, offload=options.offload is not None))
        unit.intercept()
    made[""].schedule.take(units_in(module))
    for inner in module.modules():
        show_layouts_in_repr(inner)
    prepare(module)
    return module


def _chosen(module: nn.Module, units: Units | None) -> Iterator[tuple[str, nn.Module]]:
    """The modules inside that are to be units, by path.

    Raises:
        ValueError: there is none.
    """
    if units is None:
        return
    test, count = _test(units), 0
    wrapped: set[nn.Module | None] = set()  # by torch.compile, which makes the wrapper the unit
    for name, inner in module.named_modules():
        original = inner._modules.get("_orig_mod")
        if name and inner not in wrapped and unit_of(inner) is None and test(name, original or inner):
            count += 1
            wrapped.add(original)
            yield name, inner
    if not count:
        paths = [name for name, _ in module.named_modules() if name]
        said = f"{paths[:_NAMED]}{'...' if len(paths) > _NAMED else ''}"
        raise ValueError(f"units={units!r} fits no module of {type(module).__name__}; its modules are {said}")


def _test(units: Units) -> Callable[[str, nn.Module], bool]:
    if isinstance(units, str):
        return lambda name, inner: units == type(inner).__name__ or fnmatch.fnmatchcase(name, units)
    if isinstance(units, type):
        return lambda _, inner: isinstance(inner, units)
    if callable(units):
        return units
    tests = [_test(one) for one in units]
    return lambda name, inner: any(test(name, inner) for test in tests)


# -- parameters --------------------------------------------------------------------------------------------------------


def _parameters(module: nn.Module, ignored: Collection[nn.Parameter]) -> list[Found]:
    """The parameters that are in no unit yet.

    Raises:
        ValueError: one is tied to a parameter of a unit.
    """
    left_out, taken = {id(x) for x in ignored}, {id(slot.value): slot for unit in units_in(module) for slot in unit.slots}
    found: dict[int, Found] = {}
    for path, owner, name, x in _all_parameters(module):
        slot = taken.get(id(x)) or took(x)
        if slot is not None and (owner, name) not in slot.places:
            raise ValueError(
                f"{path} is tied to {slot.path}, which is in a unit of its own; shard both in one call: "
                "fully_shard(model, mesh, units=...)"
            )
        if slot is None and id(x) not in left_out:
            found.setdefault(id(x), (path, []))[1].append((owner, name))
    return list(found.values())


def _all_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Path, owner, name and value of each parameter; tied ones several times."""
    for prefix, inner in module.named_modules():
        for name, x in inner._parameters.items():
            if x is not None:
                yield f"{prefix}.{name}" if prefix else name, inner, name, x


def _unit_for(found: Found, made: dict[str, Unit]) -> str:
    """The innermost unit that has all places of a parameter."""
    inside = {name: set(unit.module.modules()) for name, unit in made.items()}
    return max((name for name in made if all(owner in inside[name] for owner, _ in found[1])), key=len)


def _value(places: Sequence[Place]) -> Any:
    owner, name = places[0]
    return owner._parameters[name]


# -- at rest -----------------------------------------------------------------------------------------------------------


def _base(found: Found, mesh: DeviceMesh) -> Layout:
    """The layout of a parameter while it is used, on the mesh with every axis.

    Raises:
        ValueError: it lies on another mesh.
    """
    x = _value(found[1])
    if not isinstance(x, ShardedTensor):
        return Layout.of(mesh, P(), x.shape, x.dtype)
    part = x.mesh
    if part is not mesh and not (set(part.axis_names) <= set(mesh.axis_names) and mesh[part.axis_names] == part):
        here, there = distinct_mesh_names(part, mesh)
        raise ValueError(f"{found[0]} lies on {here}, and is to be split on {there}; pass the mesh that has the axes of both")
    return Layout.of(mesh, x.spec, x.shape, x.dtype)


def _at_rest(x: Tensor, rest: Layout, base: Layout, src: int | None, offload: bool) -> ShardedTensor:
    """A parameter's values, laid out as at rest."""
    found = _split(x, rest, base, src)
    if not offload or x.is_meta or rest is base:
        return found
    return ShardedTensor._make_guarded(found._local.cpu(), rest)


def _split(x: Tensor, rest: Layout, base: Layout, src: int | None) -> ShardedTensor:
    if x.is_meta:
        return ShardedTensor._make_guarded(torch.empty(rest.local_shape, dtype=rest.dtype, device="meta"), rest)
    if isinstance(x, ShardedTensor):
        part = redistribute_local(x._local.detach(), base, rest)
        return ShardedTensor._make_guarded(part.clone() if part.numel() < x._local.numel() else part, rest)  # not all, held by a view
    return distribute_tensor(x.detach(), rest.mesh, rest.spec, src_data_rank=src)  # type: ignore[arg-type]
