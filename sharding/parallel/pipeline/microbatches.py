"""Microbatches: the parts of a batch that go through a pipeline one after the other.

    inputs    [8 rows]        microbatch 0 [3 rows]   1 [3 rows]   2 [2 rows]      3 microbatches
    targets   [8 rows]                     [3 rows]     [3 rows]     [2 rows]
    mask      [1 ...]                      [1 ...]      [1 ...]      [1 ...]       not split
    flag      True                         True         True         True

A list has one value for each microbatch, of any shapes. A `BlockMask` of flex attention is split as
a tensor is, by the rows of the batch for which it is made.

`ShardedTensor`s are split on each rank, without moving anything. So the rows of a microbatch are
parts of those of each rank, and tensors next to them that are not split, or over fewer ranks, are
split in the same way:

    inputs    8 rows over 2 ranks     rank 0   0 1 | 2 3     rank 1   4 5 | 6 7
    mask      8 rows, plain           microbatch 0   0 1 4 5         1   2 3 6 7
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...layout.layout import Layout
from ...ops.block_masks import batch_size_of, is_block_mask, take_rows
from ...tensor.sharded_tensor import ShardedTensor
from .stage_meshes import RowRange


@dataclass
class Microbatch:
    """One part of a batch.

    Attributes:
        args, kwargs: of the model's forward.
        target: for the loss; None if there are no targets.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any


def microbatches_of(
    inputs: Any, kwargs: Mapping[str, Any], targets: Any, default_count: int
) -> list[Microbatch]:
    """Split a batch.

    Args:
        inputs: the model's first argument, or a tuple of positional arguments; or a list with one
            of these for each microbatch.
        kwargs: keyword arguments; a list has one value for each microbatch.
        targets: any tree of tensors, or None; or a list as well.
        default_count: the number of microbatches if nothing is a list.

    Raises:
        ValueError: lists of different lengths; fewer rows than microbatches, but not none; a tensor
            with neither the batch's rows nor one in its first dim; parts of ranks that cannot be
            split evenly.
    """
    named = {"inputs": inputs, **kwargs, "targets": targets}
    counts = {name: len(value) for name, value in named.items() if isinstance(value, list)}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"lists have one value for each microbatch, but their lengths are {counts}"
        )
    count = next(iter(counts.values()), default_count)
    if count < 1:
        raise ValueError("there is no microbatch: a list is empty")
    rows = _rows(named.values())
    if rows and rows < count:  # a rank that has run out of batches has no rows at all
        raise ValueError(f"{rows} rows cannot be split into {count} microbatches")
    ranks = _common_ranks(named, count, rows)
    parts = {name: _split(name, value, count, rows, ranks) for name, value in named.items()}
    microbatches: list[Microbatch] = []
    for number in range(count):
        positional = parts["inputs"][number]
        microbatches.append(
            Microbatch(
                positional if isinstance(positional, tuple) else (positional,),
                {name: parts[name][number] for name in kwargs},
                parts["targets"][number],
            )
        )
    return microbatches


def with_own_rows(batch: Microbatch, rows: RowRange) -> Microbatch:
    """Return what a data rank has of a microbatch that all ranks have whole.

    Raises:
        ValueError: a number of rows that cannot be split among all stages' data ranks; a tensor
            with neither these rows nor one in its first dim; a sharded one.
    """
    values = (*batch.args, batch.kwargs, batch.target)
    count = _rows(values) or 1

    def own(x: Any) -> Any:
        size = _rows_in(x)
        if size is None or (size == 1 and count != 1):
            return x
        if isinstance(x, ShardedTensor) or size != count or count % rows.of:
            raise ValueError(
                f"with stage_meshes, a microbatch is of plain tensors with a multiple of {rows.of} "
                f"rows, since stages split rows among their data ranks; got {size} rows of {count}"
            )
        if isinstance(x, Tensor):
            return rows.take(x, 0)
        return take_rows(x, rows.take(_row_numbers(x), 0))

    args, kwargs, target = pytree.tree_map(
        own, (batch.args, batch.kwargs, batch.target), is_leaf=is_block_mask
    )
    return Microbatch(args, kwargs, target)


