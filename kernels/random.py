"""Random numbers that belong to an element's place in the global tensor, in torch operations.

An element's number depends on (seed, stream, the element's row-major position i in the global tensor) and on nothing
else: not on the box that is drawn, the rank, the device or the number of threads. Drawing a box gives the same bits as
drawing the whole tensor and slicing it.

This is the definition; the kernel (`random_triton.py`), which makes any draw in one launch, is bit-equal to it:

- Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, as in Random123).
  Key = (seed low, seed high), counter = (b low, b high, stream low, stream high), 32-bit words, for block number b.
  A block is four words w0 w1 w2 w3. Seed and stream are taken modulo 2**64.
- `philox_uint32`: number i is word i % 4 of block i // 4.
- Where a distribution takes one word per element, element i has word i % 4 of block i // 4. Where it takes two,
  element i has words (2 * (i % 2), 2 * (i % 2) + 1) of block i // 2; the two make one 64-bit number, the first word
  being its low half.

| draw | per element | value |
|---|---|---|
| uniform float64 | two words | u = (number >> 11) * 2**-53 |
| uniform, other dtypes | one word | u = (word >> 8) * 2**-24 in float32 |
| normal float64 | two words | the block's pair: (cos, sin) of Box-Muller(n0, n1), n = number >> 11, 53 bits |
| normal, other dtypes | one word | the block's two pairs: Box-Muller(w0, w1), Box-Muller(w2, w3), 32 bits |
| bernoulli | one word | word < round(p * 2**32) |
| integers | two words | low + (number * (high - low) >> 64) |

Uniform: u * (high - low) + low, each operation rounded to the dtype that draws, then rounded to the result's dtype and
clamped to that dtype's numbers in [low, high). Box-Muller(m, n) of integers with `bits` bits: for
r = sqrt(-2 log((m + 1) / 2**bits)) and t = n / 2**bits, the pair is r cos(2 pi t), r sin(2 pi t); then * std, + mean.
All of it is float64 without fused multiply-adds (see `elementary.py`); a 16-bit result is rounded to float32 first.
A complex element i has the real elements 2i and 2i + 1 as its parts.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .backend import wants_kernels
from .box import Box, box_origin, box_shape, check_boxes, merge_dims, row_major_strides
from .elementary import cos_sin_turns, log, sqrt

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}

# Blocks made at a time. On the CPU 2**16 (0.5 MiB per temporary) was fastest of 2**10 ... 2**18: with fewer the calls
# cost more than the arithmetic, with more the temporaries leave the cache. Elsewhere few launches matter (32 MiB each).
BLOCKS_AT_ONCE_CPU = 1 << 16
BLOCKS_AT_ONCE = 1 << 22
# Up to here numpy, whose calls take half the time of torch's, is faster on the CPU; beyond, both are bound by memory.
BLOCKS_IN_NUMPY = 1 << 14
# What torch's gather takes instead.
_GATHERED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

RowT = TypeVar("RowT", int, Tensor)


@dataclass(frozen=True, slots=True)
class Law:
    """How the words of blocks become their elements.

    Attributes:
        name: of the kernel's form, in `random_triton.py`.
        per_block: elements made of a block: 4 of a word each, or 2 of two words.
        make: the definition: words [..., 4] -> elements [..., per_block].
        parameters: what the kernel's form wants to know, at most 4; an int is 64 bits, and a float a float64.
    """

    name: str
    per_block: int
    make: Callable[[Tensor], Tensor]
    parameters: tuple[float, ...] = ()


def halves(number: int) -> tuple[int, int]:
    """(low, high) 32-bit words of a 64-bit number."""
    return number & WORD, (number >> 32) & WORD


def _mix(high: Any, other: Any, key: int) -> Any:
    """(high ^ other ^ key) & WORD, written into `high` where that is a tensor."""
    high ^= other
    high ^= key
    high &= WORD
    return high


def philox4x32(counter: Sequence, key: tuple[int, int]) -> tuple:
    """`philox4x32(counter: 4 words, key: 2 words) -> 4 words`: the ten rounds of Philox 4x32-10.

    A word of the counter is an int, or an int64 tensor or array of values in [0, 2**32); the results are tensors where the
    counter has one. int64 products wrap and shift with the sign; the masks give the unsigned halves all the same.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = _mix(p1 >> 32, c1, k0), _mix(p0 >> 32, c3, k1)
        p0 &= WORD
        p1 &= WORD
        c1, c3 = p1, p0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def philox_blocks(seed: int, stream: int, block: Tensor) -> Tensor:
    """`philox_blocks(seed, stream, block: int64 [...]) -> int64 [..., 4]`: the four words of each block number."""
    if block.device.type == "cpu" and block.numel() <= BLOCKS_IN_NUMPY:
        number = block.reshape(-1).numpy()
        return torch.from_numpy(np.stack(_words(seed, stream, number), axis=-1).reshape(*block.shape, 4))
    return torch.stack(_words(seed, stream, block), dim=-1)


