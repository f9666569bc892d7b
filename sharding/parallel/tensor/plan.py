"""Tensor and sequence parallelism by plan: patterns of paths, and what they say of the modules and parameters they match.

    {"*.q_proj": colwise(), "*.o_proj": rowwise(out=P(None, "tp", None)), "*.norm": sequence(1), "*.w_qkv": P("tp")}

Everything is worked out and checked before the first parameter is touched.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ....mesh.context import given_or_current
from ....mesh.device_mesh import DeviceMesh
from ...debug.module_repr import show_layouts_in_repr
from ...layout.layout import Layout
from ...layout.spec import P, Placement
from ...ops.prepared_modules import prepare
from ...tensor.convert import distribute_tensor
from ...tensor.sharded_tensor import ShardedTensor
from ..replaced import mark_replaced
from .activations import InputHook, OutputHook, Site, along
from .hf_plan import with_styles
from .styles import Style, axis_of, shard
from .torch_styles import own_style

Matches = Callable[[str, str], bool]  # (path, pattern)


def parallelize(
    module: nn.Module, device_mesh: DeviceMesh | None = None, plan: Mapping[str, Any] | str | None = None, *, src_data_rank: int | None = 0
) -> nn.Module:
    """parallelize(module, mesh, plan) -> the module, its parameters and activations laid out as the plan says.

        "*.up": colwise()      x [b, k] whole            -> [b, n/tp]            weight [n/tp, k]
        "*.down": rowwise()    [b, n/tp]                 -> [b, k] pending -> summed      weight [k, n/tp]

    Parameters become `ShardedTensor`s in place (make the optimizer afterwards); those that no pattern names lie whole on every
    rank. Tied ones stay tied. Styles speak of one axis of the mesh; what the others do, such as a batch split over "dp", stays as it is.
    Parameters on the meta device stay there. `repr(module)` says from then on how everything lies. Plain tensors that a forward makes
    itself (positions, masks) count as replicated; ranks compare them the first time.

    Args:
        module: any module.
        device_mesh: the mesh, with all its axes; by default that of `set_mesh`.
        plan: patterns of paths, as `named_modules` and `named_parameters` spell them ("*" matches dots too, "" is the module itself),
            each with what it says: a style (`colwise`, `rowwise`, `sequence`, `inputs`, `outputs`, `shard`, torch's), several
            of them in a list, for parameters and buffers a `P` or a placement, or a string of Hugging Face's plans ("colwise", "rowwise",
            ...). "auto" for the plan that a model of Hugging Face has, `model.tp_plan`.
        src_data_rank: as in `distribute_tensor`.

    Raises:
        ValueError: a pattern that matches nothing, with what it may have meant; a parameter or an activation that two patterns lay
            out in two ways; a style that does not fit the module or the mesh; a string that is not known. Nothing has changed then.

    Communication: one all_to_all per parameter and buffer; none if `src_data_rank` is None. What the styles ask for, in forward.

    Example:
        >>> mesh = sm.init_device_mesh("cuda", (2, 4), axis_names=("fsdp", "tp"))
        >>> sm.parallelize(model, mesh, {"*.up": sm.colwise(), "*.down": sm.rowwise()})
        >>> y = model(sm.device_put(x, mesh, P("fsdp")))
    """
    if not isinstance(plan, (Mapping, str)):
        raise TypeError(f"parallelize takes a plan such as {{'*.up': colwise(), '*.down': rowwise()}}, got {plan!r}")
    return apply_plan(module, given_or_current(device_mesh), with_styles(module, plan), src_data_rank, fnmatchcase, rest=True)


def parallelize_module(
    module: nn.Module, device_mesh: DeviceMesh | None = None, parallelize_plan: Any = None, *, src_data_rank: int | None = 0
) -> nn.Module:
    """parallelize_module(module, mesh, plan) -> the module: `parallelize` by torch's name, arguments and meaning.

    It differs from `parallelize` in what torch does otherwise: each part of a pattern between dots is matched by itself, a single
    style is for the module itself, and parameters that no pattern names stay plain tensors.

    Args:
        module: any module.
        device_mesh: a mesh, of one axis where inputs are plain tensors; by default that of `set_mesh`.
        parallelize_plan: patterns of module paths with their styles, or one style; torch's or ours. None does nothing, with a warning.
        src_data_rank: as in `distribute_tensor`.

    Raises:
        ValueError: as `parallelize`; a pattern that matches nothing is an error, not a warning.

    Communication: as `parallelize`.

    Example:
        >>> sm.parallelize_module(model, mesh["tp"], {"layers.*.up": sm.ColwiseParallel(), "layers.*.down": sm.RowwiseParallel()})
    """
    if parallelize_plan is None:
        warnings.warn("parallelize_module without a plan does nothing; give a style, or a dict of patterns and styles", stacklevel=2)
        return module
    plan = parallelize_plan if isinstance(parallelize_plan, Mapping) else {"": parallelize_plan}
    return apply_plan(module, given_or_current(device_mesh), plan, src_data_rank, _parts_match, rest=False)


def _parts_match(path: str, pattern: str) -> bool:
    """Whether each part of the path matches that of the pattern, as torch reads it: "*" does not match a dot."""
    parts, patterns = path.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def apply_plan(
    module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any], src_data_rank: int | None, matches: Matches, *, rest: bool
) -> nn.Module:
    """Work out the plan, and do what it says; with `rest`, parameters that nobody names become replicated."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"a plan is for a DeviceMesh, as sm.init_device_mesh makes it; got {mesh!r}")
    named, tensors = dict(module.named_modules()), _tensors(module)
    _check_matched(plan, matches, [*named, *tensors], type(module).__name__)
    uses = list(_uses(plan, mesh, named, tensors, matches))
    layouts = _layouts(uses, tensors, mesh)
    hooks = _hooks(uses)
    if rest:
        for path, tensor in tensors.items():
            if id(tensor) not in layouts and not isinstance(tensor, ShardedTensor):
                layouts[id(tensor)] = _Placed(_layout(mesh, tensor, P(), path), path, "")
    tensors.clear()  # so that each whole tensor is freed when its sharded one is there
    _place(module, {key: placed.layout for key, placed in layouts.items()}, src_data_rank)
    for submodule, hook in hooks:
        _register(submodule, hook)
    for submodule in named.values():
        show_layouts_in_repr(submodule)
    prepare(module)
    return module


