"""Differences and integrals along a dim: diff, gradient, trapezoid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....redistribute.interval_exchange import IntervalExchange
from ..decomposition_utils import evenly_split, is_split, layout_of, sequential
from ..registry import decomposition, decomposition_maker
from ..shapes.view import with_whole_dims

Decomposition = Callable[..., Any]


@decomposition_maker("diff", rule=lambda a: with_whole_dims(a.input, [a.dim]))
def _diff(
    input: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None
) -> Decomposition | None:
    """Fetch the next `n` elements after this rank's part, after joining `prepend` and `append`."""
    size = torch.diff(input, n, dim, prepend, append).shape[dim]
    if n == 0:  # torch then ignores `prepend` and `append`
        return lambda input, *_, **__: input.clone()
    if prepend is not None or append is not None:
        return lambda input, n=1, dim=-1, prepend=None, append=None: torch.cat(
            [x for x in (prepend, input, append) if x is not None], dim
        ).diff(n, dim)
    if not is_split(input, [dim]):
        return None
    dim, layout = dim % input.ndim, layout_of(input)
    target = evenly_split(layout, dim, size)
    fetch = IntervalExchange(
        layout, target, dim, lambda start, stop: [(start, stop + n)] if stop > start else []
    )
    return sequential(target, fetch, lambda part: part.diff(n, dim))


# -- gradient --------------------------------------------------------------------------------------


@decomposition_maker("gradient")
def _gradient(
    input: Tensor, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1
) -> Decomposition | None:
    """Take central differences, one-sided at the ends; coordinates are left to torch."""
    spacings = list(spacing) if isinstance(spacing, (list, tuple)) else [spacing]
    if not all(isinstance(h, (int, float)) for h in spacings):
        return None
    container = type(torch.gradient(input, spacing=spacing, dim=dim, edge_order=edge_order))
    dims = [dim] if isinstance(dim, int) else list(range(input.ndim) if dim is None else dim)

    def run(input: Any, *, spacing: Any = 1, **_: Any) -> Any:
        distances = list(spacing) if isinstance(spacing, (list, tuple)) else [spacing] * len(dims)
        return container(
            _slope(input, d, h, edge_order) for d, h in zip(dims, distances, strict=True)
        )

    return run


def _slope(x: Any, dim: int, distance: float, edge_order: int) -> Any:
    size = x.shape[dim]
    inside = (x.narrow(dim, 2, size - 2) - x.narrow(dim, 0, size - 2)) / (2 * distance)
    first = x.narrow(dim, 0, edge_order + 1)
    last = x.narrow(dim, size - edge_order - 1, edge_order + 1)
    return torch.cat(
        [_end(first, dim, distance), inside, -_end(last.flip(dim), dim, distance)], dim
    )


def _end(x: Any, dim: int, distance: float) -> Any:
    """Return the slope at the first of two or three values."""
    weights = (-1.0, 1.0) if x.shape[dim] == 2 else (-1.5, 2.0, -0.5)
    return sum(x.narrow(dim, i, 1) * (w / distance) for i, w in enumerate(weights))


# -- areas -----------------------------------------------------------------------------------------


@decomposition("trapezoid", "trapz", check=torch.trapezoid, when=lambda a: a.y.shape[a.dim])
def _trapezoid(y: Any, x: Any = None, *, dx: float = 1, dim: int = -1) -> Any:
    if x is None:
        return (y.sum(dim) - (y.select(dim, 0) + y.select(dim, -1)) * 0.5) * dx
    return (_pairs(y, dim) * _widths(x, y.ndim, dim)).sum(dim) / 2


@decomposition(
    "cumulative_trapezoid", check=torch.cumulative_trapezoid, when=lambda a: a.y.shape[a.dim]
)
def _cumulative_trapezoid(y: Any, x: Any = None, *, dx: float = 1, dim: int = -1) -> Any:
    areas = _pairs(y, dim) * (dx if x is None else _widths(x, y.ndim, dim))
    return (areas / 2).cumsum(dim)


def _pairs(y: Any, dim: int) -> Any:
    """Return the sums of neighbours."""
    size = y.shape[dim] - 1
    return y.narrow(dim, 0, size) + y.narrow(dim, 1, size)


def _widths(x: Any, ndim: int, dim: int) -> Any:
    """Return the distances of neighbours along `dim`, for `x` of one dim or of the last dims."""
    if x.ndim == 1:
        return x.diff().reshape([-1 if d == dim % ndim else 1 for d in range(ndim)])
    return x.reshape([1] * (ndim - x.ndim) + list(x.shape)).diff(dim=dim)
