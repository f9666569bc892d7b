"""What forms are made of: how an operand lies, and results made from this rank's parts.

A form (see `registry.form`) computes an operator over a split dim without gathering it. Most are made of other operators on
`ShardedTensor`s, and need no more than `splits` and `whole` from here. Those that work on this rank's part use `from_parts`,
`part_sizes` and `sharding.fetch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from .. import outside
from ..dispatch import wrap
from ..layout import Layout
from ..spec import Cut, P
from ..tensor import ShardedTensor


def layout_of(x: Any) -> Layout:
    """How an operand lies, for a maker of rules or forms, which sees a meta tensor in its place."""
    return x._operand


def splitting_axes(layout: Layout, dim: int) -> tuple[str, ...]:
    """The axes of more than one rank that split a dim, major to minor."""
    return tuple(axis for axis in layout.spec.dims[dim] if layout.mesh.size(axis) > 1)


def splits(x: Any, dims: Iterable[int]) -> bool:
    """Whether any of these dims of an operand is split. For makers: x is a meta tensor."""
    return any(splitting_axes(layout_of(x), d) for d in dims)


def is_pending(x: Any) -> bool:
    """Whether an operand is pending over an axis of more than one rank. For makers: x is a meta tensor."""
    layout = layout_of(x)
    return any(layout.mesh.size(axis) > 1 for axis in layout.pending)


def settled(x: Any) -> Any:
    """The tensor with everything pending reduced, so that using it several times communicates once."""
    return x.redistribute(x.spec.with_unreduced({})) if x.layout.pending else x


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
    return x.redistribute(P.of_cuts(cuts, x.layout.pending))


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


def from_parts(layout: Layout, func: Callable[..., Tensor], *tensors: ShardedTensor) -> ShardedTensor:
    """The `ShardedTensor` of which `func` of this rank's parts is this rank's part."""
    if layout.mesh.coordinate is None:  # type: ignore[attr-defined]
        return outside.unknown(layout, *tensors)
    return wrap(func(*[x._local for x in tensors]), layout)
