"""Collectives by axis name, inside a function that `shard_map` maps: JAX's names, arguments and meaning.

    S  varies: each rank along the axis has data of its own        gradient: S
    R  replicated: the same on every rank                          gradient: pending, the ranks' shares add up
    U  pending: the value is the sum over the ranks                gradient: R

An axis name is that of one axis, or a tuple of several, which are flattened major to minor in the order given. Every `x` may
be a tree of tensors (tuples, lists, dicts). A `ShardedTensor` on the other axes of the mesh, where only some axes are manual,
is worked on part by part. All are differentiable any number of times, and under `torch.func`.

What all take:

    axis_index_groups: (not `ppermute`, `pshuffle`, `pbroadcast`) lists of places along the axis, each place in one of them: the
        collective then runs in each list by itself, in its order, and its result varies. Lists of one length, but for reductions.
    forward_dtype: cast to this dtype before anything moves; the result has it.
    backward_dtype: dtype in which the gradient travels; it arrives in the dtype of `x`.

What all raise: `UnboundAxisError` where no mapped function binds the axis; under the checker `ShardingTypeError` for a value
of another type than the first line of the docstring says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..named_axes import Axes, AxisName, Groups, bound
from .apply import Call, Law, Prepared, each, over, together
from .arguments import check_no_sizes, check_one_each, checked_dim, checked_pairs, lengths_along, word
from .extreme import Extreme, pick
from .linear_maps import Broadcast, Exchange, Gather, Permute, Reduce, Scatter, Swap, apply, even_lengths

Dtype = torch.dtype | None


# -- reductions --------------------------------------------------------------------------------------------------------

_PSUM = Law("psum", varies=False, takes_pending=True)
_PMEAN = Law("pmean", varies=False, takes_pending=True)
_PMAX = Law("pmax", varies=False, linear=False)
_PMIN = Law("pmin", varies=False, linear=False)


def _counted(x: Tensor) -> Any:
    """What is done to a tensor before it is summed: booleans are counted, as torch and JAX do."""
    return Tensor.long if x.dtype is torch.bool else None


def _reduce(axes: Axes, x: Tensor) -> Prepared:
    return Prepared(axes.kept(Reduce), _counted(x))


def _mean(axes: Axes, x: Tensor) -> Prepared:
    return Prepared(axes.kept(Reduce), _counted(x), lambda total: total / axes.size)


def _largest(axes: Axes, x: Tensor) -> Prepared:
    return Prepared(axes.kept(Extreme, "max"))


def _smallest(axes: Axes, x: Tensor) -> Prepared:
    return Prepared(axes.kept(Extreme, "min"))


def psum(
    x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None, forward_dtype: Dtype = None, backward_dtype: Dtype = None
) -> Any:
    """psum(x: S | R | U, axis) -> R: the sum over the ranks of the axis, on each of them.

        rank 0   x = [a]        [a+b]        backward   [g]        [g+h]
        rank 1   x = [b]   ->   [a+b]                   [h]   ->   [g+h]

    A replicated value is taken once for each rank: n times itself. A number is multiplied by n, as in JAX.

    Args:
        x: tensors of any shape, the same on every rank. Several of one dtype travel together.
        axis_name: one axis or a tuple of axes.

    Communication: all_reduce; backward the same.

    Example:
        >>> total = sm.shard_map(lambda x: sm.psum(x.sum(), "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())(x)
    """
    axes, law = over(axis_name, _PSUM, axis_index_groups)
    return together(x, Call(axes, law, None, _reduce, apply, lambda n: n * axes.size, forward_dtype, backward_dtype))


def pmean(
    x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None, forward_dtype: Dtype = None, backward_dtype: Dtype = None
) -> Any:
    """pmean(x: S | R | U, axis) -> R: the mean over the ranks of the axis, on each of them; of integers, floats.

    Communication: as `psum`.
    """
    axes, law = over(axis_name, _PMEAN, axis_index_groups)
    return together(x, Call(axes, law, None, _mean, apply, lambda n: n, forward_dtype, backward_dtype))


def pmax(
    x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None, forward_dtype: Dtype = None, backward_dtype: Dtype = None
) -> Any:
    """pmax(x: S | R, axis) -> R: the largest value over the ranks of the axis, element by element.

        rank 0   x = [1 5]        [3 5]        backward   [g h]        [0 h]
        rank 1   x = [3 5]   ->   [3 5]                   [g h]   ->  [2g h]

    The gradient goes to the ranks that hold the largest value, in equal parts (JAX has none).

    Communication: all_reduce; backward two.
    """
    axes, law = over(axis_name, _PMAX, axis_index_groups)
    return together(x, Call(axes, law, None, _largest, pick, lambda n: n, forward_dtype, backward_dtype))


def pmin(
    x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None, forward_dtype: Dtype = None, backward_dtype: Dtype = None
) -> Any:
    """pmin(x: S | R, axis) -> R: the smallest value over the ranks of the axis, element by element; else as `pmax`.

    Communication: all_reduce; backward two.
    """
    axes, law = over(axis_name, _PMIN, axis_index_groups)
    return together(x, Call(axes, law, None, _smallest, pick, lambda n: n, forward_dtype, backward_dtype))


_PSUM_SCATTER = Law("psum_scatter", takes_pending=True)


def psum_scatter(
    x: Any, axis_name: AxisName, *, scatter_dimension: int = 0, axis_index_groups: Groups = None, tiled: bool = False,
    forward_dtype: Dtype = None, backward_dtype: Dtype = None,
) -> Any:  # fmt: skip
    """psum_scatter(x: S | R | U, axis, dim) -> S(dim): the sum, of which each rank gets its part along a dim.

        rank 0   x = [a b]        [a+c]        backward   [g]        [g h]
        rank 1   x = [c d]   ->   [b+d]                   [h]   ->   [g h]

    Args:
        x: tensors of the same shape on every rank.
        axis_name: one axis or a tuple of axes.
        scatter_dimension: the dim that is cut.
        tiled: False: the dim has one element for each rank, and goes. True: it is cut as `torch.chunk` cuts, into parts that
            need not be equal.

    Raises: ValueError where, not tiled, the dim is not as long as the axis.

    Communication: reduce_scatter; backward all_gather.
    """

    def prepare(axes: Axes, part: Tensor) -> Prepared:
        dim = checked_dim("psum_scatter", "scatter_dimension", scatter_dimension, part.ndim)
        if tiled:
            return Prepared(axes.kept(Scatter, dim, even_lengths(part.shape[dim], axes.size)), _counted(part), dims=(dim,))
        check_one_each("psum_scatter", "scatter_dimension", axes, part, dim)
        return Prepared(axes.kept(Scatter, dim, (1,) * axes.size), _counted(part), lambda out: out.squeeze(dim), (dim,))

    axes, law = over(axis_name, _PSUM_SCATTER, axis_index_groups, equal=True)
    return each(x, Call(axes, law, (scatter_dimension, tiled), prepare, apply, None, forward_dtype, backward_dtype))


# -- gathering ---------------------------------------------------------------------------------------------------------

_ALL_GATHER = {"replicated": Law("all_gather", varies=False), "sharded": Law("all_gather")}


def all_gather(
    x: Any, axis_name: AxisName, *, axis_index_groups: Groups = None, axis: int = 0, tiled: bool = False, to: str = "replicated",
    sizes: Sequence[int] | None = None, forward_dtype: Dtype = None, backward_dtype: Dtype = None,
) -> Any:  # fmt: skip
    """all_gather(x: S(dim), axis, dim) -> R: every rank's part, on each of them.

        rank 0   x = [a]        [a b]        backward   [g h]        [g+i]
        rank 1   x = [b]   ->   [a b]                   [i j]   ->   [h+j]

    Args:
        x: tensors of the same shape on every rank, but for what `sizes` says.
        axis_name: one axis or a tuple of axes.
        axis: the dim along which parts are put together.
        tiled: False: parts are stacked along a new dim. True: they are put one after the other along an existing one.
        to: "replicated", or "sharded" to have the result count as varying (as in JAX; the values are the same).
        sizes: tiled, where parts differ in length: that of every rank's, in the order of the axis.

    Raises: ValueError for sizes that are not one for each rank, or not this rank's own, or given when not tiled.

    Communication: all_gather; backward reduce_scatter.
    """

    def prepare(axes: Axes, part: Tensor) -> Prepared:
        dim = checked_dim("all_gather", "axis", axis, part.ndim + (not tiled))
        if not tiled:
            check_no_sizes("all_gather", sizes)
            return Prepared(axes.kept(Gather, dim, (1,) * axes.size), before=lambda t: t.unsqueeze(dim), dims=(dim,))
        return Prepared(axes.kept(Gather, dim, lengths_along("all_gather", axes, part, dim, sizes)), dims=(dim,))

    axes, law = over(axis_name, _ALL_GATHER[word("all_gather", to, _ALL_GATHER)], axis_index_groups, equal=True)
    sizes = None if sizes is None else tuple(sizes)
    return each(x, Call(axes, law, (axis, tiled, sizes), prepare, apply, None, forward_dtype, backward_dtype, sizes is None))


# -- exchanging --------------------------------------------------------------------------------------------------------

_ALL_TO_ALL, _PPERMUTE, _PSHUFFLE = Law("all_to_all"), Law("ppermute"), Law("pshuffle")
_PBROADCAST = Law("pbroadcast", varies=False)


def all_to_all(
    x: Any, axis_name: AxisName, split_axis: int, concat_axis: int, *, axis_index_groups: Groups = None, tiled: bool = False,
    sizes: Sequence[int] | None = None, forward_dtype: Dtype = None, backward_dtype: Dtype = None,
) -> Any:  # fmt: skip
    """all_to_all(x: S(concat), axis, split, concat) -> S(split): part i along one dim goes to rank i, and parts are put together
    along another.

        rank 0   x = [a b]        [a c]        backward: the same, back
        rank 1   x = [c d]   ->   [b d]

    Args:
        x: tensors of the same shape on every rank, but for what `sizes` says.
        axis_name: one axis or a tuple of axes.
        split_axis: the dim that is cut.
        concat_axis: the dim along which what arrives is put together.
        tiled: False: `split_axis` has one element for each rank and goes; `concat_axis` is a new dim. True: dims stay; the one is
            cut as `torch.chunk` cuts, and along the other parts are put one after the other.
        sizes: tiled, where parts differ in length along `concat_axis`: that of every rank's.

    Raises: ValueError where, not tiled, `split_axis` is not as long as the axis; for wrong sizes; where tiled with one dim for both
        it is not a multiple of the axis.

    Communication: all_to_all; backward all_to_all.
    """

    def prepare(axes: Axes, part: Tensor) -> Prepared:
        split = checked_dim("all_to_all", "split_axis", split_axis, part.ndim)
        concat = checked_dim("all_to_all", "concat_axis", concat_axis, part.ndim)
        if not tiled:
            check_no_sizes("all_to_all", sizes)
            check_one_each("all_to_all", "split_axis", axes, part, split)
            before = None if split == 0 else lambda t: t.movedim(split, 0)
            return _rows(axes, before, None if concat == 0 else lambda t: t.movedim(0, concat), (split, concat))
        if sizes is None and part.shape[split] % axes.size == 0:
            return _evenly(axes, part, split, concat)
        if split == concat:
            raise _not_a_multiple(axes, part, split)
        given = (concat, lengths_along("all_to_all", axes, part, concat, sizes))
        return Prepared(axes.kept(Exchange, given, (split, even_lengths(part.shape[split], axes.size))), dims=(split, concat))

    sizes = None if sizes is None else tuple(sizes)
    key = (split_axis, concat_axis, tiled, sizes)
    axes, law = over(axis_name, _ALL_TO_ALL, axis_index_groups, equal=True)
    return each(x, Call(axes, law, key, prepare, apply, None, forward_dtype, backward_dtype, sizes is None))


def pswapaxes(x: Any, axis_name: AxisName, axis: int, *, axis_index_groups: Groups = None) -> Any:
    """pswapaxes(x: S, axis, dim) -> S: the mesh axis and a dim trade places: `all_to_all` with this dim as both, not tiled.

    Raises: ValueError where the dim is not as long as the axis.

    Communication: as `all_to_all`.
    """
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)


def _rows(axes: Axes, before: Any, after: Any, dims: tuple[int, ...]) -> Prepared:
    """Row i of what `before` gives goes to rank i, and arrives as row `index` there."""
    return Prepared(axes.kept(Swap), before, after, dims)


def _evenly(axes: Axes, part: Tensor, split: int, concat: int) -> Prepared:
    """Equal parts along one dim, put together along another one or the same."""
    shape = (axes.size, part.shape[split] // axes.size)
    return _rows(
        axes, lambda t: t.unflatten(split, shape).movedim(split, 0), lambda t: t.movedim(0, concat).flatten(concat, concat + 1),
        (split, concat),
    )  # fmt: skip


def _not_a_multiple(axes: Axes, part: Tensor, dim: int) -> ValueError:
    what = f"dim {dim} of {list(part.shape)} is cut and put together"
    return ValueError(f"all_to_all over {axes}: {what}, and {part.shape[dim]} is not a multiple of {axes.size}")


def ppermute(
    x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]], *, forward_dtype: Dtype = None, backward_dtype: Dtype = None
) -> Any:
    """ppermute(x: S | R, axis, perm) -> S: parts go from rank to rank; who receives nothing has zeros.

        perm = [(0, 1)]
        rank 0   x = [a]        [0]        backward   [g]        [h]
        rank 1   x = [b]   ->   [a]                   [h]   ->   [0]

    Args:
        x: tensors of the same shape on every rank.
        axis_name: one axis or a tuple of axes.
        perm: pairs (source, destination) of indices along the axis; each at most once as a source, and once as a destination.

    Raises: ValueError for an index that is not on the axis, or appears twice on one side.

    Communication: point to point; backward the other way.
    """
    pairs = tuple(map(tuple, perm))

    def prepare(axes: Axes, part: Tensor) -> Prepared:
        return Prepared(axes.kept(Permute, checked_pairs("ppermute", axes, pairs)))

    return each(x, Call(bound(axis_name), _PPERMUTE, pairs, prepare, apply, None, forward_dtype, backward_dtype))


def pshuffle(x: Any, axis_name: AxisName, perm: Sequence[int], *, forward_dtype: Dtype = None, backward_dtype: Dtype = None) -> Any:
    """pshuffle(x: S | R, axis, perm) -> S: rank i receives the part of rank perm[i].

    Args:
        perm: every index along the axis, once.

    Raises: ValueError for anything else.

    Communication: point to point; backward the other way.
    """
    pairs = tuple((int(source), i) for i, source in enumerate(perm))

    def prepare(axes: Axes, part: Tensor) -> Prepared:
        if sorted(source for source, _ in pairs) != list(range(axes.size)):
            raise ValueError(f"pshuffle over {axes}: perm={list(perm)} must hold each of 0 to {axes.size - 1} once")
        return Prepared(axes.kept(Permute, pairs))

    return each(x, Call(bound(axis_name), _PSHUFFLE, pairs, prepare, apply, None, forward_dtype, backward_dtype))


def pbroadcast(x: Any, axis_name: AxisName, source: int, *, forward_dtype: Dtype = None, backward_dtype: Dtype = None) -> Any:
    """pbroadcast(x: S | R, axis, source) -> R: the part of one rank, on every rank.

        source = 1
        rank 0   x = [a]        [b]        backward   [g]        [0]
        rank 1   x = [b]   ->   [b]                   [h]   ->   [g+h]

    Raises: ValueError for a source that is not on the axis.

    Communication: broadcast; backward all_reduce.
    """
    axes = bound(axis_name)
    if not 0 <= source < axes.size:
        raise ValueError(f"pbroadcast over {axes}: source={source} must be an index from 0 to {axes.size - 1}")

    def prepare(axes: Axes, part: Tensor) -> Prepared:
        return Prepared(axes.kept(Broadcast, source))

    return each(x, Call(axes, _PBROADCAST, source, prepare, apply, None, forward_dtype, backward_dtype))
