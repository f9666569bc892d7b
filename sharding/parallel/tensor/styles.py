"""Styles of tensor and sequence parallelism: layouts of a module's parameters, inputs and outputs.

    colwise()              weight [n/tp, k]     x whole -> y split by output features; nothing moves
    rowwise()              weight [n, k/tp]     x split by input features -> y pending -> out, by an
                                                all_reduce, or reduce_scatter
    sequence_parallel(1)   parameters whole     x split along dim 1 -> y as well; nothing moves

A style concerns its own axis, "tp"; along all others layouts do not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import Tensor, nn

from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import chunk
from ...layout.spec import P, Placement, Shard
from .activations import (
    ActivationLayout,
    AxisLayout,
    HookSite,
    InputHook,
    OutputHook,
    as_axis_layout,
    input_hook,
)

_WHOLE = P()


class Style:
    """The entry of a plan for a module. Subclass it, and override these, for your own style.

    Attributes:
        axis: its mesh axis; None for "tp", or the mesh's only axis.
    """

    axis: str | None = None

    def parameters(self, site: HookSite, module: nn.Module) -> Mapping[str, P | Placement]:
        """Return the layouts of the module's parameters and buffers; a placement is on the axis."""
        return {}

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        """Return the hook for the arguments of forward."""
        return None

    def outputs(self, site: HookSite, module: nn.Module) -> OutputHook | None:
        """Return the hook for the results of forward."""
        return None


