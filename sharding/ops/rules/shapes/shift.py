"""Operators whose result has each element of a dim at another place, or at several: flip, roll, repeat, unfold.

Along a split dim each rank fetches the intervals that its part of the result is made of, by one exchange (see
`sharding.fetch`), and arranges them.

    x over 3 ranks     [0 1 2 | 3 4 5 | 6 7]
    x.roll(1)          [7 0 1 | 2 3 4 | 5 6]       one element moves from each rank to the next
    x.flip(0)          [7 6 5 | 4 3 2 | 1 0]       every rank fetches its part, and turns it round
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....layout.layout import Layout
from ....redistribute.interval_exchange import Fetch, Interval
from ...dispatch import marked_as_copy
from ..decomposition_utils import evenly, from_parts, in_turn, layout_of, splits
from ..notation import Rule, einrule
from ..registry import form, rule
from .view import listed

Form = Callable[..., Any]


def _split_dims(input: Tensor, dims: Sequence[int]) -> list[int]:
    return [d for d in dict.fromkeys(d % input.ndim for d in dims) if splits(input, [d])] if input.ndim else []


def _cyclic(size: int, start: int, stop: int) -> Iterator[Interval]:
    """The indices from `start` to `stop`, counted round a dim of this size, as intervals of it."""
    while start < stop:
        at = start % size
        yield at, min(size, at + stop - start)
        start += min(size, at + stop - start) - at


# -- turning round ----------------------------------------------------------------------------------------------------


@form(also=(torch.flip,))
def _flip(input: Tensor, dims: Sequence[int]) -> Form | None:
    dims = list(dims)
    torch.flip(input, dims)
    layout = layout_of(input)
    fetches = [Fetch(layout, layout, d, partial(_mirror, layout.shape[d])) for d in _split_dims(input, dims)]
    return in_turn(layout, *fetches, lambda part: part.flip(dims)) if fetches else None


def _mirror(size: int, start: int, stop: int) -> list[Interval]:
    return [(size - stop, size - start)]


@form(also=(torch.Tensor.flip,))
def _flip_method(input: Tensor, *dims: Any, **kwargs: Any) -> Form | None:
    return _flip(input, listed(dims) if dims else kwargs["dims"])


@form("fliplr")
def _fliplr(input: Tensor) -> Form:
    torch.fliplr(input)
    return lambda input: input.flip(1)


@form("flipud")
def _flipud(input: Tensor) -> Form:
    torch.flipud(input)
    return lambda input: input.flip(0)


@form("rot90")
def _rot90(input: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Form:
    """Quarter turns: two of them turn both dims round, one or three one dim, and swap the two."""
    dims = list(dims)
    torch.rot90(input, k, dims)
    flipped = [[], [dims[1]], dims, [dims[0]]][k % 4]
    if k % 2:
        return lambda input, *_, **__: input.flip(flipped).transpose(*dims)
    return lambda input, *_, **__: input.flip(flipped) if flipped else input.clone()


@form("roll")
def _roll(input: Tensor, shifts: Any, dims: Any = ()) -> Form | None:
    torch.roll(input, shifts, dims)
    chosen = [dims] if isinstance(dims, int) else list(dims)
    if not chosen and input.ndim > 1:
        flat = bool(_split_dims(input, range(input.ndim)))
        return (lambda input, *_, **__: input.flatten().roll(shifts, 0).reshape(input.shape)) if flat else None
    amounts = dict.fromkeys((d % max(input.ndim, 1) for d in chosen or [0]), 0)
    for d, shift in zip(chosen or [0], [shifts] if isinstance(shifts, int) else shifts, strict=True):
        amounts[d % max(input.ndim, 1)] += shift
    layout, split = layout_of(input), _split_dims(input, list(amounts))
    fetches = [Fetch(layout, layout, d, partial(_rolled, layout.shape[d], amounts[d])) for d in split]
    rest = [d for d in amounts if d not in split]
    others = [lambda part: part.roll([amounts[d] for d in rest], rest)] if rest else []
    return in_turn(layout, *fetches, *others) if split else None


def _rolled(size: int, shift: int, start: int, stop: int) -> Iterator[Interval]:
    return _cyclic(size, start - shift, stop - shift)


# -- several times ----------------------------------------------------------------------------------------------------


def _repeated(input: Tensor, counts: Sequence[int]) -> Form | None:
    """A part that is longer than the dim fetches the dim once, and repeats it."""
    new = len(counts) - input.ndim
    split = _split_dims(input, [d for d in range(input.ndim) if counts[new + d] != 1])
    if not split:
        return None
    layout, steps = layout_of(input), []
    for d in split:
        size, target = layout.shape[d], evenly(layout, d, layout.shape[d] * counts[new + d])
        steps += Fetch(layout, target, d, partial(_repetition, size)), partial(_unrolled, d, size, *target.box[d])
        layout = target
    rest = [1 if d - new in split else n for d, n in enumerate(counts)]
    repeated = in_turn(layout, *steps)
    return lambda input, *_, **__: repeated(input).repeat(rest) if any(n != 1 for n in rest) or new else repeated(input)


def _repetition(size: int, start: int, stop: int) -> Any:
    return [(0, size)] if stop - start > size else _cyclic(size, start, stop)


def _unrolled(dim: int, size: int, start: int, stop: int, part: Tensor) -> Tensor:
    """The dim repeated as far as this rank's part goes, where that is longer than the dim."""
    if stop - start <= size:
        return part
    times = [1] * part.ndim
    times[dim] = -(-stop // size) - start // size
    return part.repeat(times).narrow(dim, start % size, stop - start)


@form(also=(torch.Tensor.repeat,))
def _repeat(input: Tensor, *sizes: Any, **kwargs: Any) -> Form | None:
    input.repeat(*sizes, **kwargs)
    return _repeated(input, list(listed(sizes) if sizes else kwargs["repeats"]))


@form("tile")
def _tile(input: Tensor, *sizes: Any, **kwargs: Any) -> Form | None:
    """`repeat`, where counts for the leading dims may be left out."""
    input.tile(*sizes, **kwargs)
    counts = list(listed(sizes) if sizes else kwargs["dims"])
    return _repeated(input, [1] * (input.ndim - len(counts)) + counts)


@form("repeat_interleave")
def _repeat_interleave(input: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None) -> Form | None:
    if not isinstance(repeats, int) or not _split_dims(input, range(input.ndim) if dim is None else [dim]):
        return None
    torch.repeat_interleave(input, repeats, dim, output_size=output_size)
    if dim is None and input.ndim > 1:
        return lambda input, *_, **__: input.flatten().repeat_interleave(repeats, 0)
    dim = (dim or 0) % input.ndim
    layout = layout_of(input)
    target = evenly(layout, dim, layout.shape[dim] * repeats)
    start, stop = target.box[dim]

    def arranged(part: Tensor) -> Tensor:
        return part.repeat_interleave(repeats, dim).narrow(dim, start % max(repeats, 1), stop - start)

    return in_turn(target, Fetch(layout, target, dim, partial(_origins, repeats)), arranged)


def _origins(repeats: int, start: int, stop: int) -> list[Interval]:
    return [(start // repeats, -(-stop // repeats))] if stop > start else []


# -- neighbours -------------------------------------------------------------------------------------------------------


@rule(also=(torch.Tensor.unfold,), view=True)
def _unfold_whole(input: Tensor, dimension: int, size: int, step: int) -> Rule:
    if not input.ndim:
        return einrule(" -> 1", input, linear=((0,),), transparent=True)
    names = ["1" if d == dimension % input.ndim else f"d{d}" for d in range(input.ndim)]
    left = " ".join(f"[d{d}]" if name == "1" else name for d, name in enumerate(names))
    return einrule(f"{left} -> {' '.join(names)} 1", input, linear=((0,),), transparent=True)


@form(also=(torch.Tensor.unfold,))
def _unfold(input: Tensor, dimension: int, size: int, step: int) -> Form | None:
    """Windows over a split dim: each rank fetches what its windows reach beyond its part. The result is a copy."""
    result = input.unfold(dimension, size, step)
    if not _split_dims(input, [dimension]):
        return None
    dim, layout = dimension % input.ndim, layout_of(input)
    cut = evenly(layout, dim, result.shape[dim])
    fetch = Fetch(layout, cut, dim, lambda start, stop: [(start * step, (stop - 1) * step + size)] if stop > start else [])
    target = _with_last_dim(cut, size)

    def local(part: Tensor) -> Tensor:
        taken = marked_as_copy(fetch(part), part)
        return taken.unfold(dim, size, step) if taken.shape[dim] else taken.unsqueeze(-1).expand(*taken.shape, size)

    return lambda input, *_, **__: from_parts(target, local, input)


def _with_last_dim(layout: Layout, size: int) -> Layout:
    """The layout with one more dim, of this size and not split."""
    return Layout.of(layout.mesh, layout.spec.padded(len(layout.shape) + 1), (*layout.shape, size), layout.dtype)
