"""Helpers for decompositions: how an operand is sharded, and results made from each rank's part.

A decomposition (see `registry.decomposition`) computes an operator over a split dim without
gathering it. Most are made of other operators on `ShardedTensor`s and need only `is_split` and
`reduce_pending`. Those that work on this rank's part use `from_parts`, `part_sizes` and
`IntervalExchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...layout.layout import Layout
from ...layout.mesh_answers import cached_on_mesh
from ...layout.shard_holders import intervals
from ...layout.spec import Cut, P
from ...tensor.sharded_tensor import ShardedTensor
from .. import nonmember
from ..dispatch import wrap


def layout_of(x: Any) -> Layout:
    """Return the layout of an operand, given the meta tensor that stands for it."""
    return x._operand


def splitting_axes(layout: Layout, dim: int) -> tuple[str, ...]:
    """Return the axes of more than one rank that split a dim, major to minor."""
    return tuple(axis for axis in layout.spec.dims[dim] if layout.mesh.size(axis) > 1)


def all_splitting_axes(layout: Layout) -> tuple[str, ...]:
    """Return the axes of more than one rank that split any dim, in the order of the dims."""
    return tuple(axis for d in range(len(layout.shape)) for axis in splitting_axes(layout, d))


def is_split(x: Any, dims: Iterable[int] | None = None) -> bool:
    """Return whether any of these dims (by default any dim) of a meta operand is split."""
    return any(splitting_axes(layout_of(x), d) for d in (range(x.ndim) if dims is None else dims))


def reduce_pending(x: Any) -> Any:
    """Return the tensor with pending values reduced, to communicate once for several uses."""
    return x.redistribute(x.spec.with_unreduced({})) if x._layout.pending else x


def without_pending(layout: Layout) -> Layout:
    """Return the layout with pending values reduced."""
    return layout.replace(layout.spec.with_unreduced({})) if layout.pending else layout


def with_dim(layout: Layout, dim: int, cuts: Sequence[Cut], size: int) -> Layout:
    """Return the layout with other cuts and another size of one dim."""
    all_cuts = [cuts if d == dim else old for d, old in enumerate(layout.spec.cuts)]
    shape = [size if d == dim else n for d, n in enumerate(layout.shape)]
    return Layout.of(layout.mesh, P.of_cuts(all_cuts, layout.pending), shape, layout.dtype)


def unshard(x: ShardedTensor, *dims: int) -> ShardedTensor:
    """Return the tensor with these dims not split, otherwise unchanged.

    Communication: an all_gather over the axes that split them.
    """
    chosen = {d % x.ndim for d in dims}
    cuts = [() if d in chosen else old for d, old in enumerate(x.spec.cuts)]
    return x.redistribute(P.of_cuts(cuts, x._layout.pending))


def even_sizes(count: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of the parts of a dim cut evenly: they differ by at most 1."""
    return tuple(count // parts + (i < count % parts) for i in range(parts))


def part_sizes(layout: Layout, dim: int) -> list[int]:
    """Return the lengths of the parts that the axes of `dim` cut it into, in order."""
    return [part.stop - part.start for part in intervals(layout, dim)]


def with_part_sizes(layout: Layout, dim: int, sizes: Sequence[int]) -> Layout:
    """Return the layout with other lengths of the parts of a split dim."""
    axes = layout.spec.dims[dim]
    return with_dim(layout, dim, [Cut(axes, tuple(sizes))] if axes else (), sum(sizes))


def evenly_split(layout: Layout, dim: int, size: int) -> Layout:
    """Return the layout with another size of a dim, cut evenly over the axes that split it.

    Minor axes are left out where the dim is too short to give every rank of theirs an element.
    """
    mesh, cuts, parts = layout.mesh, [], 1
    for axis in layout.spec.dims[dim]:
        parts *= mesh.size(axis)
        if parts > size > 0:
            break
        cuts.append(Cut((axis,)))
    return with_dim(layout, dim, cuts, size)


def interval_of(layout: Layout, dim: int, start: int, stop: int) -> Layout:
    """Return the layout of the interval [start, stop) of a dim, each element where it is."""
    bounds = accumulate(part_sizes(layout, dim), initial=0)
    return with_part_sizes(
        layout, dim, [max(0, min(b, stop) - max(a, start)) for a, b in pairwise(bounds)]
    )


def from_parts(
    layout: Layout, func: Callable[..., Tensor], *tensors: ShardedTensor
) -> ShardedTensor:
    """Return the `ShardedTensor` of which `func` of this rank's parts is this rank's part."""
    if layout.mesh.coordinate is None:  # type: ignore[attr-defined]
        return nonmember.unknown(layout, *tensors)
    return wrap(func(*[x._local for x in tensors]), layout)


def as_replicated(local: Tensor, like: ShardedTensor) -> ShardedTensor:
    """Return `local`, the same on every rank, as a replicated tensor on the mesh of `like`."""
    return wrap(local, nonmember.whole_like(local, like._layout))


@cached_on_mesh(attrgetter("mesh"), 1024)
def layout_after_reduction(layout: Layout, dims: tuple[int, ...], kind: str = "sum") -> Layout:
    """Return the layout after a reduction to one element of `dims`, pending over their axes."""
    cuts = [() if d in dims else old for d, old in enumerate(layout.spec.cuts)]
    shape = [1 if d in dims else n for d, n in enumerate(layout.shape)]
    axes = {axis: kind for d in dims for axis in layout.spec.dims[d]}
    return Layout.of(layout.mesh, P.of_cuts(cuts, {**layout.pending, **axes}), shape, layout.dtype)


def all_from_parts(
    layouts: Sequence[Layout], func: Callable[..., Iterable[Tensor]], *tensors: ShardedTensor
) -> list[ShardedTensor]:
    """Return the `ShardedTensor`s whose parts are the results of `func` of this rank's parts."""
    if layouts[0].mesh.coordinate is None:  # type: ignore[attr-defined]
        return [nonmember.unknown(layout, *tensors) for layout in layouts]
    return [
        wrap(part, layout)
        for part, layout in zip(func(*[x._local for x in tensors]), layouts, strict=True)
    ]


def with_elements(x: Tensor) -> Tensor:
    """Return this rank's part with one zero in every empty dim.

    For an operator of torch that refuses empty tensors.

    The caller slices these elements off the result. So an empty part has the same autograd graph as
    those of other ranks, and backward communicates alike on all, to every order.
    """
    return (
        x if x.numel() else F.pad(x, [n for size in reversed(x.shape) for n in (0, int(size == 0))])
    )


@lru_cache
def body_of(func: Any) -> Callable[..., Any]:
    """Return a copy of one of torch's Python functions that runs its own body on `ShardedTensor`s.

    torch's functions first ask whether an argument overrides them. In the copy the answer is no, so
    the operators in its body are dispatched one by one.
    """
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    body = FunctionType(
        func.__code__,
        {**func.__globals__, **dict.fromkeys(names, lambda *_: False)},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def sequential(layout: Layout, *steps: Callable[[Tensor], Tensor]) -> Callable[..., ShardedTensor]:
    """Return the decomposition that applies these functions to this rank's part in turn."""

    def local(part: Tensor) -> Tensor:
        for step in steps:
            part = step(part)
        return part

    return lambda input, *_, **__: from_parts(layout, local, input)
