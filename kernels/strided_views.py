"""A strided copy, and its conversion to the rows of a kernel's table.

A `View` has the same elements as a strided view of a tensor and of a flat buffer. Kernels copy it
in one of two ways:

    rows   (batch ..., A, B, run) -> the same on both sides, `run` contiguous on both: each lane
           moves one unit, the largest power of two of bytes, up to 16, that divides the run and
           every stride and offset. A and B are the dims next to the run in source and destination,
           so that a program takes whole lines of both
    tile   runs under 16 bytes: (I, J, run) where (I, run) is contiguous in the source and (J, run)
           in the destination; a program reads a block along I, transposes it and writes it along J,
           each side in its own units

A view that does not fit one row (too many dims, or planes too large for 32 bits) becomes several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter
from typing import NamedTuple

Dim = tuple[int, int, int]  # size, stride in the source, stride in the destination

UNIT = 16  # bytes that one lane loads or stores at a time
GROUP = 128  # units of a run, of under 16 bytes each, per division
SHORT = 128  # bytes: a shorter run shares a line of memory with others
BATCH = 3  # dims besides A, B and run (or I, J and run); views with more become several rows
MAX_PLANE = 1 << 31  # units: the limit of 32 bits and of the division by multiplication


class View(NamedTuple):
    """One copy: the same elements as a strided view of a tensor and of a flat buffer."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    flat_strides: tuple[int, ...]
    flat_offset: int


class PlacedView(NamedTuple):
    """A view of one of several tensors.

    Attributes:
        tensor: its index.
        view: the elements.
        parts: offsets in the flat buffer of the values that are combined, instead of
            `view.flat_offset`; () for a copy.
    """

    tensor: int
    view: View
    parts: tuple[int, ...] = ()


