"""Layouts of activations: hooks that redistribute a module's inputs and outputs.

A hook specifies layouts along some axes; along the others a tensor keeps its own:

    x: P("fsdp", None, None) on (fsdp=2, tp=2)     P(None, "tp") along tp      P("fsdp", "tp", None)
    y: P("fsdp", unreduced={"tp"})                 P() along tp                P("fsdp", None, None)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ....mesh.device_mesh import DeviceMesh
from ...layout.bounded_cache import LayoutCache
from ...layout.layout import Layout
from ...layout.spec import Cut, P, Placement, Replicate, as_placement, placements_to_spec
from ...ops.torch_compile import not_compiled, refuse_jit_trace
from ...tensor.convert import from_local
from ...tensor.redistribute import redistribute, redistribute_many
from ...tensor.sharded_tensor import ShardedTensor

AxisLayout: TypeAlias = "P | Placement | None"


@dataclass(frozen=True)
class ActivationLayout:
    """The desired layout of one argument or result.

    Attributes:
        to: a `P`, or a placement on the hook's axis; None to leave it unchanged.
        plain: the layout in which a plain tensor is taken, as this rank's part; None for that of
            `to`.
        local: return this rank's part as a plain tensor.
        size: the global size of the dim along which a plain tensor is split, if known; otherwise
            ranks exchange shapes.
    """

    to: AxisLayout = None
    plain: AxisLayout = None
    local: bool = False
    size: int | None = None

    def __str__(self) -> str:
        return f"{'as it comes' if self.to is None else self.to}{' as a plain tensor' * self.local}"


@dataclass(frozen=True)
class HookSite:
    """The place of a hook: the module's path, its style as text, the mesh, and the style's axis."""

    path: str
    style: str
    mesh: DeviceMesh
    axis: str

    def __str__(self) -> str:
        return f"{self.path!r}: {self.style}" if self.path else f"the module itself: {self.style}"


@dataclass(frozen=True)
class InputHook:
    """A forward pre-hook that redistributes arguments, together in as few collectives as possible.

    Attributes:
        site: its place.
        positional: the layouts of arguments by position.
        named: the layouts of keyword arguments.
        shown: its lines in `repr(module)`.
    """

    site: HookSite
    positional: Mapping[int, ActivationLayout]
    named: Mapping[str, ActivationLayout]
    shown: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        _check_axes(self.site, [*self.positional.values(), *self.named.values()])
        names = {
            id(desired): (name, desired)
            for name, desired in [*self.positional.items(), *self.named.items()]
        }
        object.__setattr__(
            self,
            "shown",
            tuple(
                f"input {name}: {desired} along {self.site.axis}"
                for name, desired in names.values()
            ),
        )

    @not_compiled(
        "parallelize redistributes a module's inputs and outputs here, outside of any graph"
    )
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        inputs = [(i, args[i], desired) for i, desired in self.positional.items() if i < len(args)]
        inputs += [
            (name, kwargs[name], desired) for name, desired in self.named.items() if name in kwargs
        ]
        moved = redistribute_activations(
            self.site,
            module,
            [(f"argument {key!r}", value, desired) for key, value, desired in inputs],
            are_inputs=True,
        )
        by_key = {key: value for (key, *_), value in zip(inputs, moved, strict=True)}
        return tuple([by_key.get(i, x) for i, x in enumerate(args)]), {
            name: by_key.get(name, x) for name, x in kwargs.items()
        }


@dataclass(frozen=True)
class OutputHook:
    """A forward hook that redistributes the module's results.

    Attributes:
        site: its place.
        layouts: one layout for all tensors in the result, or one for each part of a tuple.
        shown: its lines in `repr(module)`.
    """

    site: HookSite
    layouts: tuple[ActivationLayout, ...]
    shown: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        _check_axes(self.site, self.layouts)
        text = ", ".join(map(str, self.layouts))
        object.__setattr__(self, "shown", (f"output: {text} along {self.site.axis}",))

    @not_compiled(
        "parallelize redistributes a module's inputs and outputs here, outside of any graph"
    )
    def __call__(self, module: nn.Module, _: Any, output: Any) -> Any:
        if len(self.layouts) == 1:
            return redistribute_activations(
                self.site, module, [("the output", output, self.layouts[0])]
            )[0]
        if not isinstance(output, (tuple, list)) or len(output) != len(self.layouts):
            actual = (
                f"{len(output)} of them"
                if isinstance(output, (tuple, list))
                else f"one {type(output).__name__}"
            )
            raise ValueError(
                f"{self.site} has layouts for {len(self.layouts)} outputs, but the module returned "
                f"{actual}; give one for each, or one for all"
            )
        outputs = [
            (f"output {i}", x, desired)
            for i, (x, desired) in enumerate(zip(output, self.layouts, strict=True))
        ]
        moved = redistribute_activations(self.site, module, outputs)
        return output._make(moved) if hasattr(output, "_make") else type(output)(moved)  # type: ignore[attr-defined]


def input_hook(
    site: HookSite,
    module: nn.Module,
    positional: Sequence[ActivationLayout | None],
    named: Mapping[str, ActivationLayout],
) -> InputHook:
    """Return the hook for these arguments, whether a call passes them by position or by name.

    Raises:
        ValueError: the module's forward has no such argument.
    """
    taken = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    kinds, known = {p.kind for p in taken}, {p.name for p in taken}
    if len(positional) > len(names) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise ValueError(
            f"{site} has layouts for {len(positional)} arguments, but forward takes {len(names)}: "
            f"{', '.join(names)}"
        )
    unknown = sorted(set(named) - known)
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ValueError(
            f"{site} has a layout for the argument {unknown[0]!r}, but forward takes "
            f"{', '.join(map(repr, names))}"
        )
    at = {i: desired for i, desired in enumerate(positional) if desired is not None}
    by_name = {names[i]: desired for i, desired in at.items() if i < len(names)}
    at |= {names.index(name): desired for name, desired in named.items() if name in names}
    return InputHook(site, at, {**by_name, **named})


def _check_axes(site: HookSite, layouts: Iterable[ActivationLayout]) -> None:
    """Raise a ValueError for a spec with an unknown axis."""
    for where in [
        w for desired in layouts for w in (desired.to, desired.plain) if isinstance(w, P)
    ]:
        unknown = [axis for axis in where.axes if axis not in site.mesh.axis_names]
        if unknown:
            raise ValueError(
                f"{site}: {where} has axis {unknown[0]!r}, but {site.mesh} has "
                f"{', '.join(map(repr, site.mesh.axis_names))}"
            )


# -- redistribution --------------------------------------------------------------------------------


def redistribute_activations(
    site: HookSite,
    module: nn.Module,
    values: Sequence[tuple[str, Any, ActivationLayout]],
    *,
    are_inputs: bool = False,
) -> list[Any]:
    """Return each value, a tensor or a tree, in its layout; all are redistributed together.

    Args:
        are_inputs: whether the module gets them; then integers that are to be whole may stay plain.

    Raises:
        TypeError: a plain tensor whose layout is ambiguous.
        ValueError: a spec that does not fit a tensor.
        RuntimeError: under `torch.jit.trace`.

    Communication: that of `redistribute_many`; for a plain part a small all_gather of shapes, if
    `from_local` needs it.
    """
    if all(_has_layout(site, value, desired) for _, value, desired in values):
        return [value for _, value, _ in values]
    refuse_jit_trace()
    trees = [pytree.tree_flatten(value) for _, value, _ in values]
    leaves = [
        (name, leaf, desired)
        for (name, _, desired), (flat, _) in zip(values, trees, strict=True)
        for leaf in flat
    ]
    moved = iter(_redistribute_leaves(site, module, leaves, are_inputs))
    return [pytree.tree_unflatten([next(moved) for _ in flat], shape) for flat, shape in trees]


# (desired placement, axis) -> the layout of an activation that has it
_targets: LayoutCache[tuple[Any, str], Layout] = LayoutCache()


def _has_layout(site: HookSite, x: Any, desired: ActivationLayout) -> bool:
    """Return whether this is a tensor known to have the layout: the common case, and cheap."""
    if type(x) is not ShardedTensor or desired.local:
        return False
    return desired.to is None or _targets.get(x._layout, (desired.to, site.axis)) is x._layout


def _redistribute_leaves(
    site: HookSite,
    module: nn.Module,
    leaves: Sequence[tuple[str, Any, ActivationLayout]],
    are_inputs: bool,
) -> list[Any]:
    values = [
        x
        if are_inputs and _stays_plain(site, module, x, desired)
        else _on_mesh(site, module, name, x, desired)
        for name, x, desired in leaves
    ]
    targets = [
        _target(site, name, x, desired)
        for (name, _, desired), x in zip(leaves, values, strict=True)
    ]
    moving = [
        i
        for i, (x, to) in enumerate(zip(values, targets, strict=True))
        if to is not None and to is not x._layout
    ]
    specs = [targets[i].spec for i in moving]  # type: ignore[union-attr]
    if len(moving) == 1:
        values[moving[0]] = redistribute(values[moving[0]], specs[0])
    elif moving:
        for i, x in zip(moving, redistribute_many([values[i] for i in moving], specs), strict=True):
            values[i] = x
    return [
        x.to_local() if desired.local and isinstance(x, ShardedTensor) else x
        for (_, _, desired), x in zip(leaves, values, strict=True)
    ]


def _target(site: HookSite, name: str, x: Any, desired: ActivationLayout) -> Layout | None:
    """Return the desired layout of a tensor, None to leave a value unchanged."""
    if desired.to is None or not isinstance(x, ShardedTensor):
        return None
    layout = x._layout
    key = desired.to, site.axis
    target = _targets.get(layout, key)
    if target is not None:
        return target
    try:
        target = layout.replace(along(layout, desired.to, site.axis))
    except ValueError as error:
        raise ValueError(
            f"{site}: {name} is {layout} and cannot become {desired.to} along {site.axis!r}: "
            f"{error}"
        ) from None
    return _targets.keep(layout, key, target)


def along(layout: Layout, where: P | Placement, axis: str) -> P:
    """Return a layout's spec changed to `where` along `axis` and its axes, unchanged on others.

    Other axes that split the same dim stay major. If the same axes split the dim already, their
    order does not change.
    """
    spec = (
        placements_to_spec([where], (axis,), len(layout.shape))
        if isinstance(where, Placement)
        else where.padded(len(layout.shape))
    )
    named = {axis, *spec.axes}
    cuts = [
        _merge_cuts(_cuts_without(own, named, layout), new, own)
        for own, new in zip(layout.spec.cuts, spec.cuts, strict=True)
    ]
    pending = {a: kind for a, kind in layout.pending.items() if a not in named}
    return P.of_cuts(cuts, {**pending, **dict(spec.unreduced)})


def _merge_cuts(remaining: Sequence[Cut], new: Sequence[Cut], own: Sequence[Cut]) -> Sequence[Cut]:
    same = {a for cut in own for a in cut.axes} == {
        a for cut in (*remaining, *new) for a in cut.axes
    }
    return own if same and not any(cut.sizes for cut in new) else (*remaining, *new)


def _cuts_without(cuts: Sequence[Cut], named: set[str], layout: Layout) -> list[Cut]:
    """Return a dim's cuts by other axes; joint sizes are summed over the removed ones."""
    return [cut for cut in (_cut_without(cut, named, layout) for cut in cuts) if cut.axes]


