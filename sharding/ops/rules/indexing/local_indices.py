"""Local indices: the indices of a dim as indices into this rank's part.

For operators that index a split dim.

    x over 3 ranks            [a b c | d e | f]
    index, on every rank      [4 0 2 4]
    local index on rank 0     [. 0 2 .]       `.` is an element of another rank
    on rank 1                 [1 . . 1]

The indexed tensor is not moved. In a read, elements of other ranks give a neutral value, and the
result is pending as a sum, to which exactly one rank contributes; in a write, what belongs to other
ranks goes into one extra element that is then cut off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ....layout.layout import Layout
from ..decomposition_utils import layout_of


class Part:
    """This rank's part of one dim, or of several that are numbered together, as by `take`.

    Args:
        layout: the layout of the indexed tensor.
        dims: the dims that an index runs through.
        wraps: whether negative indices count from the end.
    """

    def __init__(self, layout: Layout, *dims: int, wraps: bool = False) -> None:
        self.boxes, self.sizes = [layout.box[d] for d in dims], [layout.shape[d] for d in dims]
        self.size, self.length = math.prod(self.sizes), math.prod(b - a for a, b in self.boxes)
        self.wraps = wraps

    def find(self, index: Tensor, elsewhere: int) -> tuple[Tensor, Tensor]:
        """Return local indices, `elsewhere` for those of other ranks, and which are this rank's.

        Indices that are out of range in the whole dim stay out of range, so that torch raises.
        """
        known = (index < self.size) & (index >= (-self.size if self.wraps else 0))
        rest = torch.where(index < 0, index + self.size, index) if self.wraps else index
        if len(self.sizes) == 1:
            local = rest - self.boxes[0][0]
            is_local = (local >= 0) & (local < self.length)
        else:
            local, is_local = self._in_boxes(rest, known)
        local = torch.where(is_local, local, torch.where(known, elsewhere, self.length + 1))
        return local, is_local

    def _in_boxes(self, rest: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        local, is_local, stride = torch.zeros_like(rest), known, 1
        for (start, stop), size in zip(reversed(self.boxes), reversed(self.sizes), strict=True):
            at = rest.remainder(max(size, 1)) - start
            local, is_local = local + at * stride, is_local & (at >= 0) & (at < stop - start)
            rest, stride = rest.div(max(size, 1), rounding_mode="floor"), stride * (stop - start)
        return local, is_local


def nothing(dtype: torch.dtype) -> complex | float | bool:
    """Return the neutral value of a sum: -0.0, since 0.0 + -0.0 is 0.0."""
    if dtype.is_complex:
        return complex(-0.0, -0.0)
    return -0.0 if dtype.is_floating_point else False


def kind_of_sum(dtype: torch.dtype) -> str:
    """Return the pending kind of results of which all but one are `nothing`."""
    return "max" if dtype is torch.bool else "sum"


def adds_in_parts(input: Tensor) -> bool:
    """Return whether values read from an operand may be left pending, as its own axes are."""
    adds = input.dtype.itemsize > 1 or not input.dtype.is_floating_point  # float8 does not add
    return adds and set(layout_of(input).pending.values()) <= {kind_of_sum(input.dtype)}


def reads_in_parts(input: Tensor, taken: int) -> bool:
    """Return whether to read each part by itself and leave the result of `taken` elements pending.

    That is where it is exact, and the result no larger than the operand, which would otherwise be
    gathered.
    """
    return adds_in_parts(input) and taken <= input.numel()


def mask_values(is_local: Tensor, values: Tensor, after: int = 0) -> Tensor:
    """Return the values read, neutral where not `is_local`, which has no `after` last dims."""
    return values.masked_fill(
        ~is_local.reshape((*is_local.shape, *[1] * after)), nothing(values.dtype)
    )


def not_empty(local: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the part with one element along those of these dims that are empty."""
    for d in dims:
        if not local.shape[d]:
            local = pad_by_one(local, d)
    return local


def pad_by_one(local: Tensor, dim: int) -> Tensor:
    """Return the part with one extra element along a dim, for what belongs to other ranks."""
    shape = [1 if d == dim else n for d, n in enumerate(local.shape)]
    return torch.cat([local, local.new_ones(shape)], dim)
