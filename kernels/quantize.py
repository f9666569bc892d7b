"""Quantize boxes of a tensor to records of one-byte codes, and back.

About half the bytes of 16-bit floats.

    quantize:    x ---> [ record of box 0 | record of box 1 | ... ]    1/4 to 1/2 of x's bytes
    dequantize:  x <--- the sum, in float32, of the records of each box, in order

A record is a box's elements, row-major, in blocks of `block`:

    [ codes of block 0 | codes of block 1 | ... | float32 scale of block 0 | of block 1 | ... | up
    to a multiple of 16 bytes ]

The last block is padded with zeros, and so are the last 16 bytes. With amax the largest finite
|element| of a block, in float32 with IEEE rounding of every operation:

    scale = max(amax * (1 / largest), 2**-126)
    code  = nearest(element * (1 / scale)), ties to even
    value = code * scale

| transport | codes | largest | +-inf | NaN | |value - element| of finite elements is at most |
|---|---|---|---|---|---|
| int8 | integers -126 ... 126 | 126 | +-127 | -128 | scale / 2, so amax / 252 |
| fp8 | float8_e4m3fn up to 416 | 416 | +-448 | NaN | max(|element| / 16, scale / 1024) |

and amax * 2**-22 more for the rounding of scale, reciprocal and products, and the rounding of the
result to its dtype (`error_bound` adds up all of it). A code of fp8 has 3 bits of mantissa, and a
spacing of 2**-9 below 2**-6. Zero, infinities and NaN are preserved, and no finite value becomes
infinite: the largest element keeps its value except for its last bits, even next to float32's
largest number, as no product overflows. The lower bound of the scale, float32's smallest normal
number, keeps its reciprocal finite. Values that were dequantized to the dtype that they were
quantized from get the same codes again, except subnormal 16-bit values in fp8.

torch operations take a dozen passes over memory; on a GPU one launch handles all boxes of all
tensors (`quantize_triton.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .backend import wants_kernels
from .box import Box, box_size, check_boxes, slices
from .quantize_format import (
    BLOCK,
    DTYPES,
    FORMATS,
    LARGEST,
    RECORD_ALIGNMENT,
    SMALLEST_SCALE,
    record_bytes,
)
from .reduce import Stacks


class Quantize:
    """`quantize(x, out=None) -> flat`: made by `compile_quantize`.

    Attributes:
        shape: of the tensor.
        records: the boxes that are not empty, and the starts of their records in the buffer, in
            bytes.
        size: bytes of the buffer, up to the end of the last record.
        transport: the format of the codes.
        block: elements that share a scale.
    """

    __slots__ = ("block", "records", "shape", "size", "transport")

    def __init__(
        self, shape: Sequence[int], records: Sequence[tuple[Box, int]], transport: str, block: int
    ) -> None:
        self.shape = tuple(shape)
        self.records = tuple(records)
        self.transport = transport
        self.block = block
        self.size = max(
            [start + record_bytes(box_size(box), block) for box, start in records], default=0
        )

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """`quantize(x, out=None) -> flat: uint8 [size]`: in `out` if given, which may be longer.

        Bytes of `out` between and after the records are not written.
        """
        return quantize_many(
            [self], [x], x.new_empty(self.size, dtype=torch.uint8) if out is None else out
        )

    def in_torch(self, x: Tensor, out: Tensor) -> None:
        """Compute the result in torch operations, which define it."""
        for box, start in self.records:
            codes, scales = _encode_blocks(_blocks(x[slices(box)], self.block), self.transport)
            used = codes.numel() + 4 * scales.numel()
            record = out[start:][: record_bytes(box_size(box), self.block)]
            record[: codes.numel()] = codes.view(-1)
            record[codes.numel() : used] = scales.view(torch.uint8)
            record[used:] = 0

    def __repr__(self) -> str:
        return (
            f"Quantize({list(self.shape)} -> {self.transport}, {len(self.records)} records, "
            f"{self.size} bytes)"
        )


class Dequantize:
    """`dequantize(flat, out) -> out`: made by `compile_dequantize`.

    Attributes:
        shape: of the tensor.
        stacks: box -> the starts in the buffer of the records that it is the sum of, in bytes.
        size: bytes that the buffer must have.
        transport: the format of the codes.
        block: elements that share a scale.
    """

    __slots__ = ("block", "shape", "size", "stacks", "transport")

    def __init__(self, shape: Sequence[int], stacks: Stacks, transport: str, block: int) -> None:
        self.shape, self.transport, self.block = tuple(shape), transport, block
        self.stacks = {box: tuple(starts) for box, starts in stacks.items() if box_size(box)}
        ends = [
            max(starts) + record_bytes(box_size(box), block) for box, starts in self.stacks.items()
        ]
        self.size = max(ends, default=0)

    def __call__(self, flat: Tensor, out: Tensor) -> Tensor:
        """`dequantize(flat: uint8, out) -> out`: write the boxes of `out`, which is contiguous.

        Other elements are not written.
        """
        return dequantize_many([self], flat, [out])[0]

    def in_torch(self, flat: Tensor, out: Tensor) -> None:
        """Compute the result in torch operations, which define it."""
        for box, starts in self.stacks.items():
            total = self._decode_record(flat, box, starts[0])
            for start in starts[1:]:
                total += self._decode_record(flat, box, start)
            target = out[slices(box)]
            target.copy_(total.view(target.shape))

    def _decode_record(self, flat: Tensor, box: Box, start: int) -> Tensor:
        """Return the values of one record."""
        size = box_size(box)
        blocks = -(-size // self.block)
        codes, rest = flat[start:].split(
            [blocks * self.block, flat.numel() - start - blocks * self.block]
        )
        scales = rest[: 4 * blocks].view(torch.float32)
        values = (
            _values(self.transport, flat.device)
            .index_select(0, codes.int())
            .view(blocks, self.block)
        )
        return values.mul_(scales[:, None]).view(-1)[:size]

    def __repr__(self) -> str:
        most = max([len(starts) for starts in self.stacks.values()], default=0)
        return (
            f"Dequantize({self.transport} -> {list(self.shape)}, {len(self.stacks)} boxes of up to "
            f"{most} records)"
        )


def compile_quantize(
    shape: Sequence[int],
    boxes: Sequence[Box],
    transport: str,
    offsets: Sequence[int] | None = None,
    block: int = BLOCK,
) -> Quantize:
    """`compile_quantize(shape, boxes, transport) -> quantize`: compile how to quantize.

    The result is a `Callable[[Tensor, out=None], flat]`.

    Args:
        shape: of the tensors: float16, bfloat16 or float32, with any strides.
        boxes: what to quantize; they may be empty, overlap or repeat.
        transport: "int8" or "fp8".
        offsets: where each box's record starts in the flat buffer: in bytes, multiples of 16;
            consecutive by default.
        block: elements that share a scale, a power of two from 16 to 1024.

    >>> quantize = compile_quantize((4,), [((0, 4),)], "int8", block=16)
    >>> flat = quantize(torch.tensor([0.0, 1.0, -126.0, torch.inf]))
    >>> flat[:4].view(torch.int8).tolist(), flat[16:20].view(torch.float32).item()
    ([0, 1, -126, 127], 1.0)

    Raises:
        ValueError: a box is not inside `shape`, an unknown transport or block, or offsets that are
            negative, not multiples of 16, not one per box, or make records overlap.
    """
    check_boxes(shape, boxes)
    _check_format(transport, block)
    sizes = [record_bytes(box_size(box), block) for box in boxes]
    if offsets is None:
        offsets = list(accumulate(sizes, initial=0))[:-1]
    elif len(offsets) != len(boxes):
        raise ValueError(
            f"{len(boxes)} boxes with the offsets {list(offsets)}: give one per box, in bytes"
        )
    _check_starts(offsets)
    _check_apart(
        sorted([(start, start + size) for start, size in zip(offsets, sizes, strict=True) if size])
    )
    records = [(box, start) for box, start, size in zip(boxes, offsets, sizes, strict=True) if size]
    return Quantize(shape, records, transport, block)


def compile_dequantize(
    shape: Sequence[int], stacks: Stacks, transport: str, kind: str = "sum", block: int = BLOCK
) -> Dequantize:
    """`compile_dequantize(shape, {box: starts}, transport) -> dequantize`: compile the inverse.

    The result is a `Callable[[flat, out], out]`.

    Args:
        shape: of the results: float16, bfloat16 or float32, contiguous.
        stacks: for each box of the result, the starts in the flat buffer of the records that it is
            the sum of: in bytes, multiples of 16. The sum is computed in float32, in this order,
            and rounded once.
        transport: "int8" or "fp8".
        kind: "sum"; any kind if every box has one record.
        block: elements that share a scale, as they were quantized.

    Raises:
        ValueError: a box is not inside `shape` or has no record, an unknown transport, block or
            kind, or starts that are negative or not multiples of 16.
    """
    check_boxes(shape, list(stacks))
    _check_format(transport, block)
    if kind != "sum" and any(len(starts) > 1 for starts in stacks.values()):
        raise ValueError(
            f"quantized records can only be summed, not combined by {kind!r}: send the values "
            "without quantizing"
        )
    for box, starts in stacks.items():
        if not starts:
            raise ValueError(f"box {box} has no record: omit it, then its elements are not written")
        _check_starts(starts)
    return Dequantize(shape, stacks, transport, block)


def quantize_many(quantizes: Sequence[Quantize], tensors: Sequence[Tensor], out: Tensor) -> Tensor:
    """`quantize_many(quantizes, tensors, out: uint8) -> out`: write every tensor's records.

    To their places; one launch on a GPU.

    Raises:
        TypeError: a tensor that is not float16, bfloat16 or float32.
        ValueError: a tensor of another shape than its boxes were compiled for, or a buffer that is
            too short, not uint8, not contiguous or not aligned to 16 bytes.
    """
    for quantize, x in zip(quantizes, tensors, strict=True):
        _check_tensor(quantize, x)
        _check_flat(quantize, out)
    if wants_kernels(out.device):
        from .quantize_triton import launch_quantize  # imports triton

        for alike in _alike(quantizes, tensors):
            launch_quantize(
                [quantizes[i] for i in alike], [tensors[i].resolve_neg() for i in alike], out
            )
    else:
        for quantize, x in zip(quantizes, tensors, strict=True):
            quantize.in_torch(x, out)
    return out


def dequantize_many(
    dequantizes: Sequence[Dequantize], flat: Tensor, outs: Sequence[Tensor]
) -> list[Tensor]:
    """`dequantize_many(dequantizes, flat: uint8, outs) -> outs`: read all from one buffer.

    One launch on a GPU.

    Raises:
        TypeError: a result that is not float16, bfloat16 or float32.
        ValueError: a result of another shape or that is not contiguous, or a buffer that is too
            short, not uint8, not contiguous or not aligned to 16 bytes.
    """
    for dequantize, out in zip(dequantizes, outs, strict=True):
        _check_tensor(dequantize, out)
        if not out.is_contiguous():
            raise ValueError(
                f"{dequantize!r} writes to contiguous tensors, not to one of strides {out.stride()}"
            )
        _check_flat(dequantize, flat)
    if wants_kernels(flat.device):
        from .quantize_triton import launch_dequantize  # imports triton

        for alike in _alike(dequantizes, outs):
            launch_dequantize([dequantizes[i] for i in alike], flat, [outs[i] for i in alike])
    else:
        for dequantize, out in zip(dequantizes, outs, strict=True):
            dequantize.in_torch(flat, out)
    return list(outs)


def _alike(
    compiled: Sequence[Quantize] | Sequence[Dequantize], tensors: Sequence[Tensor]
) -> list[list[int]]:
    """Return the indices of those that can share a launch; those without boxes are omitted."""
    groups: dict[object, list[int]] = {}
    for i, (one, x) in enumerate(zip(compiled, tensors, strict=True)):
        if one.size:
            groups.setdefault((x.dtype, one.transport, one.block), []).append(i)
    return list(groups.values())


def error_bound(x_block_amax: float | Tensor, x: Tensor, transport: str) -> Tensor:
    """`error_bound(amax, x, transport) -> Tensor`: the largest error of a quantized element.

    float64: its distance from x after it was dequantized.

    For a sum of n records the bounds of the elements add up, plus n - 1 roundings to float32.

    Args:
        x_block_amax: the largest finite |element| of the block that an element is in, of a shape
            that broadcasts with x.
        x: the elements; those that are not finite have no bound (they are preserved).
        transport: "int8" or "fp8".
    """
    amax = torch.as_tensor(x_block_amax, device=x.device).double()
    size = x.double().abs()
    dtype = torch.finfo(x.dtype)
    scale = (amax / LARGEST[transport]).clamp_min(SMALLEST_SCALE)
    nearest = scale / 2 if transport == "int8" else torch.maximum(size * 2**-4, scale * 2**-10)
    bound = nearest + amax * 2**-22 + 2.0**-149
    if x.dtype == torch.float32:
        return bound.expand_as(size)
    return bound + (size + bound) * dtype.eps / 2 + dtype.tiny * dtype.eps / 2


# -- blocks in torch operations --------------------------------------------------------------------


def _blocks(part: Tensor, block: int) -> Tensor:
    """`[...] -> float32 [n, block]`, row-major, padded with zeros."""
    blocks = -(-part.numel() // block)
    flat = torch.empty(blocks * block, dtype=torch.float32, device=part.device)
    flat[: part.numel()].view(part.shape).copy_(part)
    flat[part.numel() :] = 0
    return flat.view(blocks, block)


def _encode_blocks(blocks: Tensor, transport: str) -> tuple[Tensor, Tensor]:
    """`float32 [n, block] -> codes: uint8 [n, block], scales: float32 [n]`."""
    amax = blocks.nan_to_num(0.0, 0.0, 0.0).abs_().amax(1)
    scales = amax.mul_(1 / LARGEST[transport]).clamp_min_(SMALLEST_SCALE)
    scaled = blocks.mul_(scales.reciprocal()[:, None])
    if transport == "int8":
        return scaled.round_().nan_to_num_(-128.0, 127.0, -127.0).to(torch.int8).view(
            torch.uint8
        ), scales
    return scaled.nan_to_num_(torch.nan, 448.0, -448.0).to(torch.float8_e4m3fn).view(
        torch.uint8
    ), scales


@cache
def _values(transport: str, device: torch.device) -> Tensor:
    """Return the value of each of the 256 codes, as a multiple of the scale."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.int8 if transport == "int8" else torch.float8_e4m3fn).float()
    if transport == "int8":
        values[-128] = torch.nan
    values[values.abs() > LARGEST[transport]] *= torch.inf
    return values.to(device)


