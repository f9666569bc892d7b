"""Uniform, normal, Bernoulli and integer random numbers; the package has the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ..box import Box
from .draw import box_muller, by_blocks, top53
from .philox import WORD, Distribution

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def _next_below(value: float, dtype: torch.dtype) -> float:
    """Return the largest number of `dtype` below `value`.

    Subnormal numbers are left out, since a GPU may flush them to zero.
    """
    nearest = torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype)
    if nearest.item() >= value:
        bits = nearest.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
        nearest = (bits - 1 if value > 0 else bits + 1).view(dtype)
    tiny = torch.finfo(dtype).smallest_normal
    below = nearest.item()
    return below if abs(below) >= tiny else 0.0 if value > 0 else -tiny


@cache
def _range_in(dtype: torch.dtype, low: float, high: float) -> tuple[float, float]:
    """Return the smallest and largest number of `dtype` in [low, high).

    If there is none, the next larger one twice.
    """
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
    """`uniform(shape, box, ...) -> [box shape]`: numbers in [low, high).

    Of 24 random bits, 53 for float64.

    A float16 or bfloat16 number is a float32 one rounded, then kept below `high`. low == high gives
    low.

    Raises:
        ValueError: low > high, a range wider than the dtype's largest number, or a dtype that is
            not floating point.
    """
    if dtype in PARTS:
        return _complex(uniform, shape, box, seed, stream, dtype, device, low, high)
    _check_float("uniform", dtype)
    if not 0 <= high - low <= torch.finfo(dtype).max:
        raise ValueError(
            f"uniform: the range [{low}, {high}) is reversed or wider than "
            f"{torch.finfo(dtype).max:g}, the largest {dtype}; give low <= high, or draw in "
            "float32 or float64 and convert"
        )
    double = dtype == torch.float64
    smallest, largest = _range_in(dtype, float(low), float(high))

    def make(words: Tensor) -> Tensor:
        u = (
            top53(words).to(torch.float64) * 2.0**-53
            if double
            else (words >> 8).to(torch.float32) * 2.0**-24
        )
        return u.mul_(high - low).add_(low).to(dtype).clamp_(smallest, largest)

    distribution = Distribution(
        "uniform", 2 if double else 4, make, (float(high - low), float(low), smallest, largest)
    )
    return by_blocks(shape, box, seed, stream, dtype, device, distribution)


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
    """`normal(shape, box, ...) -> [box shape]`: Gaussian numbers by Box-Muller.

    Computed in float64.

    The largest distance from the mean is 6.66 std, 8.57 std for float64. A complex number has
    variance std**2 in all, half of it in each part, as in torch.randn.

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
        z = box_muller(
            numbers[..., ::2].contiguous(), numbers[..., 1::2].contiguous(), 53 if double else 32
        )
        return z.mul_(std).add_(mean).to(first).to(dtype)

    distribution = Distribution("normal", 2 if double else 4, make, (float(std), float(mean)))
    return by_blocks(shape, box, seed, stream, dtype, device, distribution)


def bernoulli_mask(
    shape: Sequence[int], box: Box, seed: int, stream: int, p: float, device: torch.device | str
) -> Tensor:
    """`bernoulli_mask(shape, box, ...) -> bool [box shape]`: True with probability p.

    To within 2**-33.

    Raises:
        ValueError: p is not in [0, 1].
    """
    if not 0 <= p <= 1:
        raise ValueError(f"bernoulli_mask: p is {p}, which is not a probability; give 0 <= p <= 1")
    threshold = round(p * 2**32)
    distribution = Distribution("bernoulli", 4, lambda words: words < threshold, (threshold,))
    return by_blocks(shape, box, seed, stream, torch.bool, device, distribution)


def _multiply_high(words: Tensor, factor: int) -> Tensor:
    """Return number * factor >> 64 for the two 64-bit numbers of each block.

    [..., 4] -> [..., 2]; factor at most 2**64.
    """
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
    """`integers(shape, box, ...) -> [box shape]`: integers in [low, high).

    Any range up to 2**64 values.

    64 random bits each: a value's probability is off by at most 2**-64, (high - low) / 2**64 of
    itself.

    Raises:
        ValueError: the range is empty or does not fit `dtype`.
    """
    least, greatest = limits(dtype)
    if not least <= low < high <= greatest + 1:
        raise ValueError(
            f"integers: the range [{low}, {high}) is empty or not inside {dtype}, which holds "
            f"[{least}, {greatest + 1})"
        )
    base = low - (1 << 64) if low >= 1 << 63 else low  # the same bits as an int64

    def make(words: Tensor) -> Tensor:
        return _multiply_high(words, high - low).add_(base).to(dtype)

    distribution = Distribution("integers", 2, make, (high - low, base))
    return by_blocks(shape, box, seed, stream, dtype, device, distribution)


def limits(dtype: torch.dtype) -> tuple[int, int]:
    """Return the least and greatest integer for `integers` in this dtype.

    For a float dtype, of the range in which it has every integer.
    """
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
        raise ValueError(f"{name}: cannot draw {dtype}; draw one of {known} and convert it")


def _complex(
    draw, shape, box: Box, seed: int, stream: int, dtype: torch.dtype, device, *parameters: float
) -> Tensor:
    """Draw real and imaginary parts as neighbours in a real tensor with one more dim, of size 2."""
    parts = draw((*shape, 2), (*box, (0, 2)), seed, stream, PARTS[dtype], device, *parameters)
    return torch.view_as_complex(parts)
