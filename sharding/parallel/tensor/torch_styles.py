"""The styles of `torch.distributed.tensor.parallel`, with the same names and arguments.

torch's own objects are accepted, too.

With `use_local_output` they take and return plain tensors, so they are for a mesh of one axis:

    x plain --input_layouts--> x on the mesh --desired--> module --output_layouts--> y on the mesh
    --use_local_output--> y plain

A program's own styles derive from `ParallelStyle`, or from one of these and override the methods
that torch's style has:

    _apply(module, mesh)    distribute_module(module, mesh, partition_fn, input_fn, output_fn)
    partition_fn            _partition_linear_fn, _partition_embedding_fn or _replicate_module_fn,
                            of (name, module, mesh)
    input_fn, output_fn     _prepare_input_fn, _prepare_output_fn, of (layouts ..., module, values,
                            mesh)

A class that overrides none of them is applied as part of the plan, whose layouts are checked
together before any is changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ....mesh.device_mesh import DeviceMesh
from ...layout.spec import P, Placement, Replicate, Shard
from ...ops.prepared_modules import prepare
from ...tensor.convert import from_local
from ...tensor.resharding import settled
from ...tensor.sharded_tensor import ShardedTensor
from ..module import distribute_module, sharded_parameter
from .activations import (
    ActivationLayout,
    AxisLayout,
    HookSite,
    InputHook,
    OutputHook,
    as_axis_layout,
    input_hook,
)
from .styles import Style, colwise, every_output, first_input, rowwise, sequence_parallel

_TORCH_METHODS = (
    "_apply",
    "_partition_linear_fn",
    "_partition_embedding_fn",
    "_replicate_module_fn",
    "_prepare_input_fn",
    "_prepare_input_arg",
    "_prepare_input_kwarg_fn",
    "_prepare_output_fn",
    "_prepare_out_fn",
)


class ParallelStyle(Style, ABC):
    """The base class of a program's own styles in torch's form.

    `parallelize_module` calls `_apply` for each module of the pattern.

    Attributes:
        src_data_rank: that of `parallelize_module`, set before `_apply`; for `distribute_tensor`.

    Raises:
        TypeError: for a class without `_apply`.

    Communication: that of `_apply`, and of the hooks that it registers.

    Example:
        >>> class Replicated(ParallelStyle):
        ...     def _apply(self, module, device_mesh):
        ...         return distribute_module(module, device_mesh, input_fn=self.on_mesh)
        ...     def on_mesh(self, module, inputs, device_mesh):
        ...         return DTensor.from_local(inputs[0], device_mesh, [Replicate()])
        >>> parallelize_module(model, mesh["tp"], {"gate": Replicated(), "up": ColwiseParallel()})
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Distribute the module's parameters and register its hooks; return the module."""


def applies_itself(style: Any) -> bool:
    """Return whether a style is applied by `_apply`.

    A program's own, or one of these with methods or desired layouts of its own.
    """
    if not isinstance(style, ParallelStyle):
        return False
    known = next(kind for kind in type(style).__mro__ if kind.__module__ == __name__)
    if any(
        getattr(type(style), name, None) is not getattr(known, name, None)
        for name in _TORCH_METHODS
    ):
        return True
    return known is ParallelStyle or not style._has_usual_inputs()  # type: ignore[attr-defined]


class _TorchStyle(ParallelStyle):
    """A style of torch, with a `repr` of its arguments."""

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments

    def _has_usual_inputs(self) -> bool:
        """Return whether the module's input is desired in the layout that the style has for it."""
        return True

    def __repr__(self) -> str:
        arguments = [
            f"{name}={value!r}" for name, value in self._arguments.items() if value is not None
        ]
        return f"{type(self).__name__}({', '.join(arguments)})"


