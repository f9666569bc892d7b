"""Wrapping: make units of a module's parameters and shard them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from ...layout.layout import Layout, distinct_mesh_names
from ...layout.spec import P
from ...ops.prepared_modules import prepare
from ...ops.torch_compile import original_of
from ...redistribute.autograd import redistribute_local
from ...tensor.convert import distribute_tensor
from ...tensor.sharded_tensor import ShardedTensor
from ..module_repr import show_layouts_in_repr
from .inputs import is_slice
from .plan import make_plan, roots_of
from .slot import Place, Slot, UnitOptions, slot_of_replaced
from .unit import Unit, is_unit_root, set_unit, unit_of, units_in, units_of

OneKind = type[nn.Module] | str | Callable[[str, nn.Module], bool]
# "auto", classes, names of classes, patterns of paths, functions of path and module
Units = OneKind | Iterable[OneKind]
AUTO = "auto"
_NAMED = 8  # modules listed in a message


def wrap(
    module: nn.Module,
    options: UnitOptions,
    units: Units | None,
    keep: str | None,
    ignored: Collection[nn.Parameter],
    src: int | None,
    dims: Mapping[int, int] | None = None,
) -> nn.Module:
    """Make units of a module and of its submodules that `units` matches.

    `dims` has dims to split, by the id of the parameter; others are split along dim 0. Without it a
    bucket chooses them; see `FlatBucket.dims`.
    """
    for root in roots_of(module):
        if is_unit_root(root):
            raise ValueError(
                f"{type(root).__name__} is a unit already; call fully_shard once per module, on "
                "the inner ones first"
            )
    modules = {"": module} | dict(matching_modules(module, units))
    slots = [  # raises before any communication
        _make_slot(path, places, options, dims) for path, places in _parameters(module, ignored)
    ]
    enclosing = _enclosing_units(module, {inner: name for name, inner in modules.items()})
    shared = _shared_modules(module, modules, enclosing)
    own_slots: dict[str, list[Slot]] = {name: [] for name in modules}
    outer: dict[str, dict[str, None]] = {name: {} for name in modules}
    for slot in slots:
        around = [enclosing[owner] for owner, _ in slot.places]
        name = reduce(_common, around)[-1]  # the innermost unit on every path to all owners
        own_slots[name].append(slot)
        for names in around:
            outer[names[-1]][name] = None
    at_rest = partial(_shard, src=src, offload=options.offload is not None)
    units_by_name: dict[str, Unit] = {}
    for name, inner in reversed(modules.items()):  # inner ones first
        inside = options if inner is module else options.inside
        plan = make_plan(name, inner, inside, own_slots[name], shared[name], at_rest)
        units_by_name[name] = Unit(plan, keep)
    for name, unit in units_by_name.items():
        for inner in (modules[name], *shared[name]):
            set_unit(inner, unit)
    for name, unit in units_by_name.items():
        unit.outer_units = [units_by_name[other] for other in outer[name] if other != name]
        unit.intercept()
    units_by_name[""].schedule.set_units(units_in(module))
    for inner in module.modules():
        show_layouts_in_repr(inner)
    prepare(module)
    return module


def matching_modules(module: nn.Module, units: Units | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules that `units` matches, by path.

    Raises:
        ValueError: no submodule matches.
    """
    if units is None:
        return
    is_auto = isinstance(units, str) and units == AUTO
    matches, count = _matcher(_own_blocks(module) if is_auto else units), 0
    compiled: set[nn.Module | None] = set()  # modules inside of wrappers, which become the units
    for name, inner in module.named_modules():
        original = original_of(inner)
        if (
            name
            and inner not in compiled
            and unit_of(inner) is None
            and matches(name, original or inner)
        ):
            count += 1
            compiled.add(original)
            yield name, inner
    if not count:
        paths = [name for name, _ in module.named_modules() if name]
        listed = f"{paths[:_NAMED]}{'...' if len(paths) > _NAMED else ''}"
        raise ValueError(
            f"units={units!r} matches no module of {type(module).__name__}; its modules are "
            f"{listed}"
        )


def _own_blocks(module: nn.Module) -> Callable[[str, nn.Module], bool]:
    """Return which modules are the blocks of a model, by its own account or as they repeat.

    Models of Hugging Face name the classes, in `_no_split_modules`. Otherwise, and if the model has
    no modules of these, blocks are the entries of each ModuleList whose entries are of one class
    and have parameters; lists inside of blocks do not count.

    Raises:
        ValueError: the model has neither.
    """
    names = set(getattr(module, "_no_split_modules", None) or ())
    if any(type(inner).__name__ in names for inner in module.modules()):
        return lambda _, inner: type(inner).__name__ in names
    blocks = set(_repeated_blocks(module))
    if not blocks:
        raise ValueError(
            f'units="auto": {type(module).__name__} neither names its blocks, as models of Hugging '
            "Face do in _no_split_modules, nor has it a ModuleList of blocks of one class; name "
            'them, such as units=Block or units="Block"'
        )
    return lambda _, inner: inner in blocks


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        blocks = (
            [original_of(block) or block for block in child.children()]
            if isinstance(child, nn.ModuleList)
            else []
        )
        has_parameters = all(next(block.parameters(), None) is not None for block in blocks)
        if blocks and has_parameters and len({type(block) for block in blocks}) == 1:
            yield from blocks
        else:
            yield from _repeated_blocks(child)


