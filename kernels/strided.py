"""Strided copies as data: the views that boxes are made of, and the table from which one launch copies many of them.

A `View` is the same elements as a strided view of a tensor and of a flat buffer. A kernel reads views as rows of a table, in
one of two classes:

    rows   (batch ..., A, run) -> the same on both sides, `run` contiguous on both: each lane moves one unit, the largest
           power of two of bytes, up to 16, that divides the run and every stride and offset
    tile   runs under 16 bytes: (I, J) where I is contiguous in the source and J in the destination; a program reads a block
           along I, turns it round and writes it along J

Everything that does not depend on addresses is decided here, once for each (views, direction, alignment); offsets are kept
in units, so that a kernel multiplies them by a constant and the compiler sees the alignment. Divisions by sizes that only
the table knows are multiplications (Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

Dim = tuple[int, int, int]  # size, stride in the source, stride in the destination

UNIT = 16  # bytes that one lane loads or stores at a time
PROGRAM_BYTES = 1 << 14  # bytes that one program of `rows` moves: 8 units for each of 128 threads
MAX_LANES = 1 << 12
TILE = 1 << 12  # words of a tile
MAX_ROWS = 1 << 10  # of one table; a program looks for its row among all of them at once
BATCH = 3  # dims beside A and run (or I and J); views with more become several rows
MAX_PLANE = 1 << 31  # units: what the multiplication that stands for a division can take

# Dtypes that kernels compute with, as torch does; all others are only copied.
COMPUTED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64})

COLUMNS = 21
"""Of a table: 0 first program, 1 tensor, 2 source offset, 3 destination offset, 4 tiles of a plane (of its first dim, for
tiles), then for rows: 5 units of a plane, 6 units of a run, 7 and 8 their divisor, 9 and 10 strides of A; for tiles: 5 and 6
sizes of I and J, 7 source stride of J, 8 destination stride of I, 9 tiles along J; then (size, source stride, destination
stride) of each batch dim, the fastest first; 20 the first entry in the table of parts, for sums."""
_NEVER = (1 << 62) - 1  # first program of a row that pads the table


class View(NamedTuple):
    """One copy: the same elements as a strided view of a tensor and of a flat buffer."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    flat_strides: tuple[int, ...]
    flat_offset: int


class Placed(NamedTuple):
    """A view of one of several tensors.

    Attributes:
        tensor: its number.
        view: the elements.
        parts: where in the flat buffer the values lie that are combined, instead of `view.flat_offset`; () for a copy.
    """

    tensor: int
    view: View
    parts: tuple[int, ...] = ()


