"""Operators that select elements along a dim.

Extremes with their indices, the k largest, sorted orders.

Over a split dim every rank proposes a few of its elements, with their indices in the whole dim.
These are gathered, and the result is selected among them:

    x over 3 ranks      [4 9 1 | 7 2 | 8 9]
    proposed            9 at 1  7 at 3  9 at 6      gathered: three values, three indices
    max                 9 at 1                      of equals the first, as in torch

An empty part proposes nothing. Values and indices are packed as bytes into one all_gather. The
gradient takes the reverse path, to the element that was selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, return_types

from ....autograd.engine_hooks import transforming
from ....layout.layout import Layout
from ....layout.spec import Cut, P
from ....redistribute.autograd import with_gradient_of_redistribute
from ....tensor.sharded_tensor import ShardedTensor
from ...dispatch import wrap
from ..decomposition_utils import (
    all_from_parts,
    all_splitting_axes,
    is_split,
    layout_of,
    part_sizes,
    reduce_pending,
    unshard,
    with_part_sizes,
    without_pending,
)
from ..elementwise.pointwise import broadcast, is_operand
from ..registry import decomposition_maker, rules
from .extreme import extreme_of_all
from .reduction import along, whole_reduction

# values and indices of the selected elements along a dim, which is kept
Choose = Callable[[Any], tuple[Any, Any]]


def _choice(
    input: Tensor, dim: int, count: int, choose: Choose
) -> Callable[[Any], tuple[Any, Any]]:
    """Return `x -> (values, indices)` of the at most `count` elements that `choose` selects."""
    layout, dim = without_pending(layout_of(input)), dim % input.ndim
    proposed = with_part_sizes(layout, dim, [min(count, size) for size in part_sizes(layout, dim)])
    layouts = proposed, proposed.replace(dtype=torch.int64)
    propose = partial(_proposals, choose, dim, layout)

    def run(x: Any) -> tuple[Any, Any]:
        values, indices = _together(dim, *all_from_parts(layouts, propose, reduce_pending(x)))
        best, at = choose(values)
        return best, indices.gather(dim, at)

    return run


def _proposals(choose: Choose, dim: int, layout: Layout, local: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's candidates; an empty part calls `choose` on zeros, for the same errors."""
    if not local.shape[dim]:
        choose(local.new_zeros([1 if d == dim else n for d, n in enumerate(local.shape)]))
        return local, torch.empty_like(local, dtype=torch.int64, requires_grad=False)
    values, indices = choose(local)
    return values, indices + layout.box[dim][0]


def _together(
    dim: int, values: ShardedTensor, indices: ShardedTensor
) -> tuple[ShardedTensor, ShardedTensor]:
    """Return `unshard` of both along `dim`, which have one layout.

    With the gradient of `unshard(values)`.

    Communication: one all_gather of the bytes of both, or an all_to_all where parts are uneven.
    """
    layout = values._layout
    if layout.mesh.coordinate is None or transforming():  # type: ignore[attr-defined]
        return unshard(values, dim), unshard(indices, dim)
    with torch.no_grad():
        parts = [x._local.contiguous() for x in (values, indices)]
        # The bytes of each element are one more dim.
        packed = torch.cat([part.unsqueeze(-1).view(torch.uint8) for part in parts], -1)
        spec, width = P.of_cuts([*layout.spec.cuts, ()], {}), packed.shape[-1]
        gathered = unshard(
            wrap(packed, Layout.of(layout.mesh, spec, [*layout.shape, width], torch.uint8)), dim
        )._local
        best, at = (x.contiguous() for x in gathered.split([width - 8, 8], -1))
        best, at = best.view(layout.dtype).squeeze(-1), at.view(torch.int64).squeeze(-1)
    target = layout.replace(
        P.of_cuts([() if d == dim else cuts for d, cuts in enumerate(layout.spec.cuts)], {})
    )
    best = with_gradient_of_redistribute(values._local, layout, target, best)
    return wrap(best, target), wrap(at, target.replace(dtype=torch.int64))


def _is_split(x: Any, dim: int) -> bool:
    return x.ndim > 0 and is_split(x, [dim])


# -- extremes --------------------------------------------------------------------------------------


