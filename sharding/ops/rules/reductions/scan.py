"""Running sums, products and extremes along a split dim: only one total of each part is
communicated.

    x over 3 ranks     [1 2 3 | 4 5 6 | 7 8 9]
    totals             [6     | 15    | 24   ]      gathered: one element of the dim from each rank
    before             []       [6]     [6 15]
    cumsum(before, x)  [1 3 6 | 6 10 15 21 | 6 21 28 36 45]
    without `before`   [1 3 6 |   10 15 21 |      28 36 45]

The preceding totals are scanned together with the part, so that values and gradients are those of
the operator itself. A rank without elements has no total.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....layout.layout import Layout
from ....redistribute.autograd import redistribute_locals
from ..decomposition_utils import (
    all_from_parts,
    from_parts,
    is_split,
    layout_of,
    part_sizes,
    reduce_pending,
    with_dim,
    with_part_sizes,
    without_pending,
)
from ..nn.window import joined
from ..registry import decomposition_maker
from .reduction import accumulator_dtype

Scan = Callable[[Tensor, int], Tensor]
Total = Callable[[Tensor, int], Tensor]


class _Parts:
    """The totals of the parts of one dim.

    Attributes:
        totals: the layout of all totals, of which each rank that has elements has one.
        gathered: the same, with all of them on every rank.
        before: the number of totals before this rank's part.
    """

    def __init__(self, layout: Layout, dim: int) -> None:
        self.dim = dim
        counts = [min(size, 1) for size in part_sizes(layout, dim)]
        self.totals = with_part_sizes(layout, dim, counts)
        self.gathered = with_dim(layout, dim, (), sum(counts))
        self.before = self.totals.box[dim][0]

    def gather(self, *totals: Tensor) -> list[Tensor]:
        """Return, of each of these totals, those of the parts before this rank's. All ranks' totals
        are inputs of their graph.
        """
        pairs = [
            (self.totals.replace(dtype=x.dtype), self.gathered.replace(dtype=x.dtype))
            for x in totals
        ]
        return [x.narrow(self.dim, 0, self.before) for x in redistribute_locals(totals, pairs)]

    def own(self, scanned: Tensor, part: Tensor) -> Tensor:
        """Return this rank's part of a scan over the preceding totals and the part."""
        return scanned.narrow(self.dim, self.before, part.shape[self.dim])


def _scanned(
    parts: _Parts, scan: Scan, total: Total, dtype: torch.dtype | None, part: Tensor
) -> Tensor:
    """Return this rank's part of the scan, in the dtype that torch gives it (which depends on
    autocast), accumulated as torch does.
    """
    result = dtype or scan(part.detach().narrow(parts.dim, 0, 0), parts.dim).dtype
    wide = part.to(accumulator_dtype(result))
    one = total(wide, parts.dim) if wide.shape[parts.dim] else wide
    (before,) = parts.gather(one)
    scanned = parts.own(scan(torch.cat([before, wide], parts.dim), parts.dim), part)
    return joined(scanned, before, linear=scan is torch.cumsum).to(
        result
    )  # the first rank needs `before` in its graph only


def _register(scan: Scan, total: Total, linear: bool) -> None:
    """Register the decomposition of a scan in which a part's total can stand for the part in later
    parts.
    """

    @decomposition_maker(scan.__name__)
    def make(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        result = scan(input if dtype is None else input.to(dtype), dim)
        if not input.ndim or not is_split(input, [dim]):
            return None
        layout = layout_of(input)
        kept = linear and layout.only_sums and result.dtype is input.dtype
        source = layout if kept else without_pending(layout)
        local = partial(_scanned, _Parts(source, dim % input.ndim), scan, total, dtype)
        target = source.replace(dtype=result.dtype)
        return lambda input, *_, **__: from_parts(
            target, local, input if kept else reduce_pending(input)
        )


_register(torch.cumsum, partial(torch.sum, keepdim=True), True)
_register(torch.cumprod, partial(torch.prod, keepdim=True), False)
_register(torch.logcumsumexp, partial(torch.logsumexp, keepdim=True), False)


# -- extremes, and where they are ------------------------------------------------------------------


def _register_extreme(scan: Callable[..., Any]) -> None:
    """Register the decomposition of cummax or cummin: of each part its extreme is sent, with its
    index in the whole dim.
    """

    @decomposition_maker(scan.__name__)
    def make(input: Tensor, dim: int) -> Callable[..., Any] | None:
        results = scan(input, dim)
        if not input.ndim or not is_split(input, [dim]):
            return None
        source = without_pending(layout_of(input))
        local = partial(_extremes, scan, _Parts(source, dim % input.ndim), source.box[dim][0])
        layouts, container = [source, source.replace(dtype=torch.int64)], type(results)
        return lambda input, *_, **__: container(
            all_from_parts(layouts, local, reduce_pending(input))
        )


_register_extreme(torch.cummax)
_register_extreme(torch.cummin)


def _located(scan: Callable[..., Any], x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the scan; of no elements the operand itself, since torch's result would not be in its
    autograd graph.
    """
    return scan(x, dim) if x.numel() else (x, torch.zeros_like(x, dtype=torch.int64))


def _extremes(scan: Callable[..., Any], parts: _Parts, start: int, part: Tensor) -> list[Tensor]:
    dim, length = parts.dim, part.shape[parts.dim]
    values, indices = _located(scan, part, dim)
    last = min(length, 1)
    values, indices = parts.gather(
        values.narrow(dim, length - last, last), indices.narrow(dim, length - last, last) + start
    )
    own = torch.arange(start, start + length, device=part.device).view(
        [-1 if d == dim else 1 for d in range(part.ndim)]
    )
    everywhere = torch.cat([indices, own.expand(part.shape)], dim)
    values, chosen = _located(scan, torch.cat([values, part], dim), dim)
    return [parts.own(values, part), everywhere.gather(dim, parts.own(chosen, part))]