def merge_views(
    sizes: Sequence[int], strides: Sequence[int], flat_strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The same elements on both sides in the fewest dims (but one), as `box.merge_dims` does for one side."""
    merged: list[Dim] = []
    for size, stride, flat_stride in zip(sizes, strides, flat_strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * stride, size * flat_stride):
            size *= merged.pop()[0]
        merged.append((size, stride, flat_stride))
    return tuple(zip(*(merged or [(1, 1, 1)]), strict=True))  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kernel is compiled for; rows of one kind share a launch.

    Attributes:
        tiled: whether it is a tile, else rows.
        unit: elements that lie together on both sides, at a multiple of their number: a lane moves them at a time.
        word: elements that are moved as one, of a tile that only copies.
        run: of a tile, the words of a run.
        parts: how many values are combined to one; 1 for a copy.
        wide: whether offsets inside a plane need 64 bits.
    """

    tiled: bool
    unit: int
    word: int = 1
    run: int = 1
    parts: int = 1
    wide: bool = False


@dataclass
class Table:
    """One launch.

    Attributes:
        kind: what the kernel is compiled for.
        lanes: for rows, units of a program; for tiles, (words along I, words along J).
        programs: the size of the grid.
        rows: see `COLUMNS`; padded to a power of two.
        parts: the offsets that rows with several parts point to, in units.
        elements: how many are written.
        aligned: the power of two that divides every address.
    """

    kind: Kind
    lanes: tuple[int, int]
    programs: int
    rows: Tensor
    parts: Tensor
    elements: int
    aligned: int
    _moved: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows and the parts on a device (copied there once)."""
        found = self._moved.get(device)
        if found is None:
            found = self._moved[device] = self.rows.to(device), self.parts.to(device)
        return found


def make_tables(
    placed: Iterable[Placed], to_flat: bool, itemsizes: tuple[int, int], aligned: int = UNIT, raw: bool = True
) -> list[Table]:
    """`make_tables(placed, to_flat, itemsizes) -> one table for each launch`.

    Args:
        placed: what to copy; views that are empty are left out.
        to_flat: from the tensors into the flat buffer; else from the buffer into the tensors.
        itemsizes: bytes of an element of the source and of the destination.
        aligned: the largest power of two, up to 16, that divides every address.
        raw: whether nothing is computed, so that several elements may be moved as one.
    """
    rows: dict[Kind, list[_Row]] = {}
    for p in placed:
        if math.prod(p.view.sizes):
            for row in _rows_of(p, to_flat, itemsizes, aligned, raw):
                rows.setdefault(row.kind, []).append(row)
    return [
        _table(kind, found[i : i + MAX_ROWS], max(itemsizes), aligned)
        for kind, found in rows.items()
        for i in range(0, len(found), MAX_ROWS)
    ]


_MOST_KNOWN = 4096
_known: dict[tuple, tuple[Sequence[object], list[Table]]] = {}


def remembered(owners: Sequence[object], key: tuple, make: Callable[[], list[Table]]) -> list[Table]:
    """The tables of these very objects (which are kept), made once: to compare hundreds of views would take longer than a
    launch."""
    key = (*map(id, owners), *key)
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            del _known[next(iter(_known))]
        found = _known[key] = owners, make()
    return found[1]


# -- one view ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """A view as a kernel wants it; strides and offsets in elements.

    Attributes:
        inner: for rows (A, run), for tiles (I, J), whose elements are runs.
        batch: the other dims, the fastest first.
    """

    kind: Kind
    tensor: int
    src: int
    dst: int
    inner: tuple[Dim, Dim]
    batch: tuple[Dim, ...]
    parts: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.kind.word * self.kind.run * math.prod(size for size, _, _ in (*self.inner, *self.batch))


def _rows_of(p: Placed, to_flat: bool, itemsizes: tuple[int, int], aligned: int, raw: bool) -> list[_Row]:
    view, src, dst = p.view, p.view.offset, p.view.flat_offset
    dims: list[Dim] = list(zip(view.sizes, view.strides, view.flat_strides, strict=True))
    if not to_flat:
        src, dst, dims = dst, src, [(n, t, s) for n, s, t in dims]
    dims = [d for d in dims if d[0] > 1]
    run = next((d[0] for d in dims if d[1:] == (1, 1)), 1)
    others = [d for d in dims if d[1:] != (1, 1)]
    if run * min(itemsizes) < UNIT and len(p.parts) < 2 and (turned := _turned(others, run)) is not None:
        word = run if raw and _is_word(run, others, (src, dst), itemsizes[0], aligned) else 1
        kind, inner, batch = Kind(True, 1, word, run // word), *turned
    else:
        kind = Kind(False, _unit(run, others, (src, dst, *p.parts), itemsizes, aligned), parts=max(1, len(p.parts)))
        first = _row_dim(others, run * min(itemsizes))
        inner, batch = (first or (1, 0, 0), (run, 1, 1)), [d for d in others if d is not first]
    batch = sorted(batch, key=lambda d: d[1])
    return list(_split(_Row(kind, p.tensor, src, dst, inner, tuple(batch), p.parts)))


def _turned(others: Sequence[Dim], run: int) -> tuple[tuple[Dim, Dim], list[Dim]] | None:
    """The dims next to the run in the source and in the destination, where they are not the same, and the rest."""
    i = next((d for d in others if d[1] == run), None)
    j = next((d for d in others if d[2] == run and d is not i), None)
    if i is None or j is None:
        return None
    return (i, j), [d for d in others if d is not i and d is not j]


def _unit(run: int, others: Sequence[Dim], offsets: Sequence[int], itemsizes: tuple[int, int], aligned: int) -> int:
    """The most elements, a power of two, that may be moved at a time."""
    common = math.gcd(run, *(s for _, *strides in others for s in strides), *offsets)
    most = min(UNIT // min(itemsizes), max(1, aligned // min(itemsizes)))
    return min(most, common & -common)


def _is_word(run: int, others: Sequence[Dim], offsets: Sequence[int], itemsize: int, aligned: int) -> bool:
    """Whether runs can be moved as integers of their size."""
    together = all(n % run == 0 for n in (*offsets, *(s for _, *strides in others for s in strides)))
    return together and run * itemsize in (2, 4, 8) and aligned % (run * itemsize) == 0


def _row_dim(others: Sequence[Dim], run_bytes: int) -> Dim | None:
    """The dim whose runs one program moves: for short runs the one next to them in the destination, else the longest."""
    if not others:
        return None
    return min(others, key=lambda d: d[2]) if run_bytes < 128 else max(others, key=lambda d: d[0])


def _split(row: _Row) -> Iterable[_Row]:
    """As several rows, where there are more batch dims than a table has columns for or a plane is too large."""
    if len(row.batch) > BATCH:
        extra, row = row.batch[BATCH:], replace(row, batch=row.batch[:BATCH])
        for index in product(*(range(size) for size, _, _ in extra)):
            yield from _split(_moved(row, *_at(index, extra)))
        return
    a, run = row.inner
    most = MAX_PLANE // 2 * row.kind.unit
    if not row.kind.tiled and a[0] * run[0] > most:
        for (a_start, a_part), (start, run_part) in product(_cut(a, max(1, most // run[0])), _cut(run, most)):
            part = replace(row, inner=(a_part, run_part))
            yield from _split(_moved(part, a_start * a[1] + start, a_start * a[2] + start))
        return
    spans = [sum((size - 1) * d[side] for size, *d in row.inner) for side in (0, 1)]
    yield replace(row, kind=replace(row.kind, wide=max(spans) >= MAX_PLANE))


def _cut(dim: Dim, most: int) -> list[tuple[int, Dim]]:
    """A dim in pieces of at most so many: where each begins, and the piece."""
    size, src, dst = dim
    return [(start, (min(most, size - start), src, dst)) for start in range(0, size, most)]


def _at(index: Sequence[int], dims: Sequence[Dim]) -> tuple[int, int]:
    """How far (source, destination) an index of some dims is."""
    src = sum(i * s for i, (_, s, _) in zip(index, dims, strict=True))
    return src, sum(i * d for i, (_, _, d) in zip(index, dims, strict=True))


def _moved(row: _Row, src: int, dst: int) -> _Row:
    return replace(row, src=row.src + src, dst=row.dst + dst, parts=tuple([p + src for p in row.parts]))


# -- many --------------------------------------------------------------------------------------------------------------


def _table(kind: Kind, rows: Sequence[_Row], itemsize: int, aligned: int) -> Table:
    lanes = _tile_lanes(rows, kind) if kind.tiled else (_row_lanes(rows, kind, itemsize), kind.unit)
    made, parts, program = [], [], 0
    for row in rows:
        count, columns = (_tile_columns if kind.tiled else _row_columns)(row, lanes)
        made.append([program, row.tensor, *columns, len(parts)])
        program += count * math.prod(size for size, _, _ in row.batch)
        parts += [p // kind.unit for p in row.parts]
    made += [[_NEVER, *[1] * (COLUMNS - 1)]] * (next_power_of_two(len(made)) - len(made))
    elements = sum(row.size for row in rows)
    table, offsets = torch.tensor(made, dtype=torch.int64), torch.tensor(parts or [0], dtype=torch.int64)
    return Table(kind, lanes, program, table, offsets, elements, aligned)


def _row_lanes(rows: Sequence[_Row], kind: Kind, itemsize: int) -> int:
    """Units of a program: enough bytes to keep the memory busy, not much more than a typical plane has."""
    planes = sorted(row.inner[0][0] * row.inner[1][0] // kind.unit for row in rows)
    most = min(MAX_LANES, max(128, PROGRAM_BYTES // (kind.unit * itemsize)))
    return max(128, min(most, next_power_of_two(planes[len(planes) // 2])))


def _row_columns(row: _Row, lanes: tuple[int, int]) -> tuple[int, list[int]]:
    unit, ((a, a_src, a_dst), (run, _, _)) = row.kind.unit, row.inner
    plane, run = a * run // unit, run // unit
    tiles = -(-plane // lanes[0])
    inner = [plane, run, *divisor(run), a_src // unit, a_dst // unit]
    return tiles, [row.src // unit, row.dst // unit, tiles, *inner, *_batch_columns(row, unit)]


def _tile_lanes(rows: Sequence[_Row], kind: Kind) -> tuple[int, int]:
    longest_i = max(row.inner[0][0] * kind.run for row in rows)
    longest_j = max(row.inner[1][0] for row in rows)
    along_i = min(next_power_of_two(longest_i), 64)
    return along_i, min(next_power_of_two(longest_j), TILE // along_i)


def _tile_columns(row: _Row, lanes: tuple[int, int]) -> tuple[int, list[int]]:
    word, ((i, _, i_dst), (j, j_src, _)) = row.kind.word, row.inner
    tiles_i, tiles_j = -(-i * row.kind.run // lanes[0]), -(-j // lanes[1])
    inner = [i * row.kind.run, j, j_src // word, i_dst // word, tiles_j, 0]
    return tiles_i * tiles_j, [row.src // word, row.dst // word, tiles_i * tiles_j, *inner, *_batch_columns(row, word)]


def _batch_columns(row: _Row, unit: int) -> list[int]:
    columns = [n for size, src, dst in row.batch for n in (size, src // unit, dst // unit)]
    return columns + [1, 0, 0] * (BATCH - len(row.batch)) if len(columns) < 3 * BATCH else columns


def divisor(d: int) -> tuple[int, int]:
    """`divisor(d) -> (multiplier, shift)`: n // d == (high 32 bits of n * multiplier + n) >> shift, for n and d < 2**31.

    >>> multiplier, shift = divisor(7)
    >>> [((n * multiplier >> 32) + n) >> shift for n in (0, 6, 7, 2**31 - 1)] == [0, 0, 1, (2**31 - 1) // 7]
    True
    """
    shift = (d - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - d)) // d + 1, shift


def next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def alignment(tensors: Iterable[Tensor]) -> int:
    """The largest power of two, up to 16, that divides the address of every tensor."""
    common = UNIT
    for x in tensors:
        address = x.data_ptr()
        common = min(common, address & -address) if address else common
    return common