def _words(seed: int, stream: int, block: Any) -> tuple:
    return philox4x32((block & WORD, (block >> 32) & WORD, *halves(stream)), halves(seed))


def philox_uint32(seed: int, stream: int, index: Tensor) -> Tensor:
    """`philox_uint32(seed, stream, index: int64) -> int64`: the index-th 32-bit word, in [0, 2**32), elementwise.

    >>> philox_uint32(0, 0, torch.tensor([0, 1])).tolist() == [0x6627E8D5, 0xE169C58D]
    True
    """
    words = philox_blocks(seed, stream, index >> 2)
    return words.gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)


def box_index(shape: Sequence[int], box: Box, device: torch.device | str | None = None) -> Tensor:
    """`box_index(shape, box) -> int64 [box shape]`: where the box's elements are in a row-major tensor of `shape`.

    >>> box_index((4, 6), ((1, 3), (2, 4))).tolist()
    [[8, 9], [14, 15]]
    """
    check_boxes(shape, [box])
    index = torch.zeros((), dtype=torch.int64, device=device)
    for (start, stop), stride in zip(box, row_major_strides(shape), strict=True):
        index = index.unsqueeze(-1) + torch.arange(start, stop, device=device) * stride
    return index


@dataclass(frozen=True, slots=True)
class Rows:
    """A box as rows of consecutive positions: row r begins at `origin` plus the digits of r times the strides."""

    origin: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    length: int

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    def starts(self, row: RowT) -> RowT:
        """Where a row begins, or where each of a tensor of rows does."""
        start = row * 0 + self.origin
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            start = start + (row % size) * stride
            row = row // size
        return start

    def tiles(self, limit: int) -> Iterator[tuple[int, int, int, int]]:
        """(first row, rows, first column, columns) of at most about `limit` elements, in row-major order."""
        if self.length > limit:
            for row in range(self.count):
                for column in range(0, self.length, limit):
                    yield row, 1, column, min(limit, self.length - column)
        else:
            at_once = limit // self.length
            for row in range(0, self.count, at_once):
                yield row, min(at_once, self.count - row), 0, self.length


def rows_of(shape: Sequence[int], box: Box) -> Rows:
    """`rows_of(shape, box) -> Rows`: as few and as long as can be."""
    strides = row_major_strides(shape)
    origin = sum(start * stride for start, stride in zip(box_origin(box), strides, strict=True))
    sizes, steps = merge_dims(box_shape(box), strides)
    if steps[-1] != 1:
        sizes, steps = (*sizes, 1), (*steps, 1)
    return Rows(origin, sizes[:-1], steps[:-1], sizes[-1])


def _blocks_of(start: Tensor, columns: int, per_block: int) -> tuple[Tensor, Tensor]:
    """The blocks that hold `columns` elements from each start on, [rows, blocks], and the offsets in the first."""
    shift = per_block.bit_length() - 1
    spanned = (columns + 2 * (per_block - 1)) >> shift  # enough for any offset
    return (start >> shift).unsqueeze(1) + torch.arange(spanned, device=start.device), start & (per_block - 1)


def by_blocks(
    shape: Sequence[int], box: Box, seed: int, stream: int, dtype: torch.dtype, device: torch.device | str, law: Law
) -> Tensor:
    """The box, drawn by this law; one launch on a GPU."""
    check_boxes(shape, [box])
    out = torch.empty(box_shape(box), dtype=dtype, device=device)
    if out.numel() == 0:
        return out
    if wants_kernels(out.device):
        from .random_triton import launch  # imports triton

        launch(out, rows_of(shape, box), seed, stream, law)
    elif not out.is_meta:
        _fill(out, rows_of(shape, box), seed, stream, law)
    return out


