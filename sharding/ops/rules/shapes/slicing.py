"""Slices of split dims: `x[1:3]`, `select`, `narrow`, `split` and its kin.

    x over 3 ranks     [0 1 2 | 3 4 5 | 6 7 8]
    x[2:8] cut         [    2 | 3 4 5 | 6 7  ]        this rank's part of the slice, without communication
    moved              [2 3   | 4 5   | 6 7  ]        laid out evenly, by one exchange of what changes ranks

A dim too short to give every rank of its axes an element is replicated over the minor ones; so is what `select` and integers
leave of a dim, which comes to all ranks from the one that holds it. (Left pending, as zeros everywhere else, it would need no
communication now and an all_reduce, twice the bytes, in every operator that is not linear; and -0.0 + 0 is 0.) The pieces of
`split` and its kin move in one exchange together.

Dims that are not split, or taken whole, are left to the rules, whose results are views. A slice that had to move is a copy:
writing to it is refused, but for `x[i] += y`, see `sliced_from.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any

from torch import Tensor

from ....layout.layout import Layout
from ....layout.spec import P
from ....redistribute.autograd import redistribute_local, redistribute_locals
from ...dispatch import marked_as_copy
from ...sliced_from import SlicedFrom
from ..decomposition_utils import all_from_parts, evenly, from_parts, layout_of, part_sizes, resized, splits
from ..indexing.masked import mask_form
from ..notation import Rule
from ..registry import form, functions, rule
from .view import with_whole_dims


def within(chosen: range, start: int, stop: int) -> range:
    """The chosen indices that lie in [start, stop)."""
    first, last = (-((chosen.start - bound) // chosen.step) for bound in (start, stop))
    return chosen[max(first, 0) : max(last, 0)]


def _cut(layout: Layout, dim: int, chosen: range) -> Layout:
    """Each rank with those of the chosen indices of a dim that it holds."""
    bounds, sizes = 0, []
    for size in part_sizes(layout, dim):
        sizes.append(len(within(chosen, bounds, bounds + size)))
        bounds += size
    return resized(layout, dim, sizes) if layout.spec.dims[dim] else evenly(layout, dim, len(chosen))


class Piece:
    """A slice of a tensor that lies in a given way.

    Attributes:
        cut: the layout in which every rank holds what it held before.
        moved: the layout of the result.
        index: what this rank's part has of the slice.
    """

    def __init__(self, layout: Layout, ranges: dict[int, range]) -> None:
        self.cut = self.moved = layout
        for dim, chosen in ranges.items():
            self.cut, self.moved = _cut(self.cut, dim, chosen), evenly(self.moved, dim, len(chosen))
        self.index = tuple(_local_slice(ranges.get(dim), *interval) for dim, interval in enumerate(layout.box))

    def part(self, local: Tensor) -> Tensor:
        """The slice of this rank's part, a view."""
        return local[self.index]


def _local_slice(chosen: range | None, start: int, stop: int) -> slice:
    if chosen is None:
        return slice(None)
    mine = within(chosen, start, stop)
    return slice(mine.start - start, mine.stop - start, mine.step) if mine else slice(0, 0)


def _moved(piece: Piece, local: Tensor) -> Tensor:
    """The slice where it should be; where it had to move it is marked as a copy."""
    part = piece.part(local)
    return part if piece.cut is piece.moved else marked_as_copy(redistribute_local(part, piece.cut, piece.moved), local)


def _all_moved(pieces: Sequence[Piece], local: Tensor) -> list[Tensor]:
    parts = redistribute_locals([piece.part(local) for piece in pieces], [(piece.cut, piece.moved) for piece in pieces])
    return [part if piece.cut is piece.moved else marked_as_copy(part, local) for piece, part in zip(pieces, parts, strict=True)]


# -- one slice --------------------------------------------------------------------------------------------------------


def sliced(input: Tensor, entries: Sequence[Any]) -> Callable[[Any], Any] | None:
    """The form of `x[entries]`, which are one for each dim and None for new ones; None where no split dim is cut."""
    given = [e for e in entries if e is not None]
    ranges = {d: _chosen(e, n) for d, (e, n) in enumerate(zip(given, input.shape, strict=True))}
    ranges = {d: chosen for d, chosen in ranges.items() if chosen != range(input.shape[d]) or type(given[d]) is int}
    if not splits(input, ranges):
        return None
    piece = Piece(layout_of(input), ranges)
    last = tuple(None if e is None else 0 if type(e) is int else slice(None) for e in entries)
    result = _reshaped(piece.moved, last)
    return lambda x: from_parts(result, lambda local: _moved(piece, local)[last], x)


def _chosen(entry: Any, size: int) -> range:
    return range(size)[entry] if isinstance(entry, slice) else range(entry % size, entry % size + 1)


def _reshaped(layout: Layout, last: Sequence[Any]) -> Layout:
    """The layout after dims are dropped (0) and made (None)."""
    kept = [isinstance(e, slice) for e in last if e is not None]
    cuts, sizes = compress(layout.spec.cuts, kept), compress(layout.shape, kept)
    dims = [((), 1) if e is None else (next(cuts), next(sizes)) for e in last if e != 0]
    return Layout.of(layout.mesh, P.of_cuts([c for c, _ in dims], layout.pending), [n for _, n in dims], layout.dtype)


