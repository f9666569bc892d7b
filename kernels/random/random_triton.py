"""Random numbers that belong to an element's place in the global tensor, in one launch.

The kernel behind `random.py`.

    out[row, column] = law(words of the Philox block that holds position start(row) + column)

A lane makes one block, 4 words, and writes all of its 4 or 2 elements that are in the row. Bytes
moved: each element is written once, nothing is read. Of instructions, counted for sm_90, uniform
float32 takes 30 an element, which an H100 issues in about the time in which it writes 4 bytes; what
is narrower is bound by integer arithmetic. Whatever takes a logarithm is bound by float64
arithmetic, 45 (normal) to 70 (gumbel) operations an element. Against torch's form (`random._fill`):
some 150 launches over int64 temporaries, about 1000 bytes read and written for each element. It
wins at every size.

All of it is IEEE arithmetic, each operation rounded on its own: the bits of the torch form.
Negation is a multiplication by -1, for Triton's subtracts from zero, which makes 0 of -0 and of 0.
"""

# The language of kernels is not quite Python:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false

from __future__ import annotations

import struct
from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from ..launcher import NO_FUSION, KernelLauncher
from ..number_triton import cast
from ..strided import divisor
from ..strided_triton import quotient
from ..transfer.device_copies import DeviceCopies
from . import elementary
from .philox import MULTIPLIERS, WEYL, Distribution, Rows, halves

LANES = 256  # blocks of a program; with more, rows of several dims take too many registers
MAX_LANES = 1 << 31  # that 32-bit divisions can distinguish

M0, M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
W0, W1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])
LOG, EXP = tl.constexpr(elementary.LOG), tl.constexpr(elementary.EXP)
SIN, COS = tl.constexpr(elementary.SIN), tl.constexpr(elementary.COS)
LN2_HIGH, LN2_LOW = tl.constexpr(elementary.LN2_HIGH), tl.constexpr(elementary.LN2_LOW)
LOG2_E, HALF_PI = tl.constexpr(elementary.LOG2_E), tl.constexpr(elementary.HALF_PI)
ONE_BITS = tl.constexpr(elementary.ONE_BITS)
SQRT_HALF_BITS = tl.constexpr(elementary.SQRT_HALF_BITS)
FRACTION_BITS = tl.constexpr(elementary.FRACTION_BITS)

# -- words -----------------------------------------------------------------------------------------


@triton.jit
def product(word, multiplier: tl.constexpr):
    """Return the high and the low word of a product.

    As 64 bits it is one instruction, unlike `umulhi` and `*`.
    """
    both = word.to(tl.uint64) * multiplier
    return (both >> 32).to(tl.uint32), both.to(tl.uint32)


