"""`parallelize`: tensor and sequence parallelism by a plan, from patterns of paths to styles.

    {"*.q_proj": colwise(), "*.o_proj": rowwise(out=P(None, "tp", None)), "*.norm":
    sequence_parallel(1), "*.w_qkv": P("tp")}

The whole plan is worked out and checked before the first parameter is changed.
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
from ...layout.layout import Layout
from ...layout.spec import P, Placement
from ...ops.prepared_modules import prepare
from ...tensor.convert import distribute_tensor
from ...tensor.sharded_tensor import ShardedTensor
from ..module_repr import show_layouts_in_repr
from ..replaced import mark_replaced
from .activations import HookSite, InputHook, OutputHook, along
from .hf_plan import plan_owner, with_styles
from .plain_calls import generate_plain, return_whole_outputs_plain
from .styles import Style, axis_of, shard_params
from .torch_styles import applies_itself, own_style

Matches = Callable[[str, str], bool]  # (path, pattern)


def parallelize(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    plan: Mapping[str, Any] | str | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """parallelize(module, mesh, plan) -> the module, its parameters and activations laid out.

        "*.up": colwise()      x [b, k] whole  ->  [b, n/tp]                     weight [n/tp, k]
        "*.down": rowwise()    [b, n/tp]       ->  [b, k] pending  ->  summed    weight [k, n/tp]

    Parameters become `ShardedTensor`s in place (make the optimizer afterwards); those that no
    pattern matches are replicated. Tied ones stay tied. A style concerns one axis of the mesh;
    layouts along the others, such as a batch split over "dp", do not change. Parameters on the meta
    device stay there. `repr(module)` shows all layouts from then on. Plain tensors that a forward
    makes itself (positions, masks) count as replicated; ranks compare them the first time.

    Called with plain tensors, each rank's rows and equal along the axes of the plan, the module
    returns plain tensors where they are whole on every rank. Others, such as logits split by
    vocabulary, stay `ShardedTensor`s, and plain targets next to them count as replicated. Called
    with a `ShardedTensor`, it returns `ShardedTensor`s. `generate` of a Hugging Face model returns
    plain ids for plain ids; logits that are split are gathered for it.

    Args:
        module: any module.
        device_mesh: the mesh, with all its axes; by default that of `set_mesh`.
        plan: patterns of paths, as `named_modules` and `named_parameters` spell them ("*" matches
            dots too, "" is the module itself), each with a style (`colwise`, `rowwise`,
            `sequence_parallel`, `prepare_inputs`, `prepare_outputs`, `shard_params`, torch's),
            several styles in a list, for parameters and buffers a `P` or a placement, or a string
            of Hugging Face's plans ("colwise", "rowwise", ...). "auto" for the plan of a Hugging
            Face model, `model.tp_plan`, also with peft's adapters.
        src_data_rank: as in `distribute_tensor`.

    Raises:
        ValueError: a pattern that matches nothing (lists similar paths); a parameter or an
            activation with two layouts from two patterns; a style that does not fit the module or
            the mesh; an unknown string. The module is then unchanged.

    Communication: one all_to_all per parameter and buffer; none if `src_data_rank` is None. In
    forward, that of the styles.

    Example:
        >>> mesh = sm.init_device_mesh("cuda", (2, 4), axis_names=("fsdp", "tp"))
        >>> sm.parallel.parallelize(model, mesh,
        ...     {"*.up": sm.parallel.colwise(), "*.down": sm.parallel.rowwise()})
        >>> sm.parallel.fully_shard(model, mesh, axes="fsdp")
        >>> F.mse_loss(model(x), y).backward()          # plain tensors: this rank's rows
    """
    if not isinstance(plan, (Mapping, str)):
        raise TypeError(
            f"parallelize: plan must be a dict such as {{'*.up': colwise(), '*.down': rowwise()}}, "
            f"got {plan!r}"
        )
    return apply_plan(
        module,
        given_or_current(device_mesh),
        with_styles(module, plan),
        src_data_rank,
        fnmatchcase,
        rest=True,
    )


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Any = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """parallelize_module(module, mesh, plan) -> the module: `parallelize` with torch's semantics.

    It differs from `parallelize` as torch does: each part of a pattern between dots is matched by
    itself, a single style is for the module itself, and parameters that no pattern matches stay
    plain tensors.

    Args:
        module: any module.
        device_mesh: a mesh, of one axis where inputs are plain tensors; by default that of
            `set_mesh`.
        parallelize_plan: patterns of module paths with their styles, or one style; torch's, ours,
            or the program's own, whose `_apply(module, device_mesh)` is called, after all others
            (see `ParallelStyle`). None does nothing, with a warning.
        src_data_rank: as in `distribute_tensor`.

    Raises:
        ValueError: as `parallelize`; a pattern that matches nothing is an error, not a warning.

    Communication: as `parallelize`.

    Example:
        >>> parallelize_module(model, mesh["tp"],
        ...     {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
    """
    if parallelize_plan is None:
        warnings.warn(
            "parallelize_module without a plan does nothing; give a style, or a dict of patterns "
            "and styles",
            stacklevel=2,
        )
        return module
    plan = parallelize_plan if isinstance(parallelize_plan, Mapping) else {"": parallelize_plan}
    return apply_plan(
        module, given_or_current(device_mesh), plan, src_data_rank, _parts_match, rest=False
    )


def _parts_match(path: str, pattern: str) -> bool:
    """Return whether each part of the path matches the pattern's: "*" does not match a dot."""
    parts, patterns = path.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def apply_plan(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, Any],
    src_data_rank: int | None,
    matches: Matches,
    *,
    rest: bool,
) -> nn.Module:
    """Resolve the plan and apply it; with `rest`, unmatched parameters become replicated."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"device_mesh must be a DeviceMesh, as sm.init_device_mesh makes it, got {mesh!r}"
        )
    named = dict(module.named_modules())
    tensors = tensors_of(module)
    check_matched(plan, matches, [*named, *tensors], type(module).__name__)
    uses = list(_uses(plan, mesh, named, tensors, matches))
    own = [use for use in uses if applies_itself(use.style)]
    uses = [use for use in uses if not applies_itself(use.style)]
    layouts = _layouts(uses, tensors, mesh)
    hooks = _hooks(uses)
    if rest:
        for path, tensor in tensors.items():
            if id(tensor) in layouts or isinstance(tensor, ShardedTensor):
                continue
            # A program's own style distributes the parameters of its module itself.
            if not any(use.site.path == "" or path.startswith(f"{use.site.path}.") for use in own):
                layouts[id(tensor)] = _PlannedLayout(_layout(mesh, tensor, P(), path), path, "")
    tensors.clear()  # so that each whole tensor is freed when its sharded one exists
    _replace_tensors(module, {key: placed.layout for key, placed in layouts.items()}, src_data_rank)
    for submodule, hook in hooks:
        _register(submodule, hook)
    for use in own:
        replacement = _apply_itself(use, mesh, src_data_rank)
        module = replacement if use.site.path == "" else module
    if rest:
        for called in dict.fromkeys((plan_owner(module), module)):
            return_whole_outputs_plain(called)
            generate_plain(called)
    for submodule in named.values():
        show_layouts_in_repr(submodule)
    prepare(module)
    return module


def _apply_itself(use: _StyleUse, mesh: DeviceMesh, src_data_rank: int | None) -> nn.Module:
    """Call `_apply` of a program's own style; return the module, or what it returns at the top."""
    use.style.src_data_rank = src_data_rank
    result = use.style._apply(use.module, mesh)
    if not isinstance(result, nn.Module):
        raise TypeError(f"{use.site}: _apply must return the module, got {result!r}")
    return result


# -- matching --------------------------------------------------------------------------------------


class _StyleUse(NamedTuple):
    """A style for a module, or for one parameter or buffer if `module` is None."""

    pattern: str
    style: Any
    site: HookSite
    module: nn.Module | None


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by all of their paths."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _uses(
    plan: Mapping[str, Any],
    mesh: DeviceMesh,
    named: Mapping[str, nn.Module],
    tensors: Mapping[str, Tensor],
    matches: Matches,
) -> Iterator[_StyleUse]:
    for pattern, entry in plan.items():
        for style in entry if isinstance(entry, (list, tuple)) else [entry]:
            yield from _uses_of(pattern, _style(style, pattern), mesh, named, tensors, matches)


def _uses_of(
    pattern: str,
    style: Any,
    mesh: DeviceMesh,
    named: Mapping[str, nn.Module],
    tensors: Mapping[str, Tensor],
    matches: Matches,
) -> Iterator[_StyleUse]:
    """Yield the style for each place that its pattern matches.

    Raises:
        ValueError: it is for modules and the pattern matches parameters, or the reverse.
    """
    # the own methods of a style have the whole mesh
    axis = mesh.axis_names[0] if applies_itself(style) else axis_of(style, mesh, pattern)
    text = f"{style!r} of plan[{pattern!r}]"
    of_tensors = isinstance(style, shard_params) and not isinstance(style.specs, Mapping)
    paths = [path for path in (tensors if of_tensors else named) if matches(path, pattern)]
    if not paths:
        kinds = ("parameters", "modules") if of_tensors else ("modules", "parameters")
        instead = (
            "name its parameters, as in shard_params({'weight': P('tp')})"
            if of_tensors
            else "write P(...) for the layout of each"
        )
        raise ValueError(
            f"plan[{pattern!r}]: {style!r} is for {kinds[0]}, but the pattern matches only "
            f"{kinds[1]}; {instead}"
        )
    for path in paths:
        yield _StyleUse(
            pattern, style, HookSite(path, text, mesh, axis), None if of_tensors else named[path]
        )


def _style(entry: Any, pattern: str) -> Style:
    """Return our style for a plan's entry: a style of ours or torch's, or a parameter's spec.

    Raises:
        TypeError: something else.
    """
    if isinstance(entry, (P, Placement)):
        return shard_params(
            entry, axis=next(iter(entry.axes), None) if isinstance(entry, P) else None
        )
    style = entry if isinstance(entry, Style) else own_style(entry)
    if style is None:
        raise TypeError(
            f"plan[{pattern!r}] is {entry!r}; write a style (colwise(), rowwise(), "
            "sequence_parallel(1), prepare_inputs(...), prepare_outputs(...), shard_params(...)), "
            "a list of styles, or for parameters P(...)"
        )
    return style


def check_matched(plan: Mapping[str, Any], matches: Matches, paths: list[str], model: str) -> None:
    """Raise a ValueError for patterns that match nothing, with similar paths."""
    lost = [pattern for pattern in plan if not any(matches(path, pattern) for path in paths)]
    if lost:
        lines = [
            f"{pattern!r} matches no module and no parameter; {_near(pattern, paths)}"
            for pattern in lost
        ]
        raise ValueError(f"the plan does not fit the model, a {model}: {'; '.join(lines)}")


def _near(pattern: str, paths: Iterable[str]) -> str:
    """Return paths like a pattern, with numbers as `*`, or after `*.` if the pattern has it."""
    known = [path for path in dict.fromkeys(paths) if path]
    numberless = [re.sub(r"(?<![^.])\d+(?![^.])", "*", path) for path in known]
    ends = ["*." + ".".join(path.split(".")[-count:]) for count in (1, 2) for path in known]
    candidates = list(
        dict.fromkeys(
            [*ends, *numberless, *known]
            if pattern.startswith("*")
            else [*known, *numberless, *ends]
        )
    )
    close = get_close_matches(pattern, candidates, n=4)
    if close:
        return f"near it are {', '.join(map(repr, close))}"
    return f"there are {', '.join(map(repr, known[:8]))}{', ...' if len(known) > 8 else ''}"


# -- parameters ------------------------------------------------------------------------------------


class _PlannedLayout(NamedTuple):
    """The layout of a tensor, and the path and pattern that gave it."""

    layout: Layout
    path: str
    pattern: str


def _layouts(
    uses: Iterable[_StyleUse], tensors: Mapping[str, Tensor], mesh: DeviceMesh
) -> dict[int, _PlannedLayout]:
    """Return the layout of each tensor that the plan matches, by id: a tied tensor has one layout.

    Raises:
        ValueError: two patterns, or two of its names, give it two layouts; or a spec does not fit
            it.
    """
    placed: dict[int, _PlannedLayout] = {}
    for use in uses:
        for path, spec in _own_layouts(use):
            tensor = tensors[path]
            planned = _PlannedLayout(
                _layout(mesh, tensor, spec, f"{use.site} at {path!r}", use.site.axis),
                path,
                use.pattern,
            )
            before = placed.setdefault(id(tensor), planned)
            if before.layout is not planned.layout:
                raise ValueError(_two_ways(before, planned))
    return placed


def _own_layouts(use: _StyleUse) -> Iterator[tuple[str, Any]]:
    """Yield path and spec of each tensor that a style has a layout for."""
    if use.module is None:
        yield use.site.path, use.style.specs
        return
    for name, spec in use.style.parameters(use.site, use.module).items():
        yield f"{use.site.path}.{name}" if use.site.path else name, spec


def _layout(
    mesh: DeviceMesh, tensor: Tensor, spec: P | Placement, name: str, axis: str | None = None
) -> Layout:
    """Return the layout of one tensor: `spec` along the axis, and unchanged along the others.

    Raises:
        ValueError: a tensor without a shape, or on another mesh, or a spec that does not fit.
    """
    if is_lazy(tensor):
        raise ValueError(
            f"{name} has no shape before the first call of its lazy module; call it once on plain "
            "tensors before parallelize"
        )
    now = (
        tensor._layout
        if isinstance(tensor, ShardedTensor)
        else Layout.of(mesh, P(), tensor.shape, tensor.dtype)
    )
    if now.mesh is not mesh:
        raise ValueError(
            f"{name} is {now} already, and the plan is for {mesh}; parallelize first, on the mesh "
            "with all axes"
        )
    try:
        return now if axis is None else now.replace(along(now, spec, axis))
    except ValueError as error:
        raise ValueError(f"{name}, {list(tensor.shape)}: {error}") from None


def _two_ways(one: _PlannedLayout, other: _PlannedLayout) -> str:
    names = (
        f"{one.path!r} and {other.path!r} are one tied parameter, and"
        if one.path != other.path
        else f"{one.path!r}:"
    )
    return (
        f"{names} plan[{one.pattern!r}] shards it as {one.layout.spec}, plan[{other.pattern!r}] as "
        f"{other.layout.spec} ({one.layout}); give it one layout"
    )


def _replace_tensors(
    module: nn.Module, layouts: Mapping[int, Layout], src_data_rank: int | None
) -> None:
    """Replace tensors by sharded ones, one by one, so that at most one is in memory twice."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for submodule in module.modules():
        for table in (submodule._parameters, submodule._buffers):
            for name, tensor in table.items():
                places.setdefault(id(tensor), []).append((table, name))
    for key, layout in layouts.items():
        (table, name), *_ = places[key]
        placed = _shard_tensor(table[name], layout, src_data_rank)
        for table, name in places[key]:
            table[name] = placed


def _shard_tensor(tensor: Tensor, layout: Layout, src_data_rank: int | None) -> Tensor:
    """Return the tensor in this layout; parameters stay parameters, meta tensors on meta."""
    if getattr(tensor, "_layout", None) is layout:
        return tensor
    if tensor.is_meta and not isinstance(tensor, ShardedTensor):
        part = torch.empty(layout.local_shape, dtype=layout.dtype, device="meta")
        value: Any = ShardedTensor._make_guarded(part, layout)
    else:
        value = distribute_tensor(
            tensor.detach(),
            layout.mesh,  # type: ignore[arg-type]
            layout.spec,
            src_data_rank=src_data_rank,
        )
    if not isinstance(tensor, nn.Parameter):
        return value
    mark_replaced(tensor)
    return nn.Parameter(value, requires_grad=tensor.requires_grad)


# -- hooks -----------------------------------------------------------------------------------------


def _hooks(uses: Iterable[_StyleUse]) -> list[tuple[nn.Module, InputHook | OutputHook]]:
    """Return each module with the hooks for its inputs and outputs.

    Raises:
        ValueError: two patterns give layouts for the inputs, or the outputs, of one module.
    """
    hooks: dict[tuple[int, str], tuple[_StyleUse, InputHook | OutputHook]] = {}
    for use in uses:
        if use.module is None:
            continue
        for name, hook in (
            ("inputs", use.style.inputs(use.site, use.module)),
            ("outputs", use.style.outputs(use.site, use.module)),
        ):
            before = hooks.get((id(use.module), name))
            if hook is not None and before is not None:
                raise ValueError(
                    f"{use.site.path!r}: {before[0].site.style} and {use.site.style} both give "
                    f"layouts for its {name}; leave one out"
                )
            if hook is not None:
                hooks[id(use.module), name] = use, hook
    return [(use.module, hook) for use, hook in hooks.values() if use.module is not None]


def _register(module: nn.Module, hook: InputHook | OutputHook) -> None:
    if isinstance(hook, InputHook):
        module.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        module.register_forward_hook(hook)
