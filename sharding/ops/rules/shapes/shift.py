"""Operators that move or repeat the elements of a dim: flip, roll, repeat, unfold.

Along a split dim each rank fetches the intervals that its part of the result is computed from (see
`interval_exchange.py`), and arranges them.

    x over 3 ranks     [0 1 2 | 3 4 5 | 6 7]
    x.roll(1)          [7 0 1 | 2 3 4 | 5 6]       one element moves from each rank to the next
    x.flip(0)          [7 6 5 | 4 3 2 | 1 0]       every rank fetches its part and reverses it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....layout.layout import Layout
from ....redistribute.interval_exchange import Interval, IntervalExchange
from ...sliced_from import marked_as_copy
from ..decomposition_utils import evenly_split, from_parts, is_split, layout_of, sequential
from ..notation import Rule, dim_names, einrule, whole_dims
from ..registry import decomposition, decomposition_maker
from .view import dims_of_call, pattern_with_new_dims, with_whole_dims

Decomposition = Callable[..., Any]


def _split_dims(input: Tensor, dims: Sequence[int]) -> list[int]:
    distinct = dict.fromkeys(d % input.ndim for d in dims) if input.ndim else ()
    return [d for d in distinct if is_split(input, [d])]


def _cyclic(size: int, start: int, stop: int) -> Iterator[Interval]:
    """Yield the indices from `start` to `stop`, modulo the size of a dim, as intervals of it."""
    while start < stop:
        at = start % size
        yield at, min(size, at + stop - start)
        start += min(size, at + stop - start) - at


# -- reversing -------------------------------------------------------------------------------------


@decomposition_maker(
    "torch.flip", check=torch.flip, rule=lambda a: with_whole_dims(a.input, a.dims)
)
def _flip(input: Tensor, dims: Sequence[int]) -> Decomposition | None:
    dims, layout = list(dims), layout_of(input)
    fetches = [
        IntervalExchange(layout, layout, d, partial(_mirror, layout.shape[d]))
        for d in _split_dims(input, dims)
    ]
    return sequential(layout, *fetches, lambda part: part.flip(dims)) if fetches else None


def _mirror(size: int, start: int, stop: int) -> list[Interval]:
    return [(size - stop, size - start)]


@decomposition_maker(
    "Tensor.flip",
    check=torch.Tensor.flip,
    rule=lambda a: with_whole_dims(a.input, dims_of_call(a.dims) if a.dims else a.kwargs["dims"]),
)
def _flip_method(input: Tensor, *dims: Any, **kwargs: Any) -> Decomposition | None:
    return _flip(input, dims_of_call(dims) if dims else kwargs["dims"])


decomposition("fliplr", check=torch.fliplr)(lambda input: input.flip(1))
decomposition("flipud", check=torch.flipud)(lambda input: input.flip(0))


@decomposition("rot90", check=torch.rot90)
def _rot90(input: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    """Rotate by quarter turns: two reverse both dims; one or three reverse one and swap the two."""
    flipped = [[], [dims[1]], list(dims), [dims[0]]][k % 4]
    if k % 2:
        return input.flip(flipped).transpose(*dims)
    return input.flip(flipped) if flipped else input.clone()


def _roll_rule(a: Any) -> Rule:
    chosen = [a.dims] if isinstance(a.dims, int) else list(a.dims)
    return with_whole_dims(a.input, chosen or range(a.input.ndim))


@decomposition_maker("roll", check=torch.roll, rule=_roll_rule)
def _roll(input: Tensor, shifts: Any, dims: Any = ()) -> Decomposition | None:
    chosen = [dims] if isinstance(dims, int) else list(dims)
    if not chosen and input.ndim > 1:
        if not _split_dims(input, range(input.ndim)):
            return None
        return lambda input, *_, **__: input.flatten().roll(shifts, 0).reshape(input.shape)
    amounts = dict.fromkeys((d % max(input.ndim, 1) for d in chosen or [0]), 0)
    for d, shift in zip(
        chosen or [0], [shifts] if isinstance(shifts, int) else shifts, strict=True
    ):
        amounts[d % max(input.ndim, 1)] += shift
    layout, split = layout_of(input), _split_dims(input, list(amounts))
    fetches = [
        IntervalExchange(layout, layout, d, partial(_roll_sources, layout.shape[d], amounts[d]))
        for d in split
    ]
    rest = [d for d in amounts if d not in split]
    others = [lambda part: part.roll([amounts[d] for d in rest], rest)] if rest else []
    return sequential(layout, *fetches, *others) if split else None


def _roll_sources(size: int, shift: int, start: int, stop: int) -> Iterator[Interval]:
    return _cyclic(size, start - shift, stop - shift)


# -- repeating -------------------------------------------------------------------------------------


def _decompose_repeat(input: Tensor, counts: Sequence[int]) -> Decomposition | None:
    """Return the decomposition; a part longer than the dim fetches the dim once and repeats it."""
    new = len(counts) - input.ndim
    split = _split_dims(input, [d for d in range(input.ndim) if counts[new + d] != 1])
    if not split:
        return None
    layout, steps = layout_of(input), []
    for d in split:
        size, target = layout.shape[d], evenly_split(layout, d, layout.shape[d] * counts[new + d])
        steps += (
            IntervalExchange(layout, target, d, partial(_repetition, size)),
            partial(_unroll, d, size, *target.box[d]),
        )
        layout = target
    rest = [1 if d - new in split else n for d, n in enumerate(counts)]
    repeated = sequential(layout, *steps)
    return lambda input, *_, **__: (
        repeated(input).repeat(rest) if any(n != 1 for n in rest) or new else repeated(input)
    )


def _repetition(size: int, start: int, stop: int) -> Any:
    return [(0, size)] if stop - start > size else _cyclic(size, start, stop)


def _unroll(dim: int, size: int, start: int, stop: int, part: Tensor) -> Tensor:
    """Repeat the dim to the length of this rank's part, where that is longer than the dim."""
    if stop - start <= size:
        return part
    times = [1] * part.ndim
    times[dim] = -(-stop // size) - start // size
    return part.repeat(times).narrow(dim, start % size, stop - start)


def _repeat_rule(a: Any) -> Rule:
    """Return the rule: dims repeated once may be split; the others must not."""
    pattern = pattern_with_new_dims(
        a.input.ndim, [n == 1 for n in _counts(a.input, a.sizes, a.kwargs)]
    )
    return einrule(pattern, a.input, linear=((0,),), transparent=True)


def _counts(input: Tensor, sizes: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return how often each dim is repeated; `tile` may leave out counts of leading dims."""
    if sizes:
        counts = list(dims_of_call(sizes))
    else:
        counts = list(kwargs["repeats"] if "repeats" in kwargs else kwargs["dims"])
    return [1] * (input.ndim - len(counts)) + counts


@decomposition_maker("Tensor.repeat", check=torch.Tensor.repeat, rule=_repeat_rule)
@decomposition_maker(
    "tile", check=lambda input, *sizes, **kwargs: input.tile(*sizes, **kwargs), rule=_repeat_rule
)
def _repeat(input: Tensor, *sizes: Any, **kwargs: Any) -> Decomposition | None:
    return _decompose_repeat(input, _counts(input, sizes, kwargs))


def _repeat_interleave_rule(a: Any) -> Rule | None:
    if not isinstance(a.repeats, int):
        return None
    if a.dim is None:
        return einrule(f"{whole_dims(a.input)} -> 1", a.input, linear=((0,),), transparent=True)
    return with_whole_dims(a.input, [a.dim])


@decomposition_maker("repeat_interleave", rule=_repeat_interleave_rule)
def _repeat_interleave(
    input: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Decomposition | None:
    if not isinstance(repeats, int) or not _split_dims(
        input, range(input.ndim) if dim is None else [dim]
    ):
        return None
    torch.repeat_interleave(input, repeats, dim, output_size=output_size)
    if dim is None and input.ndim > 1:
        return lambda input, *_, **__: input.flatten().repeat_interleave(repeats, 0)
    dim = (dim or 0) % input.ndim
    layout = layout_of(input)
    target = evenly_split(layout, dim, layout.shape[dim] * repeats)
    start, stop = target.box[dim]

    def repeat_part(part: Tensor) -> Tensor:
        return part.repeat_interleave(repeats, dim).narrow(
            dim, start % max(repeats, 1), stop - start
        )

    origins = IntervalExchange(
        layout,
        target,
        dim,
        lambda start, stop: [(start // repeats, -(-stop // repeats))] if stop > start else [],
    )
    return sequential(target, origins, repeat_part)


# -- neighbours ------------------------------------------------------------------------------------


def _unfold_rule(a: Any) -> Rule:
    if not a.input.ndim:
        return einrule(" -> 1", a.input, linear=((0,),), transparent=True)
    dim = a.dimension % a.input.ndim
    right = " ".join("1" if d == dim else f"d{d}" for d in range(a.input.ndim))
    return einrule(
        f"{dim_names(a.input.ndim, [dim])} -> {right} 1", a.input, linear=((0,),), transparent=True
    )


@decomposition_maker("Tensor.unfold", rule=_unfold_rule, view=True)
def _unfold(input: Tensor, dimension: int, size: int, step: int) -> Decomposition | None:
    """Fetch the elements of windows that extend beyond this rank's part. The result is a copy."""
    result = input.unfold(dimension, size, step)
    if not _split_dims(input, [dimension]):
        return None
    dim, layout = dimension % input.ndim, layout_of(input)
    cut = evenly_split(layout, dim, result.shape[dim])
    fetch = IntervalExchange(
        layout,
        cut,
        dim,
        lambda start, stop: [(start * step, (stop - 1) * step + size)] if stop > start else [],
    )
    # The windows are one more dim, which is not split.
    target = Layout.of(cut.mesh, cut.spec.padded(len(cut.shape) + 1), (*cut.shape, size), cut.dtype)

    def local(part: Tensor) -> Tensor:
        taken = marked_as_copy(fetch(part), part)
        return (
            taken.unfold(dim, size, step)
            if taken.shape[dim]
            else taken.unsqueeze(-1).expand(*taken.shape, size)
        )

    return lambda input, *_, **__: from_parts(target, local, input)
