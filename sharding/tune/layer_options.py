"""The ways in which a layer, or a parameter that no layer has, may lie on an axis.

    Linear, Conv, Embedding    whole, colwise(), colwise(out=P()), rowwise()
    norms                      whole, sequence_parallel(1), sequence_parallel(1, out=P())
    other parameters           whole, or split along one of their dims

The layouts are those of the styles themselves, so what is priced is what `parallelize` applies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...mesh.device_mesh import DeviceMesh
from ..layout.spec import P, Placement, Shard
from ..parallel.tensor.activations import HookSite
from ..parallel.tensor.styles import (
    Style,
    colwise,
    feature_dims_of,
    own_tensors,
    rowwise,
    sequence_parallel,
)

# What modules of Hugging Face call the number of features of a head.
_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim")


@dataclass(frozen=True)
class Option:
    """One way.

    Attributes:
        style: the entry of the plan; None for no entry: parameters are whole, and activations stay
            as they are.
        parameters: name of a parameter -> its layout along the axis; the others are whole.
        input, output: the layout along the axis of the first input and of all outputs; None leaves
            them as they are.
    """

    style: Any
    parameters: Mapping[str, P | Placement]
    input: P | Placement | None = None
    output: P | Placement | None = None

    def __str__(self) -> str:
        return "whole" if self.style is None else repr(self.style)


WHOLE = Option(None, {})


def is_layer(module: nn.Module) -> bool:
    """Return whether a module has a known kind of features, or is a norm."""
    return feature_dims_of(module) is not None or is_norm(module)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module has no parameters but vectors of its own."""
    own = list(module.parameters(recurse=False))
    return bool(own) and all(x.ndim == 1 for x in own) and not [*module.children()]


def layer_options(
    path: str, model: nn.Module, mesh: DeviceMesh, axis: str, sequence: bool
) -> list[Option]:
    """Return the ways of a layer; those that cannot be are not among them."""
    module = model.get_submodule(path)
    site = HookSite(path, "", mesh, axis)
    styles = _norm_styles(axis) if sequence and is_norm(module) else []
    if feature_dims_of(module) is not None:
        parent = model.get_submodule(path.rpartition(".")[0])
        styles = list(_feature_styles(module, parent, mesh.size(axis), axis, sequence))
    return [WHOLE, *(_option(style, site, module) for style in styles)]


def parameter_options(parameter: Tensor, mesh: DeviceMesh, axis: str) -> list[Option]:
    """Return the ways of a parameter of another module, as entries for its path."""
    size = mesh.size(axis)
    dims = [dim for dim, n in enumerate(parameter.shape) if n >= size > 1]
    if parameter.ndim < 2:
        return [WHOLE]
    specs = [P(*[None] * dim, axis) for dim in dims]
    return [WHOLE, *(Option(spec, {"": spec}) for spec in specs)]


def _norm_styles(axis: str) -> list[Style]:
    name = None if axis == "tp" else axis
    return [sequence_parallel(1, axis=name), sequence_parallel(1, out=P(), axis=name)]


def _feature_styles(
    module: nn.Module, parent: nn.Module, size: int, axis: str, sequence: bool
) -> Iterator[Style]:
    dims = feature_dims_of(module)
    weight: Any = module.weight
    name = None if axis == "tp" else axis
    outs = [P(), P(None, axis)] if sequence else [P()]
    if dims is not None and dims.outputs and weight.shape[dims.outputs["weight"]] >= size:
        for units in _units(weight.shape[dims.outputs["weight"]], parent, size):
            for out in (None, *outs):
                yield colwise(out=out, axis=name, units=units)
    if dims is not None and dims.inputs and weight.shape[dims.inputs["weight"]] >= size:
        for units in _units(weight.shape[dims.inputs["weight"]], parent, size):
            for out in outs:
                yield rowwise(out=out, axis=name, units=units)


def _units(features: int, parent: nn.Module, size: int) -> list[int | None]:
    """Return the numbers of heads that may have to stay whole; None where ranks have equal ones."""
    head = next((getattr(parent, name, None) for name in _HEAD_SIZES if hasattr(parent, name)), 0)
    if not isinstance(head, int) or head < 1 or features % head or features // head % size == 0:
        return [None]
    return [features // head, None]


def _option(style: Style, site: HookSite, module: nn.Module) -> Option:
    own = own_tensors(module)
    parameters = {
        name: where
        for name, where in style.parameters(site, module).items()
        if isinstance(own[name], nn.Parameter) and _splits(where)
    }
    inputs, outputs = style.inputs(site, module), style.outputs(site, module)
    first = None if inputs is None else inputs.positional[0].to
    out = None if outputs is None else outputs.layouts[0].to
    return Option(style, parameters, first, out)


def _splits(where: P | Placement) -> bool:
    return isinstance(where, Shard) or (isinstance(where, P) and bool(where.axes))