def _cut_without(cut: Cut, named: set[str], layout: Layout) -> Cut:
    axes = tuple(a for a in cut.axes if a not in named)
    if cut.sizes is None or not axes or axes == cut.axes:
        return cut._replace(axes=axes)
    grid = np.reshape(cut.sizes, [layout.mesh.size(a) for a in cut.axes])
    gone = tuple(i for i, a in enumerate(cut.axes) if a in named)
    return Cut(axes, tuple(int(n) for n in grid.sum(axis=gone).flat))


# -- plain tensors ---------------------------------------------------------------------------------


def _stays_plain(site: HookSite, module: nn.Module, x: Any, desired: ActivationLayout) -> bool:
    """Return whether a value is of integers that are whole, and to be whole, on an unknown mesh.

    Such as positions: inside of the module they count as replicated where ranks have compared them.
    """
    if not isinstance(x, Tensor) or isinstance(x, ShardedTensor) or desired.local:
        return False
    if x.is_floating_point() or x.is_complex():
        return False
    layouts = desired.to, desired.to if desired.plain is None else desired.plain
    return all(map(_is_whole, layouts)) and _mesh_of_plain(site, module) is None


def _is_whole(where: AxisLayout) -> bool:
    return where == Replicate() or (isinstance(where, P) and not where.axes)


