"""Many strided copies in one launch: the kernels behind `copy.py` and `reduce.py`.

    rows     out[view k] = cast(scale * combine over parts s of in[view k, part s])        16 bytes a lane where runs allow
    tiles    the same for a copy of runs under 16 bytes: through shared memory, so that both sides are read in order

Bytes moved: each element is read once for each part and written once, plus 160 bytes of table for each view, read by
every program from the cache. Against torch, which takes one launch per view (`copy_`), and one more pass over memory, read and
written, for each of cast, scale and sum; a copy of one contiguous range is left to torch (a device-to-device memcpy).
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

from .number_triton import cast, widened
from .strided import Table

COLUMNS = tl.constexpr(21)
BATCH_AT = tl.constexpr(11)
AT_ONCE = tl.constexpr(8)  # parts whose loads are all under way before the first is added


@triton.jit
def find_row(table, ROWS: tl.constexpr):
    """The row that this program works on, and its number among that row's programs."""
    program = tl.program_id(0).to(tl.int64)
    firsts = tl.load(table + tl.arange(0, ROWS) * COLUMNS)
    row = table + (tl.sum((firsts <= program).to(tl.int32)) - 1) * COLUMNS
    return row, program - tl.load(row)


@triton.jit
def batch_offsets(row, index):
    """How far the batch of this number lies from the first, in the source and in the destination."""
    src, dst = index * 0, index * 0
    for d in tl.static_range(3):
        column = row + BATCH_AT + 3 * d
        size = tl.load(column)
        digit = index % size
        index = index // size
        src += digit * tl.load(column + 1)
        dst += digit * tl.load(column + 2)
    return src, dst


@triton.jit
def quotient(n, multiplier, shift):
    """n // d by the divisor (multiplier, shift) of d, for n below 2**31."""
    return ((tl.umulhi(n, multiplier.to(tl.uint32)) + n) >> shift.to(tl.uint32)).to(tl.uint32)