# -- checks ----------------------------------------------------------------------------------------


def _check_format(transport: str, block: int) -> None:
    if transport not in FORMATS:
        raise ValueError(
            f"unknown transport {transport!r}: choose one of {', '.join(map(repr, FORMATS))}"
        )
    if block not in (16, 32, 64, 128, 256, 512, 1024):
        raise ValueError(f"blocks of {block} elements: choose a power of two from 16 to 1024")


def _check_starts(starts: Sequence[int]) -> None:
    for start in starts:
        if start < 0 or start % RECORD_ALIGNMENT:
            raise ValueError(
                f"a record cannot start at byte {start}: starts must be multiples of "
                f"{RECORD_ALIGNMENT}, >= 0"
            )


def _check_apart(ranges: Sequence[tuple[int, int]]) -> None:
    for (start, stop), (next_start, _) in pairwise(ranges):
        if stop > next_start:
            raise ValueError(
                f"one record takes the bytes {start}:{stop}, and another starts at {next_start}: "
                "give offsets that keep them apart (each takes record_bytes(elements))"
            )


def _check_tensor(compiled: Quantize | Dequantize, x: Tensor) -> None:
    if x.shape != compiled.shape:
        raise ValueError(
            f"{compiled!r} was given a tensor of shape {tuple(x.shape)}, not {compiled.shape}"
        )
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{compiled!r} takes float16, bfloat16 or float32, not {x.dtype}: send such a tensor "
            "without quantizing"
        )


def _check_flat(compiled: Quantize | Dequantize, flat: Tensor) -> None:
    fits = (
        flat.dtype == torch.uint8
        and flat.ndim == 1
        and flat.numel() >= compiled.size
        and flat.is_contiguous()
    )
    if not fits or flat.data_ptr() % RECORD_ALIGNMENT:
        raise ValueError(
            f"{compiled!r} needs a contiguous uint8 buffer of at least {compiled.size} bytes that "
            f"begins at a multiple of {RECORD_ALIGNMENT}, not {flat.dtype} of shape "
            f"{tuple(flat.shape)} and strides {flat.stride()} at {flat.data_ptr():#x}"
        )