class _LinearStyle(_TorchStyle):
    """What `ColwiseParallel` and `RowwiseParallel` share.

    One input, one output, and parameters split along one dim.
    """

    _default_input: tuple[Placement, ...]
    _default_output: tuple[Placement, ...]
    _desired_input: tuple[Placement, ...]

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        output_layouts: Any = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        self.input_layouts: tuple[Any, ...] = (
            self._default_input if input_layouts is None else (input_layouts,)
        )
        self.output_layouts: tuple[Any, ...] = (
            self._default_output if output_layouts is None else (output_layouts,)
        )
        self.desired_input_layouts: tuple[Any, ...] = self._desired_input
        self.use_local_output = use_local_output

    def _has_usual_inputs(self) -> bool:
        return self.desired_input_layouts is self._desired_input

    def _input_layout(self) -> Any:
        """Return the layout that a plain input has, None for the one that fits the module."""
        return None if self.input_layouts is self._default_input else self.input_layouts[0]

    def outputs(self, site: HookSite, module: nn.Module) -> OutputHook | None:
        layout = as_axis_layout(self.output_layouts[0], "output_layouts")
        return every_output(site, ActivationLayout(layout, local=self.use_local_output))

    def _shard(
        self, module: nn.Module, device_mesh: DeviceMesh, dims: Mapping[str, int | None]
    ) -> None:
        """Shard each parameter along its dim; replicate it for None."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            dim = dims[name]
            placement = Replicate() if dim is None else Shard(dim)
            module.register_parameter(
                name, sharded_parameter(parameter, device_mesh, [placement], self.src_data_rank)
            )

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        raise NotImplementedError

    def _partition_embedding_fn(
        self, name: str, module: nn.Module, device_mesh: DeviceMesh
    ) -> None:
        raise NotImplementedError

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any,
        desired_input_layouts: Any,
        mod: nn.Module,
        inputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        x = (
            inputs[0]
            if isinstance(inputs[0], ShardedTensor)
            else from_local(inputs[0], device_mesh, input_layouts)
        )
        return x.redistribute(placements=desired_input_layouts)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any,
        use_local_output: bool,
        mod: nn.Module,
        outputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        y = settled(outputs).redistribute(placements=output_layouts)
        return y.to_local() if use_local_output else y

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise NotImplementedError(
                f"{type(self).__name__}._apply is for nn.Linear and nn.Embedding, got "
                f"{type(module).__name__}; override _apply for other modules, or use a style "
                "without methods of its own"
            )
        is_linear = isinstance(module, nn.Linear)
        return distribute_module(
            module,
            device_mesh,
            self._partition_linear_fn if is_linear else self._partition_embedding_fn,
            partial(self._prepare_input_fn, self.input_layouts, self._desired_inputs_of(module)),
            partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
        )

    def _desired_inputs_of(self, module: nn.Module) -> tuple[Any, ...]:
        return self.desired_input_layouts


class ColwiseParallel(_LinearStyle):
    """ColwiseParallel() -> Style: `colwise` with torch's name and arguments.

    Args:
        input_layouts: the layout of the input, in which a plain one is taken; `Replicate()` by
            default.
        output_layouts: the layout of the output; `Shard(-1)` by default.
        use_local_output: return this rank's part as a plain tensor.

    Communication: as `colwise`; for a plain output that is replicated, 152 bytes in its first
    backward (see `to_local`).

    Example:
        >>> sm.compat.parallelize_module(model, mesh["tp"],
        ...     {"up": sm.compat.ColwiseParallel(), "down": sm.compat.RowwiseParallel()})
    """

    _default_input = (Replicate(),)
    _default_output = (Shard(-1),)
    _desired_input = (Replicate(),)

    def parameters(self, site: HookSite, module: nn.Module) -> Mapping[str, P | Placement]:
        return colwise().parameters(site, module)

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        return colwise(in_=self._input_layout()).inputs(site, module)

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        self._shard(module, device_mesh, {"weight": 0, "bias": 0})

    def _partition_embedding_fn(
        self, name: str, module: nn.Module, device_mesh: DeviceMesh
    ) -> None:
        self._shard(module, device_mesh, {"weight": 1})


class RowwiseParallel(_LinearStyle):
    """RowwiseParallel() -> Style: `rowwise` with torch's name and arguments.

    Args:
        input_layouts: the layout of the input, in which a plain one is taken; `Shard(-1)` by
            default, for an embedding `Replicate()`.
        output_layouts: the layout of the sum; `Replicate()` by default.
        use_local_output: return this rank's part as a plain tensor.

    Communication: as `rowwise`; for a plain output that is replicated, 152 bytes in its first
    backward (see `to_local`).

    Example:
        >>> sm.compat.parallelize_module(model, mesh["tp"],
        ...     {"up": sm.compat.ColwiseParallel(), "down": sm.compat.RowwiseParallel()})
    """

    _default_input = (Shard(-1),)
    _default_output = (Replicate(),)
    _desired_input = (Shard(-1),)

    def parameters(self, site: HookSite, module: nn.Module) -> Mapping[str, P | Placement]:
        return rowwise().parameters(site, module)

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        return rowwise(in_=self._input_layout()).inputs(site, module)

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        self._shard(module, device_mesh, {"weight": 1, "bias": None})

    def _partition_embedding_fn(
        self, name: str, module: nn.Module, device_mesh: DeviceMesh
    ) -> None:
        self._shard(module, device_mesh, {"weight": 0})

    def _desired_inputs_of(self, module: nn.Module) -> tuple[Any, ...]:
        return (
            self.desired_input_layouts
            if isinstance(module, nn.Linear) or not self._has_usual_inputs()
            else (Replicate(),)
        )


class SequenceParallel(_TorchStyle):
    """SequenceParallel(sequence_dim=1) -> Style: `sequence_parallel` with torch's arguments.

    Args:
        sequence_dim: the dim of positions; a plain input is taken as split along it.
        use_local_output: return this rank's part as a plain tensor.

    Communication: for a plain input a small all_gather of shapes, once as long as parts are equal
    (see `from_local`).

    Example:
        >>> sm.compat.parallelize_module(model, mesh["tp"], {"norm": sm.compat.SequenceParallel()})
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__(sequence_dim=sequence_dim, use_local_output=use_local_output)
        self.sequence_sharding: tuple[Any, ...] = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def parameters(self, site: HookSite, module: nn.Module) -> Mapping[str, P | Placement]:
        return sequence_parallel().parameters(site, module)

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        return first_input(
            site,
            module,
            ActivationLayout(as_axis_layout(self.sequence_sharding[0], "sequence_sharding")),
        )

    def outputs(self, site: HookSite, module: nn.Module) -> OutputHook | None:
        return every_output(site, ActivationLayout(local=True)) if self.use_local_output else None

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for own, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(
                own, sharded_parameter(parameter, device_mesh, [Replicate()], self.src_data_rank)
            )

    @staticmethod
    def _prepare_input_fn(
        sequence_sharding: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        x = inputs[0]
        if isinstance(x, ShardedTensor):
            return x.redistribute(placements=sequence_sharding)
        return from_local(x, device_mesh, sequence_sharding)

    @staticmethod
    def _prepare_output_fn(
        use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        return outputs.to_local() if use_local_output else outputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            self._replicate_module_fn,
            partial(self._prepare_input_fn, self.sequence_sharding),
            partial(self._prepare_output_fn, self.use_local_output),
        )


class PrepareModuleInput(_TorchStyle):
    """PrepareModuleInput(input_layouts=..., desired_input_layouts=...) -> Style.

    The layouts that forward's arguments have, and those that they get.

    Args:
        input_layouts: one placement, or one for each argument by position, in which a plain one is
            taken; None leaves it unchanged.
        desired_input_layouts: the desired layout of each.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same by name.
        use_local_output: pass this rank's parts to forward as plain tensors.

    Raises:
        ValueError: other numbers or names of desired layouts than of layouts, or an argument that
            forward does not have.

    Communication: that of the layouts, for all arguments together.

    Example:
        >>> style = sm.compat.PrepareModuleInput(
        ...     input_layouts=Shard(1), desired_input_layouts=Replicate()
        ... )
        >>> sm.compat.parallelize_module(model, mesh["tp"], {"attn": style})
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        desired_input_layouts: Any = None,
        input_kwarg_layouts: Mapping[str, Any] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Any] | None = None,
        use_local_output: bool = False,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )
        self.input_layouts = None if input_layouts is None else _as_sequence(input_layouts)
        self.desired_input_layouts = (
            None if desired_input_layouts is None else _as_sequence(desired_input_layouts)
        )
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.with_kwargs = input_kwarg_layouts is not None
        self.use_local_output = use_local_output
        layouts, desired = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        if set(layouts) != set(desired):
            raise ValueError(
                f"input_kwarg_layouts has {sorted(layouts)}, desired_input_kwarg_layouts "
                f"{sorted(desired)}; give both for each"
            )
        _pairs("input_layouts", self.input_layouts, self.desired_input_layouts)

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        local, desired = self.use_local_output, self.desired_input_kwarg_layouts
        pairs = _pairs("input_layouts", self.input_layouts, self.desired_input_layouts)
        layouts = self.input_kwarg_layouts
        named = {
            name: (as_axis_layout(x, name), as_axis_layout(desired[name], name))
            for name, x in layouts.items()
        }
        by_name = {
            name: ActivationLayout(to, plain, local)
            for name, (plain, to) in named.items()
            if plain is not None
        }
        return input_hook(
            site,
            module,
            [None if plain is None else ActivationLayout(to, plain, local) for plain, to in pairs],
            by_name,
        )

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Any, desired_layout: Any
    ) -> Any:
        return _in_layout(input, mesh, input_layout, desired_layout, self.use_local_output)

    def _prepare_input_fn(self, inputs: Any, device_mesh: DeviceMesh) -> Any:
        if self.input_layouts is None:
            return inputs
        values = inputs if isinstance(inputs, tuple) else (inputs,)
        if len(values) != len(self.input_layouts):
            raise ValueError(
                f"{self!r} has layouts for {len(self.input_layouts)} inputs, but forward was "
                f"called with {len(values)}"
            )
        pairs = zip(
            values,
            self.input_layouts,
            self.desired_input_layouts or self.input_layouts,
            strict=True,
        )
        return tuple(
            self._prepare_input_arg(x, device_mesh, layout, desired) for x, layout, desired in pairs
        )

    def _prepare_input_kwarg_fn(
        self, inputs: Any, kwarg_inputs: Mapping[str, Any], device_mesh: DeviceMesh
    ) -> tuple[Any, Any]:
        layouts, desired = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        positional = self._prepare_input_fn(inputs, device_mesh)
        named = {
            name: self._prepare_input_arg(x, device_mesh, layouts.get(name), desired.get(name))
            for name, x in kwarg_inputs.items()
        }
        return positional, named

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.with_kwargs:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: settled(
                    self._prepare_input_kwarg_fn(args, kwargs, device_mesh)
                ),
                with_kwargs=True,
            )
        else:
            module.register_forward_pre_hook(
                lambda _, args: settled(self._prepare_input_fn(args, device_mesh))
            )
        prepare(module)
        return module


class PrepareModuleOutput(_TorchStyle):
    """PrepareModuleOutput(output_layouts=..., desired_output_layouts=...) -> Style.

    The layouts that forward's results have, and those that they get.

    Args:
        output_layouts: one placement, or one for each of a tuple of results, in which a plain one
            is taken; None leaves it unchanged.
        desired_output_layouts: the desired layout of each.
        use_local_output: return this rank's parts as plain tensors.

    Raises:
        ValueError: other numbers of desired layouts than of layouts, or of results.

    Communication: that of the layouts, for all results together.

    Example:
        >>> style = sm.compat.PrepareModuleOutput(
        ...     output_layouts=Shard(1), desired_output_layouts=Replicate()
        ... )
        >>> sm.compat.parallelize_module(model, mesh["tp"], {"layers": style})
    """

    def __init__(
        self, *, output_layouts: Any, desired_output_layouts: Any, use_local_output: bool = True
    ) -> None:
        super().__init__(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )
        self.output_layouts = _as_sequence(output_layouts)
        self.desired_output_layouts = _as_sequence(desired_output_layouts)
        self.use_local_output = use_local_output
        _pairs("output_layouts", self.output_layouts, self.desired_output_layouts)

    def outputs(self, site: HookSite, module: nn.Module) -> OutputHook | None:
        pairs = _pairs("output_layouts", self.output_layouts, self.desired_output_layouts)
        local = self.use_local_output
        return OutputHook(
            site,
            tuple(
                ActivationLayout() if plain is None else ActivationLayout(to, plain, local)
                for plain, to in pairs
            ),
        )

    def _prepare_out_fn(self, outputs: Any, device_mesh: DeviceMesh) -> Any:
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(values) != len(self.output_layouts):
            raise ValueError(
                f"{self!r} has layouts for {len(self.output_layouts)} results, but the module "
                f"returned {len(values)}"
            )
        layouts = zip(values, self.output_layouts, self.desired_output_layouts, strict=True)
        results = tuple(
            _in_layout(x, device_mesh, layout, to, self.use_local_output)
            for x, layout, to in layouts
        )
        return results[0] if len(results) == 1 else results

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(
            lambda _, inputs, outputs: settled(self._prepare_out_fn(outputs, device_mesh))
        )
        prepare(module)
        return module


class PrepareModuleInputOutput(_TorchStyle):
    """PrepareModuleInputOutput(...) -> Style: `PrepareModuleInput` and `PrepareModuleOutput`.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts: as
            `PrepareModuleInput`.
        use_local_input: pass this rank's parts to forward as plain tensors.
        output_layouts, desired_output_layouts, use_local_output: as `PrepareModuleOutput`.

    Communication: that of the layouts.

    Example:
        >>> gathered = dict(input_layouts=Shard(1), desired_input_layouts=Replicate())
        >>> split = dict(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        >>> sm.compat.PrepareModuleInputOutput(**gathered, **split)
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        desired_input_layouts: Any = None,
        input_kwarg_layouts: Mapping[str, Any] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Any] | None = None,
        use_local_input: bool = False,
        output_layouts: Any,
        desired_output_layouts: Any,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )
        inputs = {
            name: x
            for name, x in self.prepare_module_input._arguments.items()
            if name != "use_local_output"
        }
        super().__init__(
            **inputs, use_local_input=use_local_input, **self.prepare_module_output._arguments
        )

    def inputs(self, site: HookSite, module: nn.Module) -> InputHook | None:
        return self.prepare_module_input.inputs(site, module)

    def outputs(self, site: HookSite, module: nn.Module) -> OutputHook | None:
        return self.prepare_module_output.outputs(site, module)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        self.prepare_module_output._apply(module, device_mesh)
        return module