@triton.jit
def base(given, pointers, row, FROM_TABLE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the row's tensor begins: the given pointer, or that of the tensor with the row's number."""
    if FROM_TABLE:
        found = tl.load(pointers + tl.load(row + 1)).to(tl.pointer_type(given.dtype.element_ty))
        return tl.multiple_of(found, ALIGNED)
    else:
        return given


@triton.jit
def plane_offsets(row, tile, LANES: tl.constexpr, WIDE: tl.constexpr):
    """For each lane of a program of rows: source and destination offset inside the plane, in units, and whether it is one."""
    lane = (tile * LANES + tl.arange(0, LANES)).to(tl.uint32)
    a = quotient(lane, tl.load(row + 7), tl.load(row + 8))
    r = lane - a * tl.load(row + 6).to(tl.uint32)
    if WIDE:
        a, r = a.to(tl.int64), r.to(tl.int64)
        src, dst = a * tl.load(row + 9) + r, a * tl.load(row + 10) + r
    else:
        a, r = a.to(tl.int32), r.to(tl.int32)
        src, dst = a * tl.load(row + 9).to(tl.int32) + r, a * tl.load(row + 10).to(tl.int32) + r
    return src, dst, lane < tl.load(row + 5).to(tl.uint32)


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
    src, dst, pointers, table, parts, scale,
    ROWS: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr, KIND: tl.constexpr,
    WIDE: tl.constexpr, SRC_MANY: tl.constexpr, DST_MANY: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row, index = find_row(table, ROWS)
    # programs that run together take the same place of different batches: pieces of the same lines of memory
    count = tl.load(row + BATCH_AT) * tl.load(row + BATCH_AT + 3) * tl.load(row + BATCH_AT + 6)
    tile, batch = index // count, index % count
    src_batch, dst_batch = batch_offsets(row, batch)
    src_lane, dst_lane, inside = plane_offsets(row, tile, LANES, WIDE)
    within = tl.arange(0, UNIT)[None, :]
    src = base(src, pointers, row, SRC_MANY, ALIGNED)
    dst = base(dst, pointers, row, DST_MANY, ALIGNED)
    src_at, dst_at = src_lane[:, None] * UNIT + within, dst_lane[:, None] * UNIT + within
    inside = inside[:, None]
    if PARTS == 1:
        value = tl.load(src + (tl.load(row + 2) + src_batch) * UNIT + src_at, mask=inside)
    else:
        first = parts + tl.load(row + 20)
        value = widened(tl.load(src + (tl.load(first) + src_batch) * UNIT + src_at, mask=inside))
        if PARTS <= AT_ONCE:
            for s in tl.static_range(1, PARTS):
                part = src + (tl.load(first + s) + src_batch) * UNIT
                value = combined(value, widened(tl.load(part + src_at, mask=inside)), KIND)
        else:
            for s in range(1, PARTS):
                part = src + (tl.load(first + s) + src_batch) * UNIT
                value = combined(value, widened(tl.load(part + src_at, mask=inside)), KIND)
    if SCALED:
        value = widened(value) * scale
    tl.store(dst + (tl.load(row + 3) + dst_batch) * UNIT + dst_at, cast(value, dst.dtype.element_ty), mask=inside)


@triton.jit
def move_tiles(
    src, dst, pointers, table, scale,
    ROWS: tl.constexpr, ALONG_I: tl.constexpr, ALONG_J: tl.constexpr, RUN: tl.constexpr,
    WIDE: tl.constexpr, SRC_MANY: tl.constexpr, DST_MANY: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row, index = find_row(table, ROWS)
    tiles, tiles_j = tl.load(row + 4), tl.load(row + 9)
    tile, batch = index % tiles, index // tiles
    src_batch, dst_batch = batch_offsets(row, batch)
    i0, j0 = (tile // tiles_j) * ALONG_I, (tile % tiles_j) * ALONG_J
    size_i, size_j, stride_j, stride_i = tl.load(row + 5), tl.load(row + 6), tl.load(row + 7), tl.load(row + 8)
    i, j = tl.arange(0, ALONG_I), tl.arange(0, ALONG_J)
    src = base(src, pointers, row, SRC_MANY, ALIGNED) + tl.load(row + 2) + src_batch + i0 + j0 * stride_j
    dst = base(dst, pointers, row, DST_MANY, ALIGNED) + tl.load(row + 3) + dst_batch + j0 * RUN
    if not WIDE:
        stride_i, stride_j = stride_i.to(tl.int32), stride_j.to(tl.int32)
    inside = (i[None, :] < size_i - i0) & (j[:, None] < size_j - j0)
    value = tl.load(src + i[None, :] + j[:, None] * stride_j, mask=inside)
    if SCALED:
        value = widened(value) * scale
    value = tl.trans(cast(value, dst.dtype.element_ty))
    i = i0 + i if WIDE else (i0 + i).to(tl.int32)
    to = (i // RUN)[:, None] * stride_i + (i % RUN)[:, None] + j[None, :] * RUN
    tl.store(dst + to, value, mask=tl.trans(inside))


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NO_FUSION = {"enable_fp_fusion": False}  # a fused multiply-add rounds once where torch rounds twice


def launch(
    table: Table, src: Tensor | Sequence[Tensor], dst: Tensor | Sequence[Tensor], kind: str = "sum", scale: float | None = None
) -> None:
    """`launch(table, src, dst)`: copies the table's views, from or to several tensors where a list is given.

    Args:
        src, dst: with the dtypes and the alignment that the table was made for.
        kind: how parts are combined, where the table has several for an element.
        scale: what results are multiplied by; in float32 for 16-bit floats.
    """
    first_src, first_dst = (x if isinstance(x, Tensor) else x[0] for x in (src, dst))
    many = [x for x in (src, dst) if not isinstance(x, Tensor)]
    rows, parts = table.on(first_dst.device)
    pointers = _addresses(tuple([x.data_ptr() for x in many[0]]), first_dst.device) if many else rows
    raw = first_src.dtype == first_dst.dtype and scale is None and table.kind.parts == 1
    dtypes = [_WORDS[first_dst.element_size() * table.kind.word]] * 2 if raw else [first_src.dtype, first_dst.dtype]
    given = [triton.reinterpret(x, dtype) for x, dtype in zip((first_src, first_dst), dtypes, strict=True)]
    _run(table, given, pointers, rows, parts, kind, scale, [not isinstance(x, Tensor) for x in (src, dst)])


def _run(
    table: Table, given: Sequence[Any], pointers: Tensor, rows: Tensor, parts: Tensor, how: str, scale: float | None, many: Sequence[bool]
) -> None:  # fmt: skip
    kind, grid = table.kind, (table.programs,)
    common: dict[str, Any] = {
        "ROWS": len(rows), "WIDE": kind.wide, "SRC_MANY": many[0], "DST_MANY": many[1],
        "ALIGNED": table.aligned, "SCALED": scale is not None, "num_warps": 4, **NO_FUSION,
    }  # fmt: skip
    factor = 1.0 if scale is None else scale
    if kind.tiled:
        along_i, along_j = table.lanes
        move_tiles[grid](*given, pointers, rows, factor, ALONG_I=along_i, ALONG_J=along_j, RUN=kind.run, **common)
    else:
        move_rows[grid](
            *given, pointers, rows, parts, factor,
            LANES=table.lanes[0], UNIT=kind.unit, PARTS=kind.parts, KIND=how, **common,
        )  # fmt: skip


@lru_cache(maxsize=256)
def _addresses(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """On the device. Buffers and parameters keep their addresses from step to step, so this is nearly always known."""
    return torch.tensor(addresses, dtype=torch.int64).to(device)
