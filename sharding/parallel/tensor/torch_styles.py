"""The styles of `torch.distributed.tensor.parallel`, with the same names and arguments; torch's own objects are accepted, too.

With `use_local_output` they take and return plain tensors, so they are for a mesh of one axis:

    x plain --input_layouts--> x on the mesh --desired--> module --output_layouts--> y on the mesh --use_local_output--> y plain
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...layout.spec import P, Placement, Replicate, Shard
from .activations import ActivationLayout, AxisLayout, HookSite, InputHook, OutputHook, as_axis_layout, input_hook
from .styles import Style, colwise, every_output, first_input, rowwise, sequence_parallel


@dataclass(frozen=True, kw_only=True)
class ColwiseParallel(Style):
    """ColwiseParallel() -> Style: `colwise` with torch's name and arguments.

    Args:
        input_layouts: the layout of the input, in which a plain one is taken; `Replicate()` by default.
        output_layouts: the layout of the output; `Shard(-1)` by default.
        use_local_output: return this rank's part as a plain tensor.

    Communication: as `colwise`; for a plain output that is replicated, 40 bytes in its first backward (see `to_local`).

    Example:
        >>> sm.compat.parallelize_module(model, mesh["tp"], {"up": sm.compat.ColwiseParallel(), "down": sm.compat.RowwiseParallel()})
    """

    input_layouts: Any = None
    output_layouts: Any = None
    use_local_output: bool = True

    def parameters(self, site: HookSite, module: nn.Module) -> Mapping[str, P | Placement]:
        return colwise().parameters(site, module)

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        return colwise(in_=self.input_layouts).inputs(site, module)

    def outputs(self, site: HookSite, module: nn.Module) -> OutputHook | None:
        layout = ActivationLayout(as_axis_layout(self.output_layouts, "output_layouts") or Shard(-1), local=self.use_local_output)
        return every_output(site, layout)


@dataclass(frozen=True, kw_only=True)
class RowwiseParallel(Style):
    """RowwiseParallel() -> Style: `rowwise` with torch's name and arguments.

    Args:
        input_layouts: the layout of the input, in which a plain one is taken; `Shard(-1)` by default, for an embedding
            `Replicate()`.
        output_layouts: the layout of the sum; `Replicate()` by default.
        use_local_output: return this rank's part as a plain tensor.

    Communication: as `rowwise`; for a plain output that is replicated, 40 bytes in its first backward (see `to_local`).

    Example:
        >>> sm.compat.parallelize_module(model, mesh["tp"], {"up": sm.compat.ColwiseParallel(), "down": sm.compat.RowwiseParallel()})
    """

    input_layouts: Any = None
    output_layouts: Any = None
    use_local_output: bool = True

    def parameters(self, site: HookSite, module: nn.Module) -> Mapping[str, P | Placement]:
        return rowwise().parameters(site, module)

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        return rowwise(in_=self.input_layouts).inputs(site, module)

    def outputs(self, site: HookSite, module: nn.Module) -> OutputHook | None:
        layout = ActivationLayout(as_axis_layout(self.output_layouts, "output_layouts") or Replicate(), local=self.use_local_output)
        return every_output(site, layout)


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(Style):
    """SequenceParallel(sequence_dim=1) -> Style: `sequence_parallel` with torch's name and arguments.

    Args:
        sequence_dim: the dim of positions; a plain input is taken as split along it.
        use_local_output: return this rank's part as a plain tensor.

    Communication: for a plain input a small all_gather of shapes, once as long as parts are equal (see `from_local`).

    Example:
        >>> sm.compat.parallelize_module(model, mesh["tp"], {"norm": sm.compat.SequenceParallel()})
    """

    sequence_dim: int = 1
    use_local_output: bool = False

    def parameters(self, site: HookSite, module: nn.Module) -> Mapping[str, P | Placement]:
        return sequence_parallel().parameters(site, module)

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        return first_input(site, module, ActivationLayout(Shard(self.sequence_dim)))

    def outputs(self, site: HookSite, module: nn.Module) -> OutputHook | None:
        return every_output(site, ActivationLayout(local=True)) if self.use_local_output else None


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInput(Style):
    """PrepareModuleInput(input_layouts=..., desired_input_layouts=...) -> Style: given and desired layouts of forward's arguments.

    Args:
        input_layouts: one placement, or one for each argument by position, in which a plain one is taken; None leaves it unchanged.
        desired_input_layouts: the desired layout of each.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same by name.
        use_local_output: pass this rank's parts to forward as plain tensors.

    Raises:
        ValueError: other numbers or names of desired layouts than of layouts, or an argument that forward does not have.

    Communication: that of the layouts, for all arguments together.

    Example:
        >>> style = sm.compat.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        >>> sm.compat.parallelize_module(model, mesh["tp"], {"attn": style})
    """

    input_layouts: Any = None
    desired_input_layouts: Any = None
    input_kwarg_layouts: Mapping[str, Any] | None = None
    desired_input_kwarg_layouts: Mapping[str, Any] | None = None
    use_local_output: bool = False

    def __post_init__(self) -> None:
        given, desired = self.input_kwarg_layouts or {}, self.desired_input_kwarg_layouts or {}
        if set(given) != set(desired):
            raise ValueError(f"input_kwarg_layouts has {sorted(given)}, desired_input_kwarg_layouts {sorted(desired)}; give both for each")
        _pairs("input_layouts", self.input_layouts, self.desired_input_layouts)

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        local, desired = self.use_local_output, self.desired_input_kwarg_layouts or {}
        pairs = _pairs("input_layouts", self.input_layouts, self.desired_input_layouts)
        given = self.input_kwarg_layouts or {}
        named = {name: (as_axis_layout(x, name), as_axis_layout(desired[name], name)) for name, x in given.items()}
        lays = {name: ActivationLayout(to, plain, local) for name, (plain, to) in named.items() if plain is not None}
        return input_hook(site, module, [None if plain is None else ActivationLayout(to, plain, local) for plain, to in pairs], lays)


@dataclass(frozen=True, kw_only=True)
class PrepareModuleOutput(Style):
    """PrepareModuleOutput(output_layouts=..., desired_output_layouts=...) -> Style: given and desired layouts of forward's results.

    Args:
        output_layouts: one placement, or one for each of a tuple of results, in which a plain one is taken; None leaves it unchanged.
        desired_output_layouts: the desired layout of each.
        use_local_output: return this rank's parts as plain tensors.

    Raises:
        ValueError: other numbers of desired layouts than of layouts, or of results.

    Communication: that of the layouts, for all results together.

    Example:
        >>> style = sm.compat.PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        >>> sm.compat.parallelize_module(model, mesh["tp"], {"layers": style})
    """

    output_layouts: Any
    desired_output_layouts: Any
    use_local_output: bool = True

    def __post_init__(self) -> None:
        _pairs("output_layouts", self.output_layouts, self.desired_output_layouts)

    def outputs(self, site: HookSite, module: nn.Module) -> OutputHook | None:
        pairs = _pairs("output_layouts", self.output_layouts, self.desired_output_layouts)
        local = self.use_local_output
        return OutputHook(site, tuple(ActivationLayout() if plain is None else ActivationLayout(to, plain, local) for plain, to in pairs))


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInputOutput(Style):
    """PrepareModuleInputOutput(...) -> Style: `PrepareModuleInput` and `PrepareModuleOutput` of one module.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts: as `PrepareModuleInput`.
        use_local_input: pass this rank's parts to forward as plain tensors.
        output_layouts, desired_output_layouts, use_local_output: as `PrepareModuleOutput`.

    Communication: that of the layouts.

    Example:
        >>> gathered = dict(input_layouts=Shard(1), desired_input_layouts=Replicate())
        >>> sm.compat.PrepareModuleInputOutput(**gathered, output_layouts=Replicate(), desired_output_layouts=Shard(1))
    """

    input_layouts: Any = None
    desired_input_layouts: Any = None
    input_kwarg_layouts: Mapping[str, Any] | None = None
    desired_input_kwarg_layouts: Mapping[str, Any] | None = None
    use_local_input: bool = False
    output_layouts: Any
    desired_output_layouts: Any
    use_local_output: bool = True

    def __post_init__(self) -> None:
        for part in (self._input, self._output):
            part()  # its constructor checks the arguments

    def _input(self) -> PrepareModuleInput:
        return PrepareModuleInput(
            input_layouts=self.input_layouts,
            desired_input_layouts=self.desired_input_layouts,
            input_kwarg_layouts=self.input_kwarg_layouts,
            desired_input_kwarg_layouts=self.desired_input_kwarg_layouts,
            use_local_output=self.use_local_input,
        )

    def _output(self) -> PrepareModuleOutput:
        return PrepareModuleOutput(
            output_layouts=self.output_layouts,
            desired_output_layouts=self.desired_output_layouts,
            use_local_output=self.use_local_output,
        )

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        return self._input().inputs(site, module)

    def outputs(self, site: HookSite, module: nn.Module) -> OutputHook | None:
        return self._output().outputs(site, module)


def _pairs(name: str, given: Any, desired: Any) -> list[tuple[AxisLayout, AxisLayout]]:
    """Return each layout with the desired one.

    Raises:
        ValueError: their numbers differ.
    """
    layouts, wanted = _as_sequence(given), _as_sequence(desired)
    if len(layouts) != len(wanted):
        raise ValueError(
            f"{name} has {len(layouts)} placements and desired_{name} {len(wanted)}; give one of each per tensor, None to leave it"
        )
    return [(as_axis_layout(one, name), as_axis_layout(other, f"desired_{name}")) for one, other in zip(layouts, wanted, strict=True)]


def _as_sequence(layouts: Any) -> Sequence[Any]:
    return () if layouts is None else layouts if isinstance(layouts, (tuple, list)) else (layouts,)


# -- torch's own objects -----------------------------------------------------------------------------------------------


def own_style(given: Any) -> Style | None:
    """Return our style for one of torch's, from its public attributes; None for other objects.

    Raises:
        TypeError: a style of torch without a counterpart here.
    """
    kinds = [kind for kind in type(given).__mro__ if kind.__module__.startswith("torch.distributed.tensor.parallel")]
    if not kinds:
        return None
    read = _READ.get(type(given).__name__) if kinds[0] is type(given) else None
    if read is None:
        raise TypeError(f"torch's style {given!r} is not supported; supported are {', '.join(_READ)}")
    return read(given)


def _read_input(given: Any, use_local_output: str = "use_local_output") -> dict[str, Any]:
    return {
        "input_layouts": given.input_layouts,
        "desired_input_layouts": given.desired_input_layouts,
        "input_kwarg_layouts": given.input_kwarg_layouts,
        "desired_input_kwarg_layouts": given.desired_input_kwarg_layouts,
        use_local_output: given.use_local_output,
    }


def _read_output(given: Any) -> dict[str, Any]:
    return {
        "output_layouts": given.output_layouts,
        "desired_output_layouts": given.desired_output_layouts,
        "use_local_output": given.use_local_output,
    }


def _read_linear(kind: Any, given: Any) -> Style:
    (taken,), (out,) = given.input_layouts, given.output_layouts
    return kind(input_layouts=taken, output_layouts=out, use_local_output=given.use_local_output)


_READ: dict[str, Any] = {
    "ColwiseParallel": lambda given: _read_linear(ColwiseParallel, given),
    "RowwiseParallel": lambda given: _read_linear(RowwiseParallel, given),
    "SequenceParallel": lambda given: SequenceParallel(
        sequence_dim=given.sequence_sharding[0].dim, use_local_output=given.use_local_output
    ),
    "PrepareModuleInput": lambda given: PrepareModuleInput(**_read_input(given)),
    "PrepareModuleOutput": lambda given: PrepareModuleOutput(**_read_output(given)),
    "PrepareModuleInputOutput": lambda given: PrepareModuleInputOutput(
        **_read_input(given.prepare_module_input, "use_local_input"), **_read_output(given.prepare_module_output)
    ),
}
