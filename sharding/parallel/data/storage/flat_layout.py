"""Where tensors lie in one buffer that is cut into equal pieces, so that every cut falls between two rows of a tensor.

    3 tensors, 2 pieces     | a a a | b b b   b b b | c |
                            |  piece of rank 0      .      piece of rank 1  |

A rank's piece is then whole rows of whole tensors: an all_gather of the pieces is the tensors, one after the other, and what a
reduce_scatter needs is the gradients, one after the other. Nothing is packed or unpacked. Where rows do not meet a cut, a few elements are
left empty before a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

_TRIES = 4096  # lengths of a piece that are tried before tensors are left uncut


@dataclass(frozen=True)
class Cutting:
    """A buffer of `parts` pieces.

    Attributes:
        piece: elements of a piece.
        offsets: where each tensor starts in the buffer.
        rows: elements of a row of each tensor; rows of none lie in the first piece.
    """

    parts: int
    piece: int
    offsets: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def length(self) -> int:
        """Elements of the buffer."""
        return self.parts * self.piece

    def rows_of(self, tensor: int, part: int, count: int) -> tuple[int, int]:
        """The first row of a tensor of `count` rows that lies in a piece, and the row behind its last one."""
        start, row = self.offsets[tensor], self.rows[tensor]
        if row == 0:
            return (0, count) if part == 0 else (count, count)
        low, high = ((part + i) * self.piece - start for i in (0, 1))
        return tuple(min(max(-(-end // row), 0), count) for end in (low, high))  # type: ignore[return-value]


@lru_cache(1024)
def cut(lengths: tuple[int, ...], rows: tuple[int, ...], parts: int) -> Cutting:
    """The shortest pieces found in which tensors of these lengths fit, one after the other.

    Args:
        lengths: elements of each tensor.
        rows: elements of a row of each: a tensor is cut at multiples of it only.
        parts: number of pieces.
    """
    least = tuple(max(row, 1) for row in rows)
    for allowed in (least, tuple(map(max, lengths, least))):  # the second: no tensor is cut
        for piece in _candidates(lengths, allowed, parts):
            offsets = _placed(lengths, allowed, piece, parts)
            if offsets is not None:
                return Cutting(parts, piece, offsets, rows)
    raise AssertionError("pieces as long as all tensors together hold them")


def _candidates(lengths: Sequence[int], rows: Sequence[int], parts: int) -> Iterator[int]:
    """Lengths of a piece, short ones first; the last is long enough for everything."""
    total = sum(lengths)
    shortest, step = -(-total // parts), math.gcd(*(row for row in rows if row > 1)) or 1
    start = -(-shortest // step) * step
    yield shortest
    yield from range(start, start + _TRIES * step, step)
    if all(row >= length for length, row in zip(lengths, rows, strict=True)):
        yield from range(start + _TRIES * step, total, max(step, total // _TRIES))
        yield total


def _placed(lengths: Sequence[int], rows: Sequence[int], piece: int, parts: int) -> tuple[int, ...] | None:
    """Where each tensor starts; None if they do not fit."""
    end, offsets = 0, []
    for length, row in zip(lengths, rows, strict=True):
        start = _start(end, length, row, piece, piece * parts)
        if start is None:
            return None
        offsets.append(start)
        end = start + length
    return tuple(offsets)


def _start(end: int, length: int, row: int, piece: int, total: int) -> int | None:
    """The first place from `end` on where each cut in the tensor falls between two rows."""
    start = end
    while start + length <= total:
        first = (start // piece + 1) * piece if piece else start
        if start + length <= first:
            return start
        gap = (first - start) % row
        if gap == 0:
            return start if piece % row == 0 or start + length <= first + piece else None
        start += gap
    return None
