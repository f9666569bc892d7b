"""Random numbers that depend on an element's position in the global tensor.

In torch operations and in one kernel.

An element's number depends on (seed, stream, the element's row-major position i in the global
tensor) and on nothing else: not on the box that is drawn, the rank, the device or the number of
threads. Drawing a box gives the same bits as drawing the whole tensor and slicing it.

The torch operations are the definition; the kernel (`random_triton.py`), which makes any draw in
one launch, is bit-equal to it:

- Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, as in
  Random123). Key = (seed low, seed high), counter = (b low, b high, stream low, stream high),
  32-bit words, for block number b. A block is four words w0 w1 w2 w3. Seed and stream are taken
  modulo 2**64.
- `philox_uint32`: number i is word i % 4 of block i // 4.
- Where a distribution takes one word per element, element i has word i % 4 of block i // 4. Where
  it takes two, element i has words (2 * (i % 2), 2 * (i % 2) + 1) of block i // 2; the two make one
  64-bit number, the first word being its low half.

| draw | per element | value |
|---|---|---|
| uniform float64 | two words | u = (number >> 11) * 2**-53 |
| uniform, other dtypes | one word | u = (word >> 8) * 2**-24 in float32 |
| normal float64 | two words | cos and sin of Box-Muller(n0, n1), n = number >> 11, 53 bits |
| normal, other dtypes | one word | Box-Muller(w0, w1), Box-Muller(w2, w3) of a block, 32 bits |
| bernoulli | one word | word < round(p * 2**32) |
| integers | two words | low + (number * (high - low) >> 64) |

`distributions.py` has further distributions.

Uniform: u * (high - low) + low, each operation rounded to the dtype that draws, then rounded to the
result's dtype and clamped to that dtype's numbers in [low, high). Box-Muller(m, n) of integers with
`bits` bits: for r = sqrt(-2 log((m + 1) / 2**bits)) and t = n / 2**bits, the pair is r cos(2 pi t),
r sin(2 pi t); then * std, + mean. All of it is float64 without fused multiply-adds (see
`elementary.py`); a 16-bit result is rounded to float32 first. A complex element i has the real
elements 2i and 2i + 1 as its parts.
"""

from .basic_distributions import FLOATS, PARTS, bernoulli_mask, integers, limits, normal, uniform
from .philox import box_index, philox4x32, philox_blocks, philox_uint32

__all__ = [
    "FLOATS",
    "PARTS",
    "bernoulli_mask",
    "box_index",
    "integers",
    "limits",
    "normal",
    "philox4x32",
    "philox_blocks",
    "philox_uint32",
    "uniform",
]
