"""log, exp, cos/sin and sqrt with the same bits on every device.

From float64 additions, multiplications, one division and bit shifts.

A library's log or cos differs in the last bit between CPU and GPU, and on the CPU even between the
vector loop and its tail, so it would make a number depend on where it is computed. These are
fdlibm's polynomials (`e_log.c`, `e_exp.c`, `k_sin.c`, `k_cos.c`: Sun Microsystems 1993, error below
1 ulp) evaluated by Horner's rule, each operation rounded on its own. A fused multiply-add would
change the bits, so compiled kernels must disable contraction.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LOG = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
SIN = (
    -1.66666666666666324348e-01,
    8.33333333332248946124e-03,
    -1.98412698298579493134e-04,
    2.75573137070700676789e-06,
    -2.50507602534068634195e-08,
    1.58969099521155010221e-10,
)
COS = (
    4.16666666666666019037e-02,
    -1.38888888888741095749e-03,
    2.48015872894767294178e-05,
    -2.75573143513906633035e-07,
    2.08757232129817482790e-09,
    -1.13596475577881948265e-11,
)
EXP = (
    1.66666666666666019037e-01,
    -2.77777777770155933842e-03,
    6.61375632143793436117e-05,
    -1.65339022054652515390e-06,
    4.13813679705723846039e-08,
)
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
LOG2_E = 1.44269504088896338700
HALF_PI = 1.57079632679489661923
ONE_BITS = 0x3FF0000000000000
SQRT_HALF_BITS = 0x3FE6A09E00000000  # the float64 just below sqrt(1/2) with 32 zero bits at its end
FRACTION_BITS = 0x000FFFFFFFFFFFFF


def _horner(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return c0 + x * (c1 + x * (c2 + ...))."""
    total = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total.mul_(x).add_(coefficient)
    return total


def over(x: Tensor, divisor: float) -> Tensor:
    """Return x / divisor, rounded once.

    With a Python number torch multiplies by the rounded reciprocal on a GPU.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def sqrt(x: Tensor) -> Tensor:
    """`sqrt(x: float64) -> float64`: correctly rounded, as on GPUs.

    torch's on a CPU may be MKL's, which is not.
    """
    if x.device.type != "cpu":
        return x.sqrt()
    root = torch.empty_like(x)
    np.sqrt(x.numpy(), out=root.numpy())
    return root


def log(x: Tensor) -> Tensor:
    """`log(x: float64) -> float64`: the natural logarithm of positive normal numbers."""
    bits = x.view(torch.int64) + (ONE_BITS - SQRT_HALF_BITS)
    exponent = ((bits >> 52) - 1023).to(torch.float64)
    # 1 + f in [sqrt(1/2), sqrt(2))
    f = ((bits & FRACTION_BITS) + SQRT_HALF_BITS).view(torch.float64) - 1
    s = f / (f + 2)
    z = s * s
    half_square = f * f * 0.5
    series = _horner(z, LOG) * z + half_square
    return s * series + exponent * LN2_LOW - half_square + f + exponent * LN2_HIGH


def exp(x: Tensor) -> Tensor:
    """`exp(x: float64) -> float64`: 0 below about -745, infinite above about 709."""
    x = x.clamp(-800, 800)
    power = (x * LOG2_E + 0.5).floor_()
    high, low = x - power * LN2_HIGH, power * LN2_LOW
    r = high - low
    z = r * r
    c = r - z * _horner(z, EXP)
    near_one = 1 - ((low - r * c / (2 - c)) - high)  # e**r, r at most log(2) / 2 from zero
    half = power.to(torch.int64) >> 1
    return near_one * _power_of_two(half) * _power_of_two(power.to(torch.int64) - half)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)


def cos_sin_turns(x: Tensor) -> tuple[Tensor, Tensor]:
    """`cos_sin_turns(x: float64) -> (cos(2 pi x), sin(2 pi x))` for x in [0, 1)."""
    quarters = x * 4
    nearest = (quarters + 0.5).floor_()
    angle = (quarters - nearest) * HALF_PI  # the difference is exact, in [-1/2, 1/2]
    z = angle * angle
    sin = angle * z * _horner(z, SIN) + angle
    half = z * 0.5
    rest = 1 - half
    cos = z * z * _horner(z, COS) + ((1 - rest) - half) + rest
    turned = nearest.to(torch.int64)
    odd = (turned & 1).bool()
    cos, sin = torch.where(odd, sin, cos), torch.where(odd, cos, sin)
    cos = torch.where(((turned + 1) & 2).bool(), -cos, cos)
    sin = torch.where((turned & 2).bool(), -sin, sin)
    return cos, sin