# -- what a plan speaks of ---------------------------------------------------------------------------------------------


class _Use(NamedTuple):
    """A style at a place: a module, or one parameter or buffer where `module` is None."""

    pattern: str
    style: Any
    site: Site
    module: nn.Module | None


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every path that they have."""
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def _uses(
    plan: Mapping[str, Any], mesh: DeviceMesh, named: Mapping[str, nn.Module], tensors: Mapping[str, Tensor], matches: Matches
) -> Iterator[_Use]:
    for pattern, given in plan.items():
        for style in given if isinstance(given, (list, tuple)) else [given]:
            yield from _uses_of(pattern, _style(style, pattern), mesh, named, tensors, matches)


def _uses_of(
    pattern: str, style: Any, mesh: DeviceMesh, named: Mapping[str, nn.Module], tensors: Mapping[str, Tensor], matches: Matches
) -> Iterator[_Use]:
    """The style at each place that it is for.

    Raises:
        ValueError: it is for modules and the pattern names parameters, or the other way round.
    """
    axis, text = axis_of(style, mesh, pattern), f"{style!r} of plan[{pattern!r}]"
    of_tensors = isinstance(style, shard) and not isinstance(style.specs, Mapping)
    paths = [path for path in (tensors if of_tensors else named) if matches(path, pattern)]
    if not paths:
        kinds = ("parameters", "modules") if of_tensors else ("modules", "parameters")
        instead = "name its parameters, as in shard({'weight': P('tp')})" if of_tensors else "write P(...) for where each lies"
        raise ValueError(f"plan[{pattern!r}]: {style!r} is for {kinds[0]}, and the pattern matches only {kinds[1]}; {instead}")
    for path in paths:
        yield _Use(pattern, style, Site(path, text, mesh, axis), None if of_tensors else named[path])


def _style(given: Any, pattern: str) -> Style:
    """Our style for what a plan has: one, torch's, or a spec for parameters.

    Raises:
        TypeError: something else.
    """
    if isinstance(given, (P, Placement)):
        return shard(given, axis=next(iter(given.axes), None) if isinstance(given, P) else None)
    style = given if isinstance(given, Style) else own_style(given)
    if style is None:
        raise TypeError(
            f"plan[{pattern!r}] is {given!r}; write a style (colwise(), rowwise(), sequence(1), inputs(...), outputs(...), shard(...)), "
            "a list of styles, or for parameters P(...)"
        )
    return style


def _check_matched(plan: Mapping[str, Any], matches: Matches, paths: list[str], model: str) -> None:
    """Raises: ValueError for the patterns that match nothing, with what each may have meant."""
    lost = [pattern for pattern in plan if not any(matches(path, pattern) for path in paths)]
    if lost:
        lines = [f"{pattern!r} matches no module and no parameter; {_near(pattern, paths)}" for pattern in lost]
        raise ValueError(f"the plan does not fit the model, a {model}: {'; '.join(lines)}")


def _near(pattern: str, paths: Iterable[str]) -> str:
    """What a pattern may have meant: paths like it, with numbers as `*` or behind a `*.` as it has them itself."""
    known = [path for path in dict.fromkeys(paths) if path]
    numberless = [re.sub(r"(?<![^.])\d+(?![^.])", "*", path) for path in known]
    ends = ["*." + ".".join(path.split(".")[-count:]) for count in (1, 2) for path in known]
    candidates = list(dict.fromkeys([*ends, *numberless, *known] if pattern.startswith("*") else [*known, *numberless, *ends]))
    close = get_close_matches(pattern, candidates, n=4)
    if close:
        return f"near it are {', '.join(map(repr, close))}"
    return f"there are {', '.join(map(repr, known[:8]))}{', ...' if len(known) > 8 else ''}"


# -- where parameters lie ----------------------------------------------------------------------------------------------


class _Placed(NamedTuple):
    """The layout of a tensor, the path by which a pattern named it, and the pattern."""

    layout: Layout
    path: str
    pattern: str


def _layouts(uses: Iterable[_Use], tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[int, _Placed]:
    """The layout of each tensor that the plan names, by its id: a tied one has one layout.

    Raises:
        ValueError: two patterns, or two of its names, place it in two ways; or a spec does not fit it.
    """
    placed: dict[int, _Placed] = {}
    for use in uses:
        for path, where in _own(use):
            tensor = tensors[path]
            found = _Placed(_layout(mesh, tensor, where, f"{use.site} at {path!r}", use.site.axis), path, use.pattern)
            before = placed.setdefault(id(tensor), found)
            if before.layout is not found.layout:
                raise ValueError(_two_ways(before, found))
    return placed


def _own(use: _Use) -> Iterator[tuple[str, Any]]:
    """Path and place of each tensor that a use speaks of."""
    if use.module is None:
        yield use.site.path, use.style.specs
        return
    for name, where in use.style.parameters(use.site, use.module).items():
        yield f"{use.site.path}.{name}" if use.site.path else name, where


def _layout(mesh: DeviceMesh, tensor: Tensor, where: P | Placement, what: str, axis: str | None = None) -> Layout:
    """The layout of one tensor: as `where` says along the axis, and along the others as it lies already.

    Raises:
        ValueError: a tensor without a shape, or on another mesh, or a spec that does not fit.
    """
    if is_lazy(tensor):
        raise ValueError(f"{what} has no shape before the first call of its lazy module; call it once on plain tensors before parallelize")
    lies = tensor._layout if isinstance(tensor, ShardedTensor) else Layout.of(mesh, P(), tensor.shape, tensor.dtype)
    if lies.mesh is not mesh:
        raise ValueError(f"{what} is {lies} already, and the plan is for {mesh}; parallelize first, on the mesh that has every axis")
    try:
        return lies if axis is None else lies.replace(along(lies, where, axis))
    except ValueError as error:
        raise ValueError(f"{what}, {list(tensor.shape)}: {error}") from None


def _two_ways(one: _Placed, other: _Placed) -> str:
    names = f"{one.path!r} and {other.path!r} are one tied parameter, and" if one.path != other.path else f"{one.path!r}:"
    return (
        f"{names} plan[{one.pattern!r}] places it as {one.layout.spec}, plan[{other.pattern!r}] as {other.layout.spec} ({one.layout}); "
        "place it once, or twice alike"
    )


def _place(module: nn.Module, layouts: Mapping[int, Layout], src_data_rank: int | None) -> None:
    """Put the sharded tensors in place, one after the other, so that no more than one is there twice."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for submodule in module.modules():
        for table in (submodule._parameters, submodule._buffers):
            for name, tensor in table.items():
                places.setdefault(id(tensor), []).append((table, name))
    for key, layout in layouts.items():
        (table, name), *_ = places[key]
        placed = _placed(table[name], layout, src_data_rank)
        for table, name in places[key]:
            table[name] = placed