def _fill(out: Tensor, rows: Rows, seed: int, stream: int, law: Law) -> None:
    """The definition, in torch operations."""
    flat, done, per_block = out.view(-1), 0, law.per_block
    at_once = BLOCKS_AT_ONCE_CPU if out.device.type == "cpu" else BLOCKS_AT_ONCE
    aligned = all(stride % per_block == 0 for stride in rows.strides)
    for row, count, column, columns in rows.tiles(at_once * per_block):
        start = rows.starts(torch.arange(row, row + count, device=out.device)) + column
        blocks, offsets = _blocks_of(start, columns, per_block)
        values = law.make(philox_blocks(seed, stream, blocks)).view(count, -1)
        part = flat[done : done + count * columns].view(count, columns)
        if aligned or count == 1:
            offset = (rows.starts(row) + column) % per_block
            part.copy_(values[:, offset : offset + columns])
        else:
            at = offsets.unsqueeze(1) + torch.arange(columns, device=out.device)
            gathered = _GATHERED.get(out.dtype, out.dtype)
            torch.gather(values.view(gathered), 1, at, out=part.view(gathered))
        done += count * columns


def top53(words: Tensor) -> Tensor:
    """The top 53 bits of the two 64-bit numbers of each block: [..., 4] -> [..., 2]."""
    return (words[..., 1::2] << 21) | (words[..., ::2] >> 11)


def _next_below(value: float, dtype: torch.dtype) -> float:
    """The largest number of `dtype` below `value`, none of them subnormal (a GPU may flush those to zero)."""
    nearest = torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype)
    if nearest.item() >= value:
        bits = nearest.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
        nearest = (bits - 1 if value > 0 else bits + 1).view(dtype)
    tiny = torch.finfo(dtype).smallest_normal
    below = nearest.item()
    return below if abs(below) >= tiny else 0.0 if value > 0 else -tiny


@cache
def _range_in(dtype: torch.dtype, low: float, high: float) -> tuple[float, float]:
    """The smallest and the largest number of `dtype` in [low, high); the next after them twice if there is none."""
    exact = torch.tensor(low, dtype=dtype, device="cpu").item() == low
    smallest = low if exact else -_next_below(-low, dtype)
    return smallest, max(smallest, _next_below(high, dtype))


