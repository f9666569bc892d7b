"""Triton kernels for many strided copies in one launch.

For `copy.py`, `reduce.py` and the pulls of `symmetric/`.

    rows     out[view k] = cast(scale * combine over parts s of in[view k, part s]), 16 bytes a
             lane where runs allow
    tiles    the same for a copy of runs under 16 bytes: through shared memory, so that both sides
             are read in order

Bytes moved: each element is read once for each part and written once, plus some 200 bytes of table
for each program, from the cache. Against torch, which takes one launch per view (`copy_`), and one
more pass over memory, read and written, for each of cast, scale and sum; a copy of one contiguous
range is left to torch (a device-to-device memcpy).

A row of the table (`strided.Column`) is one view: batches of equal planes, a plane of runs. Each
program finds its row (`find_row`), its batch (`batch_offsets`) and where its lanes are in the plane
(`_lane_offsets`); then `move_rows` or `move_tiles` moves what is there.
"""

# The language of kernels is not quite Python:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import strided
from .launcher import NO_FUSION, KernelLauncher
from .number_triton import cast, widened
from .strided import SPAN, Column, Table
from .transfer.device_copies import DeviceCopies

# the columns of a table
COLUMNS = tl.constexpr(strided.COLUMNS)
FIRST_PROGRAM = tl.constexpr(Column.FIRST_PROGRAM.value)
TENSOR = tl.constexpr(Column.TENSOR.value)
SRC = tl.constexpr(Column.SRC.value)
DST = tl.constexpr(Column.DST.value)
PROGRAMS = tl.constexpr(Column.PROGRAMS.value)
BATCH = tl.constexpr(Column.BATCH.value)
PART = tl.constexpr(Column.PART.value)
PLANE_LANES = tl.constexpr(Column.PLANE_LANES.value)
RUN_LANES = tl.constexpr(Column.RUN_LANES.value)
RUN_DIVISOR = tl.constexpr(Column.RUN_DIVISOR.value)
A_SRC = tl.constexpr(Column.A_SRC.value)
A_DST = tl.constexpr(Column.A_DST.value)
B_SIZE = tl.constexpr(Column.B_SIZE.value)
B_DIVISOR = tl.constexpr(Column.B_DIVISOR.value)
B_SRC = tl.constexpr(Column.B_SRC.value)
B_DST = tl.constexpr(Column.B_DST.value)
RUN_UNITS = tl.constexpr(Column.RUN_UNITS.value)
I_WORDS = tl.constexpr(Column.I_WORDS.value)
J_WORDS = tl.constexpr(Column.J_WORDS.value)
J_SRC = tl.constexpr(Column.J_SRC.value)
I_DST = tl.constexpr(Column.I_DST.value)
J_PROGRAMS = tl.constexpr(Column.J_PROGRAMS.value)

ROWS_AT_ONCE = tl.constexpr(32)  # that a program compares at a time when it searches for its row
WARP = tl.constexpr(32)
AREA = tl.constexpr(SPAN)
AT_ONCE = tl.constexpr(8)  # parts whose loads are all in flight before the first is added


