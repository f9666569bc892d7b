"""Hugging Face's plans: the styles that their strings stand for.

    {"model.layers.*.self_attn.q_proj": "colwise", "model.layers.*.mlp.experts.down_proj":
    "rowwise", "lm_head": "colwise_gather_output"}

In Hugging Face the strings also say which local results and gradients must be summed. Here layouts
determine that, so most strings only say how parameters are split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        ValueError: an unknown string; "auto" for a module without a plan.

    A pattern of the module's own plan that matches nothing is left out, since this configuration
    may lack the module.
    """
    own = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None) or {}
    if isinstance(plan, str):
        plan = _own_plan(module, plan, own)
    modules = dict(module.named_modules())
    tensors = dict(module.named_parameters(remove_duplicate=False))
    strings = {pattern: entry for pattern, entry in plan.items() if isinstance(entry, str)}
    _check_known(strings)
    styles: dict[str, Any] = {}
    for pattern, entry in plan.items():
        matched = (
            _styles_and_specs(pattern, entry, modules, tensors)
            if pattern in strings
            else {pattern: entry}
        )
        # raises later, with similar names
        styles |= matched or ({} if pattern in own else {pattern: _OF_MODULES[entry](None)})
    return styles


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


def _styles_and_specs(
    pattern: str, style_name: str, modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return, by path, the style of each module and the spec of each parameter that match."""
    styles: dict[str, Any] = {
        path: _style_of(style_name, inner, modules.get(path.rpartition(".")[0]))
        for path, inner in modules.items()
        if fnmatchcase(path, pattern)
    }
    return styles | {
        path: shard_params(_spec_of(style_name, x.ndim))
        for path, x in tensors.items()
        if fnmatchcase(path, pattern)
    }


def _style_of(style_name: str, module: nn.Module, parent: nn.Module | None) -> Style:
    """Return the style for a module; projections of an attention are split by whole heads."""
    known = feature_dims_of(module)
    size = getattr(parent, "head_dim", None)
    dims = (
        None
        if known is None
        else known.outputs
        if style_name in _BY_OUTPUTS
        else known.inputs
        if style_name in _BY_INPUTS
        else None
    )
    features = None if not dims else module.weight.shape[dims[("weight")]]  # type: ignore[union-attr,index]
    whole = isinstance(size, int) and size > 0 and features is not None and features % size == 0
    return _OF_MODULES[style_name](features // size if whole else None)  # type: ignore[operator]


def _spec_of(style_name: str, ndim: int) -> Any:
    """Return the placement of a parameter: matrices, or stacks of them, by rows (outputs) or
    columns; an output bias like the rows.
    """
    if style_name in _BY_OUTPUTS:
        return Shard(max(ndim - 2, 0))
    return Shard(ndim - 1) if style_name in _BY_INPUTS and ndim > 1 else _WHOLE