def _in_layout(x: Any, mesh: DeviceMesh, layout: Any, desired: Any, use_local: bool) -> Any:
    """Return a tensor in the desired layout; values without a layout are unchanged.

    A plain tensor is taken in `layout`.
    """
    x = settled(x)
    if layout is None or not isinstance(x, Tensor):
        return x
    y = x if isinstance(x, ShardedTensor) else from_local(x, mesh, [layout])
    if desired is not None:
        y = y.redistribute(placements=[desired])
    return y.to_local() if use_local else y


def _pairs(name: str, actual: Any, desired: Any) -> list[tuple[AxisLayout, AxisLayout]]:
    """Return each layout with the desired one.

    Raises:
        ValueError: their numbers differ.
    """
    layouts, desired_layouts = _as_sequence(actual), _as_sequence(desired)
    if len(layouts) != len(desired_layouts):
        raise ValueError(
            f"{name} has {len(layouts)} placements and desired_{name} {len(desired_layouts)}; give "
            "one of each per tensor, None to leave it"
        )
    return [
        (as_axis_layout(one, name), as_axis_layout(other, f"desired_{name}"))
        for one, other in zip(layouts, desired_layouts, strict=True)
    ]


def _as_sequence(layouts: Any) -> tuple[Any, ...]:
    if layouts is None:
        return ()
    return tuple(layouts) if isinstance(layouts, (tuple, list)) else (layouts,)