def _basic(index: Any, ndim: int) -> list[Any] | None:
    """The index with one entry for each dim, and None for each new one; None where anything else is in it."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(e is None or e is Ellipsis or type(e) is int or _is_plain_slice(e) for e in entries):
        return None
    missing = ndim - sum(e is not None and e is not Ellipsis for e in entries)
    at = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    return [*entries[:at], *[slice(None)] * missing, *entries[at + 1 :]]


def _is_plain_slice(entry: Any) -> bool:
    return isinstance(entry, slice) and all(e is None or type(e) is int for e in (entry.start, entry.stop, entry.step))


@form("__getitem__")
def _getitem(input: Tensor, index: Any) -> Callable[..., Any] | None:
    entries = _basic(index, input.ndim)
    if entries is None:
        return mask_form(input, index)
    input[index]  # torch's own complaint comes before any of Python's
    found = sliced(input, entries)
    return found and partial(_sliced_by_index, found)


def _sliced_by_index(found: Callable[[Any], Any], input: Any, index: Any) -> Any:
    out = found(input)
    out._sliced_from = SlicedFrom(input, index)
    return out


def _along(input: Tensor, dim: int, entry: Any) -> Callable[[Any], Any] | None:
    return sliced(input, [entry if d == dim % input.ndim else slice(None) for d in range(input.ndim)])


@form("select")
def _select(input: Tensor, dim: int, index: int | Tensor) -> Callable[..., Any] | None:
    input.select(dim, index)  # type: ignore[arg-type]
    found = _along(input, dim, index) if type(index) is int else None
    return found and (lambda input, dim, index: found(input))


@form("narrow", "narrow_copy")
def _narrow(input: Tensor, dim: int, start: Any, length: int) -> Callable[..., Any] | None:
    if type(start) is not int:
        return None
    input.narrow(dim, start, length)
    first = start % input.shape[dim] if start < 0 else start
    found = _along(input, dim, slice(first, first + length))
    return found and (lambda input, dim, start, length: found(input))


@rule("narrow_copy")
def _narrow_copy(input: Tensor, dim: int, start: Any, length: int) -> Rule:
    return with_whole_dims(input, [dim], local=lambda local, dim, start, length: local.narrow(dim, start, length).clone())


# -- several slices ---------------------------------------------------------------------------------------------------


def _splitting(func: Callable[..., Any], dim_of: Callable[..., int], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The form of a function that cuts one dim into pieces, which are read off its result on a meta tensor."""
    results, dim = func(input, *args, **kwargs), dim_of(input, *args, **kwargs) % max(input.ndim, 1)
    if not results or not splits(input, [dim]):
        return None
    starts = [(piece.storage_offset() - input.storage_offset()) // input.stride(dim) for piece in results]
    chosen = [range(start, start + piece.shape[dim]) for start, piece in zip(starts, results, strict=True)]
    pieces = [Piece(layout_of(input), {dim: each}) for each in chosen]
    layouts, container = [piece.moved for piece in pieces], type(results)
    return lambda input, *_, **__: container(all_from_parts(layouts, partial(_all_moved, pieces), input))


def _given_dim(input: Tensor, *args: Any, dim: int = 0, **kwargs: Any) -> int:
    """The second argument, whatever the first is called."""
    return args[1] if len(args) > 1 else dim


_SPLITS = ("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")
_DIM_OF: dict[str, Callable[..., int]] = dict.fromkeys(_SPLITS, _given_dim)
_DIM_OF |= {"hsplit": lambda x, *_, **__: min(x.ndim - 1, 1), "vsplit": lambda *_, **__: 0, "dsplit": lambda *_, **__: 2}

for name, dim_of in _DIM_OF.items():
    for func in functions(name):
        form(also=(func,))(partial(_splitting, func, dim_of))


@form("unbind")
def _unbind(input: Tensor, dim: int = 0) -> Callable[..., Any] | None:
    input.unbind(dim)
    at = dim % input.ndim
    if not splits(input, [at]) or not input.shape[at]:
        return None
    pieces = [Piece(layout_of(input), {at: range(i, i + 1)}) for i in range(input.shape[at])]
    dropped = [0 if d == at else slice(None) for d in range(input.ndim)]
    layouts = [_reshaped(piece.moved, dropped) for piece in pieces]
    return lambda input, *_, **__: tuple(all_from_parts(layouts, partial(_rows_moved, pieces, tuple(dropped)), input))


def _rows_moved(pieces: Sequence[Piece], dropped: tuple[Any, ...], local: Tensor) -> list[Tensor]:
    return [part[dropped] for part in _all_moved(pieces, local)]


@rule("unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")
def _unsafe_split(input: Tensor, sections: Any = None, dim: int = 0, **kwargs: Any) -> Rule:
    return with_whole_dims(input, [dim])


@rule("hsplit", view=True)
def _hsplit(input: Tensor, *args: Any, **kwargs: Any) -> Rule:
    return with_whole_dims(input, [min(input.ndim - 1, 1)])


@rule("vsplit", view=True)
def _vsplit(input: Tensor, *args: Any, **kwargs: Any) -> Rule:
    return with_whole_dims(input, [0])


@rule("dsplit", view=True)
def _dsplit(input: Tensor, *args: Any, **kwargs: Any) -> Rule:
    return with_whole_dims(input, [2])
