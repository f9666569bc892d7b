"""More distributions, and those with parameters per element.

Exponential, Gumbel, Cauchy, log-normal, geometric.

With scalar parameters they are drawn like those of `basic_distributions.py`: element i has two
words, of which 52 bits give u = (2 m + 1) / 2**53, which is neither 0 nor 1.

| draw | value |
|---|---|
| exponential | -log(u) / rate |
| gumbel | -log(-log(u)) |
| cauchy | median - sigma cos(pi u) / sin(pi u) |
| log-normal | exp of a normal float64 number |
| geometric | 1 + floor(log(u) / log(1 - p)) |

All of it is float64 by the functions of `elementary.py`, so that CPU and GPU agree, then rounded to
the result's dtype.

With parameters per element (`bernoulli`, `poisson`, `binomial`, `categories`) a draw is a function
of these and of one or several u per element, which `Units` returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..box import Box
from .draw import box_muller, by_blocks, top53
from .elementary import cos_sin_turns, exp, log, over, sqrt
from .philox import Distribution

Units = Callable[[int], Tensor]  # number of the draw -> float64 in (0, 1), one per element
PARTS_FROM = 40  # streams above 2**40 are further draws of those below

SMALL_MEAN = 10  # Hörmann's rejection needs a mean of at least 10
NEGLIGIBLE = 2.0**-70  # inversion stops at events rarer than this


def _inside(words: Tensor) -> Tensor:
    """Return numbers in (0, 1), two per block: [..., 4] -> [..., 2]."""
    return (top53(words) | 1).to(torch.float64) * 2.0**-53


_UNIT = Distribution("unit", 2, _inside)


def unit(
    shape: Sequence[int], box: Box, seed: int, stream: int, part: int, device: torch.device | str
) -> Tensor:
    """`unit(shape, box, ...) -> float64 [box shape]`: u in (0, 1).

    The part-th of a stream of fewer than 2**40.
    """
    return by_blocks(shape, box, seed, stream + (part << PARTS_FROM), torch.float64, device, _UNIT)


def exponential(
    shape: Sequence[int],
    box: Box,
    seed: int,
    stream: int,
    dtype: torch.dtype,
    device: torch.device | str,
    rate: float,
) -> Tensor:
    """`exponential(shape, box, ...) -> [box shape]`: positive, with mean 1 / rate.

    Raises:
        ValueError: rate is not positive, or the dtype not floating point.
    """
    _check("exponential", dtype, rate > 0, f"rate is {rate}; give rate > 0")
    least = torch.finfo(dtype).tiny  # so that results can be divided by

    def make(words: Tensor) -> Tensor:
        return over(log(_inside(words)), -rate).to(dtype).clamp_min_(least)

    return by_blocks(
        shape,
        box,
        seed,
        stream,
        dtype,
        device,
        Distribution("exponential", 2, make, (float(rate), least)),
    )


def gumbel(
    shape: Sequence[int],
    box: Box,
    seed: int,
    stream: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """`gumbel(shape, box, ...) -> [box shape]`: standard Gumbel numbers, always finite."""
    _check("gumbel", dtype)
    distribution = Distribution("gumbel", 2, lambda words: (-log(-log(_inside(words)))).to(dtype))
    return by_blocks(shape, box, seed, stream, dtype, device, distribution)


def cauchy(
    shape: Sequence[int],
    box: Box,
    seed: int,
    stream: int,
    dtype: torch.dtype,
    device: torch.device | str,
    median: float,
    sigma: float,
) -> Tensor:
    """`cauchy(shape, box, ...) -> [box shape]`: half of the numbers are within sigma of the median.

    Raises:
        ValueError: sigma is not positive, or the dtype not floating point.
    """
    _check("cauchy", dtype, sigma > 0, f"sigma is {sigma}; give sigma > 0")

    def make(words: Tensor) -> Tensor:
        cos, sin = cos_sin_turns(_inside(words) / 2)
        return (cos / sin * -sigma + median).to(dtype)

    return by_blocks(
        shape,
        box,
        seed,
        stream,
        dtype,
        device,
        Distribution("cauchy", 2, make, (float(median), float(sigma))),
    )


def log_normal(
    shape: Sequence[int],
    box: Box,
    seed: int,
    stream: int,
    dtype: torch.dtype,
    device: torch.device | str,
    mean: float,
    std: float,
) -> Tensor:
    """`log_normal(shape, box, ...) -> [box shape]`: numbers whose logarithm is Gaussian.

    With this mean and std.

    Raises:
        ValueError: std is not positive, or the dtype not floating point.
    """
    _check("log_normal", dtype, std > 0, f"std is {std}; give std > 0")

    def make(words: Tensor) -> Tensor:
        numbers = top53(words)
        normal = box_muller(numbers[..., ::2].contiguous(), numbers[..., 1::2].contiguous(), 53)
        return exp(normal * std + mean).to(dtype)

    return by_blocks(
        shape,
        box,
        seed,
        stream,
        dtype,
        device,
        Distribution("log_normal", 2, make, (float(std), float(mean))),
    )


def geometric(
    shape: Sequence[int],
    box: Box,
    seed: int,
    stream: int,
    dtype: torch.dtype,
    device: torch.device | str,
    p: float,
) -> Tensor:
    """`geometric(shape, box, ...) -> [box shape]`: trials up to the first success, at least 1.

    Larger numbers than the dtype's largest are clamped to it.

    Raises:
        ValueError: p is not in (0, 1), or the dtype complex or bool.
    """
    if not 0 < p < 1:
        raise ValueError(f"geometric: p is {p}; give 0 < p < 1")
    if dtype.is_complex or dtype == torch.bool:
        raise ValueError(
            f"geometric: cannot draw {dtype}; draw whole or floating-point numbers and convert"
        )
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
    else:  # the largest double that is no larger than the dtype's largest number
        whole = torch.iinfo(dtype).max
        largest = float(whole)
        if int(largest) > whole:
            largest = math.nextafter(largest, 0)
    failure = math.log1p(-p)

    def make(words: Tensor) -> Tensor:
        return over(log(_inside(words)), failure).floor_().add_(1).clamp_(max=largest).to(dtype)

    return by_blocks(
        shape,
        box,
        seed,
        stream,
        dtype,
        device,
        Distribution("geometric", 2, make, (failure, largest)),
    )


def _check(name: str, dtype: torch.dtype, sound: bool = True, advice: str = "") -> None:
    if not sound:
        raise ValueError(f"{name}: {advice}")
    if not dtype.is_floating_point:
        raise ValueError(f"{name}: cannot draw {dtype}; draw a floating-point dtype and convert")


# -- with parameters of each element ---------------------------------------------------------------


def bernoulli(p: Tensor, units: Units) -> Tensor:
    """`bernoulli(p) -> bool`: True with each element's own probability."""
    return units(0) < p.to(torch.float64)


