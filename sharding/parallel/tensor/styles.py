"""Styles of tensor and sequence parallelism: where a module's parameters lie, and how its inputs and outputs do.

    colwise()        weight [n/tp, k]    x whole  -> y split by output features           nothing moves
    rowwise()        weight [n, k/tp]    x split by input features -> y pending -> out    all_reduce, or reduce_scatter
    sequence(1)      parameters whole    x split along dim 1 -> y split along dim 1       nothing moves

What a style says is about its own axis, "tp"; along all others tensors lie as they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import Tensor, nn

from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import chunk
from ...layout.spec import P, Placement, Shard
from .activations import InputHook, Lay, OutputHook, Site, Where, as_where, input_hook

_WHOLE = P()


class Style:
    """What a plan says of a module. A style of one's own gives back what it needs from these methods.

    Attributes:
        axis: the mesh axis that it speaks of; None for "tp", or the only one.
    """

    axis: str | None = None

    def parameters(self, site: Site, module: nn.Module) -> Mapping[str, P | Placement]:
        """Where the module's own parameters and buffers lie, by name; a placement is one on the style's axis."""
        return {}

    def inputs(self, site: Site, module: nn.Module) -> InputHook | None:
        """What lays out the arguments of forward."""
        return None

    def outputs(self, site: Site, module: nn.Module) -> OutputHook | None:
        """What lays out the results of forward."""
        return None


class _Shown(Style):
    """Shows the fields that differ from their defaults."""

    def __repr__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of the module itself."""
    return {name: x for name, x in [*module._parameters.items(), *module._buffers.items()] if x is not None}


def first_input(site: Site, module: nn.Module, lay: Lay) -> InputHook | None:
    """The hook for the first argument."""
    return None if lay.to is None else input_hook(site, module, [lay], {})


def every_output(site: Site, lay: Lay) -> OutputHook | None:
    """The hook for all that the module returns."""
    return None if lay.to is None and not lay.local else OutputHook(site, (lay,))


@dataclass(frozen=True, repr=False)
class colwise(_Shown):
    """colwise(out=None) -> Style: each rank computes some of the output features (of an embedding: of each row's).

        x [b, k]        weight [n/tp, k]        y [b, n/tp]           nothing moves
        backward: the gradient of x is pending over tp

    Args:
        out: how the output shall lie along the axis: a `P` or a placement; None leaves it split by features.
        in_: what a plain input is taken for: this rank's part of a tensor that lies so; None for the whole tensor.
        axis: the mesh axis; "tp" where the mesh has it, else the mesh's only one.
        units: how many units the features come in that stay whole, such as heads: a rank has some of them, so that
            `view(b, s, -1, head_dim)` finds whole heads on every rank even where ranks have different numbers of them.

    Raises:
        ValueError: in `parallelize`, for a module whose parameters it does not know (write `shard({...})`), or features that are
            no such number of units.

    Communication: an all_gather or all_reduce where the input is split or pending along the axis; what `out` asks for.

    Example:
        >>> sm.parallelize(model, mesh, {"*.q_proj": sm.colwise(units=32), "*.o_proj": sm.rowwise(units=32)})
    """

    out: Where = None
    in_: Where = None
    axis: str | None = None
    units: int | None = None

    def parameters(self, site: Site, module: nn.Module) -> Mapping[str, P | Placement]:
        return _split(site, module, _known(site, module, "outputs").outputs, self.units)

    def inputs(self, site: Site, module: nn.Module) -> InputHook | None:
        return first_input(site, module, Lay(_WHOLE, plain=as_where(self.in_, "in_")))

    def outputs(self, site: Site, module: nn.Module) -> OutputHook | None:
        return every_output(site, Lay(as_where(self.out, "out")))


@dataclass(frozen=True, repr=False)
class rowwise(_Shown):
    """rowwise(out=P()) -> Style: each rank has some of the input features (of an embedding: of the rows), and sums over those.

        x [b, k/tp]     weight [n, k/tp]        y [b, n] pending over tp  ->  out

    Args:
        out: how the sum shall lie along the axis: `P()` on every rank, `P(None, "tp", None)` split by sequence; None
            leaves it pending, to be summed where it is needed.
        in_: what a plain input is taken for: this rank's part of a tensor that lies so; None for its features (of an embedding:
            the whole tensor).
        axis, units: as for `colwise`.

    Raises:
        ValueError: as `colwise`.

    Communication: an all_reduce for `P()`, a reduce_scatter for a split `out`; an exchange where the input lies otherwise.

    Example:
        >>> sm.parallelize(model, mesh, {"*.up": sm.colwise(), "*.down": sm.rowwise(out=P(None, "tp", None))})
    """

    out: Where = _WHOLE
    in_: Where = None
    axis: str | None = None
    units: int | None = None

    def parameters(self, site: Site, module: nn.Module) -> Mapping[str, P | Placement]:
        return _split(site, module, _known(site, module, "inputs").inputs, self.units)

    def inputs(self, site: Site, module: nn.Module) -> InputHook | None:
        return first_input(site, module, self.input_of(site, module))

    def input_of(self, site: Site, module: nn.Module) -> Lay:
        """How the first argument shall lie."""
        kind, plain = _known(site, module, "inputs"), as_where(self.in_, "in_")
        if kind.features is None:
            return Lay(_WHOLE, plain)
        split: Any = self.parameters(site, module)["weight"]
        to = Shard(kind.features, sizes=split.sizes)
        return Lay(to, plain, size=module.weight.shape[split.dim] if plain in (None, to) else None)  # type: ignore[union-attr]

    def outputs(self, site: Site, module: nn.Module) -> OutputHook | None:
        return every_output(site, Lay(as_where(self.out, "out")))