def _leaves(value: Any) -> list[Any]:
    return pytree.tree_leaves(value, is_leaf=is_block_mask)


def _rows(values: Iterable[Any]) -> int | None:
    """Return the number of rows of the batch: those of the first tensor that is to be split."""
    for value in values:
        if isinstance(value, list):
            continue
        for leaf in _leaves(value):
            if isinstance(leaf, Tensor) and leaf.ndim:
                return leaf.shape[0]
    return None


def _rows_in(leaf: Any) -> int | None:
    """Return the number of rows of a value; None if it has none."""
    if isinstance(leaf, Tensor) and leaf.ndim:
        return leaf.shape[0]
    return batch_size_of(leaf) if is_block_mask(leaf) else None


def _row_numbers(mask: Any) -> Tensor:
    return torch.arange(batch_size_of(mask), device=mask.kv_num_blocks.device)


def _ranks_of_rows(x: ShardedTensor) -> int:
    """Return over how many ranks the rows of a tensor are split."""
    axes = x.spec.dims[0]
    return x.mesh.size(axes) if axes else 1


def _common_ranks(values: Mapping[str, Any], count: int, rows: int | None) -> int:
    """Return over how many ranks the rows of the batch are split.

    It is the least number that is a multiple of those of all `ShardedTensor`s.

    Raises:
        ValueError: parts of ranks that cannot be split evenly.
    """
    common = 1
    for name, value in values.items():
        for leaf in [] if isinstance(value, list) else _leaves(value):
            if not isinstance(leaf, ShardedTensor) or rows is None or _rows_in(leaf) != rows:
                continue
            ranks = _ranks_of_rows(leaf)
            common = math.lcm(common, ranks)
            has_sizes = any(set(axes) & set(leaf.spec.dims[0]) for axes, _ in leaf.spec.sizes)
            if has_sizes or (ranks > 1 and rows % (common * count)):
                raise ValueError(
                    f"{name} has {rows} rows over {ranks} ranks, which are not split evenly into "
                    f"{count} microbatches: give a list with one sharded tensor for each microbatch"
                )
    return common


def _split(name: str, value: Any, count: int, rows: int | None, ranks: int) -> list[Any]:
    """Return the parts of an argument.

    Args:
        ranks: over how many ranks the rows of the batch are split.
    """
    if isinstance(value, list):
        return value
    leaves, tree = pytree.tree_flatten(value, is_leaf=is_block_mask)
    parts = [_split_leaf(name, leaf, count, rows, ranks) for leaf in leaves]
    return [
        pytree.tree_unflatten([leaf_parts[number] for leaf_parts in parts], tree)
        for number in range(count)
    ]


def _split_leaf(name: str, leaf: Any, count: int, rows: int | None, ranks: int) -> list[Any]:
    size = _rows_in(leaf)
    if size is None:
        return [leaf] * count
    if size == rows:
        if isinstance(leaf, ShardedTensor):
            return _split_sharded(leaf, count, ranks)
        if isinstance(leaf, Tensor):
            return _split_rows(leaf, count, ranks)
        return [take_rows(leaf, part) for part in _split_rows(_row_numbers(leaf), count, ranks)]
    if size == 1:
        return [leaf] * count
    raise ValueError(
        f"{name} has {size} rows, and the batch {rows}: give a list with one value for each of the "
        f"{count} microbatches"
    )


def _split_rows(x: Tensor, count: int, ranks: int) -> list[Tensor]:
    """Split the rows of a plain tensor as those of tensors over this number of ranks."""
    if ranks == 1:
        return list(x.tensor_split(count))
    by_rank = x.unflatten(0, (ranks, count, -1))
    return [by_rank[:, number].flatten(0, 1) for number in range(count)]


def _split_sharded(x: ShardedTensor, count: int, ranks: int) -> list[ShardedTensor]:
    """Split each rank's rows; nothing is moved."""
    own_ranks = _ranks_of_rows(x)
    parts: list[ShardedTensor] = []
    for local in _split_rows(x._local, count, ranks // own_ranks):
        shape = (local.shape[0] * own_ranks, *x.shape[1:])
        layout = Layout.of(x.mesh, x.spec, shape, x.dtype)
        parts.append(ShardedTensor._make_guarded(local, layout))
    return parts