def poisson(rate: Tensor, units: Units) -> Tensor:
    """`poisson(rate) -> float64`: whole numbers with these means.

    Small means by inversion, large ones by rejection (Hörmann, "The transformed rejection method
    for generating Poisson random variables", 1993, algorithm PTRS without its short cuts).
    """
    rate = rate.to(torch.float64)
    small, large = rate.clamp(max=SMALL_MEAN), rate.clamp(min=SMALL_MEAN)
    few = _invert_cdf(units(0), exp(-small), lambda k: over(small, k))
    b = sqrt(large) * 2.53 + 0.931
    a = b * 0.02483 - 0.059
    log_rate = log(large)

    def log_likelihood(k: Tensor) -> Tensor:
        return k * log_rate - large - log_factorial(k)

    many = _sample_by_rejection(
        rate >= SMALL_MEAN, units, a, b, large + 0.43, 1.1239 + 1.1328 / (b - 3.4), log_likelihood
    )
    return torch.where(rate >= SMALL_MEAN, many, few)


def binomial(count: Tensor, p: Tensor, units: Units) -> Tensor:
    """`binomial(count, p) -> float64`: successes among `count` trials.

    Small means by inversion, large ones by rejection (Hörmann, "The generation of binomial random
    variates", 1993, algorithm BTRS without its short cuts). No trials where `count` is negative; p
    is clamped to [0, 1].
    """
    n, p = count.to(torch.float64).floor().clamp_min(0), p.to(torch.float64).clamp(0, 1)
    rarer = torch.where(p > 0.5, 1 - p, p)
    mean = n * rarer
    successes = torch.where(
        mean < SMALL_MEAN, _few_of(n, rarer, mean, units), _many_of(n, rarer, mean, units)
    )
    return torch.where(p > 0.5, n - successes, successes)


