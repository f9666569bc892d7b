"""Plans of tensor and sequence parallelism of a model, as entries that also print as a program.

{"model.layers.*.self_attn.q_proj": "colwise", ...}      the model's own strings
{"model.layers.*.input_layernorm": GATHERED, ...}        with sequence parallelism
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..layout.spec import P
from ..parallel.tensor.styles import colwise, prepare_outputs, rowwise, sequence_parallel

_SEQUENCE = P(None, "tp")

# Entries of a plan: the text in a program, and the style.
STYLES: dict[str, Any] = {
    "colwise()": colwise(),
    'rowwise(out=P(None, "tp"))': rowwise(out=_SEQUENCE),
    'prepare_outputs(P(None, "tp"))': prepare_outputs(_SEQUENCE),
}
IN_SEQUENCE = "sequence_parallel(1)"
GATHERED = "[sequence_parallel(1), prepare_outputs(P())]"
STYLES |= {
    IN_SEQUENCE: sequence_parallel(1),
    GATHERED: [sequence_parallel(1), prepare_outputs(P())],
}
_SPLIT_LOGITS = ("colwise_gather_output", "colwise_rep")
_SUMMED = ("rowwise", "rowwise_split_input", "rowwise_rep", "embedding_rowwise")


def own_plan(model: nn.Module) -> dict[str, str]:
    """Return the model's own plan of strings, with logits that stay split; {} if it has none.

    One that splits an embedding and a head alone, such as that of gpt-oss, counts as none.
    """
    plan = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    if not any("*" in path for path in plan):
        return {}
    return {path: "colwise()" if style in _SPLIT_LOGITS else style for path, style in plan.items()}


def sequence_plan(model: nn.Module, blocks: str, plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the plan with activations between layers split along the sequence over "tp".

    Sums over "tp" are scattered along the sequence, and the norms before a layer gather it. Those
    of experts, which are no layers, stay whole.

    Args:
        blocks: the path of the list of blocks, such as "model.layers".
        plan: the plan without sequence parallelism.

    Returns:
        The plan; None if the model has none that says where sums are.
    """
    if not any(_is_summed(style) for style in plan.values()):
        return None
    names = [name for name, _ in model.named_modules()]
    out: dict[str, Any] = {}
    for path, style in plan.items():
        if not _is_summed(style) or not any(fnmatchcase(name, path) for name in names):
            out[path] = style
        elif isinstance(style, rowwise):
            out[path] = replace(style, out=_SEQUENCE)
        else:
            out[path] = 'rowwise(out=P(None, "tp"))'
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        parent, _, last = name.rpartition(".")
        inside = parent.startswith(f"{blocks}.")
        if isinstance(module, nn.Embedding) and name not in out and not inside:
            out[name] = 'prepare_outputs(P(None, "tp"))'
        is_norm = bool(parameters) and all(x.ndim == 1 for x in parameters)
        if not is_norm or next(module.children(), None) is not None:
            continue
        in_block = inside and parent.removeprefix(f"{blocks}.").isdecimal()
        if in_block or not inside:
            pattern = f"{blocks}.*.{last}" if in_block else name
            out[pattern] = GATHERED
    return out


def plan_of_copy(plan: Mapping[str, Any], model: nn.Module, copy: nn.Module) -> dict[str, Any]:
    """Return the plan for a copy with some of a model's blocks.

    Entries of layers that only the other blocks have are left out, such as those of shared experts
    where the copy's blocks are dense. Entries that match nothing in the model stay, as errors.
    """
    whole, short = paths_of(model), paths_of(copy)
    return {
        pattern: style
        for pattern, style in plan.items()
        if any(fnmatchcase(path, pattern) for path in short)
        or not any(fnmatchcase(path, pattern) for path in whole)
    }


def paths_of(model: nn.Module) -> list[str]:
    """Return the paths of modules, parameters and buffers."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return [name for name, _ in (*model.named_modules(), *parameters, *buffers)]


def _is_summed(style: Any) -> bool:
    """Return whether the results of a layer with this style are summed on every rank."""
    return style in _SUMMED if isinstance(style, str) else style == rowwise(units=_units(style))


def _units(style: Any) -> int | None:
    return getattr(style, "units", None)


def styles_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan as `parallelize` takes it."""
    return {
        path: STYLES.get(style, style) if isinstance(style, str) else style
        for path, style in plan.items()
    }


def style_text(style: Any) -> str:
    """Return an entry of a plan as a program writes it."""
    return style if isinstance(style, str) and style in STYLES else repr(style)


def plan_text(plan: Mapping[str, Any], indent: str) -> str:
    """Return the plan as lines of a program."""
    lines = [
        f'{indent}"{path}": {style_text(style)},'.replace("'", '"') for path, style in plan.items()
    ]
    return "\n".join(lines)
