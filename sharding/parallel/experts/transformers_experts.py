"""Experts of transformers by `moe`, as a function of transformers' interface for experts.

    has_gate         gate_up_proj [e 2f d] and `_apply_gate`, down_proj [e d f]
      not            up_proj [e f d] and `act_fn`, down_proj [e d f]
    is_transposed    [e d 2f] and [e f d]
    has_bias         also gate_up_proj_bias [e 2f], down_proj_bias [e d]

These are what modules of the interface say of themselves; see `transformers.integrations.moe`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .moe import moe
from .router import Routing

_FLAGS = ("has_gate", "has_bias", "is_transposed")


def register_moe(axis: str | tuple[str, ...] = "ep") -> str:
    """register_moe("ep") -> "moe over ep": let experts of transformers be computed by `moe`.

    Adds a function to `transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS`, which sends each row
    to the ranks of its experts. A plan splits the stacks of matrices along dim 0 over the axis,
    which splits the batch, too.

    Args:
        axis: the axis, or axes, over which experts are split, as in `moe`.

    Returns:
        The name of the function, for `model.set_experts_implementation(name)`.

    Raises:
        ImportError: transformers is not installed, or a version without the interface.
        ValueError: when the experts of a model are called, and `moe` cannot compute them; see
            `why_not_moe`.

    Communication: none; in forward that of `moe`.

    Example:
        >>> model.set_experts_implementation(register_moe("ep"))
        >>> experts = "model.layers.*.mlp.experts"
        >>> plan = {f"{experts}.gate_up_proj": P("ep"), f"{experts}.down_proj": P("ep")}
        >>> parallelize(model, mesh, plan)
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    name = f"moe over {', '.join(axes)}"
    ALL_EXPERTS_FUNCTIONS.register(name, partial(_by_moe, axes))
    return name


def why_not_moe(experts: nn.Module) -> str | None:
    """Return why `moe` cannot compute a module's experts, in words; None if it can."""
    if not all(hasattr(experts, name) for name in _FLAGS):
        return f"{type(experts).__name__} is not one of transformers' interface for experts"
    if getattr(experts, "has_post_expert_norm", False):
        return f"{type(experts).__name__} has a norm after each expert"
    expected = set(_weights(experts))
    actual = {name for name, _ in experts.named_parameters()}
    if actual != expected:
        weights, others = (", ".join(sorted(names)) for names in (actual, expected))
        return f"{type(experts).__name__} has the weights {weights}, not {others}"
    return None


def _weights(experts: Any) -> list[str]:
    """Return the names of the weights that the module's flags say it has."""
    names = ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]
    return names + [f"{name}_bias" for name in names] * experts.has_bias


def _by_moe(
    axes: tuple[str, ...], module: Any, rows: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """Send rows to the ranks of their experts, and back.

    Args:
        rows: [n d].
        experts, weights: those of each row [n k].
    """
    reason = why_not_moe(module)
    if reason is not None:
        raise ValueError(f"moe: {reason}")

    def linear(rows: Tensor, params: dict[str, Tensor], name: str) -> Tensor:
        weight = params[name].T if module.is_transposed else params[name]
        return F.linear(rows, weight, params.get(f"{name}_bias"))

    def expert(rows: Tensor, params: dict[str, Tensor]) -> Tensor:
        if module.has_gate:
            hidden = module._apply_gate(linear(rows, params, "gate_up_proj"))
        else:
            hidden = module.act_fn(linear(rows, params, "up_proj"))
        return linear(hidden, params, "down_proj")

    params = {name: getattr(module, name) for name in _weights(module)}
    return moe(rows, Routing(experts, weights), expert, params, axis=axes)
