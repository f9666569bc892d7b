"""What forms are made of: how an operand lies, and results made from this rank's parts.

A form (see `registry.form`) computes an operator over a split dim without gathering it. Most are made of other operators on
`ShardedTensor`s, and need no more than `splits` and `whole` from here. Those that work on this rank's part use `from_parts`,
`part_sizes` and `sharding.fetch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layout.layout import Layout
from ...layout.spec import Cut, P
from ...tensor.sharded_tensor import ShardedTensor
from .. import nonmember
from ..dispatch import wrap


def layout_of(x: Any) -> Layout:
    """How an operand lies, for a maker of rules or forms, which sees a meta tensor in its place."""
    return x._operand


def splitting_axes(layout: Layout, dim: int) -> tuple[str, ...]:
    """The axes of more than one rank that split a dim, major to minor."""
    return tuple(axis for axis in layout.spec.dims[dim] if layout.mesh.size(axis) > 1)


def all_splitting_axes(layout: Layout) -> tuple[str, ...]:
    """The axes of more than one rank that split any dim, in the order of the dims."""
    return tuple(axis for d in range(len(layout.shape)) for axis in splitting_axes(layout, d))


def splits(x: Any, dims: Iterable[int]) -> bool:
    """Whether any of these dims of an operand is split. For makers: x is a meta tensor."""
    return any(splitting_axes(layout_of(x), d) for d in dims)


def settled(x: Any) -> Any:
    """The tensor with everything pending reduced, so that using it several times communicates once."""
    return x.redistribute(x.spec.with_unreduced({})) if x._layout.pending else x


def with_dim(layout: Layout, dim: int, cuts: Sequence[Cut], size: int) -> Layout:
    """The layout with one dim cut and sized otherwise."""
    all_cuts = [cuts if d == dim else old for d, old in enumerate(layout.spec.cuts)]
    shape = [size if d == dim else n for d, n in enumerate(layout.shape)]
    return Layout.of(layout.mesh, P.of_cuts(all_cuts, layout.pending), shape, layout.dtype)


def whole(x: ShardedTensor, *dims: int) -> ShardedTensor:
    """The tensor with these dims not split, everything else as it is.

    Communication: an all_gather over the axes that split them.
    """
    chosen = {d % x.ndim for d in dims}
    cuts = [() if d in chosen else old for d, old in enumerate(x.spec.cuts)]
    return x.redistribute(P.of_cuts(cuts, x._layout.pending))


def part_sizes(layout: Layout, dim: int) -> list[int]:
    """Lengths of the parts that the axes of `dim` cut it into, in order."""
    mesh, axes = layout.mesh, layout.spec.dims[dim]
    coordinate = [0] * mesh.ndim
    sizes = []
    for number in range(mesh.size(axes) if axes else 1):
        for axis in reversed(axes):
            number, coordinate[mesh.axis_index(axis)] = divmod(number, mesh.size(axis))
        start, stop = layout.box_at(coordinate)[dim]
        sizes.append(stop - start)
    return sizes


def resized(layout: Layout, dim: int, sizes: Sequence[int]) -> Layout:
    """The layout with each part of a split dim of another length, on the same ranks: what an operator that shortens every
    part leaves behind."""
    axes = layout.spec.dims[dim]
    return with_dim(layout, dim, [Cut(axes, tuple(sizes))] if axes else (), sum(sizes))


def evenly(layout: Layout, dim: int, size: int) -> Layout:
    """The layout with a dim of another size, cut evenly over the axes that split it now; over only as many of them, the major
    ones first, as still get an element for each rank."""
    mesh, kept, parts = layout.mesh, [], 1
    for axis in layout.spec.dims[dim]:
        parts *= mesh.size(axis)
        if parts > size > 0:
            break
        kept.append(Cut((axis,)))
    return with_dim(layout, dim, kept, size)


def interval_of(layout: Layout, dim: int, start: int, stop: int) -> Layout:
    """How the interval [start, stop) of a dim of this layout lies by itself, where it is."""
    bounds = accumulate(part_sizes(layout, dim), initial=0)
    return resized(layout, dim, [max(0, min(b, stop) - max(a, start)) for a, b in pairwise(bounds)])


def from_parts(layout: Layout, func: Callable[..., Tensor], *tensors: ShardedTensor) -> ShardedTensor:
    """The `ShardedTensor` of which `func` of this rank's parts is this rank's part."""
    if layout.mesh.coordinate is None:  # type: ignore[attr-defined]
        return nonmember.unknown(layout, *tensors)
    return wrap(func(*[x._local for x in tensors]), layout)


def replicated(local: Tensor, like: ShardedTensor) -> ShardedTensor:
    """A result that every rank of the tensor's mesh has whole."""
    return wrap(local, nonmember.whole_like(local, like._layout))


@lru_cache(maxsize=1024)
def reduced(layout: Layout, dims: tuple[int, ...], kind: str = "sum") -> Layout:
    """The layout after a reduction that leaves `dims` with one element: pending over the axes that split them."""
    cuts = [() if d in dims else old for d, old in enumerate(layout.spec.cuts)]
    shape = [1 if d in dims else n for d, n in enumerate(layout.shape)]
    axes = {axis: kind for d in dims for axis in layout.spec.dims[d]}
    return Layout.of(layout.mesh, P.of_cuts(cuts, {**layout.pending, **axes}), shape, layout.dtype)


def all_from_parts(layouts: Sequence[Layout], func: Callable[..., Iterable[Tensor]], *tensors: ShardedTensor) -> list[ShardedTensor]:
    """`from_parts` of a function with several results."""
    if layouts[0].mesh.coordinate is None:  # type: ignore[attr-defined]
        return [nonmember.unknown(layout, *tensors) for layout in layouts]
    return [wrap(part, layout) for part, layout in zip(func(*[x._local for x in tensors]), layouts, strict=True)]


def with_elements(x: Tensor) -> Tensor:
    """This rank's part with one zero in every dim that is empty, for an operator of torch that refuses to work on nothing.

    Of its result the part without these is taken. So the graph of an empty part has the nodes that it has on other ranks, and
    backward communicates as it does there, however often it is differentiated.
    """
    return x if x.numel() else F.pad(x, [n for size in reversed(x.shape) for n in (0, int(size == 0))])


def check_by_torch(func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Have torch's own function check the arguments of a form, for a maker: they are meta tensors.

    Raises:
        whatever torch raises.
    """
    with torch.no_grad():
        func(*args, **kwargs)


@lru_cache
def body_of(func: Any) -> Callable[..., Any]:
    """A function of torch written in Python, made to run as it is written, on `ShardedTensor`s too.

    torch's functions begin by asking whether an argument overrides them; in this one the answer is no, so that its own lines
    run, and the operators in them are dispatched.
    """
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    body = FunctionType(
        func.__code__, {**func.__globals__, **dict.fromkeys(names, _never)}, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _never(*_: Any) -> bool:
    return False


def in_turn(layout: Layout, *steps: Callable[[Tensor], Tensor]) -> Callable[..., ShardedTensor]:
    """The form whose result, in this layout, is what these functions make of this rank's part one after the other."""

    def local(part: Tensor) -> Tensor:
        for step in steps:
            part = step(part)
        return part

    return lambda input, *_, **__: from_parts(layout, local, input)
