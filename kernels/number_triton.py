"""Convert between number formats inside kernels.

Conversions use integer arithmetic, so that the interpreter (which rounds bfloat16 wrongly) and
every GPU give the same bits.
"""

# The language of kernels is not quite Python:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import cuda_capability_geq


@triton.jit
def to_bfloat16(x):
    """float32 -> bfloat16, to the nearest, ties to even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    high_bits = tl.where(x != x, (bits >> 16) | 0x40, rounded)
    return high_bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def from_bfloat16(x):
    """bfloat16 -> float32, exact; subnormal numbers, too."""
    return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Cast as torch's `.to(dtype)`: casts to 16 bits, and from bfloat16, go through float32."""
    if x.dtype == dtype:
        return x
    elif x.dtype == tl.bfloat16:
        return cast(from_bfloat16(x), dtype)
    elif dtype == tl.bfloat16:
        return to_bfloat16(x.to(tl.float32))
    elif dtype == tl.float16:
        return x.to(tl.float32).to(tl.float16)
    elif dtype == tl.int1:
        return x != 0
    else:
        return x.to(dtype)


@triton.jit
def widened(x):
    """Return 16-bit floats as float32, others unchanged."""
    if x.dtype == tl.bfloat16:
        return from_bfloat16(x)
    elif x.dtype == tl.float16:
        return x.to(tl.float32)
    else:
        return x


@triton.constexpr_function
def converts_natively():
    """Return whether the GPU converts float32 to and from bfloat16 and float8_e4m3fn itself.

    By instructions that round to the nearest, ties to even: Nvidia's do from compute capability 8.9
    on. (They do not preserve the payload of a NaN.)
    """
    return not knobs.runtime.interpret and cuda_capability_geq(8, 9)


@triton.jit
def to_e4m3(x):
    """float32 -> the codes of float8_e4m3fn, as int8: to the nearest, ties to even.

    448 for larger values, 0x7f for NaN.
    """
    if converts_natively():
        return x.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        size = tl.minimum(tl.abs(x), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # 2**14: the last bit is worth 2**-9, as that of the code
        below = (size + 16384.0).to(tl.int32, bitcast=True)
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        code = tl.where(size < 0.015625, below & 0xF, normal) | sign
        return tl.where(x == x, code, 0x7F).to(tl.int8)


@triton.jit
def from_e4m3(code):
    """Convert the codes of float8_e4m3fn, as int8, to float32."""
    if converts_natively():
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        code = code.to(tl.int32)
        bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
        # 2**120, the difference of the exponents' biases
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value)
