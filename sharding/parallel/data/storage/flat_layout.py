"""The positions of tensors in one buffer that is split into equal pieces.

Every boundary is between two rows of a tensor.

    3 tensors, 2 pieces     | a a a | b b b   b b b | c |
                            |  piece of rank 0      .      piece of rank 1  |

A rank's piece then has whole rows: the output of an all_gather is the tensors one after the other,
and the input of a reduce_scatter is the gradients one after the other. Nothing is packed or
unpacked. Where a row would cross a boundary, a few elements before the tensor are padding.

Tensors and pieces start at multiples of 64 elements if that lengthens the buffer by at most 1/256,
else of 8, else anywhere. Matrix products on GPUs read 16 bytes at a time, and use slow kernels if a
weight starts elsewhere, as it would after a scale of one element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

_TRIES = 4096  # lengths of a piece to try before no tensor is split
# Elements, the first that fits: 128 and 16 bytes of the smallest dtype that is common, more of
# others.
_ALIGNMENTS = 64, 8
_PADDING = 256  # alignment adds at most this part of the shortest buffer


@dataclass(frozen=True)
class FlatLayout:
    """A buffer of `parts` equal pieces.

    Attributes:
        piece: elements in a piece.
        offsets: where each tensor starts in the buffer.
        rows: elements in a row of each tensor; if 0, all its rows are in the first piece.
    """

    parts: int
    piece: int
    offsets: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def length(self) -> int:
        """Elements in the buffer."""
        return self.parts * self.piece

    def rows_of(self, tensor: int, part: int, count: int) -> tuple[int, int]:
        """Return the rows [start, stop) of a tensor with `count` rows that are in a piece."""
        start, row = self.offsets[tensor], self.rows[tensor]
        if row == 0:
            return (0, count) if part == 0 else (count, count)
        low, high = ((part + i) * self.piece - start for i in (0, 1))
        return tuple(min(max(-(-end // row), 0), count) for end in (low, high))  # type: ignore[return-value]


@lru_cache(1024)
def make_flat_layout(lengths: tuple[int, ...], rows: tuple[int, ...], parts: int) -> FlatLayout:
    """Return the layout with the shortest pieces for tensors of these lengths.

    The tensors follow each other, with aligned starts; the search is not exhaustive.

    Args:
        lengths: elements in each tensor.
        rows: elements in a row of each: a tensor is split at multiples of it only.
        parts: number of pieces.
    """
    shortest = _make(lengths, rows, parts, 1, math.inf)
    if shortest is None:
        raise AssertionError("pieces as long as all tensors together hold them")
    longest = shortest.length + shortest.length // _PADDING
    return next(
        (
            layout
            for align in _ALIGNMENTS
            if (layout := _make(lengths, rows, parts, align, longest))
        ),
        shortest,
    )


def _make(
    lengths: tuple[int, ...], rows: tuple[int, ...], parts: int, align: int, longest: float
) -> FlatLayout | None:
    """Return the layout with the shortest pieces whose starts are multiples of `align`.

    None if there is none of at most this length.
    """
    least = tuple(max(row, 1) for row in rows)
    for allowed in (least, tuple(map(max, lengths, least))):  # the second: no tensor is split
        for piece in _candidates(lengths, allowed, parts, align):
            if piece * parts > longest:
                break
            offsets = _starts(lengths, allowed, piece, parts, align)
            if offsets is not None:
                return FlatLayout(parts, piece, offsets, rows)
    return None


def _candidates(
    lengths: Sequence[int], rows: Sequence[int], parts: int, align: int
) -> Iterator[int]:
    """Yield lengths of a piece, short ones first; the last one fits everything."""
    total = sum(_round_up(length, align) for length in lengths)
    shortest = _round_up(-(-sum(lengths) // parts), align)
    step = math.lcm(math.gcd(*(row for row in rows if row > 1)) or 1, align)
    start = _round_up(shortest, step)
    yield shortest
    yield from range(start, start + _TRIES * step, step)
    if all(row >= length for length, row in zip(lengths, rows, strict=True)):
        yield from range(start + _TRIES * step, total, max(step, _round_up(total // _TRIES, align)))
        yield total


def _starts(
    lengths: Sequence[int], rows: Sequence[int], piece: int, parts: int, align: int
) -> tuple[int, ...] | None:
    """Return where each tensor starts, None if they do not fit."""
    end, offsets = 0, []
    for length, row in zip(lengths, rows, strict=True):
        start = _start(
            _round_up(end, align) if length else end, length, row, piece, piece * parts, align
        )
        if start is None:
            return None
        offsets.append(start)
        end = start + length
    return tuple(offsets)


def _start(end: int, length: int, row: int, piece: int, total: int, align: int) -> int | None:
    """Return the first start from `end` on with each boundary between two rows.

    A multiple of `align`. None if there is none.
    """
    start = end
    while start + length <= total:
        first = (start // piece + 1) * piece if piece else start
        if start + length <= first:
            return start
        gap = (first - start) % math.lcm(row, align)
        if gap == 0:
            return start if piece % row == 0 or start + length <= first + piece else None
        start += gap
    return None


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