@triton.jit
def find_row(table, ROWS: tl.constexpr):
    """Return the row that this program works on, and its index among that row's programs."""
    program = tl.program_id(0).to(tl.int64)
    if ROWS > ROWS_AT_ONCE:
        table += _last_not_after(table, program, ROWS_AT_ONCE, ROWS // ROWS_AT_ONCE * COLUMNS)
        row = table + _last_not_after(table, program, ROWS // ROWS_AT_ONCE, COLUMNS)
    else:
        row = table + _last_not_after(table, program, ROWS, COLUMNS)
    return row, program - tl.load(row + FIRST_PROGRAM)


@triton.jit
def _last_not_after(table, program, COUNT: tl.constexpr, STEP: tl.constexpr):
    """Return where the last row begins whose first program is this one or an earlier one.

    Of COUNT rows that are STEP words apart.
    """
    firsts = tl.load(table + tl.arange(0, COUNT) * STEP)
    return (tl.sum((firsts <= program).to(tl.int32)) - 1) * STEP


@triton.jit
def batch_offsets(row, index):
    """Return the offsets of the batch with this index, below 2**31, in source and destination."""
    index = index.to(tl.uint32)
    src, dst = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for d in tl.static_range(3):
        column = row + BATCH + 3 * d
        size = tl.load(column).to(tl.uint32)
        digit = (index % size).to(tl.int64)
        index = index // size
        src += digit * tl.load(column + 1)
        dst += digit * tl.load(column + 2)
    return src, dst


@triton.jit
def quotient(n, multiplier, shift):
    """Return n // d by the divisor (multiplier, shift) of d, for n below 2**31."""
    return ((tl.umulhi(n, multiplier.to(tl.uint32)) + n) >> shift.to(tl.uint32)).to(tl.uint32)


@triton.jit
def base(pointer, pointers, row, FROM_TABLE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the start of the row's tensor: the given pointer, or that of its index."""
    if FROM_TABLE:
        pointer = tl.load(pointers + tl.load(row + TENSOR)).to(
            tl.pointer_type(pointer.dtype.element_ty)
        )
    return tl.multiple_of(pointer, ALIGNED)


@triton.jit
def part_at(
    src, pointers, parts, batch, UNIT: tl.constexpr, FROM_TABLE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return the start of a part of a sum, in the given tensor or the one that its offset says."""
    place = (tl.load(parts) + batch) * UNIT
    if FROM_TABLE:
        src = tl.load(pointers + place // AREA).to(tl.pointer_type(src.dtype.element_ty))
        place = place % AREA
    return tl.multiple_of(src, ALIGNED) + tl.multiple_of(place, UNIT)


@triton.jit
def _lane_offsets(row, tile, LANES: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr):
    """Return each lane's source and destination offset, its place in the run, if in the plane."""
    lane = (tile * LANES + tl.arange(0, LANES)).to(tl.uint32)
    ab = quotient(lane, tl.load(row + RUN_DIVISOR), tl.load(row + RUN_DIVISOR + 1))
    a = quotient(ab, tl.load(row + B_DIVISOR), tl.load(row + B_DIVISOR + 1))
    b = ab - a * tl.load(row + B_SIZE).to(tl.uint32)
    r = (lane - ab * tl.load(row + RUN_LANES).to(tl.uint32)) * GROUP
    if WIDE:
        a, b, r = a.to(tl.int64), b.to(tl.int64), r.to(tl.int64)
        src = a * tl.load(row + A_SRC) + b * tl.load(row + B_SRC) + r
        dst = a * tl.load(row + A_DST) + b * tl.load(row + B_DST) + r
    else:
        a, b, r = a.to(tl.int32), b.to(tl.int32), r.to(tl.int32)
        src = a * tl.load(row + A_SRC).to(tl.int32) + b * tl.load(row + B_SRC).to(tl.int32) + r
        dst = a * tl.load(row + A_DST).to(tl.int32) + b * tl.load(row + B_DST).to(tl.int32) + r
    return src, dst, r, lane < tl.load(row + PLANE_LANES).to(tl.uint32)


@triton.jit
def unit_offsets(
    row, tile, LANES: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr
):
    """[LANES, (32 or 1) * UNIT]: the offsets of the elements that a program moves.

    The elements of a program of rows, or the first 32 units of each group: source and destination
    offset inside the plane, and how many units of the plane, or of the run, begin here or after.

    Of groups a warp moves 32 consecutive units at a time, and each thread every 32nd: one pair of
    divisions and one address.
    """
    src, dst, r, inside = _lane_offsets(row, tile, LANES, GROUP, WIDE)
    if GROUP == 1:
        within = tl.arange(0, UNIT)[None, :]
        left = inside.to(tl.int32)[:, None]
    else:
        within = tl.arange(0, WARP * UNIT)[None, :]
        left = (
            tl.where(inside, tl.load(row + RUN_UNITS).to(tl.int32) - r.to(tl.int32), 0)[:, None]
            - within // UNIT
        )
    return src[:, None] * UNIT + within, dst[:, None] * UNIT + within, left


@triton.jit
def move_words(src, dst, left, is_first, GROUP: tl.constexpr):
    """Copy groups of elements of 1 or 2 bytes, wherever they begin, as words of 8 bytes.

    The words are aligned in the destination. Each is made of the two aligned words of the source
    that its bytes are in, so at most 7 bytes around a run are read:

        source         |a b c d e f g h|i j k l m n o p|        the words low and high
        destination         |d e f g h i j k|                   low >> shift | high << (64 - shift)

    A group writes all words that begin in it, if the run ends after them; what is before the first
    word and after the last of a run is moved by elements.

    Args:
        src, dst: [LANES], where the groups begin.
        left: [LANES], int32: the elements of the run from there on, if not many more than GROUP; 0
            for lanes without a group.
        is_first: [LANES], whether the run begins there.
    """
    BYTES: tl.constexpr = src.dtype.element_ty.primitive_bitwidth // 8
    WORDS: tl.constexpr = GROUP * BYTES // 8
    dst_byte = dst.to(tl.int64)[:, None]
    bytes_left = (left * BYTES)[:, None]
    head = (8 - dst_byte.to(tl.int32)) & 7  # bytes before the first word
    words = tl.minimum((bytes_left - head) >> 3, WORDS)
    src_byte = src.to(tl.int64)[:, None] + head
    shift = (src_byte & 7) * 8
    word = tl.arange(0, WORDS)[None, :]
    inside = word < words
    low_word = (src_byte & -8).to(tl.pointer_type(tl.uint64)) + word
    low = tl.load(low_word, mask=inside)
    high = tl.load(low_word + 1, mask=inside & (shift != 0), other=0)
    # up to 8 bytes before the first word of the run, and up to 8 after its last
    byte = tl.arange(0, 16 // BYTES)[None, :] * BYTES
    edge = tl.where(byte < 8, byte, byte - 8 + head + tl.maximum(words, 0) * 8)
    is_edge = tl.where(byte < 8, is_first[:, None] & (byte < head), words < WORDS)
    is_edge = is_edge & (edge < bytes_left)
    value = tl.load(src[:, None] + edge // BYTES, mask=is_edge)
    tl.store(
        (dst_byte + head).to(tl.pointer_type(tl.uint64)) + word,
        (low >> shift) | ((high << 1) << (63 - shift)),  # in two steps: none shifts by 64
        mask=inside,
    )
    tl.store(dst[:, None] + edge // BYTES, value, mask=is_edge)


@triton.jit
def combined(total, x, KIND: tl.constexpr):
    if KIND == "sum":
        return total + x
    elif KIND == "product":
        return total * x
    elif KIND == "max":
        return tl.maximum(total, x, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.minimum(total, x, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def move_rows(
    src,
    dst,
    pointers,
    table,
    parts,
    scale,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
    SRC_MANY: tl.constexpr,
    DST_MANY: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Copy, cast, scale or combine the views of the table: their elements that this program has.

    Args:
        ROWS: of the table.
        LANES, UNIT, GROUP: a program has so many lanes; a lane moves a unit, or a group of them.
        PARTS, KIND: how many values are combined for an element, and how.
        WIDE: whether offsets inside a plane need 64 bits.
        SRC_MANY, DST_MANY: whether rows say in which tensor that side is.
    """
    row, index = find_row(table, ROWS)
    # programs that run together take the same position of different batches, which often share
    # cache lines
    count = (tl.load(row + BATCH) * tl.load(row + BATCH + 3) * tl.load(row + BATCH + 6)).to(
        tl.uint32
    )
    index = index.to(tl.uint32)
    src_batch, dst_batch = batch_offsets(row, index % count)
    dst = base(dst, pointers, row, DST_MANY, ALIGNED) + (dst_batch + tl.load(row + DST)) * UNIT
    if (
        GROUP > 1
        and UNIT * src.dtype.element_ty.primitive_bitwidth < 32
        and src.dtype == dst.dtype
        and not SCALED
    ):
        src = base(src, pointers, row, SRC_MANY, ALIGNED) + (src_batch + tl.load(row + SRC)) * UNIT
        src_at, dst_at, r, inside = _lane_offsets(row, index // count, LANES, GROUP, WIDE)
        left = tl.where(
            inside, tl.minimum(tl.load(row + RUN_UNITS).to(tl.int32) - r.to(tl.int32), GROUP + 8), 0
        )
        move_words(src + src_at * UNIT, dst + dst_at * UNIT, left * UNIT, r == 0, GROUP * UNIT)
        return
    src_at, dst_at, left = unit_offsets(row, index // count, LANES, UNIT, GROUP, WIDE)
    dst_at = dst + dst_at
    if GROUP > 1:
        src = base(src, pointers, row, SRC_MANY, ALIGNED) + (src_batch + tl.load(row + SRC)) * UNIT
        src_at = src + src_at
        # all loads before the first store; a loop, for in three dims the order of warps is the
        # compiler's choice
        values = ()
        for step in tl.static_range(0, GROUP, WARP):
            values += (tl.load(src_at + step * UNIT, mask=step < left),)
        for step in tl.static_range(0, GROUP, WARP):
            value = values[step // WARP]
            if SCALED:
                value = widened(value) * scale
            tl.store(dst_at + step * UNIT, cast(value, dst.dtype.element_ty), mask=step < left)
    else:
        inside = left > 0
        if PARTS == 1:
            src = base(src, pointers, row, SRC_MANY, ALIGNED) + src_batch * UNIT
            value = tl.load(src + tl.load(row + SRC) * UNIT + src_at, mask=inside)
        else:
            first = parts + tl.load(row + PART)
            part = part_at(src, pointers, first, src_batch, UNIT, SRC_MANY, ALIGNED)
            value = widened(tl.load(part + src_at, mask=inside))
            if PARTS <= AT_ONCE:
                for s in tl.static_range(1, PARTS):
                    part = part_at(src, pointers, first + s, src_batch, UNIT, SRC_MANY, ALIGNED)
                    value = combined(value, widened(tl.load(part + src_at, mask=inside)), KIND)
            else:
                for s in range(1, PARTS):
                    part = part_at(src, pointers, first + s, src_batch, UNIT, SRC_MANY, ALIGNED)
                    value = combined(value, widened(tl.load(part + src_at, mask=inside)), KIND)
        if SCALED:
            value = widened(value) * scale
        tl.store(dst_at, cast(value, dst.dtype.element_ty), mask=inside)


@triton.jit
def move_tiles(
    src,
    dst,
    pointers,
    table,
    scale,
    ROWS: tl.constexpr,
    ALONG_I: tl.constexpr,
    ALONG_J: tl.constexpr,
    RUN: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT_I: tl.constexpr,
    UNIT_J: tl.constexpr,
    WIDE: tl.constexpr,
    SRC_MANY: tl.constexpr,
    DST_MANY: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Copy, cast or scale one tile of runs.

    Those along I follow each other in the source, those along J in the destination.

    Args:
        ALONG_I, ALONG_J: runs of a tile.
        RUN, PADDED: words of a run, and the power of two that it counts as.
        UNIT_I, UNIT_J: words of a unit of the source, and of the destination.
        others: as in `move_rows`.
    """
    row, index = find_row(table, ROWS)
    index = index.to(tl.uint32)
    tiles = tl.load(row + PROGRAMS).to(tl.uint32)
    tiles_j = tl.load(row + J_PROGRAMS).to(tl.uint32)
    tile = index % tiles
    src_batch, dst_batch = batch_offsets(row, index // tiles)
    i0, j0 = (tile // tiles_j).to(tl.int32) * ALONG_I, (tile % tiles_j).to(tl.int32) * ALONG_J
    stride_j, stride_i = tl.load(row + J_SRC) * UNIT_I, tl.load(row + I_DST) * UNIT_J
    src = base(src, pointers, row, SRC_MANY, ALIGNED) + (tl.load(row + SRC) + src_batch) * UNIT_I
    dst = base(dst, pointers, row, DST_MANY, ALIGNED) + (tl.load(row + DST) + dst_batch) * UNIT_J
    src, dst = src + i0 * RUN + j0 * stride_j, dst + j0 * RUN + i0 * stride_i
    if not WIDE:
        stride_i, stride_j = stride_i.to(tl.int32), stride_j.to(tl.int32)
    # sizes in words, where a run counts as PADDED words, and the rest of them for this tile
    left_i = (tl.load(row + I_WORDS) * UNIT_I).to(tl.int32) - i0 * PADDED
    left_j = (tl.load(row + J_WORDS) * UNIT_J).to(tl.int32) - j0 * PADDED
    i, j = tl.arange(0, ALONG_I)[:, None], tl.arange(0, ALONG_J)[:, None]
    word, inside = _words_of_runs(left_i, ALONG_I, RUN, PADDED)
    value = tl.load(src + word + j * stride_j, mask=inside & (j * PADDED < left_j))
    if SCALED:
        value = widened(value) * scale
    value = cast(value, dst.dtype.element_ty)
    value = tl.permute(tl.reshape(value, (ALONG_J, ALONG_I, PADDED)), (1, 0, 2))
    value = tl.reshape(value, (ALONG_I, ALONG_J * PADDED))
    word, inside = _words_of_runs(left_j, ALONG_J, RUN, PADDED)
    tl.store(dst + word + i * stride_i, value, mask=inside & (i * PADDED < left_i))


@triton.jit
def _words_of_runs(left, RUNS: tl.constexpr, RUN: tl.constexpr, PADDED: tl.constexpr):
    """[1, words]: offsets of the words of consecutive runs, and which belong to the view."""
    word = tl.arange(0, RUNS * PADDED)[None, :]
    if RUN == PADDED:
        return word, word < left
    else:
        return word // PADDED * RUN + word % PADDED, (word < left) & (word % PADDED < RUN)


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def launch(
    table: Table,
    src: Tensor | Sequence[Tensor],
    dst: Tensor | Sequence[Tensor],
    kind: str = "sum",
    scale: float | None = None,
) -> None:
    """`launch(table, src, dst)`: copy the table's views. A list stands for several tensors.

    Args:
        src, dst: with the dtypes and the alignment that the table was made for.
        kind: how parts are combined, if the table has several for an element.
        scale: a factor on the results; in float32 for 16-bit floats.
    """
    first_src, first_dst = (x if isinstance(x, Tensor) else x[0] for x in (src, dst))
    many = [x for x in (src, dst) if not isinstance(x, Tensor)]
    pointers = addresses(many[0], first_dst.device) if many else None
    run(
        table,
        first_src,
        first_dst,
        pointers,
        kind,
        scale,
        (not isinstance(src, Tensor), not isinstance(dst, Tensor)),
    )


def run(
    table: Table,
    src: Tensor,
    dst: Tensor,
    pointers: Tensor | None,
    reduction: str,
    scale: float | None,
    many: tuple[bool, bool],
) -> None:
    """`run(table, src, dst, pointers, ...)`: as `launch`, with addresses on the device already.

    Args:
        src, dst: of the side that has many tensors, one of their dtype.
        pointers: int64, the addresses of those, if a side has many.
        many: of source and destination, whether the table has the tensor's index: in each row, or
            for sums in each part (`SPAN`).
    """
    key = (src.dtype, dst.dtype, reduction, scale is None, many)
    launcher = table.launchers.get(key)
    if launcher is None:
        launcher = table.launchers[key] = _launcher(table, *key)
    rows = table.rows.on(dst.device)
    parts = (
        () if table.kind.tiled else (table.parts.on(dst.device) if table.kind.parts > 1 else rows,)
    )
    launcher(
        src,
        dst,
        rows if pointers is None else pointers,
        rows,
        *parts,
        1.0 if scale is None else scale,
    )


def _launcher(
    table: Table,
    src: torch.dtype,
    dst: torch.dtype,
    reduction: str,
    is_unscaled: bool,
    many: tuple[bool, bool],
) -> KernelLauncher:
    kind = table.kind
    raw = src == dst and is_unscaled and kind.parts == 1
    dtypes = (_WORDS[dst.itemsize * kind.word],) * 2 if raw else (src, dst)
    common: dict[str, Any] = {
        "ROWS": len(table.rows.host), "WIDE": kind.wide, "SRC_MANY": many[0], "DST_MANY": many[1],
        "ALIGNED": table.aligned, "SCALED": not is_unscaled, "num_warps": 4, **NO_FUSION,
    }  # fmt: skip
    if kind.tiled:
        along_i, along_j = table.lanes
        tiles = {"ALONG_I": along_i, "ALONG_J": along_j, "RUN": kind.run, "PADDED": kind.padded}
        units = {"UNIT_I": kind.unit // kind.word, "UNIT_J": kind.dst_unit // kind.word}
        return KernelLauncher(move_tiles, (table.programs,), {**tiles, **units, **common}, dtypes)
    own = {
        "LANES": table.lanes[0],
        "UNIT": kind.unit,
        "GROUP": kind.group,
        "PARTS": kind.parts,
        "KIND": reduction,
    }
    return KernelLauncher(move_rows, (table.programs,), {**own, **common}, dtypes)


def addresses(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """`addresses(tensors, device) -> int64`: on the device.

    Buffers and parameters keep their addresses from step to step, so the result is often cached.
    """
    return _addresses(tuple([x.data_ptr() for x in tensors])).on(device)


@lru_cache(maxsize=256)
def _addresses(pointers: tuple[int, ...]) -> DeviceCopies:
    return DeviceCopies(pointers)
