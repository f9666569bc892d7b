"""Operators that count: places in a sorted sequence, membership, histograms.

All of them add up over parts: how many elements of a sorted sequence are smaller than a value is the sum of how many are in
each part, so neither the sequence nor the counted tensor has to be whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....layout.layout import Layout
from ....layout.spec import P
from ...dispatch import wrap
from ..decomposition_utils import all_splitting_axes, replicated, settled, splits
from ..elementwise.pointwise import is_operand, tensors_of
from ..indexing.masked import check_inside
from ..notation import Rule, einrule
from ..registry import form, rule


@rule("searchsorted")
def _searchsorted(sorted_sequence: Tensor, input: Any = None, *, sorter: Tensor | None = None, **options: Any) -> Rule | None:
    values = options.get("self", input)
    if not is_operand(sorted_sequence) or (sorter is not None and not is_operand(sorter)):
        return None
    lead = " ".join(f"b{d}" for d in range(sorted_sequence.ndim - 1))
    each = " ".join(f"v{d}" for d in range(values.ndim)) if sorted_sequence.ndim == 1 and is_operand(values) else f"{lead} v"
    row = f"{lead} [n]" if sorter is not None else f"{lead} n"
    if not is_operand(values):
        return einrule(f"{row}, {row} ->", sorted_sequence, sorter) if sorted_sequence.ndim == 1 else None
    return einrule(f"{row}, {each}, {row} -> {each}", sorted_sequence, values, sorter)


@rule("bucketize")
def _bucketize(input: Any, boundaries: Tensor, **options: Any) -> Rule | None:
    if not is_operand(boundaries):
        return None
    if not is_operand(input):
        return einrule("n ->", boundaries)
    dims = " ".join(f"d{d}" for d in range(input.ndim))
    return einrule(f"{dims}, n -> {dims}", input, boundaries)


@rule("isin")
def _isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Rule:
    """Found in any part, or missing from all."""
    operands = tensors_of(elements, test_elements)
    dims = [" ".join(f"{name}{d}" for d in range(x.ndim)) for name, x in (("e", elements), ("t", test_elements)) if is_operand(x)]
    result = dims[0] if is_operand(elements) else ""
    return einrule(f"{', '.join(dims)} -> {result}", *operands, combine="min" if invert else "max")


# -- histograms --------------------------------------------------------------------------------------------------------


def _summed(x: Any, local: Tensor) -> Any:
    """This rank's counts of what it holds of x, as a pending sum over the axes that split x."""
    check_inside(x.mesh)
    return wrap(local, Layout.of(x.mesh, P(unreduced=all_splitting_axes(x._layout)), local.shape, local.dtype))


@form("bincount")
def _bincount_form(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Callable[..., Any] | None:
    return _bincount if is_operand(input) and input.ndim == 1 and (weights is None or is_operand(weights)) else None


def _bincount(input: Any, weights: Any = None, minlength: int = 0) -> Any:
    """The largest number says how long the result is; then every rank counts its own part.

    Raises:
        RuntimeError: a negative number, on every rank alike.
    """
    x = settled(input)
    low, high = (int(extreme) for extreme in torch.aminmax(x)) if x.numel() else (0, -1)
    if low < 0:
        raise RuntimeError(f"bincount only supports 1-d non-negative integral inputs, and {low} is among these")
    given = None if weights is None else settled(weights).redistribute(x.spec)._local
    counts = torch.bincount(x._local, given, max(minlength, high + 1))
    if given is not None and not x._local.numel():  # torch forgets the weights of an empty part
        counts = counts.to(torch.float32 if given.dtype is torch.float32 else torch.float64)
    return _summed(x, counts)


@form("histc")
def _histc_form(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Callable[..., Any] | None:
    return partial(_histc) if splits(input, range(input.ndim)) and input.numel() else None


def _histc(input: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Between the least and the greatest element of all where no limits are given, as in torch."""
    x = settled(input.detach())
    if min == max:
        min, max = (extreme.item() for extreme in torch.aminmax(x))
    if min == max:
        min, max = min - 1, max + 1
    return _summed(x, torch.histc(x._local, bins, min, max))


@rule("histc")
def _histc_whole(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Rule:
    return einrule(f"{' '.join(f'[d{d}]' for d in range(input.ndim))} -> 1", input)


@form(also=(torch.histogram, torch.Tensor.histogram))
def _histogram_form(input: Tensor, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    return _histogram if isinstance(bins, int) and input.numel() else None


def _histogram(input: Any, bins: int, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    x = settled(input.detach())
    low, high = range or [extreme.item() for extreme in torch.aminmax(x)]
    low, high = (low, high) if low < high else (low - 0.5, high + 0.5)
    given = None if weight is None else settled(weight.detach()).redistribute(x.spec)._local
    local = torch.histogram(x._local, bins, range=(low, high), weight=given)
    edges = replicated(local.bin_edges, x)
    counts = _summed(x, local.hist)
    if density:
        counts = settled(counts)
        counts = counts / (counts.sum() * edges.diff())
    return torch.return_types.histogram((counts, edges))
