"""Slices of split dims: `x[1:3]`, `select`, `narrow`, `split` and related functions.

    x over 3 ranks   [0 1 2 | 3 4 5 | 6 7 8]
    x[2:8] cut       [    2 | 3 4 5 | 6 7  ]    this rank's part of the slice, without communication
    moved            [2 3   | 4 5   | 6 7  ]    cut evenly, by one exchange of what changes ranks

A dim too short to give every rank of its axes an element is replicated over the minor ones. So is
what `select` and integers leave of a dim, which the rank that has it sends to all. (Left pending,
as zeros everywhere else, it would need no communication now and an all_reduce, twice the bytes, in
every operator that is not linear; and -0.0 + 0 is 0.) The pieces of `split` and related functions
move in one exchange together.

Dims that are not split, or taken whole, are left to the rules, whose results are views. A slice
that moved is a copy: writing to it is refused, except for `x[i] += y`, see `sliced_from.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, pairwise
from typing import Any

import torch
from torch import Tensor

from ....layout.layout import Layout
from ....layout.spec import P
from ....redistribute.autograd import redistribute_local, redistribute_locals
from ....tensor.sharded_tensor import ShardedTensor
from ...sliced_from import SlicedFrom, marked_as_copy
from ..decomposition_utils import (
    all_from_parts,
    evenly_split,
    from_parts,
    is_split,
    layout_of,
    part_sizes,
    with_part_sizes,
)
from ..indexing.masked import index_by_mask
from ..registry import decomposition_maker, handler, rules
from .view import with_whole_dims

rules(
    {
        "unsafe_split unsafe_chunk unsafe_split_with_sizes(input, sections=None, dim=0, **_)": (
            lambda a: with_whole_dims(a.input, [a.dim])
        )
    }
)
rules(
    {
        "hsplit(input, *_, **__)": lambda a: with_whole_dims(a.input, [min(a.input.ndim - 1, 1)]),
        "vsplit(input, *_, **__)": lambda a: with_whole_dims(a.input, [0]),
        "dsplit(input, *_, **__)": lambda a: with_whole_dims(a.input, [2]),
    },
    view=True,
)


def within(chosen: range, start: int, stop: int) -> range:
    """Return the chosen indices that are in [start, stop)."""
    first, last = (-((chosen.start - bound) // chosen.step) for bound in (start, stop))
    return chosen[max(first, 0) : max(last, 0)]


def _cut(layout: Layout, dim: int, chosen: range) -> Layout:
    """Return the layout in which each rank has those of the chosen indices that are in its part."""
    bounds, sizes = 0, []
    for size in part_sizes(layout, dim):
        sizes.append(len(within(chosen, bounds, bounds + size)))
        bounds += size
    return (
        with_part_sizes(layout, dim, sizes)
        if layout.spec.dims[dim]
        else evenly_split(layout, dim, len(chosen))
    )


class Piece:
    """A slice of a tensor of a given layout.

    Attributes:
        cut: the layout in which every rank keeps its part of the slice.
        moved: the layout of the result.
        index: the index of the slice in this rank's part.
    """

    def __init__(self, layout: Layout, ranges: dict[int, range]) -> None:
        self.cut = self.moved = layout
        for dim, chosen in ranges.items():
            self.cut = _cut(self.cut, dim, chosen)
            self.moved = evenly_split(self.moved, dim, len(chosen))
        self.index = tuple(
            _local_slice(ranges.get(dim), *interval) for dim, interval in enumerate(layout.box)
        )

    def part(self, local: Tensor) -> Tensor:
        """Return the slice of this rank's part, a view."""
        return local[self.index]


def _local_slice(chosen: range | None, start: int, stop: int) -> slice:
    if chosen is None:
        return slice(None)
    own = within(chosen, start, stop)
    return slice(own.start - start, own.stop - start, own.step) if own else slice(0, 0)