@dataclass(frozen=True, repr=False)
class sequence(_Shown):
    """sequence(dim=1) -> Style: each rank computes on some positions; for norms, dropout, and all that treats positions alike.

        x [b, s/tp, d]      parameters whole      y [b, s/tp, d]      nothing moves
        backward: the gradients of the parameters are pending, and reduced once at its end, together

    Args:
        dim: the dim of positions.
        out: how the output shall lie along the axis; `P()` gathers it once for all that read it, None leaves it split.
        axis: as for `colwise`.

    Communication: an exchange where the input lies otherwise, none where it is whole; what `out` asks for.

    Example:
        >>> sm.parallelize(model, mesh, {"*.norm": sm.sequence(1, out=P())})
    """

    dim: int = 1
    out: Where = None
    axis: str | None = None

    def parameters(self, site: Site, module: nn.Module) -> Mapping[str, P | Placement]:
        return dict.fromkeys(own_tensors(module), _WHOLE)

    def inputs(self, site: Site, module: nn.Module) -> InputHook | None:
        return first_input(site, module, Lay(Shard(self.dim)))

    def outputs(self, site: Site, module: nn.Module) -> OutputHook | None:
        return every_output(site, Lay(as_where(self.out, "out")))


class inputs(Style):
    """inputs(P(), mask=P()) -> Style: how arguments of a module's forward shall lie along the axis.

    Args:
        where: for each argument by position a `P` or a placement, for all tensors in it; None leaves it as it comes. A plain
            tensor is taken to be this rank's part of one that lies so.
        axis: as for `colwise`.
        named: the same by name, however the module is called.

    Raises:
        ValueError: in `parallelize`, for an argument that forward does not have.

    Communication: what the layouts ask for, all arguments together.

    Example:
        >>> sm.parallelize(model, mesh, {"*.attn": sm.inputs(P()), "*.q_proj": sm.colwise()})   # one gather for q, k and v
    """

    def __init__(self, *where: Where, axis: str | None = None, **named: Where) -> None:
        self.axis = axis
        self._where = [as_where(w, "inputs") for w in where]
        self._named = {name: as_where(w, name) for name, w in named.items()}

    def inputs(self, site: Site, module: nn.Module) -> InputHook | None:
        positional = [None if w is None else Lay(w) for w in self._where]
        return input_hook(site, module, positional, {name: Lay(w) for name, w in self._named.items() if w is not None})

    def __repr__(self) -> str:
        return f"inputs({', '.join([*map(repr, self._where), *[f'{k}={v!r}' for k, v in self._named.items()]])})"


class outputs(Style):
    """outputs(P()) -> Style: how the results of a module's forward shall lie along the axis.

    Args:
        where: a `P` or a placement for all tensors that it returns, or one for each part of a tuple; None leaves it as it comes.
        axis: as for `colwise`.

    Raises:
        ValueError: when the module returns another number of results.

    Communication: what the layouts ask for, all results together.

    Example:
        >>> sm.parallelize(model, mesh, {"": sm.outputs(P())})
    """

    def __init__(self, *where: Where, axis: str | None = None) -> None:
        if not where:
            raise TypeError("outputs(): give one P(...) for all results, or one for each of a tuple")
        self.axis = axis
        self._where = [as_where(w, "outputs") for w in where]

    def outputs(self, site: Site, module: nn.Module) -> OutputHook | None:
        return OutputHook(site, tuple(map(Lay, self._where)))

    def __repr__(self) -> str:
        return f"outputs({', '.join(map(repr, self._where))})"


@dataclass(frozen=True, repr=False)
class shard(_Shown):
    """shard({"w_in": P("tp"), "scale": P()}, out=None) -> Style: where parameters lie, said one by one.

    Args:
        specs: of a module, a `P` or a placement for each parameter or buffer by name, the others whole; of a pattern that names
            parameters themselves, one for all of them (a bare `P` in the plan says the same).
        in_: how the first input shall lie along the axis; None leaves it as it comes.
        out: how the output shall lie along the axis.
        axis: as for `colwise`.

    Raises:
        ValueError: in `parallelize`, for a name that the module does not have.

    Communication: what `in_` and `out` ask for.

    Example:
        >>> sm.parallelize(model, mesh, {"*.attn": sm.shard({"w_qkv": P("tp"), "w_out": P(None, "tp")}, out=P())})
    """

    specs: Any
    in_: Where = None
    out: Where = None
    axis: str | None = None

    def parameters(self, site: Site, module: nn.Module) -> Mapping[str, P | Placement]:
        if not isinstance(self.specs, Mapping):
            raise ValueError(f"{site} has one spec, and this is a module; name its parameters: shard({{{_example(module)}}})")
        own = list(own_tensors(module))
        unknown = [name for name in self.specs if name not in own]
        if unknown:
            raise ValueError(f"{site}: {type(module).__name__} has no parameter or buffer {unknown[0]!r}; it has {own}")
        return {name: as_where(where, name) or P() for name, where in self.specs.items()}

    def inputs(self, site: Site, module: nn.Module) -> InputHook | None:
        return first_input(site, module, Lay(as_where(self.in_, "in_")))

    def outputs(self, site: Site, module: nn.Module) -> OutputHook | None:
        return every_output(site, Lay(as_where(self.out, "out")))