@triton.jit
def philox(seed_low, seed_high, stream_low, stream_high, block):
    """Return the four words of each block number."""
    c0, c1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    c2, c3 = stream_low.to(tl.uint32), stream_high.to(tl.uint32)
    k0, k1 = seed_low.to(tl.uint32), seed_high.to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = product(c0, M0)
        high1, low1 = product(c2, M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + W0, k1 + W1
    return c0, c1, c2, c3


@triton.jit
def number(low, high):
    """Combine two words into one 64-bit number."""
    return (high.to(tl.uint64) << 32) | low.to(tl.uint64)


# -- `elementary.py` -------------------------------------------------------------------------------


@triton.jit
def bits_of(x):
    return x.to(tl.int64, bitcast=True)


@triton.jit
def double(bits):
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def horner(x, coefficients: tl.constexpr, count: tl.constexpr):
    total = x * coefficients[count - 1] + coefficients[count - 2]
    for i in tl.static_range(3, count + 1):
        total = total * x + coefficients[count - i]
    return total


@triton.jit
def log(x):
    bits = bits_of(x) + (ONE_BITS - SQRT_HALF_BITS)
    exponent = ((bits >> 52) - 1023).to(tl.float64)
    f = double((bits & FRACTION_BITS) + SQRT_HALF_BITS) - 1
    s = f / (f + 2)
    z = s * s
    half_square = f * f * 0.5
    series = horner(z, LOG, 7) * z + half_square
    return s * series + exponent * LN2_LOW - half_square + f + exponent * LN2_HIGH


@triton.jit
def power_of_two(exponent):
    return double((exponent + 1023) << 52)


@triton.jit
def exp(x):
    x = tl.where(x < -800, -800, tl.where(x > 800, 800, x))
    power = tl.floor(x * LOG2_E + 0.5)
    high, low = x - power * LN2_HIGH, power * LN2_LOW
    r = high - low
    z = r * r
    c = r - z * horner(z, EXP, 5)
    near_one = 1 - ((low - r * c / (2 - c)) - high)
    whole = power.to(tl.int64)
    half = whole >> 1
    return near_one * power_of_two(half) * power_of_two(whole - half)


@triton.jit
def cos_sin_turns(x):
    quarters = x * 4
    nearest = tl.floor(quarters + 0.5)
    angle = (quarters - nearest) * HALF_PI
    z = angle * angle
    sin = angle * z * horner(z, SIN, 6) + angle
    half = z * 0.5
    rest = 1 - half
    cos = z * z * horner(z, COS, 6) + ((1 - rest) - half) + rest
    turned = nearest.to(tl.int32)
    odd = (turned & 1) != 0
    cos, sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    cos = tl.where(((turned + 1) & 2) != 0, cos * -1.0, cos)
    return cos, tl.where((turned & 2) != 0, sin * -1.0, sin)


# -- distributions: two numbers m, n of a block, of 32 or 64 bits, and parameters -> two elements --


@triton.jit
def uniform(m, n, width, low, smallest, largest):
    return uniform_of(m, width, low, smallest, largest), uniform_of(
        n, width, low, smallest, largest
    )


@triton.jit
def uniform_of(m, width, low, smallest, largest):
    if m.dtype == tl.uint64:
        u = (m >> 11).to(tl.float64) * 2.0**-53
    else:
        u = (m >> 8).to(tl.float32) * 2.0**-24
    x = u * double(width).to(u.dtype) + double(low).to(u.dtype)
    return tl.minimum(tl.maximum(x, double(smallest).to(u.dtype)), double(largest).to(u.dtype))


@triton.jit
def fraction(m, plus):
    """Return (m + plus) / 2**bits, in float64, from a number's 32 bits or the top 53 of 64."""
    if m.dtype == tl.uint64:
        return ((m >> 11) + plus).to(tl.float64) * 2.0**-53
    else:
        return (m.to(tl.int64) + plus).to(tl.float64) * 2.0**-32


@triton.jit
def box_muller(m, n):
    radius = tl.sqrt(log(fraction(m, 1)) * -2.0)
    cos, sin = cos_sin_turns(fraction(n, 0))
    return cos * radius, sin * radius


@triton.jit
def normal(m, n, std, mean, c, d):
    x, y = box_muller(m, n)
    return x * double(std) + double(mean), y * double(std) + double(mean)


@triton.jit
def log_normal(m, n, std, mean, c, d):
    x, y = normal(m, n, std, mean, c, d)
    return exp(x), exp(y)


@triton.jit
def bernoulli(m, n, threshold, b, c, d):
    return m.to(tl.int64) < threshold, n.to(tl.int64) < threshold


@triton.jit
def integers(m, n, count, low, c, d):
    return integer(m, count, low), integer(n, count, low)


@triton.jit
def integer(m, count, low):
    """Return low + (m * count >> 64), where a count of 0 stands for 2**64."""
    count = count.to(tl.uint64)
    return tl.where(count == 0, m, tl.umulhi(m, count + m * 0)).to(tl.int64) + low


@triton.jit
def inside(m):
    """Return a number in (0, 1)."""
    return ((m >> 11) | 1).to(tl.float64) * 2.0**-53


@triton.jit
def unit(m, n, a, b, c, d):
    return inside(m), inside(n)


@triton.jit
def exponential(m, n, rate, least, c, d):
    return exponential_of(m, rate, least), exponential_of(n, rate, least)


@triton.jit
def exponential_of(m, rate, least):
    return tl.maximum(log(inside(m)) / (double(rate) * -1.0), double(least))


@triton.jit
def gumbel(m, n, a, b, c, d):
    return gumbel_of(m), gumbel_of(n)


@triton.jit
def gumbel_of(m):
    return log(log(inside(m)) * -1.0) * -1.0


@triton.jit
def cauchy(m, n, median, sigma, c, d):
    return cauchy_of(m, median, sigma), cauchy_of(n, median, sigma)


@triton.jit
def cauchy_of(m, median, sigma):
    cos, sin = cos_sin_turns(inside(m) * 0.5)
    return cos / sin * (double(sigma) * -1.0) + double(median)


@triton.jit
def geometric(m, n, failure, largest, c, d):
    return geometric_of(m, failure, largest), geometric_of(n, failure, largest)


@triton.jit
def geometric_of(m, failure, largest):
    return tl.minimum(tl.floor(log(inside(m)) / double(failure)) + 1, double(largest))


_DISTRIBUTIONS = {
    distribution.__name__: distribution
    for distribution in (
        uniform,
        normal,
        bernoulli,
        integers,
        unit,
        exponential,
        gumbel,
        cauchy,
        log_normal,
        geometric,
    )
}

# -- the kernel ------------------------------------------------------------------------------------


@triton.jit
def over(n, entry):
    """Return n // size and n % size; a multiplication where n has 32 bits."""
    size = tl.load(entry).to(n.dtype)
    if n.dtype == tl.uint32:
        floor = quotient(n, tl.load(entry + 1), tl.load(entry + 2))
    else:
        floor = n // size
    return floor, n - floor * size


_ANY_VALUE = ["k0", "k1", "s0", "s1", "a", "b", "c", "d", "origin", "count", "length"]


@triton.jit(do_not_specialize=_ANY_VALUE)
def draw(
    out,
    dims,
    k0: tl.int64,
    k1: tl.int64,
    s0: tl.int64,
    s1: tl.int64,
    a: tl.int64,
    b: tl.int64,
    c: tl.int64,
    d: tl.int64,
    origin: tl.int64,
    count: tl.int64,
    length: tl.int64,
    skipped,
    total,
    DISTRIBUTION: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    FLAT: tl.constexpr,
    WIDE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Draw one block of a row per lane; `dims` is `_table`.

    FLAT: the elements of all lanes are consecutive, after those skipped.
    """
    first = tl.program_id(0).to(tl.int64) * LANES
    place = first + tl.arange(0, LANES)
    if not WIDE:
        place = place.to(tl.uint32)
    row, start = place * 0, place.to(tl.int64) * 0 + origin
    if DIMS:
        row, place = over(place, dims)
        rest = row
        for dim in tl.static_range(1, DIMS):
            rest, digit = over(rest, dims + 4 * dim)
            start += digit.to(tl.int64) * tl.load(dims + 4 * dim + 3)
        start += rest.to(tl.int64) * tl.load(dims + 4 * DIMS + 3)
    place = place.to(tl.int64)
    w0, w1, w2, w3 = philox(k0, k1, s0, s1, (start >> (PER_BLOCK // 2)) + place)
    if PER_BLOCK == 4:
        x, y = DISTRIBUTION(tl.join(w0, w2), tl.join(w1, w3), a, b, c, d)
    else:
        x, y = DISTRIBUTION(number(w0, w1), number(w2, w3), a, b, c, d)
    values = tl.join(cast(x, out.dtype.element_ty), cast(y, out.dtype.element_ty))
    if FLAT:
        at = first * PER_BLOCK - skipped + tl.arange(0, LANES * PER_BLOCK)
        tl.store(out + at, tl.reshape(values, (LANES * PER_BLOCK,)), mask=(at >= 0) & (at < total))
    else:
        column = (place * PER_BLOCK - (start & (PER_BLOCK - 1)))[:, None] + tl.arange(0, PER_BLOCK)[
            None, :
        ]
        inside = (column >= 0) & (column < length) & (row.to(tl.int64) < count)[:, None]
        at = (row.to(tl.int64) * length)[:, None] + column
        tl.store(out + at, tl.reshape(values, (LANES, PER_BLOCK)), mask=inside)


def launch(out: Tensor, rows: Rows, seed: int, stream: int, distribution: Distribution) -> None:
    """`launch(out, rows, seed, stream, distribution)`: fill `out` with random numbers.

    Those of these rows. `out` is contiguous and not empty.
    """
    launcher, table, skipped = _prepare_launch(rows, distribution.name, distribution.per_block)
    parameters = [*map(_bits, distribution.parameters), 0, 0, 0, 0][:4]
    dims = out if table is None else table.on(out.device)  # any tensor: it is not read
    launcher(
        out,
        dims,
        *halves(seed),
        *halves(stream),
        *parameters,
        rows.origin,
        rows.count,
        rows.length,
        skipped,
        out.numel(),
    )


@lru_cache(maxsize=1024)
def _prepare_launch(
    rows: Rows, name: str, per_block: int
) -> tuple[KernelLauncher, DeviceCopies | None, int]:
    """Return the launcher, the table of `_table`, and the number of elements before `out`."""
    blocks, flat, skipped = _blocks(rows, per_block)
    programs = -(-rows.count * blocks // LANES)
    constants = {
        "DISTRIBUTION": _DISTRIBUTIONS[name],
        "PER_BLOCK": per_block,
        "DIMS": len(rows.sizes),
        "FLAT": flat,
        "WIDE": programs * LANES >= MAX_LANES,
        "LANES": LANES,
        "num_warps": 4,
        **NO_FUSION,
    }
    return (
        KernelLauncher(draw, (programs,), constants),
        _table(rows, blocks) if rows.sizes else None,
        skipped,
    )


def _blocks(rows: Rows, per_block: int) -> tuple[int, bool, int]:
    """Return the blocks of each row, and where their elements begin.

    (blocks, whether all of their elements are consecutive, number of elements before `out`).
    """
    if any(stride % per_block for stride in rows.strides):
        return (2 * (per_block - 1) + rows.length) // per_block, False, 0  # enough for any offset
    offset = rows.origin % per_block
    blocks = -(-(offset + rows.length) // per_block)
    return blocks, rows.count == 1 or blocks * per_block == rows.length, offset


def _table(rows: Rows, blocks: int) -> DeviceCopies:
    """Return (size, its divisor, stride) of the blocks of a row and of each dim of rows.

    The fastest first.
    """
    dims = [(blocks, 0), *zip(reversed(rows.sizes), reversed(rows.strides), strict=True)]
    return DeviceCopies(
        [(size, *(divisor(size) if size < MAX_LANES else (0, 0)), stride) for size, stride in dims]
    )


def _bits(parameter: float) -> int:
    """Return the parameter as a signed 64-bit integer."""
    if isinstance(parameter, float):
        return struct.unpack("q", struct.pack("d", parameter))[0]
    return (parameter + (1 << 63)) % (1 << 64) - (1 << 63)
