"""Running sums, products and extremes along a split dim.

Only one total of each part is communicated.

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
from ..nn.window import with_graph_of
from ..registry import decomposition_maker
from .reduction import accumulator_dtype

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
        """Return, of each of these, the totals before this rank's part; all are in their graph."""
        pairs = [
            (self.totals.replace(dtype=x.dtype), self.gathered.replace(dtype=x.dtype))
            for x in totals
        ]
        return [x.narrow(self.dim, 0, self.before) for x in redistribute_locals(totals, pairs)]

    def own(self, scanned: Tensor, part: Tensor) -> Tensor:
        """Return this rank's part of a scan over the preceding totals and the part."""
        return scanned.narrow(self.dim, self.before, part.shape[self.dim])


def _scan_part(parts: _Parts, scan: Any, dtype: torch.dtype | None, part: Tensor) -> Tensor:
    """Return this rank's part of the scan, in torch's dtype (under autocast, too) and precision."""
    result = dtype or scan(part.detach().narrow(parts.dim, 0, 0), parts.dim).dtype
    wide = part.to(accumulator_dtype(result))
    one = _TOTALS[scan.__name__](wide, parts.dim) if wide.shape[parts.dim] else wide
    (before,) = parts.gather(one)
    scanned = parts.own(scan(torch.cat([before, wide], parts.dim), parts.dim), part)
    # the first rank needs `before` in its graph only
    return with_graph_of(scanned, before, linear=scan.__name__ == "cumsum").to(result)


_TOTALS: dict[str, Total] = {
    "cumsum": partial(torch.sum, keepdim=True),
    "cumprod": partial(torch.prod, keepdim=True),
    "logcumsumexp": partial(torch.logsumexp, keepdim=True),
}


@decomposition_maker(*_TOTALS, with_func=True)
def _scan(scan: Any, input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Let a part's total stand for the part in later parts."""
    result = scan(input if dtype is None else input.to(dtype), dim)
    if not input.ndim or not is_split(input, [dim]):
        return None
    layout = layout_of(input)
    is_linear = scan.__name__ == "cumsum" and layout.only_sums and result.dtype is input.dtype
    source = layout if is_linear else without_pending(layout)
    local = partial(_scan_part, _Parts(source, dim % input.ndim), scan, dtype)
    target = source.replace(dtype=result.dtype)
    return lambda input, *_, **__: from_parts(
        target, local, input if is_linear else reduce_pending(input)
    )


# -- extremes, and where they are ------------------------------------------------------------------


@decomposition_maker("cummax", "cummin", with_func=True)
def _scan_extremes(scan: Any, input: Tensor, dim: int) -> Callable[..., Any] | None:
    """Send the extreme of each part, with its index in the whole dim."""
    results = scan(input, dim)
    if not input.ndim or not is_split(input, [dim]):
        return None
    source = without_pending(layout_of(input))
    local = partial(_extremes, scan, _Parts(source, dim % input.ndim), source.box[dim][0])
    layouts, container = [source, source.replace(dtype=torch.int64)], type(results)
    return lambda input, *_, **__: container(all_from_parts(layouts, local, reduce_pending(input)))


def _scan_or_operand(scan: Callable[..., Any], x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the scan; of no elements the operand, as torch's result would not be in the graph."""
    return scan(x, dim) if x.numel() else (x, torch.zeros_like(x, dtype=torch.int64))


def _extremes(scan: Callable[..., Any], parts: _Parts, start: int, part: Tensor) -> list[Tensor]:
    dim, length = parts.dim, part.shape[parts.dim]
    values, indices = _scan_or_operand(scan, part, dim)
    last = min(length, 1)
    values, indices = parts.gather(
        values.narrow(dim, length - last, last), indices.narrow(dim, length - last, last) + start
    )
    own = torch.arange(start, start + length, device=part.device).view(
        [-1 if d == dim else 1 for d in range(part.ndim)]
    )
    everywhere = torch.cat([indices, own.expand(part.shape)], dim)
    values, chosen = _scan_or_operand(scan, torch.cat([values, part], dim), dim)
    return [parts.own(values, part), everywhere.gather(dim, parts.own(chosen, part))]