def _example(module: nn.Module) -> str:
    return ", ".join(f"{name!r}: P(...)" for name in own_tensors(module)) or "'weight': P(...)"


# -- which dim of which parameter --------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """Of a kind of module: which dim of its parameters runs over the output features, and which over the input features.

    Attributes:
        outputs, inputs: parameter -> dim; one that is not there is whole. None where the module cannot be split so.
        features: the input's dim of features; None where it has none, as the numbers of rows that an embedding takes.
    """

    outputs: dict[str, int] | None
    inputs: dict[str, int] | None
    features: int | None = -1


_LINEAR = Kind({"weight": 0, "bias": 0}, {"weight": 1})
_BILINEAR = Kind({"weight": 0, "bias": 0}, None)
_EMBEDDING = Kind({"weight": 1}, {"weight": 0}, None)
_TRANSPOSED = Kind({"weight": 1, "bias": 0}, {"weight": 0})  # `Conv1D` of Hugging Face's GPT-2


def kind_of(module: nn.Module) -> Kind | None:
    """What is known of a module, by its class."""
    if isinstance(module, nn.Linear):
        return _LINEAR
    if isinstance(module, nn.Bilinear):
        return _BILINEAR
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return _EMBEDDING
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module.groups == 1:
        return Kind({"weight": 0, "bias": 0}, {"weight": 1}, 1 - module.weight.ndim)
    return _TRANSPOSED if type(module).__name__ == "Conv1D" and set(module._parameters) == {"weight", "bias"} else None


def _known(site: Site, module: nn.Module, what: str) -> Any:
    """The kind of a module that can be split by its outputs or inputs.

    Raises:
        ValueError: nothing is known of it, or it cannot.
    """
    kind = kind_of(module)
    if kind is not None and getattr(kind, what) is not None:
        return kind
    own = ", ".join(f"{name} {list(x.shape)}" for name, x in own_tensors(module).items()) or "none"
    raise ValueError(
        f"{site} splits a module by its {what}, and which dims of the parameters of {type(module).__name__} ({own}) run over those is not "
        f"known; say where each lies: shard({{{_example(module)}}}, in_=..., out=...)"
    )


def _split(site: Site, module: nn.Module, dims: Mapping[str, int], units: int | None) -> dict[str, P | Placement]:
    """Where each of the module's own parameters lies: split along the dim of features, or whole."""
    own = own_tensors(module)
    split = {name: dim for name, dim in dims.items() if name in own}
    sizes = {name: None if units is None else _sizes(site, name, own[name].shape[dim], units) for name, dim in split.items()}
    return {**dict.fromkeys(own, _WHOLE), **{name: Shard(dim, sizes=sizes[name]) for name, dim in split.items()}}


def _sizes(site: Site, name: str, size: int, units: int) -> tuple[int, ...]:
    """How many features each rank has: whole units, dealt as `torch.chunk` deals.

    Raises:
        ValueError: the features are no such number of units.
    """
    if units < 1 or size % units:
        raise ValueError(
            f"{site}: the {size} features of {name} do not come in {units} units of one size; give units= that divides it, or none"
        )
    return tuple(size // units * (stop - start) for start, stop in _dealt(units, site.mesh.size(site.axis)))


def _dealt(units: int, ranks: int) -> Iterator[tuple[int, int]]:
    return (chunk(0, units, ranks, i) for i in range(ranks))


# -- the axis ----------------------------------------------------------------------------------------------------------


def axis_of(style: Any, mesh: DeviceMesh, pattern: str) -> str:
    """The axis that a style speaks of on this mesh.

    Raises:
        ValueError: the mesh does not have it, or several and none is "tp".
    """
    given = getattr(style, "axis", None)
    names: Sequence[str] = mesh.axis_names
    if given in names:
        return given
    if given is None and ("tp" in names or len(names) == 1):
        return "tp" if "tp" in names else names[0]
    wanted = f"is for axis {given!r}" if given is not None else "does not say which axis it is for, and none is called 'tp'"
    raise ValueError(
        f"plan[{pattern!r}]: {style!r} {wanted}; {mesh} has {', '.join(map(repr, names))}: say which with axis={names[-1]!r}, or "
        f"parallelize on mesh[{names[-1]!r}] alone"
    )
