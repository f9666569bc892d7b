"""Triton kernels that write or read the records of many boxes in one launch, for `quantize.py`.

    quantize_boxes      flat[record of box] = codes and scales of x[box]
                        3 + 4/128 bytes an element of 16 bits
    dequantize_boxes    out[box] = cast(sum over records of codes * scales)
                        2 + (1 + 4/128) * records bytes

Every element is read once and every code written once; a scale is 4 bytes for each block. Where
runs, strides and offsets are multiples of 8 elements of 16 bits (4 of 32), a lane reads 16 bytes
and writes 8 (4) bytes of codes, else one element at a time, but codes as before; likewise the other
way. All records of a box are under way before the first is added up (of up to 8). A block's maximum
is found in registers, by lanes of one warp. Against torch, whose definition passes over memory a
dozen times, and against quantizing a packed buffer, which reads and writes the tensor once more.

A program works on consecutive blocks of one box. Which element of the tensor a unit of a block is
takes one multiplication for each dim of the box, of the fewest that describe it, but the outermost.

Arithmetic is what could hold these kernels back: per element of 16 bits an H200 has time for about
20 instructions, half of them logic and comparisons, while its memory moves 3 bytes. Compiled for
sm_90 (not run: no GPU was at hand), quantizing takes 21 (int8) and 16 (fp8), and 33 where elements
are moved one by one; a code read takes 9 to 12. At 62 to 72 registers.
"""

# The language of kernels is not quite Python:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from .box import Box, box_origin, box_shape, merge_dims, row_major_strides
from .launcher import NO_FUSION, KernelLauncher
from .number_triton import cast, converts_natively, from_e4m3, to_e4m3, widened
from .quantize_format import LARGEST, RECORD_ALIGNMENT
from .reduce import Stacks
from .strided import MAX_ROWS, NEVER, alignment, divisor
from .strided_triton import addresses, base, quotient
from .strided_views import next_power_of_two
from .transfer.device_copies import DeviceCopies


class CompiledQuantize(Protocol):
    """What is read of `quantize.Quantize`."""

    records: tuple[tuple[Box, int], ...]
    transport: str
    block: int


class CompiledDequantize(Protocol):
    """What is read of `quantize.Dequantize`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stacks(self) -> Stacks: ...
    @property
    def transport(self) -> str: ...
    @property
    def block(self) -> int: ...


HEAD = tl.constexpr(5)
"""Columns of a row of a table before its dims: 0 first program, 1 tensor, 2 where the box begins in
it, 3 how long the box is (both in units), 4 its blocks. Then (size, its divisor's multiplier and
shift, stride), in units, of each dim, the fastest first, and where the records begin, in 16 bytes.
"""
START = tl.constexpr(RECORD_ALIGNMENT)
AT_ONCE = tl.constexpr(8)  # records whose loads are all under way before the first is added
SMALLEST_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def find_row(table, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the row that this program works on, and its index among that row's programs."""
    program = tl.program_id(0).to(tl.int64)
    if ROWS == 1:
        return table + 1, program
    else:
        firsts = tl.load(table + tl.arange(0, ROWS))
        row = table + ROWS + (tl.sum((firsts <= program).to(tl.int32)) - 1) * COLUMNS
        return row, program - tl.load(row)


