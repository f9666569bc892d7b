"""Hugging Face's plans: the styles that their strings stand for.

    {"model.layers.*.self_attn.q_proj": "colwise", "model.layers.*.mlp.experts.down_proj":
    "rowwise", "lm_head": "colwise_gather_output"}

In Hugging Face the strings also say which local results and gradients must be summed. Here layouts
determine that, so most strings only say how parameters are split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from ...layout.spec import P, Shard
from .styles import (
    Style,
    colwise,
    feature_dims_of,
    prepare_outputs,
    rowwise,
    sequence_parallel,
    shard_params,
)

_WHOLE = P()


class _AsItComes(Style):
    """Whole parameters, unchanged activations: ranks with parts of them sum the gradients."""

    def __repr__(self) -> str:
        return "Style()"


_AS_IT_COMES = _AsItComes()

# For modules, given the number of units of their features (None if it does not matter).
_OF_MODULES: dict[str, Callable[[int | None], Style]] = {
    **dict.fromkeys(
        ("colwise", "packed_colwise", "local_colwise"), lambda units: colwise(units=units)
    ),
    **dict.fromkeys(
        ("colwise_gather_output", "colwise_rep"), lambda units: colwise(out=_WHOLE, units=units)
    ),
    **dict.fromkeys(
        ("rowwise", "packed_rowwise", "local_rowwise", "local_packed_rowwise", "embedding_rowwise"),
        lambda units: rowwise(units=units),
    ),
    **dict.fromkeys(
        ("rowwise_split_input", "rowwise_rep"), lambda units: rowwise(in_=_WHOLE, units=units)
    ),
    "embedding_colwise": lambda _: colwise(out=_WHOLE),
    "sequence_parallel": lambda _: sequence_parallel(1),
    **dict.fromkeys(("all_reduce", "gather", "moe_tp_experts"), lambda _: prepare_outputs(_WHOLE)),
    **dict.fromkeys(
        (
            "replicate",
            "replicated",
            "replicated_with_grad_allreduce",
            "local_params",
            "local",
            "isolated",
            "mla_kv_a_proj",
            "moe_identity_expert",
        ),
        lambda _: _AS_IT_COMES,
    ),
}
_BY_OUTPUTS = frozenset(
    {"colwise", "packed_colwise", "local_colwise", "colwise_gather_output", "colwise_rep"}
)
_BY_INPUTS = frozenset(
    {
        "rowwise",
        "packed_rowwise",
        "local_rowwise",
        "local_packed_rowwise",
        "rowwise_split_input",
        "rowwise_rep",
        "embedding_rowwise",
    }
)


def with_styles(module: nn.Module, plan: Mapping[str, Any] | str) -> dict[str, Any]:
    """Replace Hugging Face's strings in a plan by styles and specs, for the matching paths.

    Args:
        module: the module to parallelize.
        plan: "auto" for the module's own plan, or a plan in which some entries may be strings.

    Raises:
        ValueError: an unknown string; "auto" for a module without a plan, or one whose plan matches
            nothing.

    A pattern of the module's own plan that matches nothing is left out, since this configuration
    may lack the module. Patterns of strings are matched with the paths that modules have without
    peft's adapters (`_paths_in_model`).
    """
    own = _plan_of(module)
    entries = _own_plan(module, plan, own) if isinstance(plan, str) else plan
    strings = {pattern: style for pattern, style in entries.items() if isinstance(style, str)}
    _check_known(strings)
    modules = dict(module.named_modules())
    tensors = dict(module.named_parameters(remove_duplicate=False))
    paths = _paths_in_model(module, modules, tensors) if strings else {}
    styles: dict[str, Any] = {}
    for pattern, style in entries.items():
        if pattern not in strings:
            styles[pattern] = style
            continue
        matched = _styles_of_pattern(pattern, style, paths, modules, tensors)
        if not matched and pattern not in own:
            matched = {pattern: _OF_MODULES[style](None)}  # raises later, with similar names
        styles |= matched
    if isinstance(plan, str) and not styles:
        raise ValueError(
            f"no pattern of the plan of {type(module).__name__} matches any of its modules; "
            "parallelize the model inside of it, or write a plan with the paths of its "
            f"named_modules(). The patterns are {', '.join(map(repr, own))}"
        )
    return styles


def _plan_of(module: nn.Module) -> Mapping[str, str]:
    return getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None) or {}


def plan_owner(module: nn.Module) -> nn.Module:
    """Return the module whose plan `module` has.

    Itself, or the model inside of a wrapper that passes on its attributes, such as a `PeftModel`.
    """
    return owner_of(module, ("tp_plan", "_tp_plan")) if _plan_of(module) else module


def owner_of(module: nn.Module, attributes: Collection[str]) -> nn.Module:
    """Return the outermost module in `module` that has one of these attributes of its own.

    A wrapper that passes on the attributes of the model inside of it does not; without any such
    module, `module` itself.
    """
    for inner in module.modules():
        if not {*vars(inner), *dir(type(inner))}.isdisjoint(attributes):
            return inner
    return module


def _own_plan(module: nn.Module, plan: str, own: Mapping[str, str]) -> Mapping[str, str]:
    if plan != "auto":
        raise ValueError(f"parallelize takes a plan, or 'auto' for the model's own, got {plan!r}")
    if not own:
        raise ValueError(
            f"{type(module).__name__} has no plan of its own (tp_plan), unlike some models of "
            "Hugging Face; write one, such as {'*.up': colwise(), '*.down': rowwise()}"
        )
    return own


def _check_known(strings: Mapping[str, str]) -> None:
    for pattern, style_name in strings.items():
        if style_name not in _OF_MODULES:
            raise ValueError(
                f"plan[{pattern!r}] is {style_name!r}, which is unknown; write one of "
                f"{', '.join(map(repr, sorted(_OF_MODULES)))}"
            )


# -- peft's adapters -------------------------------------------------------------------------------


def _paths_in_model(
    module: nn.Module, modules: Mapping[str, nn.Module], tensors: Iterable[str]
) -> dict[str, str]:
    """Return, for each module and parameter, its path in the model without peft's adapters.

    base_model.model.layers.0.q_proj                     no path: the adapter around the layer
    base_model.model.layers.0.q_proj.base_layer          layers.0.q_proj
    base_model.model.layers.0.q_proj.lora_A.default      no path
    base_model.model.head.modules_to_save.default        head
    """
    owner = plan_owner(module)
    prefix = next(path for path, inner in modules.items() if inner is owner)
    paths = {}
    for path in [*modules, *tensors]:
        if path == prefix:
            paths[path] = ""
        elif prefix == "" or path.startswith(f"{prefix}."):
            within = _without_adapters(path, len(prefix) and len(prefix) + 1, modules)
            if within is not None:
                paths[path] = within
    return paths


_ADAPTED, _COPIED, _COPIES = "base_layer", "original_module", "modules_to_save"


def _without_adapters(path: str, start: int, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the part of a path after `start` without what adapters insert; None for an adapter."""
    names, parts = [], path[start:].split(".")
    before, waiting = path[:start].rstrip("."), iter(parts)
    for name in waiting:
        children = modules[before]._modules
        if _ADAPTED in children and name != _ADAPTED:
            return None
        if _COPIED in children and name == _COPIES:
            copy = next(waiting, None)
            if copy is None:
                return None
            name = f"{name}.{copy}"
        elif name not in (_ADAPTED, _COPIED):
            names.append(name)
        before = f"{before}.{name}".lstrip(".")
    inner = modules.get(path)
    if inner is not None and inner._modules.keys() & {_ADAPTED, _COPIED}:
        return None
    return ".".join(names)