# -- torch's own objects ---------------------------------------------------------------------------


def own_style(style: Any) -> Style | None:
    """Return our style for one of torch's, from its public attributes; None for other objects.

    Raises:
        TypeError: a style of torch without a counterpart here.
    """
    kinds = [
        kind
        for kind in type(style).__mro__
        if kind.__module__.startswith("torch.distributed.tensor.parallel")
    ]
    if not kinds:
        return None
    read = _READ.get(type(style).__name__) if kinds[0] is type(style) else None
    if read is None:
        raise TypeError(
            f"torch's style {style!r} is not supported; supported are {', '.join(_READ)}, and "
            "styles whose class derives from shardmesh.compat.ParallelStyle or from another style "
            "of shardmesh.compat instead of torch's"
        )
    return read(style)


def _read_input(style: Any, use_local_output: str = "use_local_output") -> dict[str, Any]:
    return {
        "input_layouts": style.input_layouts,
        "desired_input_layouts": style.desired_input_layouts,
        "input_kwarg_layouts": style.input_kwarg_layouts,
        "desired_input_kwarg_layouts": style.desired_input_kwarg_layouts,
        use_local_output: style.use_local_output,
    }


def _read_output(style: Any) -> dict[str, Any]:
    return {
        "output_layouts": style.output_layouts,
        "desired_output_layouts": style.desired_output_layouts,
        "use_local_output": style.use_local_output,
    }


def _read_linear(kind: Any, style: Any) -> Style:
    (taken,), (out,) = style.input_layouts, style.output_layouts
    return kind(input_layouts=taken, output_layouts=out, use_local_output=style.use_local_output)


_READ: dict[str, Any] = {
    "ColwiseParallel": lambda style: _read_linear(ColwiseParallel, style),
    "RowwiseParallel": lambda style: _read_linear(RowwiseParallel, style),
    "SequenceParallel": lambda style: SequenceParallel(
        sequence_dim=style.sequence_sharding[0].dim, use_local_output=style.use_local_output
    ),
    "PrepareModuleInput": lambda style: PrepareModuleInput(**_read_input(style)),
    "PrepareModuleOutput": lambda style: PrepareModuleOutput(**_read_output(style)),
    "PrepareModuleInputOutput": lambda style: PrepareModuleInputOutput(
        **_read_input(style.prepare_module_input, "use_local_input"),
        **_read_output(style.prepare_module_output),
    ),
}