class _StyleWithRepr(Style):
    """A style whose `repr` shows the fields that differ from their defaults."""

    def __repr__(self) -> str:
        arguments = [
            (f.name, getattr(self, f.name))
            for f in fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        ]
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in arguments)})"
        )


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of the module itself."""
    return {
        name: x
        for name, x in [*module._parameters.items(), *module._buffers.items()]
        if x is not None
    }


def first_input(site: HookSite, module: nn.Module, desired: ActivationLayout) -> InputHook | None:
    """Return the hook for the first argument."""
    return None if desired.to is None else input_hook(site, module, [desired], {})


def every_output(site: HookSite, desired: ActivationLayout) -> OutputHook | None:
    """Return the hook for all results of the module."""
    return None if desired.to is None and not desired.local else OutputHook(site, (desired,))


@dataclass(frozen=True, repr=False)
class colwise(_StyleWithRepr):
    """colwise(out=None) -> Style: each rank computes some output features (of embeddings: of rows).

        x [b, k]        weight [n/tp, k]        y [b, n/tp]           nothing moves
        backward: the gradient of x is pending over tp

    Args:
        out: the layout of the output along the axis, a `P` or a placement; None leaves it split by
            features.
        in_: the layout in which a plain input is taken, as this rank's part; None for the whole
            tensor.
        axis: the mesh axis; "tp" if the mesh has it, else the mesh's only axis.
        units: the number of units, such as heads, that stay whole when features are split, so that
            `view(b, s, -1, head_dim)` finds whole heads on every rank even if ranks have different
            numbers of them.

    Raises:
        ValueError: in `parallelize`, for an unknown kind of module (write `shard_params({...})`),
            or features that `units` does not divide.

    Communication: an all_gather or all_reduce if the input is split or pending along the axis; that
    of `out`.

    Example:
        >>> heads, sums = sm.parallel.colwise(units=32), sm.parallel.rowwise(units=32)
        >>> sm.parallel.parallelize(model, mesh, {"*.q_proj": heads, "*.o_proj": sums})
    """

    out: AxisLayout = None
    in_: AxisLayout = None
    axis: str | None = None
    units: int | None = None

    def parameters(self, site: HookSite, module: nn.Module) -> Mapping[str, P | Placement]:
        return _param_layouts(
            site, module, _feature_dims(site, module, "outputs").outputs, self.units
        )

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        return first_input(
            site, module, ActivationLayout(_WHOLE, plain=as_axis_layout(self.in_, "in_"))
        )

    def outputs(self, site: HookSite, module: nn.Module) -> OutputHook | None:
        return every_output(site, ActivationLayout(as_axis_layout(self.out, "out")))


@dataclass(frozen=True, repr=False)
class rowwise(_StyleWithRepr):
    """rowwise(out=P()) -> Style: each rank has some of the input features.

    For an embedding, some of the rows. Results are summed.

        x [b, k/tp]     weight [n, k/tp]        y [b, n] pending over tp  ->  out

    Args:
        out: the layout of the sum along the axis: `P()` on every rank, `P(None, "tp", None)` split
            by sequence; None leaves it pending until it is needed.
        in_: the layout in which a plain input is taken, as this rank's part; None for split by
            features (for an embedding, the whole tensor).
        axis, units: as for `colwise`.

    Raises:
        ValueError: as `colwise`.

    Communication: an all_reduce for `P()`, a reduce_scatter for a split `out`; an all_to_all if the
    input is split differently.

    Example:
        >>> down = sm.parallel.rowwise(out=P(None, "tp", None))
        >>> sm.parallel.parallelize(model, mesh, {"*.up": sm.parallel.colwise(), "*.down": down})
    """

    out: AxisLayout = _WHOLE
    in_: AxisLayout = None
    axis: str | None = None
    units: int | None = None

    def parameters(self, site: HookSite, module: nn.Module) -> Mapping[str, P | Placement]:
        return _param_layouts(
            site, module, _feature_dims(site, module, "inputs").inputs, self.units
        )

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        return first_input(site, module, self.input_of(site, module))

    def input_of(self, site: HookSite, module: nn.Module) -> ActivationLayout:
        """Return the desired layout of the first argument."""
        dims = _feature_dims(site, module, "inputs")
        plain = as_axis_layout(self.in_, "in_")
        if dims.features is None:
            return ActivationLayout(_WHOLE, plain)
        split: Any = self.parameters(site, module)["weight"]
        to = Shard(dims.features, sizes=split.sizes)
        return ActivationLayout(
            to,
            plain,
            size=module.weight.shape[split.dim] if plain in (None, to) else None,  # type: ignore[union-attr]
        )

    def outputs(self, site: HookSite, module: nn.Module) -> OutputHook | None:
        return every_output(site, ActivationLayout(as_axis_layout(self.out, "out")))


@dataclass(frozen=True, repr=False)
class sequence_parallel(_StyleWithRepr):
    """sequence_parallel(dim=1) -> Style: each rank computes some positions.

    For norms, dropout and other position-wise modules.

        x [b, s/tp, d]      parameters whole      y [b, s/tp, d]      nothing moves
        backward: the gradients of the parameters are pending, and reduced once at its end, together

    Args:
        dim: the dim of positions.
        out: the layout of the output along the axis; `P()` gathers it once for all modules that use
            it, None leaves it split.
        axis: as for `colwise`.

    Communication: an all_to_all if the input is split differently, none if it is whole; that of
    `out`.

    Example:
        >>> sm.parallel.parallelize(model, mesh,
        ...     {"*.norm": sm.parallel.sequence_parallel(1, out=P())})
    """

    dim: int = 1
    out: AxisLayout = None
    axis: str | None = None

    def parameters(self, site: HookSite, module: nn.Module) -> Mapping[str, P | Placement]:
        return dict.fromkeys(own_tensors(module), _WHOLE)

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        return first_input(site, module, ActivationLayout(Shard(self.dim)))

    def outputs(self, site: HookSite, module: nn.Module) -> OutputHook | None:
        return every_output(site, ActivationLayout(as_axis_layout(self.out, "out")))


class prepare_inputs(Style):
    """prepare_inputs(P(), mask=P()) -> Style: the layouts of a module's arguments along the axis.

    Args:
        where: for each argument by position a `P` or a placement, for all tensors in it; None
            leaves it unchanged. A plain tensor is taken as this rank's part in that layout.
        axis: as for `colwise`.
        named: the same by name, also if the call passes them by position.

    Raises:
        ValueError: in `parallelize`, for an argument that forward does not have.

    Communication: that of the layouts, for all arguments together.

    Example:
        >>> # one gather for q, k and v
        >>> parallelize(model, mesh, {"*.attn": prepare_inputs(P()), "*.q_proj": colwise()})
    """

    def __init__(self, *where: AxisLayout, axis: str | None = None, **named: AxisLayout) -> None:
        self.axis = axis
        self._where = [as_axis_layout(w, "inputs") for w in where]
        self._named = {name: as_axis_layout(w, name) for name, w in named.items()}

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        positional = [None if w is None else ActivationLayout(w) for w in self._where]
        return input_hook(
            site,
            module,
            positional,
            {name: ActivationLayout(w) for name, w in self._named.items() if w is not None},
        )

    def __repr__(self) -> str:
        named = [f"{name}={where!r}" for name, where in self._named.items()]
        return f"prepare_inputs({', '.join([*map(repr, self._where), *named])})"


class prepare_outputs(Style):
    """prepare_outputs(P()) -> Style: the layouts of a module's results along the axis.

    Args:
        where: a `P` or a placement for all tensors in the result, or one for each part of a tuple;
            None leaves it unchanged.
        axis: as for `colwise`.

    Raises:
        ValueError: when the module returns another number of results.

    Communication: that of the layouts, for all results together.

    Example:
        >>> sm.parallel.parallelize(model, mesh, {"": sm.parallel.prepare_outputs(P())})
    """

    def __init__(self, *where: AxisLayout, axis: str | None = None) -> None:
        if not where:
            raise TypeError(
                "prepare_outputs(): give one P(...) for all results, or one for each of a tuple"
            )
        self.axis = axis
        self._where = [as_axis_layout(w, "outputs") for w in where]

    def outputs(self, site: HookSite, module: nn.Module) -> OutputHook | None:
        return OutputHook(site, tuple(map(ActivationLayout, self._where)))

    def __repr__(self) -> str:
        return f"prepare_outputs({', '.join(map(repr, self._where))})"


@dataclass(frozen=True, repr=False)
class shard_params(_StyleWithRepr):
    """shard_params({"w_in": P("tp"), "scale": P()}, out=None) -> Style: each parameter's layout.

    Args:
        specs: for a module, a `P` or a placement for each parameter or buffer by name, the others
            whole; for a pattern that matches parameters themselves, one for all of them (a bare `P`
            in the plan means the same).
        in_: the layout of the first input along the axis; None leaves it unchanged.
        out: the layout of the output along the axis.
        axis: as for `colwise`.

    Raises:
        ValueError: in `parallelize`, for a name that the module does not have.

    Communication: that of `in_` and `out`.

    Example:
        >>> specs = {"w_qkv": P("tp"), "w_out": P(None, "tp")}
        >>> attention = sm.parallel.shard_params(specs, out=P())
        >>> sm.parallel.parallelize(model, mesh, {"*.attn": attention})
    """

    specs: Any
    in_: AxisLayout = None
    out: AxisLayout = None
    axis: str | None = None

    def parameters(self, site: HookSite, module: nn.Module) -> Mapping[str, P | Placement]:
        if not isinstance(self.specs, Mapping):
            raise ValueError(
                f"{site} has one spec, but this is a module; name its parameters: "
                f"shard_params({{{_example(module)}}})"
            )
        own = list(own_tensors(module))
        unknown = [name for name in self.specs if name not in own]
        if unknown:
            raise ValueError(
                f"{site}: {type(module).__name__} has no parameter or buffer {unknown[0]!r}; it "
                f"has {own}"
            )
        return {name: as_axis_layout(where, name) or P() for name, where in self.specs.items()}

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        return first_input(site, module, ActivationLayout(as_axis_layout(self.in_, "in_")))

    def outputs(self, site: HookSite, module: nn.Module) -> OutputHook | None:
        return every_output(site, ActivationLayout(as_axis_layout(self.out, "out")))


def _example(module: nn.Module) -> str:
    return ", ".join(f"{name!r}: P(...)" for name in own_tensors(module)) or "'weight': P(...)"


# -- dims of parameters ----------------------------------------------------------------------------


class FeatureDims(NamedTuple):
    """For a kind of module, the dims of its parameters with the output and input features.

    Attributes:
        outputs, inputs: parameter -> dim; missing parameters are whole. None if the module cannot
            be split so.
        features: the feature dim of the input; None if it has none, like the indices of an
            embedding.
    """

    outputs: dict[str, int] | None
    inputs: dict[str, int] | None
    features: int | None = -1


_LINEAR = FeatureDims({"weight": 0, "bias": 0}, {"weight": 1})
_BILINEAR = FeatureDims({"weight": 0, "bias": 0}, None)
_EMBEDDING = FeatureDims({"weight": 1}, {"weight": 0}, None)
# `Conv1D` of Hugging Face's GPT-2
_TRANSPOSED = FeatureDims({"weight": 1, "bias": 0}, {"weight": 0})


def feature_dims_of(module: nn.Module) -> FeatureDims | None:
    """Return the feature dims for a known class of module, else None."""
    if isinstance(module, nn.Linear):
        return _LINEAR
    if isinstance(module, nn.Bilinear):
        return _BILINEAR
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return _EMBEDDING
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module.groups == 1:
        return FeatureDims({"weight": 0, "bias": 0}, {"weight": 1}, 1 - module.weight.ndim)
    return (
        _TRANSPOSED
        if type(module).__name__ == "Conv1D" and set(module._parameters) == {"weight", "bias"}
        else None
    )


def _feature_dims(site: HookSite, module: nn.Module, what: str) -> Any:
    """Return the feature dims of a module that can be split by its outputs or inputs.

    Raises:
        ValueError: its class is unknown, or it cannot be split.
    """
    dims = feature_dims_of(module)
    if dims is not None and getattr(dims, what) is not None:
        return dims
    own = ", ".join(f"{name} {list(x.shape)}" for name, x in own_tensors(module).items()) or "none"
    raise ValueError(
        f"{site} splits a module by its {what}, but which dims of the parameters of "
        f"{type(module).__name__} ({own}) have those is not known; give the layout of each: "
        f"shard_params({{{_example(module)}}}, in_=..., out=...)"
    )


def _param_layouts(
    site: HookSite, module: nn.Module, dims: Mapping[str, int], units: int | None
) -> dict[str, P | Placement]:
    """Return the layouts of a module's own parameters: split along the feature dim, or whole."""
    own = own_tensors(module)
    split = {name: dim for name, dim in dims.items() if name in own}
    sizes = {
        name: None if units is None else _sizes(site, name, own[name].shape[dim], units)
        for name, dim in split.items()
    }
    return {
        **dict.fromkeys(own, _WHOLE),
        **{name: Shard(dim, sizes=sizes[name]) for name, dim in split.items()},
    }


