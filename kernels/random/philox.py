"""Philox 4x32-10: random words by block number, and the records that a draw and its kernel share.

A draw is a `Distribution`, made of blocks of four words, over the `Rows` of a box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..box import Box, box_origin, box_shape, check_boxes, merge_dims, row_major_strides

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF

# On the CPU numpy is faster up to this size, since its calls take half the time of torch's; above,
# both are bound by memory.
BLOCKS_IN_NUMPY = 1 << 14

RowT = TypeVar("RowT", int, Tensor)


@dataclass(frozen=True, slots=True)
class Distribution:
    """How the words of blocks become elements.

    Attributes:
        name: of the function in `random_triton.py`.
        per_block: elements per block: 4 of one word each, or 2 of two words.
        make: the definition: words [..., 4] -> elements [..., per_block].
        parameters: arguments of the function in `random_triton.py`, at most 4: 64-bit ints or
            float64s.
    """

    name: str
    per_block: int
    make: Callable[[Tensor], Tensor]
    parameters: tuple[float, ...] = ()


def halves(number: int) -> tuple[int, int]:
    """Return the (low, high) 32-bit words of a 64-bit number."""
    return number & WORD, (number >> 32) & WORD


def _mix(high: Any, other: Any, key: int) -> Any:
    """Return (high ^ other ^ key) & WORD, in place if `high` is a tensor."""
    high ^= other
    high ^= key
    high &= WORD
    return high


def philox4x32(counter: Sequence, key: tuple[int, int]) -> tuple:
    """`philox4x32(counter: 4 words, key: 2 words) -> 4 words`: the ten rounds of Philox 4x32-10.

    A word of the counter is an int, or an int64 tensor or array of values in [0, 2**32); the
    results are tensors if the counter has one. int64 products wrap and shifts keep the sign, but
    the masks select the right unsigned halves.
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
    """`philox_blocks(seed, stream, block: int64 [...]) -> int64 [..., 4]`: words of blocks.

    The four words of each block number.
    """
    if block.device.type == "cpu" and block.numel() <= BLOCKS_IN_NUMPY:
        number = block.reshape(-1).numpy()
        return torch.from_numpy(
            np.stack(_words(seed, stream, number), axis=-1).reshape(*block.shape, 4)
        )
    return torch.stack(_words(seed, stream, block), dim=-1)


def _words(seed: int, stream: int, block: Any) -> tuple:
    return philox4x32((block & WORD, (block >> 32) & WORD, *halves(stream)), halves(seed))


def philox_uint32(seed: int, stream: int, index: Tensor) -> Tensor:
    """`philox_uint32(seed, stream, index: int64) -> int64`: the index-th 32-bit word.

    In [0, 2**32), elementwise.

    >>> philox_uint32(0, 0, torch.tensor([0, 1])).tolist() == [0x6627E8D5, 0xE169C58D]
    True
    """
    words = philox_blocks(seed, stream, index >> 2)
    return words.gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)


def box_index(shape: Sequence[int], box: Box, device: torch.device | str | None = None) -> Tensor:
    """`box_index(shape, box) -> int64 [box shape]`: the positions of the box's elements.

    In a row-major tensor of `shape`.

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
    """A box as rows of consecutive positions.

    Row r begins at `origin` plus the digits of r times the strides.
    """

    origin: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    length: int

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    def starts(self, row: RowT) -> RowT:
        """Return the start of a row, or of each row in a tensor of rows."""
        start = row * 0 + self.origin
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            start = start + (row % size) * stride
            row = row // size
        return start

    def tiles(self, limit: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (first row, rows, first column, columns) of tiles, in row-major order.

        Each of at most about `limit` elements.
        """
        if self.length > limit:
            for row in range(self.count):
                for column in range(0, self.length, limit):
                    yield row, 1, column, min(limit, self.length - column)
        else:
            at_once = limit // self.length
            for row in range(0, self.count, at_once):
                yield row, min(at_once, self.count - row), 0, self.length


def rows_of(shape: Sequence[int], box: Box) -> Rows:
    """`rows_of(shape, box) -> Rows`: the box as the fewest, longest rows."""
    strides = row_major_strides(shape)
    origin = sum(start * stride for start, stride in zip(box_origin(box), strides, strict=True))
    sizes, steps = merge_dims(box_shape(box), strides)
    if steps[-1] != 1:
        sizes, steps = (*sizes, 1), (*steps, 1)
    return Rows(origin, sizes[:-1], steps[:-1], sizes[-1])