def _few_of(n: Tensor, p: Tensor, mean: Tensor, units: Units) -> Tensor:
    p = torch.where(mean < SMALL_MEAN, p, 0)
    odds = p / (1 - p)
    return _invert_cdf(units(0), exp(log(1 - p) * n), lambda k: over(n - k + 1, k) * odds)


def _many_of(n: Tensor, p: Tensor, mean: Tensor, units: Units) -> Tensor:
    large = mean >= SMALL_MEAN
    n, p = torch.where(large, n, 4 * SMALL_MEAN), torch.where(large, p, 0.5)
    spread = sqrt(n * p * (1 - p))
    b = spread * 2.53 + 1.15
    a = b * 0.0248 - 0.0873 + p * 0.01
    mode, log_odds = ((n + 1) * p).floor(), log(p / (1 - p))
    at_mode = log_factorial(mode) + log_factorial(n - mode)

    def log_likelihood(k: Tensor) -> Tensor:
        """Return the log-likelihood relative to the mode."""
        inside = k.minimum(n)
        relative = (
            at_mode - log_factorial(inside) - log_factorial(n - inside) + (inside - mode) * log_odds
        )
        return torch.where(k > n, -torch.inf, relative)

    return _sample_by_rejection(
        large, units, a, b, n * p + 0.5, (2.83 + 5.1 / b) * spread, log_likelihood
    )


def _invert_cdf(u: Tensor, first: Tensor, ratio: Callable[[int], Tensor]) -> Tensor:
    """Return the least k with P(0) + ... + P(k) >= u.

    P(0) is `first` and P(k) = P(k - 1) * ratio(k).
    """
    k, number, likely, rest = torch.zeros_like(u), 0, first, u - first
    while bool((unfinished := (rest > 0) & (likely > NEGLIGIBLE)).any()):
        number += 1
        k += unfinished
        likely = likely * ratio(number)
        rest = rest - likely
    return k


def _sample_by_rejection(
    remaining: Tensor,
    units: Units,
    a: Tensor,
    b: Tensor,
    center: Tensor,
    alpha: Tensor,
    log_likelihood: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return whole numbers by transformed rejection, with a new pair of u for each try."""
    samples, number = torch.zeros_like(a), 0
    while bool(remaining.any()):
        number += 2
        u, v = units(number - 1) - 0.5, units(number)
        near = 0.5 - u.abs()
        k = ((2 * a / near + b) * u + center).floor_()
        likelihood = log_likelihood(k.clamp_min(0))
        taken = remaining & (k >= 0) & (log(v * alpha / (a / (near * near) + b)) <= likelihood)
        samples, remaining = torch.where(taken, k, samples), remaining & ~taken
    return samples


def log_factorial(k: Tensor) -> Tensor:
    """Return log(k!) of whole float64 numbers, to 2e-14.

    A table up to 9, then Stirling's series (DLMF 5.11.1).
    """
    table = torch.tensor(
        [math.log(math.factorial(i)) for i in range(10)], dtype=torch.float64, device=k.device
    )
    n = k.clamp_min(10)
    r = 1 / n
    z = r * r
    series = r * (1 / 12 - z * (1 / 360 - z * (1 / 1260 - z * (1 / 1680 - z * (1 / 1188)))))
    stirling = (n + 0.5) * log(n) - n + 0.5 * math.log(2 * math.pi) + series
    return torch.where(k < 10, table[k.clamp_max(9).to(torch.int64)], stirling)


def categories(weights: Tensor, u: Tensor) -> Tensor:
    """`categories(weights [..., c], u [..., n] in (0, 1)) -> int64 [..., n]`: by inversion.

    Never one of weight zero.
    """
    bounds = weights.to(torch.float64).cumsum(-1)
    total = bounds[..., -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(bounds, (u * total).minimum(below), right=True)
