"""Conversions between number formats, for use inside kernels.

In integer arithmetic, so that the interpreter, which gets bfloat16 wrong, and every GPU give the same bits.
"""

# The language of kernels is not quite Python:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

import triton
import triton.language as tl


@triton.jit
def to_bfloat16(x):
    """float32 -> bfloat16, to the nearest, ties to even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    kept = tl.where(x != x, (bits >> 16) | 0x40, rounded)
    return kept.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """As torch's `.to(dtype)`: what goes to 16 bits goes through float32."""
    if x.dtype == dtype:
        return x
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
    """16-bit floats as float32, the rest as it is."""
    if x.dtype == tl.bfloat16 or x.dtype == tl.float16:
        return x.to(tl.float32)
    else:
        return x