def _styles_of_pattern(
    pattern: str,
    style: str,
    paths: Mapping[str, str],
    modules: Mapping[str, nn.Module],
    tensors: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return the styles of modules and the specs of parameters that the pattern matches.

    Both by path.
    """
    styles: dict[str, Any] = {}
    for path, path_in_model in paths.items():
        if not fnmatchcase(path_in_model, pattern):
            continue
        if path not in modules:
            styles[path] = shard_params(_spec_of(style, tensors[path].ndim))
            continue
        outside, _, name = path.rpartition(".")
        layer = outside if name == _ADAPTED else path
        parent = modules.get(layer.rpartition(".")[0])
        styles[path] = _style_of(style, modules[path], parent)
        if name == _ADAPTED:
            for adapter in _split_adapters(style, outside, modules):
                styles[adapter] = _style_of(style, modules[adapter], parent)
    return styles


def _split_adapters(style: str, path: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the paths of the LoRA matrices that are split as the layer is.

    B by rows next to a layer that is split by outputs, A by columns next to one that is split by
    inputs.

    Those of DoRA, which multiplies them with an identity, stay whole.
    """
    layer: Any = modules[path]
    if len(getattr(layer, "lora_magnitude_vector", ())):
        return []
    name = "lora_B" if style in _BY_OUTPUTS else "lora_A" if style in _BY_INPUTS else None
    adapters = getattr(layer, name, {}) if name else {}
    return [f"{path}.{name}.{key}" for key in adapters if isinstance(adapters[key], nn.Linear)]


def _style_of(style_name: str, module: nn.Module, parent: nn.Module | None) -> Style:
    """Return the style for a module; projections of an attention are split by whole heads."""
    known = feature_dims_of(module)
    size = getattr(parent, "head_dim", None)
    dims = None
    if known is not None and style_name in _BY_OUTPUTS:
        dims = known.outputs
    elif known is not None and style_name in _BY_INPUTS:
        dims = known.inputs
    features = None if not dims else module.weight.shape[dims["weight"]]  # type: ignore[union-attr,index]
    whole = isinstance(size, int) and size > 0 and features is not None and features % size == 0
    return _OF_MODULES[style_name](features // size if whole else None)  # type: ignore[operator]


def _spec_of(style_name: str, ndim: int) -> Any:
    """Return the placement of a parameter.

    Matrices, or stacks of them, by rows (outputs) or columns; an output bias like the rows.
    """
    if style_name in _BY_OUTPUTS:
        return Shard(max(ndim - 2, 0))
    return Shard(ndim - 1) if style_name in _BY_INPUTS and ndim > 1 else _WHOLE
