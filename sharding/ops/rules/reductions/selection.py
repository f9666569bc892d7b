"""Operators that select elements along a dim: extremes with their indices, the k largest, sorted
orders.

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
from ..notation import Rule
from ..registry import decomposition_maker, rule
from .extreme import extreme_of_all
from .reduction import along, reduction, whole_reduction

Choose = Callable[
    [Any], tuple[Any, Any]
]  # values and indices of the selected elements along a dim, which is kept


def _choice(
    input: Tensor, dim: int, count: int, choose: Choose
) -> Callable[[Any], tuple[Any, Any]]:
    """Return `x -> (values, indices)` of at most `count` elements along a split dim, selected by
    `choose` from any number of them.
    """
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
    """Return the candidates of this rank's part; for an empty part `choose` is called on zeros, to
    raise the same errors as elsewhere.
    """
    if not local.shape[dim]:
        choose(local.new_zeros([1 if d == dim else n for d, n in enumerate(local.shape)]))
        return local, torch.empty_like(local, dtype=torch.int64, requires_grad=False)
    values, indices = choose(local)
    return values, indices + layout.box[dim][0]


def _together(
    dim: int, values: ShardedTensor, indices: ShardedTensor
) -> tuple[ShardedTensor, ShardedTensor]:
    """Return `unshard` of both along `dim`, which have one layout; with the gradient of
    `unshard(values)`.

    Communication: one all_gather of the bytes of both, or an all_to_all where parts are uneven.
    """
    layout = values._layout
    if layout.mesh.coordinate is None or transforming():  # type: ignore[attr-defined]
        return unshard(values, dim), unshard(indices, dim)
    with torch.no_grad():
        packed = torch.cat([_bytes(values._local), _bytes(indices._local)], -1)
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


def _bytes(x: Tensor) -> Tensor:
    """Return the bytes of each element, as another dim."""
    return x.contiguous().unsqueeze(-1).view(torch.uint8)


def _is_split(x: Any, dim: int) -> bool:
    return x.ndim > 0 and is_split(x, [dim])


# -- extremes --------------------------------------------------------------------------------------


def _extreme(name: str, input: Any, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
    """Make the decomposition: of all elements, another operator's; along a split dim, one element
    of each part is proposed.
    """
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
    chosen, container = (
        _choice(input, dim, 1, lambda x: func(x, dim, keepdim=True)),
        getattr(return_types, name),
    )

    def run(x: Any, *_: Any, **__: Any) -> Any:
        both = chosen(x)
        return container(both if keepdim else [y.squeeze(dim) for y in both])

    return run


def _extreme_rule(
    name: str, input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None
) -> Rule:
    if is_operand(dim) or is_operand(other):
        return broadcast(input, other if dim is None else dim)
    return reduction(input, dim, keepdim, whole=True, results=2)


def _register_argument(name: str) -> None:
    own = getattr(torch, f"arg{name}")

    @decomposition_maker(f"arg{name}", check=own, rule=whole_reduction)
    def make(
        input: Tensor, dim: int | None = None, keepdim: bool = False
    ) -> Callable[..., Any] | None:
        if dim is None:
            return _arg_of_all(name, input, keepdim) if is_split(input) else None
        if not _is_split(input, dim):
            return None
        along: Any = _extreme_along(name, input, dim, keepdim)
        return lambda input, *_, **__: along(input.detach())[1]


for _name in ("max", "min"):
    decomposition_maker(_name)(partial(_extreme, _name))
    rule(_name)(partial(_extreme_rule, _name))
    _register_argument(_name)


def _arg_of_all(name: str, input: Tensor, keepdim: bool) -> Callable[..., Any]:
    """Return the decomposition in which every rank proposes one element and its index among all;
    the first of equal ones wins.
    """
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
    """Return, for each combination of ranks of these axes, major to minor, 1 if they have elements,
    else 0.
    """
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
    """Return the first extreme value of this rank's part, and its index among the elements of the
    whole tensor.
    """
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


@rule("sort")
def _sort(
    input: Tensor, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> Rule:
    return along(input, dim, results=2)


@rule("argsort")
def _argsort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Rule:
    return along(input, dim)


@rule("msort")
def _msort(input: Tensor) -> Rule:
    return along(input, 0)


def _register_sort(func: Callable[..., Any], fixed: int | None) -> None:
    """Register a decomposition with a result split as the operand is: every rank sorts the whole
    dim and keeps its part.
    """

    @decomposition_maker(func.__name__)
    def make(input: Tensor, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
        dim = (
            fixed
            if fixed is not None
            else kwargs["dim"]
            if "dim" in kwargs
            else args[0]
            if args
            else -1
        )
        if not _is_split(input, dim):
            return None
        with torch.no_grad():
            func(input, *args, **kwargs)
        spec, dim = layout_of(input).spec.with_unreduced({}), dim % input.ndim
        gathered = P.of_cuts([() if d == dim else cuts for d, cuts in enumerate(spec.cuts)], {})

        def run(input: Any, *args: Any, **kwargs: Any) -> Any:
            found = func(input.redistribute(gathered), *args, **kwargs)
            parts = [
                x.redistribute(spec) for x in (found if isinstance(found, tuple) else (found,))
            ]
            return return_types.sort(tuple(parts)) if isinstance(found, tuple) else parts[0]

        return run


for _func, _dim in ((torch.sort, None), (torch.argsort, None), (torch.msort, 0)):
    _register_sort(_func, _dim)


@rule("kthvalue")
def _kthvalue(input: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Rule:
    return reduction(input, dim, keepdim, whole=True, results=2)


@rule("median", "nanmedian")
def _median(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Rule:
    return reduction(input, dim, keepdim, whole=True, results=1 if dim is None else 2)


@rule("mode")
def _mode(input: Tensor, dim: int = -1, keepdim: bool = False) -> Rule:
    return reduction(input, dim, keepdim, whole=True, results=2)
