"""Plans of Hugging Face: what their strings mean for modules and parameters.

    {"model.layers.*.self_attn.q_proj": "colwise", "model.layers.*.mlp.experts.down_proj": "rowwise", "lm_head": "colwise_gather_output"}

There the strings also say which local results must be summed, and which gradients. Here layouts say that, so that most strings
come down to how parameters are split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from ...layout.spec import P, Shard
from .styles import Style, colwise, kind_of, outputs, rowwise, sequence, shard

_WHOLE = P()


class _AsItComes(Style):
    """Parameters whole, activations as they come: gradients are summed wherever each rank sees a part."""

    def __repr__(self) -> str:
        return "Style()"


_AS_IT_COMES = _AsItComes()

# For modules, given how many units their features come in (None where that does not matter).
_OF_MODULES: dict[str, Callable[[int | None], Style]] = {
    **dict.fromkeys(("colwise", "packed_colwise", "local_colwise"), lambda units: colwise(units=units)),
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), lambda units: colwise(out=_WHOLE, units=units)),
    **dict.fromkeys(
        ("rowwise", "packed_rowwise", "local_rowwise", "local_packed_rowwise", "embedding_rowwise"), lambda units: rowwise(units=units)
    ),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), lambda units: rowwise(in_=_WHOLE, units=units)),
    "embedding_colwise": lambda _: colwise(out=_WHOLE),
    "sequence_parallel": lambda _: sequence(1),
    **dict.fromkeys(("all_reduce", "gather", "moe_tp_experts"), lambda _: outputs(_WHOLE)),
    **dict.fromkeys(
        (
            "replicate", "replicated", "replicated_with_grad_allreduce", "local_params", "local", "isolated", "mla_kv_a_proj",
            "moe_identity_expert",
        ),
        lambda _: _AS_IT_COMES,
    ),
}  # fmt: skip
_BY_OUTPUTS = frozenset({"colwise", "packed_colwise", "local_colwise", "colwise_gather_output", "colwise_rep"})
_BY_INPUTS = frozenset(
    {"rowwise", "packed_rowwise", "local_rowwise", "local_packed_rowwise", "rowwise_split_input", "rowwise_rep", "embedding_rowwise"}
)


def with_styles(module: nn.Module, plan: Mapping[str, Any] | str) -> dict[str, Any]:
    """The plan with a style or a spec in place of each string of Hugging Face, by the paths that its pattern matches.

    Args:
        module: what is to be laid out.
        plan: "auto" for the module's own plan, or a plan in which some entries may be strings.

    Raises:
        ValueError: a string that is not known; "auto" for a module without a plan.

    A pattern of the module's own plan that matches nothing is left out: this configuration may lack what it speaks of.
    """
    own = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None) or {}
    if isinstance(plan, str):
        plan = _own_plan(module, plan, own)
    modules = dict(module.named_modules())
    tensors = dict(module.named_parameters(remove_duplicate=False))
    strings = {pattern: given for pattern, given in plan.items() if isinstance(given, str)}
    _check_known(strings)
    found: dict[str, Any] = {}
    for pattern, given in plan.items():
        matched = _matched(pattern, given, modules, tensors) if pattern in strings else {pattern: given}
        found |= matched or ({} if pattern in own else {pattern: _OF_MODULES[given](None)})  # an error later on, which tells near names
    return found


def _own_plan(module: nn.Module, given: str, own: Mapping[str, str]) -> Mapping[str, str]:
    if given != "auto":
        raise ValueError(f"parallelize takes a plan, or 'auto' for the model's own, got {given!r}")
    if not own:
        raise ValueError(
            f"{type(module).__name__} has no plan of its own (tp_plan), as models of Hugging Face may have; write one, such as "
            "{'*.up': colwise(), '*.down': rowwise()}"
        )
    return own


def _check_known(strings: Mapping[str, str]) -> None:
    for pattern, given in strings.items():
        if given not in _OF_MODULES:
            raise ValueError(f"plan[{pattern!r}] is {given!r}, which is not known; known are {', '.join(map(repr, sorted(_OF_MODULES)))}")


def _matched(pattern: str, given: str, modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """By path, the style of each module and the spec of each parameter that the pattern matches."""
    styles: dict[str, Any] = {
        path: _style_of(given, inner, modules.get(path.rpartition(".")[0])) for path, inner in modules.items() if fnmatchcase(path, pattern)
    }
    return styles | {path: shard(_spec_of(given, x.ndim)) for path, x in tensors.items() if fnmatchcase(path, pattern)}


def _style_of(given: str, module: nn.Module, parent: nn.Module | None) -> Style:
    """The style for a module; heads stay whole where the module is a projection of an attention, which knows their size."""
    kind, size = kind_of(module), getattr(parent, "head_dim", None)
    dims = None if kind is None else kind.outputs if given in _BY_OUTPUTS else kind.inputs if given in _BY_INPUTS else None
    features = None if not dims else module.weight.shape[dims["weight"]]  # type: ignore[union-attr,index]
    whole = isinstance(size, int) and size > 0 and features is not None and features % size == 0
    return _OF_MODULES[given](features // size if whole else None)  # type: ignore[operator]


def _spec_of(given: str, ndim: int) -> Any:
    """How a parameter lies: matrices, or stacks of them, by rows (the outputs) or columns; a bias of outputs is split like them."""
    if given in _BY_OUTPUTS:
        return Shard(max(ndim - 2, 0))
    return Shard(ndim - 1) if given in _BY_INPUTS and ndim > 1 else _WHOLE