def uniform(
    shape: Sequence[int],
    box: Box,
    seed: int,
    stream: int,
    dtype: torch.dtype,
    device: torch.device | str,
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """`uniform(shape, box, ...) -> [box shape]`: numbers in [low, high) of 24 random bits, 53 for float64.

    A float16 or bfloat16 number is a float32 one rounded, then kept below `high`. low == high gives low.

    Raises:
        ValueError: low > high, a range wider than the dtype's largest number, or a dtype that is not floating point.
    """
    if dtype in PARTS:
        return _complex(uniform, shape, box, seed, stream, dtype, device, low, high)
    _check_float("uniform", dtype)
    if not 0 <= high - low <= torch.finfo(dtype).max:
        raise ValueError(
            f"uniform: the range [{low}, {high}) is inside out or wider than {torch.finfo(dtype).max:g}, "
            f"the largest {dtype}; give low <= high, or draw in float32 or float64 and convert"
        )
    double = dtype == torch.float64
    smallest, largest = _range_in(dtype, float(low), float(high))

    def make(words: Tensor) -> Tensor:
        u = top53(words).to(torch.float64) * 2.0**-53 if double else (words >> 8).to(torch.float32) * 2.0**-24
        return u.mul_(high - low).add_(low).to(dtype).clamp_(smallest, largest)

    law = Law("uniform", 2 if double else 4, make, (float(high - low), float(low), smallest, largest))
    return by_blocks(shape, box, seed, stream, dtype, device, law)


def box_muller(m: Tensor, n: Tensor, bits: int) -> Tensor:
    """Two bits-wide integers [...] -> two independent standard normal numbers [..., 2]."""
    radius = sqrt(log((m + 1).to(torch.float64) * 2.0**-bits).mul_(-2))
    cos, sin = cos_sin_turns(n.to(torch.float64) * 2.0**-bits)
    return torch.stack((cos.mul_(radius), sin.mul_(radius)), dim=-1)


def normal(
    shape: Sequence[int],
    box: Box,
    seed: int,
    stream: int,
    dtype: torch.dtype,
    device: torch.device | str,
    mean: float = 0.0,
    std: float = 1.0,
) -> Tensor:
    """`normal(shape, box, ...) -> [box shape]`: Gaussian numbers by Box-Muller, computed in float64.

    The largest distance from the mean is 6.66 std, 8.57 std for float64. A complex number has variance std**2 in all,
    half of it in each part, as in torch.randn.

    Raises:
        ValueError: std < 0, or a dtype that is not floating point.
    """
    if not std >= 0:
        raise ValueError(f"normal: std is {std}; give std >= 0")
    if dtype in PARTS:
        if mean:
            raise ValueError(f"normal: mean is {mean} for {dtype}; draw with mean 0 and add it")
        return _complex(normal, shape, box, seed, stream, dtype, device, 0.0, std * 0.5**0.5)
    _check_float("normal", dtype)
    double = dtype == torch.float64
    first = torch.float64 if double else torch.float32

    def make(words: Tensor) -> Tensor:
        numbers = top53(words) if double else words
        z = box_muller(numbers[..., ::2].contiguous(), numbers[..., 1::2].contiguous(), 53 if double else 32)
        return z.mul_(std).add_(mean).to(first).to(dtype)

    law = Law("normal", 2 if double else 4, make, (float(std), float(mean)))
    return by_blocks(shape, box, seed, stream, dtype, device, law)


def bernoulli_mask(
    shape: Sequence[int], box: Box, seed: int, stream: int, p: float, device: torch.device | str
) -> Tensor:
    """`bernoulli_mask(shape, box, ...) -> bool [box shape]`: True with probability p (to within 2**-33).

    Raises:
        ValueError: p is not in [0, 1].
    """
    if not 0 <= p <= 1:
        raise ValueError(f"bernoulli_mask: p is {p}, which is not a probability; give 0 <= p <= 1")
    threshold = round(p * 2**32)
    law = Law("bernoulli", 4, lambda words: words < threshold, (threshold,))
    return by_blocks(shape, box, seed, stream, torch.bool, device, law)


def _multiply_high(words: Tensor, factor: int) -> Tensor:
    """number * factor >> 64 for the two 64-bit numbers of each block [..., 4] -> [..., 2]; factor at most 2**64."""
    low, high = words[..., ::2], words[..., 1::2]
    factor_low, factor_high = factor & WORD, factor >> 32
    across = high * factor_low
    back = low * factor_high
    carry = ((low * factor_low >> 32) & WORD) + (across & WORD) + (back & WORD)
    return high * factor_high + ((across >> 32) & WORD) + ((back >> 32) & WORD) + (carry >> 32)


def integers(
    shape: Sequence[int],
    box: Box,
    seed: int,
    stream: int,
    low: int,
    high: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """`integers(shape, box, ...) -> [box shape]`: integers in [low, high), any range up to 2**64 values.

    64 random bits each: a value's probability is off by at most 2**-64, (high - low) / 2**64 of itself.

    Raises:
        ValueError: the range is empty or does not fit `dtype`.
    """
    least, greatest = limits(dtype)
    if not least <= low < high <= greatest + 1:
        raise ValueError(
            f"integers: the range [{low}, {high}) is empty or not inside {dtype}, which holds [{least}, {greatest + 1})"
        )
    base = low - (1 << 64) if low >= 1 << 63 else low  # the same bits as an int64

    def make(words: Tensor) -> Tensor:
        return _multiply_high(words, high - low).add_(base).to(dtype)

    law = Law("integers", 2, make, (high - low, base))
    return by_blocks(shape, box, seed, stream, dtype, device, law)


def limits(dtype: torch.dtype) -> tuple[int, int]:
    """The least and greatest integer that `integers` may write in this dtype; for a float, where it holds them all."""
    if dtype == torch.bool:
        return 0, 1
    if dtype.is_floating_point:
        exact = round(2 / torch.finfo(dtype).eps)
        return -exact, exact
    if dtype.is_complex:
        raise ValueError(f"integers: {dtype} is complex; draw real integers and convert")
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _check_float(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        known = ", ".join(str(known) for known in (*FLOATS, *PARTS))
        raise ValueError(f"{name}: cannot draw {dtype}; draw one of {known} and convert")


def _complex(draw, shape, box: Box, seed: int, stream: int, dtype: torch.dtype, device, *parameters: float) -> Tensor:
    """Real and imaginary part are neighbours in a real tensor with one more dim of 2."""
    parts = draw((*shape, 2), (*box, (0, 2)), seed, stream, PARTS[dtype], device, *parameters)
    return torch.view_as_complex(parts)
