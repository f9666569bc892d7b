"""A kernel with each kind of argument."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["k"])
def toy(x, n, k: tl.int64, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, (scale * k).to(x.dtype.element_ty), mask=at < n)
