"""Mixed precision of stages, for the forward that is recorded on tensors without values.

    embed  float32 on "meta"  ->  bfloat16 as its unit uses it      so that what stands for its
    mask   min of float32         min of bfloat16                   output has the dtype of values

The skeleton was made before `fully_shard`, whose units cast parameters, inputs and outputs. What a
stage computes between units, such as masks and rotary embeddings, depends on these dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...data.precision import MixedPrecisionPolicy
from ...data.unit import is_unit_root, unit_of


@dataclass(frozen=True)
class Precision:
    """How units of FSDP and of data parallelism cast.

    Attributes:
        parameters: by name, the dtype in which a parameter is used, if it is not its own.
        modules: by path, the policies that cast inputs or outputs of modules.
    """

    parameters: Mapping[str, torch.dtype] = field(default_factory=dict)
    modules: Mapping[str, MixedPrecisionPolicy] = field(default_factory=dict)


def precision_of(stages: Iterable[nn.Module]) -> Precision:
    """Return how the units in stages cast, by the names that the model has for them."""
    parameters: dict[str, torch.dtype] = {}
    modules: dict[str, MixedPrecisionPolicy] = {}
    for stage in stages:
        policies: dict[int, MixedPrecisionPolicy] = {}
        for path, module in stage.named_modules():
            unit = unit_of(module)
            if unit is None:
                continue
            policy = unit.plan.options.policy
            policies |= {id(x): policy for x in unit.plan.parameters}
            casts = policy.param_dtype is not None or policy.output_dtype is not None
            if is_unit_root(module) and casts:
                modules.setdefault(path, policy)
        for name, x in stage.named_parameters(remove_duplicate=False):
            policy = policies.get(id(x))
            if policy is not None and policy.used_as(x.dtype) != x.dtype:
                parameters[name] = policy.used_as(x.dtype)
    return Precision(parameters, modules)


def assume_for_others(own: Precision, stages: Iterable[nn.Module], model: nn.Module) -> Precision:
    """Return a precision in which parameters of other ranks' stages are used as this rank's are.

    For a world whose other ranks tell nothing (`null_world`).
    """
    held = {
        name: x for stage in stages for name, x in stage.named_parameters(remove_duplicate=False)
    }
    used_as = {x.dtype: own.parameters[name] for name, x in held.items() if name in own.parameters}
    others = {
        name: used_as[x.dtype]
        for name, x in model.named_parameters(remove_duplicate=False)
        if name not in held and x.dtype in used_as
    }
    return Precision({**others, **own.parameters}, own.modules)


def merge_precisions(precisions: Iterable[Precision]) -> Precision:
    """Return the precision of all stages, given those of all ranks."""
    parameters: dict[str, torch.dtype] = {}
    modules: dict[str, MixedPrecisionPolicy] = {}
    for precision in precisions:
        parameters |= precision.parameters
        modules |= {path: x for path, x in precision.modules.items() if path not in modules}
    return Precision(parameters, modules)


def apply_precision(precision: Precision, model: nn.Module) -> None:
    """Let a model without values cast as the units do; before its tensors are in any recording."""
    modules = dict(model.named_modules(remove_duplicate=False))
    cast: dict[int, Tensor] = {}
    for name, dtype in precision.parameters.items():
        path, _, own_name = name.rpartition(".")
        if path in modules:
            x: Any = modules[path]._parameters[own_name]
            cast[id(x)] = _leaf_as(x, dtype)
    for module in modules.values():
        for name, x in module._parameters.items():
            if id(x) in cast:
                module._parameters[name] = cast[id(x)]  # type: ignore[assignment]
    for path, policy in precision.modules.items():
        if path in modules:
            modules[path].register_forward_pre_hook(_cast_inputs(policy), with_kwargs=True)
            modules[path].register_forward_hook(_cast_outputs(policy))


def _leaf_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    leaf = x.detach().to(dtype).requires_grad_(x.requires_grad)
    leaf._is_param = True  # type: ignore[attr-defined]  # what isinstance(leaf, nn.Parameter) reads
    return leaf


def _cast_inputs(policy: MixedPrecisionPolicy) -> Any:
    return lambda _, args, kwargs: policy.inputs((args, kwargs))


def _cast_outputs(policy: MixedPrecisionPolicy) -> Any:
    return lambda _, args, result: policy.outputs(result)