def _sizes(site: HookSite, name: str, size: int, units: int) -> tuple[int, ...]:
    """Return the number of features of each rank: whole units, chunked as by `torch.chunk`.

    Raises:
        ValueError: `units` does not divide the features.
    """
    if units < 1 or size % units:
        raise ValueError(
            f"{site}: units={units} does not divide the {size} features of {name}; give units= "
            "that does, or leave it out"
        )
    ranks = site.mesh.size(site.axis)
    return tuple(
        size // units * (stop - start)
        for start, stop in (chunk(0, units, ranks, i) for i in range(ranks))
    )


# -- the axis --------------------------------------------------------------------------------------


def axis_of(style: Any, mesh: DeviceMesh, pattern: str) -> str:
    """Return the mesh axis of a style.

    Raises:
        ValueError: the mesh does not have it, or the mesh has several axes and none is "tp".
    """
    axis = getattr(style, "axis", None)
    names: Sequence[str] = mesh.axis_names
    if axis in names:
        return axis
    if axis is None and ("tp" in names or len(names) == 1):
        return "tp" if "tp" in names else names[0]
    problem = (
        f"is for axis {axis!r}" if axis is not None else "has no axis=, and no axis is called 'tp'"
    )
    raise ValueError(
        f"plan[{pattern!r}]: {style!r} {problem}; {mesh} has {', '.join(map(repr, names))}: choose "
        f"with axis={names[-1]!r}, or parallelize on mesh[{names[-1]!r}] alone"
    )
