"""The pipeline plan that a model of Hugging Face has: the modules between which it may be cut.

    {"model.embed_tokens": (["input_ids"], ["inputs_embeds"]),
     "model.layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
     "model.norm": (["hidden_states"], ["hidden_states"]),
     "lm_head": (["hidden_states"], ["logits"])}

The plan of a model is `model.pp_plan`, which joins `base_model_pp_plan` of its configuration to
what its class adds (transformers 5, `distributed/mixin.py`). The names of inputs and outputs are
not read: what a stage needs of earlier ones follows from its forward.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ...tensor.hf_plan import owner_of
from .units import is_callable, join

_PLAN = ("pp_plan", "_pp_plan")


def plan_of(model: nn.Module) -> Iterable[str]:
    """Return the paths of a model's own plan; none if it has no plan."""
    return getattr(model, "pp_plan", None) or getattr(model, "_pp_plan", None) or ()


def modules_of_plan(model: nn.Module) -> list[str]:
    """Return the paths of the modules with parameters that the plan of a model names.

    A list of modules stands for its entries. Paths that this configuration lacks are left out, as
    are modules without parameters, such as dropout. A wrapper that passes on attributes, such as a
    `PeftModel`, has the plan of the model inside of it.
    """
    plan = plan_of(model)
    if not plan:
        return []
    modules = dict(model.named_modules())
    owner = owner_of(model, _PLAN)
    prefix = next(path for path, module in modules.items() if module is owner)
    paths: list[str] = []
    for name in plan:
        path = join(prefix, name)
        module = modules.get(path)
        if module is None:
            continue
        entries = {path: module}
        if not is_callable(module):
            entries = {join(path, child): inner for child, inner in module.named_children()}
        for inner_path, inner in entries.items():
            if next(inner.parameters(), None) is not None:
                paths.append(inner_path)
    return paths