def merge_views(
    sizes: Sequence[int], strides: Sequence[int], flat_strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the same elements on both sides in the fewest dims (at least one).

    As `box.merge_dims` does for one side.
    """
    merged: list[Dim] = []
    for size, stride, flat_stride in zip(sizes, strides, flat_strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * stride, size * flat_stride):
            size *= merged.pop()[0]
        merged.append((size, stride, flat_stride))
    return tuple(zip(*(merged or [(1, 1, 1)]), strict=True))  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class KernelKind:
    """The constants that a kernel is compiled for; rows of one kind share a launch.

    Attributes:
        tiled: whether it is a tile, else rows.
        unit: consecutive, aligned elements of the source that are read at a time.
        dst_unit: elements of the destination that are written at a time; for rows the same.
        group: of rows, the units of a run that belong to one lane.
        word: elements that are moved as one, of a tile that only copies.
        run: of a tile, the words of a run.
        parts: number of values combined to one; 1 for a copy.
        wide: whether offsets inside a program need 64 bits.
    """

    tiled: bool
    unit: int
    dst_unit: int
    group: int = 1
    word: int = 1
    run: int = 1
    parts: int = 1
    wide: bool = False

    @property
    def padded(self) -> int:
        """Words of a run of a tile in the kernel."""
        return next_power_of_two(self.run)


@dataclass(frozen=True, slots=True)
class Row:
    """A view in the form of a table row; strides and offsets in elements.

    Attributes:
        inner: for rows (A, B, run), for tiles (I, J), whose elements are runs.
        batch: the other dims, the fastest first.
    """

    kind: KernelKind
    tensor: int
    src: int
    dst: int
    inner: tuple[Dim, ...]
    batch: tuple[Dim, ...]
    parts: tuple[int, ...]

    @property
    def size(self) -> int:
        return (
            self.kind.word
            * self.kind.run
            * math.prod(size for size, _, _ in (*self.inner, *self.batch))
        )


def rows_of(
    p: PlacedView, to_flat: bool, itemsizes: tuple[int, int], aligned: int, raw: bool
) -> Iterable[Row]:
    """`rows_of(placed, to_flat, itemsizes, aligned, raw) -> rows`: convert a view.

    See `strided.make_tables`.
    """
    view, src, dst = p.view, p.view.offset, p.view.flat_offset
    dims: list[Dim] = list(zip(view.sizes, view.strides, view.flat_strides, strict=True))
    if not to_flat:
        src, dst, dims = dst, src, [(n, t, s) for n, s, t in dims]
    run = next((d[0] for d in dims if d[0] > 1 and d[1:] == (1, 1)), 1)
    others = [d for d in dims if d[0] > 1 and d[1:] != (1, 1)]
    most = [max(1, min(UNIT, aligned) // itemsize) for itemsize in itemsizes]
    if (
        run * min(itemsizes) < UNIT
        and len(p.parts) < 2
        and (turned := _transposed_dims(others, run)) is not None
    ):
        word = run if raw and _is_word(run, others, (src, dst), itemsizes[0], aligned) else 1
        kind, inner = _tile_kind(run, word, turned, others, (src, dst), most), turned
    else:
        unit = _common(
            max(most), run, src, dst, *p.parts, *(s for _, *strides in others for s in strides)
        )
        inner = (*_row_dims(others, run * min(itemsizes)), (run, 1, 1))
        parts = max(1, len(p.parts))
        units = run // unit
        # Units of a run per lane: GROUP if that leaves few lanes idle.
        few_idle = -units % GROUP * 8 <= units
        grouped = few_idle and parts == 1 and unit * min(itemsizes) < UNIT
        group = GROUP if grouped else 1
        kind = KernelKind(False, unit, unit, group, parts=parts)
    batch = sorted([d for d in others if d not in inner], key=itemgetter(1))
    return _split(Row(kind, p.tensor, src, dst, inner, tuple(batch), p.parts))


def _common(most: int, *numbers: int) -> int:
    """Return the largest power of two, at most `most`, that divides all numbers."""
    common = math.gcd(most, *numbers)
    return common & -common


def _transposed_dims(others: Sequence[Dim], run: int) -> tuple[Dim, Dim] | None:
    """Return the dims next to the run in source and destination; None if they are the same."""
    i = next((d for d in others if d[1] == run), None)
    j = next((d for d in others if d[2] == run and d is not i), None)
    return None if i is None or j is None else (i, j)


def _is_word(
    run: int, others: Sequence[Dim], offsets: Sequence[int], itemsize: int, aligned: int
) -> bool:
    """Return whether runs can be moved as integers of their size."""
    together = all(
        n % run == 0 for n in (*offsets, *(s for _, *strides in others for s in strides))
    )
    return together and run * itemsize in (2, 4, 8) and aligned % (run * itemsize) == 0


def _tile_kind(
    run: int,
    word: int,
    turned: tuple[Dim, Dim],
    others: Sequence[Dim],
    offsets: tuple[int, int],
    most: Sequence[int],
) -> KernelKind:
    words = run // word
    if words != next_power_of_two(words):  # padded in the kernel, so that only words are contiguous
        return KernelKind(True, word, word, 1, word, words)
    (i, j), (src, dst) = turned, offsets
    unit = _common(most[0], src, i[0] * run, *(d[1] for d in others if d is not i))
    dst_unit = _common(most[1], dst, j[0] * run, *(d[2] for d in others if d is not j))
    return KernelKind(True, max(word, unit), max(word, dst_unit), 1, word, words)


def _row_dims(others: Sequence[Dim], run_bytes: int) -> tuple[Dim, Dim]:
    """Return (A, B): the larger and the smaller of two dims.

    Those next to the run in source and destination, or the longest two.
    """
    longest = sorted(others, key=itemgetter(0), reverse=True)
    near = (
        [min(others, key=itemgetter(side)) for side in (1, 2)]
        if others and run_bytes < SHORT
        else []
    )
    chosen = [*dict.fromkeys([*near, *longest]), (1, 0, 0), (1, 0, 0)][:2]
    return max(chosen), min(chosen)


def _split(row: Row) -> Iterable[Row]:
    """Yield the row as several if it has too many batch dims or a plane is too large."""
    extra, row = row.batch[BATCH:], replace(row, batch=row.batch[:BATCH])
    for index in product(*(range(size) for size, _, _ in extra)):
        yield from _cut(_shift_row(row, *_at(index, extra)))


def _cut(row: Row) -> Iterable[Row]:
    """Yield rows whose planes fit into 32 bits; only offsets inside a program may need more."""
    pieces = [_pieces(dim, most) for dim, most in zip(row.inner, _most(row), strict=True)]
    for cut in product(*pieces):
        starts, inner = zip(*cut, strict=True)
        part = _shift_row(replace(row, inner=inner), *_at(starts, inner))
        spans = [sum((size - 1) * d[side] for size, *d in inner) for side in (0, 1)]
        yield replace(part, kind=replace(row.kind, wide=max(spans) >= MAX_PLANE - UNIT))


def _most(row: Row) -> list[int]:
    """Return the longest sizes of the inner dims."""
    most = MAX_PLANE // 2
    if row.kind.tiled:
        return [max(UNIT, most // row.kind.padded)] * 2
    (_, *_), (b, *_), (run, *_) = row.inner
    run = min(run, most * row.kind.unit)
    b = min(b, max(1, most * row.kind.unit // run))
    return [max(1, most * row.kind.unit // (run * b)), b, run]


def _pieces(dim: Dim, most: int) -> list[tuple[int, Dim]]:
    """Return a dim in pieces of at most `most`: the start of each, and the piece."""
    size, src, dst = dim
    return [(start, (min(most, size - start), src, dst)) for start in range(0, size, most)]


def _at(index: Sequence[int], dims: Sequence[Dim]) -> tuple[int, int]:
    """Return the offset of an index of some dims, in source and destination."""
    src = sum(i * s for i, (_, s, _) in zip(index, dims, strict=True))
    return src, sum(i * d for i, (_, _, d) in zip(index, dims, strict=True))


def _shift_row(row: Row, src: int, dst: int) -> Row:
    return replace(
        row, src=row.src + src, dst=row.dst + dst, parts=tuple([p + src for p in row.parts])
    )


def next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