def _matcher(units: Units) -> Callable[[str, nn.Module], bool]:
    if isinstance(units, str):
        return lambda name, inner: units == type(inner).__name__ or fnmatch.fnmatchcase(name, units)
    if isinstance(units, type):
        return lambda _, inner: isinstance(inner, units)
    if callable(units):
        return units
    tests = [_matcher(one) for one in units]
    return lambda name, inner: any(matches(name, inner) for matches in tests)


# -- parameters ------------------------------------------------------------------------------------


def _parameters(
    module: nn.Module, ignored: Collection[nn.Parameter]
) -> Iterable[tuple[str, list[Place]]]:
    """Return the path and places of each parameter that is in no unit yet.

    Raises:
        ValueError: one is tied to a parameter of a unit.
    """
    left_out = {id(x) for x in ignored}
    taken = {id(slot.value): slot for unit in units_of(module) for slot in unit.plan.slots}
    parameters: dict[int, tuple[str, list[Place]]] = {}
    for path, owner, name, x in _all_parameters(module):
        slot = taken.get(id(x)) or slot_of_replaced(x)
        if slot is not None and (owner, name) not in slot.places:
            raise ValueError(
                f"{path} is tied to {slot.path}, which is in a unit of its own; shard both in one "
                "call: fully_shard(model, mesh, units=...)"
            )
        if slot is None and id(x) not in left_out:
            parameters.setdefault(id(x), (path, []))[1].append((owner, name))
    return parameters.values()


def _all_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield path, owner, name and value of each parameter; tied ones several times."""
    for prefix, inner in module.named_modules():
        for name, x in inner._parameters.items():
            if x is not None:
                yield f"{prefix}.{name}" if prefix else name, inner, name, x


Enclosing = dict[nn.Module, tuple[str, ...]]  # for each module, names of units


def _enclosing_units(module: nn.Module, names: dict[nn.Module, str]) -> Enclosing:
    """Return the units on every path to each module, its own included, outermost first."""
    around: Enclosing = {module: ()}
    enclosing: Enclosing = {}
    for parent in _parents_first(module):
        own = (names[parent],) if parent in names else ()
        inside = enclosing[parent] = around[parent] + own
        for child in parent.children():
            around[child] = _common(around.get(child, inside), inside)
    return enclosing


def _parents_first(module: nn.Module) -> list[nn.Module]:
    """Return a module and those inside it, each once and after all of its parents."""
    order: list[nn.Module] = []
    visited: set[nn.Module] = set()

    def visit(inner: nn.Module) -> None:
        visited.add(inner)
        for child in inner.children():
            if child not in visited:
                visit(child)
        order.append(inner)

    visit(module)
    return order[::-1]


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """Return the common beginning of two tuples."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return one[:same]


def _shared_modules(
    module: nn.Module, modules: dict[str, nn.Module], enclosing: Enclosing
) -> dict[str, list[nn.Module]]:
    """Return the modules that several units share, by the name of the unit around all of these."""
    shared: dict[str, list[nn.Module]] = {name: [] for name in modules}
    for parent in module.modules():
        for child in parent.children():
            name = enclosing[child][-1]
            is_shared = enclosing[parent][-1] != name and child not in roots_of(modules[name])
            if is_shared and unit_of(child) is None and child not in shared[name]:
                shared[name].append(child)
    return shared


def _make_slot(
    path: str, places: list[Place], options: UnitOptions, dims: Mapping[int, int] | None
) -> Slot:
    """Return the slot of a parameter, with its layout in use on the mesh with all axes.

    Raises:
        ValueError: it is on another mesh.
    """
    owner, name = places[0]
    mesh = options.mesh
    x: Any = owner._parameters[name]
    own, spec = (x.mesh, x.spec) if isinstance(x, ShardedTensor) else (None, P())
    if own is not None and not is_slice(own, mesh):
        own_name, mesh_name = distinct_mesh_names(own, mesh)
        raise ValueError(
            f"{path} is on {own_name}, and cannot be split on {mesh_name}; pass the mesh that has "
            "the axes of both"
        )
    base = Layout.of(mesh, spec, x.shape, x.dtype)
    is_free = dims is None and options.stage.parameter
    dim = None if is_free else (dims or {}).get(id(x), 0)
    return Slot(path, places, base, base, own, dim)


# -- sharding --------------------------------------------------------------------------------------


def _shard(x: Tensor, rest: Layout, base: Layout, src: int | None, offload: bool) -> ShardedTensor:
    """Return a parameter's values in its sharded layout, on the host if offloaded."""
    out = _redistribute(x, rest, base, src)
    if not offload or x.is_meta or rest is base:
        return out
    return ShardedTensor._make_guarded(out._local.cpu(), rest)


def _redistribute(x: Tensor, rest: Layout, base: Layout, src: int | None) -> ShardedTensor:
    if x.is_meta:
        return ShardedTensor._make_guarded(
            torch.empty(rest.local_shape, dtype=rest.dtype, device="meta"), rest
        )
    if isinstance(x, ShardedTensor):
        part = redistribute_local(x._local.detach(), base, rest)
        # No view of the whole.
        part = part.clone() if part.numel() < x._local.numel() else part
        return ShardedTensor._make_guarded(part, rest)
    return distribute_tensor(x.detach(), rest.mesh, rest.spec, src_data_rank=src)  # type: ignore[arg-type]
