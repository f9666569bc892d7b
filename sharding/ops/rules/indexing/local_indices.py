"""Numbers of a dim as places in this rank's part of it: how operators that index read and write a split dim.

    x over 3 ranks            [a b c | d e | f]
    index, on every rank      [4 0 2 4]
    places on rank 0          [. 0 2 .]       `.` is a place that another rank holds
    on rank 1                 [1 . . 1]

Nobody sends the indexed tensor. In a read, every place held elsewhere gives nothing, and the result is pending as a sum, to
which exactly one rank contributes; in a write, what belongs elsewhere goes into one more element that is then cut off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ....layout.layout import Layout
from ..decomposition_utils import layout_of


class Part:
    """This rank's part of one dim, or of several dims numbered together in row-major order (as `take` numbers them).

    Args:
        layout: how the indexed tensor lies.
        dims: the dims that an index counts through.
        wraps: whether negative numbers count from the end.
    """

    def __init__(self, layout: Layout, *dims: int, wraps: bool = False) -> None:
        self.boxes, self.sizes = [layout.box[d] for d in dims], [layout.shape[d] for d in dims]
        self.size, self.length, self.wraps = math.prod(self.sizes), math.prod(b - a for a, b in self.boxes), wraps

    def find(self, index: Tensor, elsewhere: int) -> tuple[Tensor, Tensor]:
        """Places in this part, and which of them are this rank's; others are `elsewhere`.

        Numbers that are out of range in the whole dim stay so, for torch to complain of.
        """
        known = (index < self.size) & (index >= (-self.size if self.wraps else 0))
        rest = torch.where(index < 0, index + self.size, index) if self.wraps else index
        place, mine = self._here(rest) if len(self.sizes) == 1 else self._here_jointly(rest, known)
        return torch.where(mine, place, torch.where(known, elsewhere, self.length + 1)), mine

    def _here(self, index: Tensor) -> tuple[Tensor, Tensor]:
        place = index - self.boxes[0][0]
        return place, (place >= 0) & (place < self.length)

    def _here_jointly(self, rest: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        place, mine, stride = torch.zeros_like(rest), known, 1
        for (start, stop), size in zip(reversed(self.boxes), reversed(self.sizes), strict=True):
            at = rest.remainder(max(size, 1)) - start
            place, mine = place + at * stride, mine & (at >= 0) & (at < stop - start)
            rest, stride = rest.div(max(size, 1), rounding_mode="floor"), stride * (stop - start)
        return place, mine


def nothing(dtype: torch.dtype) -> complex | float | bool:
    """What leaves every value as it is when it is added: not 0.0, which makes -0.0 of a sum positive."""
    if dtype.is_complex:
        return complex(-0.0, -0.0)
    return -0.0 if dtype.is_floating_point else False


def kind_of_sum(dtype: torch.dtype) -> str:
    """How results combine of which all but one are `nothing`."""
    return "max" if dtype is torch.bool else "sum"


def adds_in_parts(input: Tensor) -> bool:
    """Whether values read from an operand may be left pending, beside what is pending in it. For makers: it is a meta tensor."""
    adds = input.dtype.itemsize > 1 or not input.dtype.is_floating_point  # float8 does not add
    return adds and set(layout_of(input).pending.values()) <= {kind_of_sum(input.dtype)}


def reads_in_parts(input: Tensor, taken: int) -> bool:
    """Whether to read each part of an operand by itself and leave the result of `taken` elements pending: where that is exact,
    and the result no larger than the operand, which would otherwise be gathered."""
    return adds_in_parts(input) and taken <= input.numel()


def kept(mine: Tensor, found: Tensor, after: int = 0) -> Tensor:
    """What was read, without what other ranks hold; `mine` lacks the last `after` dims."""
    return found.masked_fill(~mine.reshape((*mine.shape, *[1] * after)), nothing(found.dtype))


def not_empty(local: Tensor, dims: Sequence[int]) -> Tensor:
    """The part with one element along each of these dims where it has none, so that place 0 exists."""
    for d in dims:
        if not local.shape[d]:
            local = widened(local, d)
    return local


def widened(local: Tensor, dim: int) -> Tensor:
    """The part with one more element along a dim: the place for what other ranks hold."""
    shape = [1 if d == dim else n for d, n in enumerate(local.shape)]
    return torch.cat([local, local.new_ones(shape)], dim)