def _on_mesh(
    site: HookSite, module: nn.Module, name: str, x: Any, desired: ActivationLayout
) -> Any:
    """Return a plain tensor with a desired layout as a sharded one; other values unchanged.

    Raises:
        TypeError: a plain tensor whose layout is ambiguous.
    """
    where = desired.to if desired.plain is None else desired.plain
    if where is None or not isinstance(x, Tensor):
        return x
    if isinstance(x, ShardedTensor):
        return _check_has_axis(site, name, x)
    mesh = _mesh_of_plain(site, module)
    if mesh is None:
        raise TypeError(_ambiguous(site, name, x))
    spec = (
        placements_to_spec([where], (site.axis,), x.ndim) if isinstance(where, Placement) else where
    ).padded(x.ndim)
    known = (
        None
        if desired.size is None
        else [desired.size if axes else n for n, axes in zip(x.shape, spec.dims, strict=True)]
    )
    return from_local(x, mesh, spec, shape=known)


def _ambiguous(site: HookSite, name: str, x: Tensor) -> str:
    others = [a for a in site.mesh.axis_names if a != site.axis and site.mesh.size(a) > 1]
    return (
        f"{site}: {name} is a plain tensor {list(x.shape)}, and along "
        f"{', '.join(map(repr, others))} of {site.mesh} it may be the whole tensor or this rank's "
        f"part; convert it before the model: sm.device_put(x, mesh, P({others[0]!r})) for the "
        f"whole tensor, sm.from_local(x, mesh, P({others[0]!r})) for this rank's part of the batch"
    )