def _move_piece(piece: Piece, local: Tensor) -> Tensor:
    """Return this rank's part of the result, marked as a copy if anything moved."""
    part = piece.part(local)
    return (
        part
        if piece.cut is piece.moved
        else marked_as_copy(redistribute_local(part, piece.cut, piece.moved), local)
    )


def _all_moved(pieces: Sequence[Piece], local: Tensor) -> list[Tensor]:
    parts = redistribute_locals(
        [piece.part(local) for piece in pieces], [(piece.cut, piece.moved) for piece in pieces]
    )
    return [
        part if piece.cut is piece.moved else marked_as_copy(part, local)
        for piece, part in zip(pieces, parts, strict=True)
    ]


# -- one slice -------------------------------------------------------------------------------------


def decompose_slices(input: Tensor, entries: Sequence[Any]) -> Callable[[Any], Any] | None:
    """Return the decomposition of `x[entries]`, one for each dim; None if no split dim is cut."""
    dim_entries = [e for e in entries if e is not None]
    ranges = {}
    for d, (entry, size) in enumerate(zip(dim_entries, input.shape, strict=True)):
        if not isinstance(entry, slice):
            ranges[d] = range(entry % size, entry % size + 1)
        elif (chosen := range(size)[entry]) != range(size):
            ranges[d] = chosen
    if not is_split(input, ranges):
        return None
    piece = Piece(layout_of(input), ranges)
    last = tuple(None if e is None else 0 if type(e) is int else slice(None) for e in entries)
    result = _layout_after_dims(piece.moved, last)
    return lambda x: from_parts(result, lambda local: _move_piece(piece, local)[last], x)


def _layout_after_dims(layout: Layout, last: Sequence[Any]) -> Layout:
    """Return the layout after dims are dropped (0) and added (None)."""
    stays = [isinstance(e, slice) for e in last if e is not None]
    cuts, sizes = compress(layout.spec.cuts, stays), compress(layout.shape, stays)
    dims = [((), 1) if e is None else (next(cuts), next(sizes)) for e in last if e != 0]
    return Layout.of(
        layout.mesh,
        P.of_cuts([c for c, _ in dims], layout.pending),
        [n for _, n in dims],
        layout.dtype,
    )


def _basic(index: Any, ndim: int) -> list[Any] | None:
    """Return the index with an entry for each dim (None: a new one); None if it has other kinds."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(e is None or e is Ellipsis or type(e) is int or _is_plain_slice(e) for e in entries):
        return None
    missing = ndim - sum(e is not None and e is not Ellipsis for e in entries)
    at = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    return [*entries[:at], *[slice(None)] * missing, *entries[at + 1 :]]


def _is_plain_slice(entry: Any) -> bool:
    return isinstance(entry, slice) and all(
        e is None or type(e) is int for e in (entry.start, entry.stop, entry.step)
    )


@decomposition_maker("__getitem__")
def _getitem(input: Tensor, index: Any) -> Callable[..., Any] | None:
    entries = _basic(index, input.ndim)
    if entries is None:
        return index_by_mask(input, index)
    input[index]  # raises torch's own error before any of Python's
    slice_of = decompose_slices(input, entries)
    return slice_of and partial(_sliced_by_index, slice_of)


def _sliced_by_index(slice_of: Callable[[Any], Any], input: Any, index: Any) -> Any:
    out = slice_of(input)
    out._sliced_from = SlicedFrom(input, index)
    return out


def _along(input: Tensor, dim: int, entry: Any) -> Callable[[Any], Any] | None:
    return decompose_slices(
        input, [entry if d == dim % input.ndim else slice(None) for d in range(input.ndim)]
    )


@decomposition_maker(
    "select",
    check=torch.select,
    rule=lambda a: with_whole_dims(a.input, [a.dim], drop=True),
    view=True,
)
def _select(input: Tensor, dim: int, index: int | Tensor) -> Callable[..., Any] | None:
    slice_of = _along(input, dim, index) if type(index) is int else None
    return slice_of and (lambda input, dim, index: slice_of(input))


def _narrow(input: Tensor, dim: int, start: Any, length: int) -> Callable[..., Any] | None:
    if type(start) is not int:
        return None
    input.narrow(dim, start, length)
    first = start % input.shape[dim] if start < 0 else start
    slice_of = _along(input, dim, slice(first, first + length))
    return slice_of and (lambda input, dim, start, length: slice_of(input))


decomposition_maker("narrow", rule=lambda a: with_whole_dims(a.input, [a.dim]), view=True)(_narrow)
decomposition_maker(
    "narrow_copy",
    rule=lambda a: with_whole_dims(
        a.input,
        [a.dim],
        local=lambda x, dim, start, length: x.narrow(dim, start, length).clone(),
    ),
)(_narrow)


# -- several slices --------------------------------------------------------------------------------


_SPLITS = """
    split chunk tensor_split split_with_sizes unsafe_split unsafe_chunk unsafe_split_with_sizes
