"""Collectives by axis name, for use inside a function that `shard_map` maps.

Names, arguments and meaning are JAX's.

    S  varies: each rank along the axis has different data    gradient: S
    R  replicated: the same on every rank                     gradient: pending, a share per rank
    U  pending: the value is the sum over the ranks           gradient: R

An axis name is that of one axis, or a tuple of several, which are flattened major to minor in the
order given. Every `x` may be a tree of tensors (tuples, lists, dicts). If only some axes are
manual, a collective of a `ShardedTensor` on the others works on its local tensors. All are
differentiable any number of times, and work under `torch.func`.

Arguments of all collectives:

    axis_index_groups: (not `ppermute`, `pshuffle`, `pbroadcast`) lists of places along the axis,
        each place in one of them: the collective runs in each list separately, in its order, and
        its result varies. Lists have one length, except for reductions.
    forward_dtype: the dtype to cast to before communication, which the result has.
    backward_dtype: the dtype of the gradient during communication; it is cast back to the dtype of
    `x`.

All raise `UnboundAxisError` if no mapped function binds the axis, and under the checker
`ShardingTypeError` for a value of another type than the first line of the docstring says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...autograd.named_axes import Axes, AxisName, Groups, bound_axes
from .apply import CollectiveCall, Prepared, TypingRule, map_bucketed, map_collective, resolve_axes
from .arguments import (
    canonical_word,
    check_no_sizes,
    check_one_each,
    checked_dim,
    checked_pairs,
    lengths_along,
)
from .extreme import Extreme, pick
from .linear_maps import (
    AllToAllMap,
    AllToAllRowsMap,
    BroadcastMap,
    GatherMap,
    PermuteMap,
    ReduceMap,
    ScatterMap,
    apply,
    even_lengths,
)

Dtype = torch.dtype | None


# -- reductions ------------------------------------------------------------------------------------

_PSUM = TypingRule("psum", varies=False, takes_pending=True)
_PMEAN = TypingRule("pmean", varies=False, takes_pending=True)
_PMAX = TypingRule("pmax", varies=False, linear=False)
_PMIN = TypingRule("pmin", varies=False, linear=False)


def _counting_cast(x: Tensor) -> Any:
    """Return the cast applied before a sum: booleans are counted, as in torch and JAX."""
    return Tensor.long if x.dtype is torch.bool else None


def _reduce(axes: Axes, x: Tensor) -> Prepared:
    return Prepared(axes.cached(ReduceMap), _counting_cast(x))


def _mean(axes: Axes, x: Tensor) -> Prepared:
    return Prepared(axes.cached(ReduceMap), _counting_cast(x), lambda total: total / axes.size)


def _largest(axes: Axes, x: Tensor) -> Prepared:
    return Prepared(axes.cached(Extreme, "max"))


def _smallest(axes: Axes, x: Tensor) -> Prepared:
    return Prepared(axes.cached(Extreme, "min"))


def psum(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    forward_dtype: Dtype = None,
    backward_dtype: Dtype = None,
) -> Any:
    """psum(x: S | R | U, axis) -> R: sum over the ranks of the axis.

    Each of them has the result.

        rank 0   x = [a]        [a+b]        backward   [g]        [g+h]
        rank 1   x = [b]   ->   [a+b]                   [h]   ->   [g+h]

    A replicated value is added once for each of n ranks: n times itself. A number is multiplied by
    n, as in JAX.

    Args:
        x: tensors of any shape, the same on every rank. Those of one dtype are reduced together.
        axis_name: one axis or a tuple of axes.

    Communication: all_reduce; backward the same.

    Example:
        >>> total = sm.shard_map(
        ...     lambda x: sm.psum(x.sum(), "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P()
        ... )(x)
    """
    axes, rule = resolve_axes(axis_name, _PSUM, axis_index_groups)
    return map_bucketed(
        x,
        CollectiveCall(
            axes, rule, None, _reduce, apply, lambda n: n * axes.size, forward_dtype, backward_dtype
        ),
    )


def pmean(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    forward_dtype: Dtype = None,
    backward_dtype: Dtype = None,
) -> Any:
    """pmean(x: S | R | U, axis) -> R: average over the ranks of the axis; integers give floats.

    Communication: as `psum`.
    """
    axes, rule = resolve_axes(axis_name, _PMEAN, axis_index_groups)
    return map_bucketed(
        x,
        CollectiveCall(axes, rule, None, _mean, apply, lambda n: n, forward_dtype, backward_dtype),
    )


def pmax(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    forward_dtype: Dtype = None,
    backward_dtype: Dtype = None,
) -> Any:
    """pmax(x: S | R, axis) -> R: take the elementwise maximum over the ranks of the axis.

        rank 0   x = [1 5]        [3 5]        backward   [g h]        [0 h]
        rank 1   x = [3 5]   ->   [3 5]                   [g h]   ->  [2g h]

    The gradient goes to the ranks that hold the largest value, in equal parts (JAX has none).

    Communication: all_reduce; backward two.
    """
    axes, rule = resolve_axes(axis_name, _PMAX, axis_index_groups)
    return map_bucketed(
        x,
        CollectiveCall(
            axes, rule, None, _largest, pick, lambda n: n, forward_dtype, backward_dtype
        ),
    )


def pmin(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    forward_dtype: Dtype = None,
    backward_dtype: Dtype = None,
) -> Any:
    """pmin(x: S | R, axis) -> R: take the elementwise minimum over the ranks of the axis.

    Otherwise as `pmax`.

    Communication: all_reduce; backward two.
    """
    axes, rule = resolve_axes(axis_name, _PMIN, axis_index_groups)
    return map_bucketed(
        x,
        CollectiveCall(
            axes, rule, None, _smallest, pick, lambda n: n, forward_dtype, backward_dtype
        ),
    )


_PSUM_SCATTER = TypingRule("psum_scatter", takes_pending=True)


def psum_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    forward_dtype: Dtype = None,
    backward_dtype: Dtype = None,
) -> Any:
    """psum_scatter(x: S | R | U, axis, dim) -> S(dim): sum over the ranks of the axis, and split.

    The result is split along `dim`.

        rank 0   x = [a b]        [a+c]        backward   [g]        [g h]
        rank 1   x = [c d]   ->   [b+d]                   [h]   ->   [g h]

    Args:
        x: tensors of the same shape on every rank.
        axis_name: one axis or a tuple of axes.
        scatter_dimension: the dim to split.
        tiled: False: the dim has one element for each rank, and is removed. True: it is split as
            `torch.chunk` does, into parts that need not be equal.

    Raises: ValueError if `tiled` is False and the dim is not as long as the axis.

    Communication: reduce_scatter; backward all_gather.
    """

    def prepare(axes: Axes, part: Tensor) -> Prepared:
        dim = checked_dim("psum_scatter", "scatter_dimension", scatter_dimension, part.ndim)
        if tiled:
            return Prepared(
                axes.cached(ScatterMap, dim, even_lengths(part.shape[dim], axes.size)),
                _counting_cast(part),
                dims=(dim,),
            )
        check_one_each("psum_scatter", "scatter_dimension", axes, part, dim)
        return Prepared(
            axes.cached(ScatterMap, dim, (1,) * axes.size),
            _counting_cast(part),
            lambda out: out.squeeze(dim),
            (dim,),
        )

    axes, rule = resolve_axes(axis_name, _PSUM_SCATTER, axis_index_groups, equal=True)
    return map_collective(
        x,
        CollectiveCall(
            axes,
            rule,
            (scatter_dimension, tiled),
            prepare,
            apply,
            None,
            forward_dtype,
            backward_dtype,
        ),
    )


# -- gathering -------------------------------------------------------------------------------------

_ALL_GATHER = {
    "replicated": TypingRule("all_gather", varies=False),
    "sharded": TypingRule("all_gather"),
}


def all_gather(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "replicated",
    sizes: Sequence[int] | None = None,
    forward_dtype: Dtype = None,
    backward_dtype: Dtype = None,
) -> Any:
    """all_gather(x: S(dim), axis, dim) -> R: concatenate or stack the parts of all ranks.

    The ranks are those of the axis.

        rank 0   x = [a]        [a b]        backward   [g h]        [g+i]
        rank 1   x = [b]   ->   [a b]                   [i j]   ->   [h+j]

    Args:
        x: tensors of the same shape on every rank, except as `sizes` says.
        axis_name: one axis or a tuple of axes.
        axis: the dim along which parts are concatenated or stacked.
        tiled: False: parts are stacked along a new dim. True: they are concatenated along an
            existing one.
        to: "replicated", or "sharded" to have the result count as varying (as in JAX; the values
            are the same).
        sizes: with `tiled`, for parts of different lengths: that of every rank's, in the order of
            the axis.

    Raises: ValueError for sizes that are not one for each rank, that contradict this rank's part,
    or without `tiled`.

    Communication: all_gather; backward reduce_scatter.
    """

    def prepare(axes: Axes, part: Tensor) -> Prepared:
        dim = checked_dim("all_gather", "axis", axis, part.ndim + (not tiled))
        if not tiled:
            check_no_sizes("all_gather", sizes)
            return Prepared(
                axes.cached(GatherMap, dim, (1,) * axes.size),
                before=lambda t: t.unsqueeze(dim),
                dims=(dim,),
            )
        return Prepared(
            axes.cached(GatherMap, dim, lengths_along("all_gather", axes, part, dim, sizes)),
            dims=(dim,),
        )

    axes, rule = resolve_axes(
        axis_name,
        _ALL_GATHER[canonical_word("all_gather", to, _ALL_GATHER)],
        axis_index_groups,
        equal=True,
    )
    sizes = None if sizes is None else tuple(sizes)
    call = CollectiveCall(
        axes,
        rule,
        (axis, tiled, sizes),
        prepare,
        apply,
        None,
        forward_dtype,
        backward_dtype,
        sizes is None,
    )
    return map_collective(x, call)


# -- exchanging ------------------------------------------------------------------------------------

_ALL_TO_ALL = TypingRule("all_to_all")
_PPERMUTE = TypingRule("ppermute")
_PSHUFFLE = TypingRule("pshuffle")
_PBROADCAST = TypingRule("pbroadcast", varies=False)


def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    sizes: Sequence[int] | None = None,
    forward_dtype: Dtype = None,
    backward_dtype: Dtype = None,
) -> Any:
    """all_to_all(x: S(concat), axis, split, concat) -> S(split): exchange pieces of parts.

    Split along one dim, send part i to rank i, and concatenate along another.

        rank 0   x = [a b]        [a c]        backward: the same, back
        rank 1   x = [c d]   ->   [b d]

    Args:
        x: tensors of the same shape on every rank, except as `sizes` says.
        axis_name: one axis or a tuple of axes.
        split_axis: the dim to split.
        concat_axis: the dim along which received parts are concatenated.
        tiled: False: `split_axis` has one element for each rank and is removed; `concat_axis` is a
            new dim. True: dims stay; one is split as `torch.chunk` does, and parts are concatenated
            along the other.
        sizes: with `tiled`, for parts of different lengths along `concat_axis`: that of every
            rank's.

    Raises: ValueError if `tiled` is False and `split_axis` is not as long as the axis; for wrong
        sizes; with `tiled` and one dim for both, if it is not a multiple of the axis.

    Communication: all_to_all; backward all_to_all.
    """

    def prepare(axes: Axes, part: Tensor) -> Prepared:
        split = checked_dim("all_to_all", "split_axis", split_axis, part.ndim)
        concat = checked_dim("all_to_all", "concat_axis", concat_axis, part.ndim)
        if not tiled:
            check_no_sizes("all_to_all", sizes)
            check_one_each("all_to_all", "split_axis", axes, part, split)
            before = None if split == 0 else lambda t: t.movedim(split, 0)
            return _rows(
                axes,
                before,
                None if concat == 0 else lambda t: t.movedim(0, concat),
                (split, concat),
            )
        if sizes is None and part.shape[split] % axes.size == 0:
            return _evenly(axes, part, split, concat)
        if split == concat:
            raise _not_a_multiple(axes, part, split)
        concat_side = (concat, lengths_along("all_to_all", axes, part, concat, sizes))
        return Prepared(
            axes.cached(
                AllToAllMap, concat_side, (split, even_lengths(part.shape[split], axes.size))
            ),
            dims=(split, concat),
        )

    sizes = None if sizes is None else tuple(sizes)
    key = (split_axis, concat_axis, tiled, sizes)
    axes, rule = resolve_axes(axis_name, _ALL_TO_ALL, axis_index_groups, equal=True)
    return map_collective(
        x,
        CollectiveCall(
            axes, rule, key, prepare, apply, None, forward_dtype, backward_dtype, sizes is None
        ),
    )


def pswapaxes(x: Any, axis_name: AxisName, axis: int, *, axis_index_groups: Groups = None) -> Any:
    """pswapaxes(x: S, axis, dim) -> S: swap the mesh axis and a dim.

    `all_to_all` with this dim as both, not tiled.

    Raises: ValueError if the dim is not as long as the axis.

    Communication: as `all_to_all`.
    """
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)


def _rows(axes: Axes, before: Any, after: Any, dims: tuple[int, ...]) -> Prepared:
    """Return a map that sends row i of `before(x)` to rank i, where it arrives as row `index`."""
    return Prepared(axes.cached(AllToAllRowsMap), before, after, dims)


def _evenly(axes: Axes, part: Tensor, split: int, concat: int) -> Prepared:
    """Return a map that splits one dim into equal parts and concatenates them.

    Along another dim or the same.
    """
    shape = (axes.size, part.shape[split] // axes.size)
    return _rows(
        axes,
        lambda t: t.unflatten(split, shape).movedim(split, 0),
        lambda t: t.movedim(0, concat).flatten(concat, concat + 1),
        (split, concat),
    )


def _not_a_multiple(axes: Axes, part: Tensor, dim: int) -> ValueError:
    what = f"dim {dim} of {list(part.shape)} is both split and concatenated"
    return ValueError(
        f"all_to_all over {axes}: {what}, and {part.shape[dim]} is not a multiple of {axes.size}"
    )


def ppermute(
    x: Any,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    *,
    forward_dtype: Dtype = None,
    backward_dtype: Dtype = None,
) -> Any:
    """ppermute(x: S | R, axis, perm) -> S: send parts from rank to rank.

    A rank that receives nothing has zeros.

        perm = [(0, 1)]
        rank 0   x = [a]        [0]        backward   [g]        [h]
        rank 1   x = [b]   ->   [a]                   [h]   ->   [0]

    Args:
        x: tensors of the same shape on every rank.
        axis_name: one axis or a tuple of axes.
        perm: pairs (source, destination) of indices along the axis; each at most once as a source,
            and once as a destination.

    Raises: ValueError for an index that is not on the axis, or appears twice on one side.

    Communication: point to point; backward the other way.
    """
    pairs = tuple(map(tuple, perm))

    return map_collective(
        x,
        CollectiveCall(
            bound_axes(axis_name),
            _PPERMUTE,
            pairs,
            lambda axes, part: Prepared(
                axes.cached(PermuteMap, checked_pairs("ppermute", axes, pairs))
            ),
            apply,
            None,
            forward_dtype,
            backward_dtype,
        ),
    )


def pshuffle(
    x: Any,
    axis_name: AxisName,
    perm: Sequence[int],
    *,
    forward_dtype: Dtype = None,
    backward_dtype: Dtype = None,
) -> Any:
    """pshuffle(x: S | R, axis, perm) -> S: receive the part of rank perm[i] on rank i.

    Args:
        perm: every index along the axis, once.

    Raises: ValueError for anything else.

    Communication: point to point; backward the other way.
    """
    pairs = tuple((int(source), i) for i, source in enumerate(perm))

    def prepare(axes: Axes, part: Tensor) -> Prepared:
        if sorted(source for source, _ in pairs) != list(range(axes.size)):
            raise ValueError(
                f"pshuffle over {axes}: perm={list(perm)} must hold each of 0 to {axes.size - 1} "
                "once"
            )
        return Prepared(axes.cached(PermuteMap, pairs))

    return map_collective(
        x,
        CollectiveCall(
            bound_axes(axis_name),
            _PSHUFFLE,
            pairs,
            prepare,
            apply,
            None,
            forward_dtype,
            backward_dtype,
        ),
    )


def pbroadcast(
    x: Any,
    axis_name: AxisName,
    source: int,
    *,
    forward_dtype: Dtype = None,
    backward_dtype: Dtype = None,
) -> Any:
    """pbroadcast(x: S | R, axis, source) -> R: copy the part of one rank to every rank.

        source = 1
        rank 0   x = [a]        [b]        backward   [g]        [0]
        rank 1   x = [b]   ->   [b]                   [h]   ->   [g+h]

    Raises: ValueError for a source that is not on the axis.

    Communication: broadcast; backward all_reduce.
    """
    axes = bound_axes(axis_name)
    if not 0 <= source < axes.size:
        raise ValueError(
            f"pbroadcast over {axes}: source={source} must be an index from 0 to {axes.size - 1}"
        )

    return map_collective(
        x,
        CollectiveCall(
            axes,
            _PBROADCAST,
            source,
            lambda axes, part: Prepared(axes.cached(BroadcastMap, source)),
            apply,
            None,
            forward_dtype,
            backward_dtype,
        ),
    )