@decomposition_maker("max", "min", with_func=True)
def _extreme(func: Any, input: Any, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
    """Use amax for all elements; along a split dim, propose one element of each part."""
    name = func.__name__
    if not args and not kwargs:
        return extreme_of_all(torch.amax if name == "max" else torch.amin, input)
    if "other" in kwargs or isinstance(args[0] if args else None, Tensor):
        return None
    return _extreme_along(name, input, *args, **kwargs)


def _extreme_along(
    name: str, input: Tensor, dim: int, keepdim: bool = False
) -> Callable[..., Any] | None:
    func = getattr(torch, name)
    func(input, dim)
    if not _is_split(input, dim):
        return None
    chosen = _choice(input, dim, 1, lambda x: func(x, dim, keepdim=True))
    container = getattr(return_types, name)

    def run(x: Any, *_: Any, **__: Any) -> Any:
        both = chosen(x)
        return container(both if keepdim else [y.squeeze(dim) for y in both])

    return run


rules(
    {
        "max min(input, dim=None, keepdim=False, *, other=None)": lambda a: (
            broadcast(a.input, a.other if a.dim is None else a.dim)
            if is_operand(a.dim) or is_operand(a.other)
            else whole_reduction(a, results=2)
        )
    }
)


@decomposition_maker("argmax", "argmin", with_func=True, check=True, rule=whole_reduction)
def _argument(
    func: Any, input: Tensor, dim: int | None = None, keepdim: bool = False
) -> Callable[..., Any] | None:
    name = func.__name__.removeprefix("arg")
    if dim is None:
        return _arg_of_all(name, input, keepdim) if is_split(input) else None
    extreme = _extreme_along(name, input, dim, keepdim)
    return extreme and (lambda input, *_, **__: extreme(input.detach())[1])


def _arg_of_all(name: str, input: Tensor, keepdim: bool) -> Callable[..., Any]:
    """Return the index among all elements; of one from each rank, the first of equal ones wins."""
    layout, ndim = without_pending(layout_of(input)), input.ndim
    axes = all_splitting_axes(layout)
    proposed = Layout.of(
        layout.mesh,
        P.of_cuts([[Cut(axes, _counts(layout, axes))]], {}),
        [sum(_counts(layout, axes))],
        layout.dtype,
    )
    layouts = proposed, proposed.replace(dtype=torch.int64)

    def run(input: Any, *_: Any, **__: Any) -> Any:
        x = reduce_pending(input.detach())
        values, indices = _together(
            0, *all_from_parts(layouts, partial(_first_extreme, name, layout), x)
        )
        best = getattr(values, f"a{name}")()
        first = torch.where(
            (values == best) | (values != values), indices, math.prod(layout.shape)
        ).amin()
        return first.reshape([1] * ndim) if keepdim else first

    return run


def _counts(layout: Layout, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return 1 for each rank of these axes, major to minor, that has elements, else 0."""
    mesh = layout.mesh
    coordinates = (
        torch.cartesian_prod(*[torch.arange(mesh.size(axis)) for axis in axes])
        .reshape(-1, len(axes))
        .tolist()
    )
    numbers = [mesh.axis_index(axis) for axis in axes]
    at = [
        [dict(zip(numbers, c, strict=True)).get(i, 0) for i in range(mesh.ndim)]
        for c in coordinates
    ]
    return tuple(int(all(stop > start for start, stop in layout.box_at(c))) for c in at)


def _first_extreme(name: str, layout: Layout, local: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first extreme value of this rank's part, and its index in the whole tensor."""
    if not local.numel():
        getattr(local.new_zeros(1), f"arg{name}")()
        return local.reshape(-1), local.new_empty(0, dtype=torch.int64)
    at = getattr(local, f"arg{name}")()
    index = torch.zeros_like(at)
    for (start, _), offset, size in zip(
        layout.box, torch.unravel_index(at, local.shape), layout.shape, strict=True
    ):
        index = index * size + start + offset
    return local.reshape(-1)[at][None], index[None]


# -- the k largest ---------------------------------------------------------------------------------


@decomposition_maker(
    "topk", check=torch.topk, rule=lambda a: along(a.input, a.dim, results=2, keeps_size=False)
)
def _topk(
    input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Callable[..., Any] | None:
    if not _is_split(input, dim):
        return None
    chosen = _choice(input, dim, k, lambda x: x.topk(min(k, x.shape[dim]), dim, largest, sorted))
    return lambda input, *_, **__: return_types.topk(chosen(input))


# -- orders ----------------------------------------------------------------------------------------


@decomposition_maker("sort", "argsort", "msort", with_func=True)
def _sort(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
    """Sort the whole dim on every rank and keep its part: the result is split as the operand is."""
    dim = 0 if func.__name__ == "msort" else kwargs.get("dim", args[0] if args else -1)
    if not _is_split(input, dim):
        return None
    with torch.no_grad():
        func(input, *args, **kwargs)
    spec, dim = layout_of(input).spec.with_unreduced({}), dim % input.ndim
    gathered = P.of_cuts([() if d == dim else cuts for d, cuts in enumerate(spec.cuts)], {})

    def run(input: Any, *args: Any, **kwargs: Any) -> Any:
        result = func(input.redistribute(gathered), *args, **kwargs)
        if isinstance(result, tuple):
            return return_types.sort(tuple(x.redistribute(spec) for x in result))
        return result.redistribute(spec)

    return run