"""
# The dim is the second argument after the input; the name of the first differs.
_DIM_OF: dict[str, Callable[..., int]] = dict.fromkeys(
    _SPLITS.split(), lambda input, *args, dim=0, **kwargs: args[1] if len(args) > 1 else dim
)
_DIM_OF |= {
    "hsplit": lambda x, *_, **__: min(x.ndim - 1, 1),
    "vsplit": lambda *_, **__: 0,
    "dsplit": lambda *_, **__: 2,
}


@decomposition_maker(*_DIM_OF, with_func=True)
def _split(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Cut one dim into pieces, which are read off the result on a meta tensor."""
    results = func(input, *args, **kwargs)
    dim = _DIM_OF[func.__name__](input, *args, **kwargs) % max(input.ndim, 1)
    if not results or not is_split(input, [dim]):
        return None
    layout, origin, stride = layout_of(input), input.storage_offset(), input.stride(dim)
    starts = [(piece.storage_offset() - origin) // stride for piece in results]
    pieces = [
        Piece(layout, {dim: range(start, start + piece.shape[dim])})
        for start, piece in zip(starts, results, strict=True)
    ]
    layouts, container = [piece.moved for piece in pieces], type(results)
    return lambda input, *_, **__: container(
        all_from_parts(layouts, partial(_all_moved, pieces), input)
    )


@handler("tensor_split")
def _tensor_split_at(
    input: Any, indices_or_sections: Any = None, dim: int = 0, **kwargs: Any
) -> Any:
    """Cut at indices into pieces that expose their device, for `torch.vmap(chunk_size=)`."""
    if (
        type(indices_or_sections) is not tuple
        or not isinstance(input, ShardedTensor)
        or not input.ndim
    ):
        return NotImplemented
    sizes = [stop - start for start, stop in pairwise((0, *indices_or_sections, input.shape[dim]))]
    if min(sizes) < 0:
        return NotImplemented
    pieces: Any = torch.split_with_sizes(input, sizes, dim)
    for piece in pieces:
        piece._expose_device()
    return pieces


@decomposition_maker(
    "unbind",
    check=torch.unbind,
    rule=lambda a: with_whole_dims(a.input, [a.dim], drop=True),
    view=True,
)
def _unbind(input: Tensor, dim: int = 0) -> Callable[..., Any] | None:
    at = dim % input.ndim
    if not is_split(input, [at]) or not input.shape[at]:
        return None
    pieces = [Piece(layout_of(input), {at: range(i, i + 1)}) for i in range(input.shape[at])]
    dropped = [0 if d == at else slice(None) for d in range(input.ndim)]
    layouts = [_layout_after_dims(piece.moved, dropped) for piece in pieces]
    row = tuple(dropped)
    return lambda input, *_, **__: tuple(
        all_from_parts(
            layouts, lambda local: [part[row] for part in _all_moved(pieces, local)], input
        )
    )