@triton.jit
def units_of(BLOCK: tl.constexpr, UNIT: tl.constexpr, VECTOR: tl.constexpr):
    """[1, lanes, units of a lane]: the units of a block, where a lane has VECTOR elements."""
    return (
        tl.arange(0, BLOCK // VECTOR)[None, :, None] * (VECTOR // UNIT)
        + tl.arange(0, VECTOR // UNIT)[None, None, :]
    )


@triton.jit
def places(
    row,
    block,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """[blocks, lanes, VECTOR]: the distance of these blocks' elements from the box's first.

    The second result says whether they exist.
    """
    if WIDE:
        n = block[:, None, None] * (BLOCK // UNIT) + units_of(BLOCK, UNIT, VECTOR)
        offset = n * 0
    else:
        n = (block[:, None, None] * (BLOCK // UNIT) + units_of(BLOCK, UNIT, VECTOR)).to(tl.uint32)
        offset = n.to(tl.int32) * 0
    inside = n < tl.load(row + 3).to(n.dtype)
    for d in tl.static_range(DIMS - 1):
        dim = row + HEAD + 4 * d
        size = tl.load(dim).to(n.dtype)
        outer = n // size if WIDE else quotient(n, tl.load(dim + 1), tl.load(dim + 2))
        offset += (n - outer * size).to(offset.dtype) * tl.load(dim + 3).to(offset.dtype)
        n = outer
    offset += n.to(offset.dtype) * tl.load(row + HEAD + 4 * DIMS - 1).to(offset.dtype)
    return offset * UNIT + tl.arange(0, UNIT)[None, None, :], inside


@triton.jit
def encoded(x, LARGEST: tl.constexpr):
    """float32 [blocks, lanes, VECTOR] -> codes: int8, scales: [blocks]."""
    finite = tl.fma(x, 0.0, x)  # infinities become NaN, which the maximum ignores
    amax = tl.max(tl.max(tl.abs(finite), 2), 1)
    scale = tl.maximum(amax * (1.0 / LARGEST), SMALLEST_SCALE)
    x = x * tl.div_rn(1.0, scale)[:, None, None]
    if LARGEST == 126:
        # + 1.5 * 2**23, so that the last bit is worth 1: the sum is rounded to the code, which is
        # its lowest byte
        code = (tl.minimum(tl.maximum(x, -127.0), 127.0) + 12582912.0).to(tl.int32, bitcast=True)
        return tl.where(x == x, code, -128).to(tl.int8), scale
    else:
        return to_e4m3(x), scale


@triton.jit
def decoded(code, LARGEST: tl.constexpr):
    """int8 -> float32: the values of codes, as multiples of their scales."""
    if LARGEST == 126:
        x = (code.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
        special = (x + 128) * x * float("inf")  # +-inf of +-127, NaN of -128
    else:
        x = from_e4m3(code)
        special = x * float("inf")
    return tl.where(tl.abs(x) > LARGEST, special, x)


@triton.jit
def quantize_boxes(
    x,
    flat,
    pointers,
    table,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDE: tl.constexpr,
    MANY: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row, program = find_row(table, ROWS, HEAD + 4 * DIMS + PARTS)
    local = tl.arange(0, BLOCKS)
    block, blocks = program * BLOCKS + local, tl.load(row + 4)
    at, inside = places(row, block, BLOCK, UNIT, VECTOR, DIMS, WIDE)
    x = base(x, pointers, row, MANY, ALIGNED) + tl.load(row + 2) * UNIT
    code, scale = encoded(widened(tl.load(x + at, mask=inside, other=0.0)), LARGEST)
    record = flat + tl.load(row + HEAD + 4 * DIMS) * START
    to = (
        record
        + program * (BLOCKS * BLOCK)
        + (local[:, None, None] * BLOCK + units_of(BLOCK, 1, VECTOR))
    )
    tl.store(to, code, mask=(block < blocks)[:, None, None])
    scales = (record + blocks * BLOCK).to(tl.pointer_type(tl.float32)) + block
    tl.store(scales, tl.where(block < blocks, scale, 0.0), mask=block < (blocks + 3) // 4 * 4)


@triton.jit
def values(record, block, blocks, BLOCK: tl.constexpr, VECTOR: tl.constexpr, LARGEST: tl.constexpr):
    """float32 [blocks, lanes, VECTOR]: the values of these blocks of a record."""
    mask = block < blocks
    codes = record + (block[:, None, None] * BLOCK + units_of(BLOCK, 1, VECTOR))
    code = tl.load(codes, mask=mask[:, None, None], other=0)
    scale = tl.load(
        (record + blocks * BLOCK).to(tl.pointer_type(tl.float32)) + block, mask=mask, other=0.0
    )
    return decoded(code, LARGEST) * scale[:, None, None]


@triton.jit
def dequantize_boxes(
    flat,
    out,
    pointers,
    table,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDE: tl.constexpr,
    MANY: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row, program = find_row(table, ROWS, HEAD + 4 * DIMS + PARTS)
    block, blocks = program * BLOCKS + tl.arange(0, BLOCKS), tl.load(row + 4)
    starts = row + HEAD + 4 * DIMS
    total = values(flat + tl.load(starts) * START, block, blocks, BLOCK, VECTOR, LARGEST)
    if PARTS <= AT_ONCE:
        for s in tl.static_range(1, PARTS):
            total += values(
                flat + tl.load(starts + s) * START, block, blocks, BLOCK, VECTOR, LARGEST
            )
    else:
        for s in range(1, PARTS):
            total += values(
                flat + tl.load(starts + s) * START, block, blocks, BLOCK, VECTOR, LARGEST
            )
    out = base(out, pointers, row, MANY, ALIGNED) + tl.load(row + 2) * UNIT
    result = (
        total.to(out.dtype.element_ty) if converts_natively() else cast(total, out.dtype.element_ty)
    )
    # single elements are written in memory order, which differs from the order of lanes
    at, inside = places(row, block, BLOCK, UNIT, UNIT, DIMS, WIDE)
    tl.store(out + at, tl.reshape(result, [BLOCKS, BLOCK // UNIT, UNIT]), mask=inside)


# -- arguments of a launch -------------------------------------------------------------------------

MIN_BLOCKS = 4  # of a program: whole multiples of 16 bytes of scales
# elements that one program writes: 32 per thread of 128; half if it sums many records
PROGRAM_ELEMENTS = 1 << 12
# a lane moves at least this many consecutive elements at a time, else one by one, VECTOR in all
MIN_VECTOR = 4
VECTOR = 8
NARROW = 1 << 30  # with more elements in a box, or between its ends, offsets have 64 bits

Dims = tuple[tuple[int, int], ...]  # (size, stride), the fastest first


class BoxRow(NamedTuple):
    """A box of a tensor, in elements, and the bytes at which its records begin.

    Lanes move `unit` elements at a time.
    """

    tensor: int
    offset: int
    dims: Dims
    starts: tuple[int, ...]
    unit: int

    @property
    def elements(self) -> int:
        return math.prod(size for size, _ in self.dims)

    @property
    def is_wide(self) -> bool:
        return max(self.elements, sum((size - 1) * stride for size, stride in self.dims)) >= NARROW


@dataclass
class BoxTable:
    """One launch.

    Attributes:
        rows: as `HEAD` describes, after their first programs; padded to a power of two.
        grid: number of programs.
        constants: compile-time constants of the kernel.
        launchers: of the kernels that were launched with this table, by what else their constants
            depend on.
    """

    rows: DeviceCopies
    grid: int
    constants: dict[str, int]
    launchers: dict[tuple, KernelLauncher] = field(default_factory=dict)


def make_row(
    tensor: int, strides: Sequence[int], box: Box, starts: Sequence[int], most: int
) -> BoxRow:
    """Return the row of a box of the tensor with this index.

    Lanes move up to `most` elements, a power of two, at a time.
    """
    offset = sum(o * s for o, s in zip(box_origin(box), strides, strict=True))
    dims = tuple(zip(*map(reversed, merge_dims(box_shape(box), strides)), strict=True))
    (run, step), *others = dims
    unit = math.gcd(most, run, offset, *(stride for _, stride in others)) if step == 1 else 1
    return BoxRow(tensor, offset, dims, tuple(starts), unit if unit >= MIN_VECTOR else 1)


def make_tables(rows: Iterable[BoxRow], block: int) -> list[BoxTable]:
    """`make_tables(rows, block) -> one table per launch`.

    Rows with equal unit and number of records share one.
    """
    alike: dict[tuple[int, int], list[BoxRow]] = {}
    for row in rows:
        alike.setdefault((row.unit, len(row.starts)), []).append(row)
    return [
        _table(group[i : i + MAX_ROWS], block)
        for group in alike.values()
        for i in range(0, len(group), MAX_ROWS)
    ]


def _table(rows: Sequence[BoxRow], block: int) -> BoxTable:
    counts = [-(-row.elements // block) for row in rows]
    parts, unit = len(rows[0].starts), rows[0].unit
    # Blocks of a program: enough for the memory, not many more than most boxes have.
    most = PROGRAM_ELEMENTS // (block * (1 if parts <= 4 else 2))
    median = sorted(counts)[len(counts) // 2]
    blocks = max(MIN_BLOCKS, min(most, next_power_of_two(median)))
    firsts = list(accumulate([-(-count // blocks) for count in counts], initial=0))
    dims = max(len(row.dims) for row in rows)
    table_rows = [
        [first, *_columns(row, count, dims)]
        for first, row, count in zip(firsts, rows, counts, strict=False)
    ]
    padding = next_power_of_two(len(table_rows)) - len(table_rows)
    table_rows += [[NEVER, *table_rows[0][1:]]] * padding
    flat = [columns[0] for columns in table_rows] + [n for columns in table_rows for n in columns]
    constants = {
        "ROWS": len(table_rows),
        "DIMS": dims,
        "BLOCKS": blocks,
        "BLOCK": block,
        "UNIT": unit,
        "VECTOR": unit if unit > 1 else VECTOR,
        "PARTS": parts,
        "WIDE": any(row.is_wide for row in rows),
    }
    return BoxTable(DeviceCopies(flat), firsts[-1], constants)


def _columns(row: BoxRow, blocks: int, dims: int) -> list[int]:
    (run, step), *others = row.dims
    unit = row.unit
    scaled = [(run // unit, step), *((size, stride // unit) for size, stride in others)]
    scaled += [(1, 0)] * (dims - len(scaled))
    columns = [n for size, stride in scaled for n in (size, *divisor(size), stride)]
    starts = [start // RECORD_ALIGNMENT for start in row.starts]
    return [row.tensor, row.offset // unit, row.elements // unit, blocks, *columns, *starts]


# -- launches --------------------------------------------------------------------------------------


def launch_quantize(
    quantizes: Sequence[CompiledQuantize], tensors: Sequence[Tensor], flat: Tensor
) -> None:
    """`launch_quantize(quantizes, tensors, flat)`: quantize tensors of one dtype, in one format."""
    strides, aligned = tuple([x.stride() for x in tensors]), alignment(tensors)
    for table in _quantize_tables(tuple(quantizes), strides, tensors[0].itemsize, aligned):
        _launch(quantize_boxes, table, (tensors[0], flat), tensors, quantizes[0].transport, aligned)


def launch_dequantize(
    dequantizes: Sequence[CompiledDequantize], flat: Tensor, outs: Sequence[Tensor]
) -> None:
    """`launch_dequantize(dequantizes, flat, outs)`: dequantize to contiguous tensors.

    All of one dtype, from one format.
    """
    aligned = alignment(outs)
    for table in _dequantize_tables(tuple(dequantizes), outs[0].itemsize, aligned):
        _launch(dequantize_boxes, table, (flat, outs[0]), outs, dequantizes[0].transport, aligned)


@lru_cache(maxsize=4096)
def _quantize_tables(
    quantizes: tuple[CompiledQuantize, ...],
    strides: tuple[tuple[int, ...], ...],
    itemsize: int,
    aligned: int,
) -> list[BoxTable]:
    """Return the launches, cached: computing rows of hundreds of boxes takes longer than one."""
    rows = [
        make_row(i, ours, box, (start,), max(1, aligned // itemsize))
        for i, (quantize, ours) in enumerate(zip(quantizes, strides, strict=True))
        for box, start in quantize.records
    ]
    return make_tables(rows, quantizes[0].block)


@lru_cache(maxsize=4096)
def _dequantize_tables(
    dequantizes: tuple[CompiledDequantize, ...], itemsize: int, aligned: int
) -> list[BoxTable]:
    rows = [
        make_row(i, row_major_strides(dequantize.shape), box, starts, max(1, aligned // itemsize))
        for i, dequantize in enumerate(dequantizes)
        for box, starts in dequantize.stacks.items()
    ]
    return make_tables(rows, dequantizes[0].block)


def _launch(
    kernel: Any,
    table: BoxTable,
    operands: tuple[Tensor, Tensor],
    tensors: Sequence[Tensor],
    transport: str,
    aligned: int,
) -> None:
    rows, many = table.rows.on(tensors[0].device), len(tensors) > 1
    pointers = addresses(tensors, rows.device) if many else rows
    key = (kernel, operands[0].dtype, operands[1].dtype, transport, many, aligned)
    launcher = table.launchers.get(key)
    if launcher is None:
        more = {
            "LARGEST": LARGEST[transport],
            "MANY": many,
            "ALIGNED": aligned,
            "num_warps": 4,
            **NO_FUSION,
        }
        dtypes = [torch.int8 if x.dtype == torch.uint8 else None for x in operands]
        launcher = table.launchers[key] = KernelLauncher(
            kernel, (table.grid,), {**table.constants, **more}, dtypes
        )
    launcher(*operands, pointers, rows)
