"""Operators that count: positions in a sorted sequence, membership, histograms.

Counts of parts add up: the number of elements of a sorted sequence that are smaller than a value is
the sum of the numbers in each part, so neither the sequence nor the counted tensor has to be whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .....mesh.comm.thread_context import thread_context
from ....layout.layout import Layout
from ....layout.spec import P
from ...dispatch import wrap
from ..decomposition_utils import all_splitting_axes, as_replicated, is_split, reduce_pending
from ..elementwise.pointwise import is_operand, tensors_of
from ..indexing.masked import check_inside, check_not_recorded
from ..notation import Rule, dim_names, einrule, whole_dims
from ..registry import decomposition, rule


@rule("searchsorted")
def _rule_of_searchsorted(
    sorted_sequence: Tensor, input: Any = None, *, sorter: Tensor | None = None, **options: Any
) -> Rule | None:
    values = options.get("self", input)
    if not is_operand(sorted_sequence) or (sorter is not None and not is_operand(sorter)):
        return None
    lead = dim_names(sorted_sequence.ndim - 1, prefix="b")
    each = (
        dim_names(values.ndim, prefix="v")
        if sorted_sequence.ndim == 1 and is_operand(values)
        else f"{lead} v"
    )
    row = f"{lead} [n]" if sorter is not None else f"{lead} n"
    if not is_operand(values):
        return (
            einrule(f"{row}, {row} ->", sorted_sequence, sorter)
            if sorted_sequence.ndim == 1
            else None
        )
    return einrule(f"{row}, {each}, {row} -> {each}", sorted_sequence, values, sorter)


@rule("bucketize")
def _bucketize(input: Any, boundaries: Tensor, **options: Any) -> Rule | None:
    if not is_operand(boundaries):
        return None
    if not is_operand(input):
        return einrule("n ->", boundaries)
    dims = dim_names(input.ndim)
    return einrule(f"{dims}, n -> {dims}", input, boundaries)


@rule("isin")
def _isin(
    elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Rule:
    """Combine by max: an element is in any part; by min if inverted: it is missing from all."""
    operands = tensors_of(elements, test_elements)
    dims = [
        dim_names(x.ndim, prefix=name)
        for name, x in (("e", elements), ("t", test_elements))
        if is_operand(x)
    ]
    result = dims[0] if is_operand(elements) else ""
    return einrule(f"{', '.join(dims)} -> {result}", *operands, combine="min" if invert else "max")


# -- histograms ------------------------------------------------------------------------------------


def _as_pending_sum(x: Any, local: Tensor) -> Any:
    """Return this rank's counts of its part of x as a pending sum over the axes that split x."""
    check_inside(x.mesh)
    return wrap(
        local,
        Layout.of(x.mesh, P(unreduced=all_splitting_axes(x._layout)), local.shape, local.dtype),
    )


@decomposition(
    "bincount",
    when=lambda a: (
        is_operand(a.input) and a.input.ndim == 1 and (a.weights is None or is_operand(a.weights))
    ),
)
def _bincount(input: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Reduce the largest number, then count this rank's part.

    The largest number gives the length of the result.

    Raises:
        RuntimeError: a negative number, on every rank alike.
        JitError: inside `sm.jit`, numbers that are not less than `minlength`.
    """
    x = reduce_pending(input)
    low, high = 0, minlength - 1
    if thread_context.recorder is None or not _is_within(x, low, high):
        check_not_recorded("bincount", input, f"minlength={minlength} must be more than all values")
        low, high = (int(extreme) for extreme in torch.aminmax(x)) if x.numel() else (0, -1)
    if low < 0:
        raise RuntimeError(
            f"bincount only supports 1-d non-negative integral inputs, and {low} is among these"
        )
    local_weights = None if weights is None else reduce_pending(weights).redistribute(x.spec)._local
    counts = torch.bincount(x._local, local_weights, max(minlength, high + 1))
    # torch ignores the weights of an empty part
    if local_weights is not None and not x._local.numel():
        counts = counts.to(torch.float32 if local_weights.dtype is torch.float32 else torch.float64)
    return _as_pending_sum(x, counts)


def _is_within(x: Any, low: int, high: int) -> bool:
    """Return whether all values are between two; a graph checks in each call that it stays so."""
    if not x.numel():
        return True
    least, most = (reduce_pending(extreme)._local for extreme in torch.aminmax(x))
    return bool((least >= low) & (most <= high))


@decomposition(
    "histc",
    when=lambda a: is_split(a.input) and a.input.numel(),
    rule=lambda a: einrule(f"{whole_dims(a.input)} -> 1", a.input),
)
def _histc(input: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Count between the least and the greatest of all elements where no limits are given."""
    x = reduce_pending(input.detach())
    if min == max:
        min, max = _limits("histc", "min= and max=", x)
    if min == max:
        min, max = min - 1, max + 1
    return _as_pending_sum(x, torch.histc(x._local, bins, min, max))


def _limits(name: str, argument: str, x: Any) -> Sequence[float]:
    """Return the least and the greatest value.

    Raises:
        JitError: inside `sm.jit(fullgraph=True)`.
    """
    if thread_context.recorder is not None:
        thread_context.recorder.refuse(
            f"{name} without limits reads the least and the greatest value of {x._layout}",
            f"Pass {argument}",
        )
    return [extreme.item() for extreme in torch.aminmax(x)]


@decomposition(
    "torch.histogram",
    "Tensor.histogram",
    when=lambda a: isinstance(a.bins, int) and a.input.numel(),
)
def _histogram(
    input: Any, bins: int, *, range: Any = None, weight: Any = None, density: bool = False
) -> Any:
    x = reduce_pending(input.detach())
    low, high = range or _limits("histogram", "range=", x)
    low, high = (low, high) if low < high else (low - 0.5, high + 0.5)
    local_weight = (
        None if weight is None else reduce_pending(weight.detach()).redistribute(x.spec)._local
    )
    local = torch.histogram(x._local, bins, range=(low, high), weight=local_weight)
    edges = as_replicated(local.bin_edges, x)
    counts = _as_pending_sum(x, local.hist)
    if density:
        counts = reduce_pending(counts)
        counts = counts / (counts.sum() * edges.diff())
    return torch.return_types.histogram((counts, edges))