def _check_has_axis(site: HookSite, name: str, x: ShardedTensor) -> ShardedTensor:
    """Return the tensor itself.

    Raises:
        ValueError: it is on a mesh without the axis.
    """
    if site.axis not in x._layout.mesh.axis_names:
        raise ValueError(
            f"{site}: {name} is {x._layout}, on a mesh without the axis {site.axis!r}; place it on "
            f"{site.mesh}, where the module's parameters are"
        )
    return x


def _mesh_of_plain(site: HookSite, module: nn.Module) -> DeviceMesh | None:
    """Return the mesh on which the layout of a plain tensor is unambiguous.

    A mesh of the axis alone but for axes of one rank, that of the plan or of the module's
    parameters; of several the one with the fewest axes, where `fully_shard` has the parameters in
    use for plain inputs.
    """
    meshes = [site.mesh, *{p.mesh for p in module.parameters() if isinstance(p, ShardedTensor)}]
    known = [m for m in meshes if site.axis in m.axis_names and prod(m.shape) == m.size(site.axis)]
    return min(known, key=lambda m: len(m.axis_names), default=None)


def as_axis_layout(layout: Any, what: str) -> AxisLayout:
    """Return a `P`, a placement (torch's are translated) or None.

    Raises:
        TypeError: something else.
    """
    if layout is None or isinstance(layout, P):
        return layout
    try:
        return as_placement(layout)
    except TypeError:
        raise TypeError(
            f"{what}: expected P(...), Shard(dim), Replicate() or None, got {layout!r}"
        ) from None
