"""Strided copies as data: the tables from which one launch copies many views (`strided_views.py`).

Tables are computed once per (views, direction, alignment) and do not depend on addresses. Offsets
are in units, so that a kernel multiplies them by a constant and the compiler knows their alignment.
Divisions by sizes in the table are multiplications (Granlund and Montgomery, "Division by Invariant
Integers using Multiplication", 1994).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from .strided_views import BATCH, UNIT, KernelKind, PlacedView, Row, next_power_of_two, rows_of
from .strided_views import View as View
from .strided_views import merge_views as merge_views
from .transfer.device_copies import DeviceCopies

PROGRAM_BYTES = 1 << 14  # bytes per program: 8 units per thread of 128
MAX_ACCESSES = 1 << 12  # of one program to one side: 32 per thread, which its registers hold
MAX_TILE = 1 << 13  # words
MAX_ROWS = 1 << 10  # of one table
MAX_PROGRAMS = (1 << 31) - 1  # of one launch

# Dtypes that kernels compute with, as torch does; all others are only copied.
COMPUTED = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64}
)

# If the parts of a sum are in several tensors, elements are numbered as if each had this many.
SPAN = 1 << 40


class Column(IntEnum):
    """The columns of a table; those of rows and those of tiles share places.

    Everything of the source is counted in its units, everything of the destination in those.
    """

    FIRST_PROGRAM = 0
    TENSOR = 1
    SRC = 2  # offset
    DST = 3
    PROGRAMS = 4  # of a plane
    BATCH = 11  # to 19: (size, source stride, destination stride) of each dim, the fastest first
    PART = 20  # the first entry in the table of parts, for sums
    # rows
    PLANE_LANES = 5
    RUN_LANES = 6
    RUN_DIVISOR = 7  # and 8: of lanes by RUN_LANES, see `divisor`
    A_SRC = 9  # strides
    A_DST = 10
    B_SIZE = 21
    B_DIVISOR = 22  # and 23
    B_SRC = 24
    B_DST = 25
    RUN_UNITS = 26
    # tiles
    I_WORDS = 5  # a run padded to a power of two
    J_WORDS = 6
    J_SRC = 7  # strides
    I_DST = 8
    J_PROGRAMS = 9


COLUMNS = 27  # of a table
NEVER = (1 << 62) - 1  # first program of a row that pads the table


@dataclass
class Table:
    """One launch.

    Attributes:
        kind: the constants of the kernel.
        lanes: of a program of rows, (lanes,); of tiles, (runs along I, runs along J).
        programs: the size of the grid.
        rows: see `Column`; padded to a power of two.
        parts: the offsets that rows with several parts refer to, in units; the rows if none has.
        elements: number of elements written.
        aligned: the power of two that divides every address.
        launchers: of the kernels that were launched with this table, by what else their constants
            depend on.
    """

    kind: KernelKind
    lanes: tuple[int, ...]
    programs: int
    rows: DeviceCopies
    parts: DeviceCopies
    elements: int
    aligned: int
    launchers: dict[tuple, Any] = field(default_factory=dict)


def make_tables(
    placed: Iterable[PlacedView],
    to_flat: bool,
    itemsizes: tuple[int, int],
    aligned: int = UNIT,
    raw: bool = True,
) -> list[Table]:
    """`make_tables(placed, to_flat, itemsizes) -> one table per launch`.

    Args:
        placed: what to copy; empty views are skipped.
        to_flat: from the tensors into the flat buffer; else from the buffer into the tensors.
        itemsizes: bytes of an element of the source and of the destination.
        aligned: the largest power of two, up to 16, that divides every address.
        raw: whether values are only copied, so that several elements may be moved as one.
    """
    rows: dict[KernelKind, list[Row]] = {}
    for p in placed:
        if math.prod(p.view.sizes):
            for row in rows_of(p, to_flat, itemsizes, aligned, raw):
                rows.setdefault(row.kind, []).append(row)
    return [
        _table(kind, alike[i : i + MAX_ROWS], max(itemsizes), aligned)
        for kind, alike in rows.items()
        for i in range(0, len(alike), MAX_ROWS)
    ]


_MOST_KNOWN = 4096
_known: dict[tuple, tuple[Sequence[object], list[Table]]] = {}


def cached_tables(
    owners: Sequence[object], key: tuple, make: Callable[[], list[Table]]
) -> list[Table]:
    """Return the tables of these objects, cached by identity, which is faster than by value."""
    key = (*map(id, owners), *key)
    known = _known.get(key)
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.pop(next(iter(_known)), None)
        known = _known[key] = owners, make()  # the objects live as long as their ids are keys
    return known[1]


# -- tables ----------------------------------------------------------------------------------------


def _table(kind: KernelKind, rows: Sequence[Row], itemsize: int, aligned: int) -> Table:
    lanes = _tile_lanes(rows, kind, itemsize) if kind.tiled else _row_lanes(rows, kind, itemsize)
    filled, parts, program = [], [], 0
    for row in rows:
        count, own = (_tile_columns if kind.tiled else _row_columns)(row, lanes)
        columns = [0] * COLUMNS
        columns[: Column.PROGRAMS + 1] = (
            program, row.tensor, row.src // kind.unit, row.dst // kind.dst_unit, count
        )  # fmt: skip
        batch = [*row.batch, *[(1, 0, 0)] * (BATCH - len(row.batch))]
        for i, (size, src, dst) in enumerate(batch):
            first = Column.BATCH + 3 * i
            columns[first : first + 3] = size, src // kind.unit, dst // kind.dst_unit
        columns[Column.PART] = len(parts)
        for column, value in own.items():
            columns[column] = value
        filled.append(columns)
        program += count * math.prod(size for size, _, _ in row.batch)
        parts += [p // kind.unit for p in row.parts]
    if program > MAX_PROGRAMS:
        raise ValueError(
            f"{len(rows)} views take {program} programs; one launch has at most {MAX_PROGRAMS}: "
            "copy in parts"
        )
    filled += [[NEVER, *[1] * (COLUMNS - 1)]] * (next_power_of_two(len(filled)) - len(filled))
    elements = sum(row.size for row in rows)
    table = DeviceCopies(filled)
    offsets = DeviceCopies(parts) if parts else table
    return Table(kind, lanes, program, table, offsets, elements, aligned)


def _row_lanes(rows: Sequence[Row], kind: KernelKind, itemsize: int) -> tuple[int]:
    """Return the lanes of a program: enough for the memory, not many more than planes have."""
    planes = sorted(_lanes_of_plane(row) for row in rows)
    # without groups each access needs an address
    accesses = MAX_ACCESSES if kind.group > 1 else MAX_ACCESSES // 2
    most = min(accesses, PROGRAM_BYTES // (kind.unit * itemsize)) // kind.group
    if kind.parts > 1:
        most //= 2
    return (max(128 // kind.group, min(most, next_power_of_two(planes[len(planes) // 2]))),)


def _lanes_of_plane(row: Row) -> int:
    (a, *_), (b, *_), (run, *_) = row.inner
    return a * b * -(-run // (row.kind.unit * row.kind.group))


def _row_columns(row: Row, lanes: tuple[int, ...]) -> tuple[int, dict[int, int]]:
    """Return the programs of a plane, and the columns of rows."""
    unit, ((_, *a), (size_b, *b), (run, *_)) = row.kind.unit, row.inner
    plane, of_run = _lanes_of_plane(row), -(-run // (unit * row.kind.group))
    columns: dict[int, int] = {
        Column.PLANE_LANES: plane,
        Column.RUN_LANES: of_run,
        Column.A_SRC: a[0] // unit,
        Column.A_DST: a[1] // unit,
        Column.B_SIZE: size_b,
        Column.B_SRC: b[0] // unit,
        Column.B_DST: b[1] // unit,
        Column.RUN_UNITS: run // unit,
    }
    for column, d in ((Column.RUN_DIVISOR, of_run), (Column.B_DIVISOR, size_b)):
        columns[column], columns[column + 1] = divisor(d)
    return -(-plane // lanes[0]), columns


def _tile_lanes(rows: Sequence[Row], kind: KernelKind, itemsize: int) -> tuple[int, int]:
    """Return runs along I and J: about as many bytes along both, or more along the longer one."""
    words = min(kind.unit, kind.dst_unit) // kind.word * MAX_ACCESSES
    most = min(words, MAX_TILE, PROGRAM_BYTES // (kind.word * itemsize)) // kind.padded
    i, j = (next_power_of_two(max(row.inner[side][0] for row in rows)) for side in (0, 1))
    along_i = min(i, max(1 << most.bit_length() // 2, most // j))
    return along_i, min(j, most // along_i)


def _tile_columns(row: Row, lanes: tuple[int, ...]) -> tuple[int, dict[int, int]]:
    """Return the programs of a plane, and the columns of tiles."""
    kind, ((i, _, i_dst), (j, j_src, _)) = row.kind, row.inner
    tiles_i, tiles_j = -(-i // lanes[0]), -(-j // lanes[1])
    return tiles_i * tiles_j, {
        Column.I_WORDS: i * kind.padded * kind.word // kind.unit,
        Column.J_WORDS: j * kind.padded * kind.word // kind.dst_unit,
        Column.J_SRC: j_src // kind.unit,
        Column.I_DST: i_dst // kind.dst_unit,
        Column.J_PROGRAMS: tiles_j,
    }


def divisor(d: int) -> tuple[int, int]:
    """`divisor(d) -> (multiplier, shift)`: to divide by a product and a shift.

    n // d == (high 32 bits of n * multiplier + n) >> shift, for n and d < 2**31.

    >>> multiplier, shift = divisor(7)
    >>> [((n * multiplier >> 32) + n) >> shift for n in (0, 6, 7, 2**31 - 1)]
    [0, 0, 1, 306783378]
    """
    shift = (d - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - d)) // d + 1, shift


def alignment(tensors: Iterable[Tensor]) -> int:
    """Return the largest power of two, up to 16, that divides the address of every tensor."""
    common = UNIT
    for x in tensors:
        address = x.data_ptr()
        common = min(common, address & -address) if address else common
    return common
