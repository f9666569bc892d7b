"""Experts of transformers on ShardedTensors, as a function of transformers' interface for experts.

    experts over "ep"    `moe`: rows travel to the ranks of their experts
    experts whole        `grouped_mm` of transformers: each rank computes its own rows

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

from ....mesh.comm.thread_context import thread_context
from ...layout.spec import P
from ...lineage import comm_context, mixed, seed_of
from ...ops import nonmember
from ...ops.dispatch import wrap
from ...tensor.autograd.local_part import known_local
from ...tensor.sharded_tensor import ShardedTensor
from ..redistribute_operands import redistribute_operands
from .moe import check_one_mesh, moe
from .router import Routing, check_sharded

_FLAGS = ("has_gate", "has_bias", "is_transposed")
_SEED = seed_of("moe on each rank")


def register_moe(axis: str | tuple[str, ...] | None = "ep") -> str:
    """register_moe("ep") -> "moe over ep": let experts of transformers be computed by `moe`.

    Adds a function to `transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS`, which sends each row
    to the ranks of its experts. A plan splits the stacks of matrices along dim 0 over the axis,
    which splits the batch, too.

    With None, experts are not split: each rank computes its own rows with the whole experts, which
    `fully_shard` gathers for the call. Transformers' own functions sort the rows of all ranks by
    expert, and so gather them.

    Args:
        axis: the axis, or axes, over which experts are split, as in `moe`; None for whole experts.

    Returns:
        The name of the function, for `model.set_experts_implementation(name)`.

    Raises:
        ImportError: transformers is not installed, or a version without the interface.
        ValueError: when the experts of a model are called, and `moe` cannot compute them; see
            `why_not_moe`.

    Communication: none; in forward that of `moe`, for whole experts none.

    Example:
        >>> model.set_experts_implementation(register_moe("ep"))
        >>> experts = "model.layers.*.mlp.experts"
        >>> plan = {f"{experts}.gate_up_proj": P("ep"), f"{experts}.down_proj": P("ep")}
        >>> parallelize(model, mesh, plan)
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if axis is None:
        own_rows = partial(_on_each_rank, ALL_EXPERTS_FUNCTIONS["grouped_mm"])
        ALL_EXPERTS_FUNCTIONS.register("moe on each rank", own_rows)
        return "moe on each rank"
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


def _check_module(experts: nn.Module) -> None:
    reason = why_not_moe(experts)
    if reason is not None:
        raise ValueError(f"moe: {reason}")


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
    _check_module(module)

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


# -- whole experts ---------------------------------------------------------------------------------


def _on_each_rank(
    own_rows: Any, module: Any, rows: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """Apply a function of transformers to this rank's rows and the whole experts.

    Args:
        own_rows: `own_rows(module, rows, experts, weights)`, row by row.
        rows: [n d]; dim 0 may be split over any axes, evenly or not.
        experts, weights: those of each row [n k].
    """
    _check_module(module)
    params = {name: getattr(module, name) for name in _weights(module)}
    inputs: dict[str, Any] = {"rows": rows, "experts": experts, "weights": weights, **params}
    if not any(isinstance(x, ShardedTensor) for x in inputs.values()):
        return own_rows(module, rows, experts, weights)
    check_sharded("moe", inputs)
    check_one_mesh(inputs)
    tensors = list(inputs.values())
    by_row = P.of_cuts([tensors[0].spec.cuts[0], ()], {})
    lineage = mixed(_SEED, tensors)
    with comm_context(tensors[0].mesh.world, lineage):
        operands = redistribute_operands(
            tensors,
            [
                x._layout.replace(by_row if i < 3 else P.of_cuts([()] * x.ndim, {}))
                for i, x in enumerate(tensors)
            ],
        )
        layout = operands[0]._layout  # that of the result, too
        if layout.mesh.coordinate is None:
            result = nonmember.unknown(layout, *operands)
        else:
            if thread_context.weights is not None:
                thread_context.weights.add_sharded(operands[3:])
            local_rows, chosen, factors, *values = map(known_local, operands)
            own = _WithWeights(module, dict(zip(params, values, strict=True)))
            result = wrap(own_rows(own, local_rows, chosen, factors), layout)
        result._lineage = lineage
        return result


class _WithWeights:
    """A module's experts with other weights, for functions that read attributes."""

    def __init__(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        self.__dict__.update(weights)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