def _placed(tensor: Tensor, layout: Layout, src_data_rank: int | None) -> Tensor:
    """The tensor laid out so; a parameter stays one, and what has no values yet has none then."""
    if getattr(tensor, "_layout", None) is layout:
        return tensor
    if tensor.is_meta and not isinstance(tensor, ShardedTensor):
        part = torch.empty(layout.local_shape, dtype=layout.dtype, device="meta")
        value: Any = ShardedTensor._make_guarded(part, layout)
    else:
        value = distribute_tensor(tensor.detach(), layout.mesh, layout.spec, src_data_rank=src_data_rank)  # type: ignore[arg-type]
    if not isinstance(tensor, nn.Parameter):
        return value
    mark_replaced(tensor)
    return nn.Parameter(value, requires_grad=tensor.requires_grad)


# -- hooks -------------------------------------------------------------------------------------------------------------


def _hooks(uses: Iterable[_Use]) -> list[tuple[nn.Module, InputHook | OutputHook]]:
    """Each module with what lays out its inputs or its outputs.

    Raises:
        ValueError: two patterns lay out the inputs, or the outputs, of one module.
    """
    found: dict[tuple[int, str], tuple[_Use, InputHook | OutputHook]] = {}
    for use in uses:
        if use.module is None:
            continue
        for what, hook in (("inputs", use.style.inputs(use.site, use.module)), ("outputs", use.style.outputs(use.site, use.module))):
            before = found.get((id(use.module), what))
            if hook is not None and before is not None:
                raise ValueError(
                    f"{use.site.path!r}: {before[0].site.style} and {use.site.style} both lay out its {what}; leave one of them out"
                )
            if hook is not None:
                found[id(use.module), what] = use, hook
    return [(use.module, hook) for use, hook in found.values() if use.module is not None]


def _register(module: nn.Module, hook: InputHook | OutputHook) -> None:
    if isinstance(hook, InputHook):
        module.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        module.register_forward_hook(hook)
