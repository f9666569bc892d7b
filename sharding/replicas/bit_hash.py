"""`bit_hash`: a 64-bit hash of a tensor's bits and their positions, computed on its device.

The tensor is read as 64-bit words, the last one padded with zeros. Each word and its position go
through a permutation of the 64-bit numbers (the finaliser of SplitMix64, Steele, Lea, Flood 2014),
and the hash is the sum of the results, modulo 2**64:

    sum over i of mix(word[i] ^ i * golden)

So a tensor that differs in one word always has another hash; one that differs in several has the
same one with a probability of about 2**-64. The sum does not depend on the order, so any device
gives the same number. The hash is not cryptographic.
"""

from __future__ import annotations

import torch
from torch import Tensor

_AT_A_TIME = 1 << 22  # bytes, so that intermediate results fit into the cache
GOLDEN, _FIRST, _SECOND = (
    c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@torch.no_grad()
def bit_hash(x: Tensor) -> Tensor:
    """bit_hash(x) -> 0-d int64 on the device of x: a hash of the bits of a plain tensor.

    Its shape and dtype are not part of the hash.

    -0.0 and 0.0 have different hashes, and so have NaNs with different bits.

    Communication: none.
    """
    bits = flat_of(x).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), _AT_A_TIME):
        total += _mixed_words(bits[start : start + _AT_A_TIME], start // 8).sum()
    return total


def flat_of(x: Tensor) -> Tensor:
    """Return the elements of a tensor as a contiguous 1-d tensor."""
    dense = x.detach() if x.layout is torch.strided else x.detach().to_dense()
    return dense.resolve_conj().resolve_neg().contiguous().view(-1)


def _mixed_words(part: Tensor, start: int) -> Tensor:
    """Return the words of these bytes, mixed with their positions, which begin at `start`."""
    count = -(-part.numel() // 8)
    words = torch.arange(start, start + count, device=part.device).mul_(GOLDEN)
    words ^= _words(part, count)
    return permute_(words)


def permute_(words: Tensor) -> Tensor:
    """Apply the permutation of the 64-bit numbers to each word, in place."""
    words *= _FIRST
    words ^= (words >> 32).bitwise_and_((1 << 32) - 1)  # a logical shift: torch's own is arithmetic
    words *= _SECOND
    words ^= (words >> 29).bitwise_and_((1 << 35) - 1)
    return words


def _words(part: Tensor, count: int) -> Tensor:
    if part.numel() == 8 * count and part.storage_offset() % 8 == 0:
        return part.view(torch.int64)
    words = torch.zeros(count, dtype=torch.int64, device=part.device)
    words.view(torch.uint8)[: part.numel()] = part
    return words
