"""Running sums, products and extremes along a split dim, of which only the totals of the parts travel.

    x over 3 ranks     [1 2 3 | 4 5 6 | 7 8 9]
    totals             [6     | 15    | 24   ]      gathered: one element of the dim from each rank
    before             []       [6]     [6 15]
    cumsum(before, x)  [1 3 6 | 6 10 15 21 | 6 21 28 36 45]
    without `before`   [1 3 6 |   10 15 21 |      28 36 45]

The totals that come before are scanned together with the part, so that values and gradients are those of the same operator.
A rank without elements has no total.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....layout.layout import Layout
from ....redistribute.autograd import redistribute_locals
from ..decomposition_utils import all_from_parts, from_parts, layout_of, part_sizes, resized, settled, splits, with_dim
from ..nn.window import joined
from ..registry import form
from .reduction import accumulator_dtype

Scan = Callable[[Tensor, int], Tensor]
Total = Callable[[Tensor, int], Tensor]


class _Parts:
    """How the totals of the parts of one dim travel.

    Attributes:
        totals: the layout of all totals, of which each rank that has elements has one.
        gathered: the same, with all of them on every rank.
        before: the number of totals that come before this rank's part.
    """

    def __init__(self, layout: Layout, dim: int) -> None:
        self.dim = dim
        counts = [min(size, 1) for size in part_sizes(layout, dim)]
        self.totals = resized(layout, dim, counts)
        self.gathered = with_dim(layout, dim, (), sum(counts))
        self.before = self.totals.box[dim][0]

    def gather(self, *totals: Tensor) -> list[Tensor]:
        """Of each of these totals those that come before; from all ranks, which are behind all of them in the graph."""
        pairs = [(self.totals.replace(dtype=x.dtype), self.gathered.replace(dtype=x.dtype)) for x in totals]
        return [x.narrow(self.dim, 0, self.before) for x in redistribute_locals(totals, pairs)]

    def own(self, scanned: Tensor, part: Tensor) -> Tensor:
        """Of a scan over those and the part, what belongs to this rank's part."""
        return scanned.narrow(self.dim, self.before, part.shape[self.dim])


def _scanned(parts: _Parts, scan: Scan, total: Total, dtype: torch.dtype | None, part: Tensor) -> Tensor:
    """This rank's part of the scan, in the dtype that torch gives it (autocast has a say), added up as torch does."""
    result = dtype or scan(part.detach().narrow(parts.dim, 0, 0), parts.dim).dtype
    wide = part.to(accumulator_dtype(result))
    one = total(wide, parts.dim) if wide.shape[parts.dim] else wide
    (before,) = parts.gather(one)
    scanned = parts.own(scan(torch.cat([before, wide], parts.dim), parts.dim), part)
    return joined(scanned, before, linear=scan is torch.cumsum).to(result)  # the first rank's own numbers may be all that it needs


def _form(scan: Scan, total: Total, linear: bool, input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """The form of a scan for which a part's total is as good as the part, for what comes after it."""
    result = scan(input if dtype is None else input.to(dtype), dim)
    if not input.ndim or not splits(input, [dim]):
        return None
    layout = layout_of(input)
    kept = linear and layout.only_sums and result.dtype is input.dtype
    source = layout if kept else layout.replace(layout.spec.with_unreduced({}))
    local = partial(_scanned, _Parts(source, dim % input.ndim), scan, total, dtype)
    target = source.replace(dtype=result.dtype)
    return lambda input, *_, **__: from_parts(target, local, input if kept else settled(input))


form("cumsum")(partial(_form, torch.cumsum, partial(torch.sum, keepdim=True), True))
form("cumprod")(partial(_form, torch.cumprod, partial(torch.prod, keepdim=True), False))
form("logcumsumexp")(partial(_form, torch.logcumsumexp, partial(torch.logsumexp, keepdim=True), False))


# -- extremes, and where they are -------------------------------------------------------------------------------------


def _extreme(scan: Callable[..., Any], input: Tensor, dim: int) -> Callable[..., Any] | None:
    """cummax or cummin: of each part its extreme travels, with its place in the whole dim."""
    results = scan(input, dim)
    if not input.ndim or not splits(input, [dim]):
        return None
    layout = layout_of(input)
    source = layout.replace(layout.spec.with_unreduced({}))
    local = partial(_extremes, scan, _Parts(source, dim % input.ndim), source.box[dim][0])
    layouts, container = [source, source.replace(dtype=torch.int64)], type(results)
    return lambda input, *_, **__: container(all_from_parts(layouts, local, settled(input)))


def _located(scan: Callable[..., Any], x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The scan; torch's own backward leaves the graph where there are no elements."""
    return scan(x, dim) if x.numel() else (x, torch.zeros_like(x, dtype=torch.int64))


def _extremes(scan: Callable[..., Any], parts: _Parts, start: int, part: Tensor) -> list[Tensor]:
    dim, length = parts.dim, part.shape[parts.dim]
    values, places = _located(scan, part, dim)
    last = min(length, 1)
    values, places = parts.gather(values.narrow(dim, length - last, last), places.narrow(dim, length - last, last) + start)
    own = torch.arange(start, start + length, device=part.device).view([-1 if d == dim else 1 for d in range(part.ndim)])
    everywhere = torch.cat([places, own.expand(part.shape)], dim)
    values, chosen = _located(scan, torch.cat([values, part], dim), dim)
    return [parts.own(values, part), everywhere.gather(dim, parts.own(chosen, part))]


form("cummax")(partial(_extreme, torch.cummax))
form("cummin")(partial(_extreme, torch.cummin))
