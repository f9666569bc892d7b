"""Microbatches: the parts of a batch that go through a pipeline one after the other.

    inputs    [8 rows]        microbatch 0 [3 rows]   1 [3 rows]   2 [2 rows]      3 microbatches
    targets   [8 rows]                     [3 rows]     [3 rows]     [2 rows]
    mask      [1 ...]                      [1 ...]      [1 ...]      [1 ...]       not split
    flag      True                         True         True         True

A list has one value for each microbatch, of any shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ...layout.layout import Layout
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
            with neither the batch's rows nor one in its first dim.
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
    parts = {name: _split(name, value, count, rows) for name, value in named.items()}
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
        if not isinstance(x, Tensor) or x.ndim == 0 or (x.shape[0] == 1 and count != 1):
            return x
        if isinstance(x, ShardedTensor) or x.shape[0] != count or count % rows.of:
            raise ValueError(
                f"with stage_meshes, a microbatch is of plain tensors with a multiple of {rows.of} "
                f"rows, since stages split rows among their data ranks; got {x.shape[0]} rows of "
                f"{count}"
            )
        return rows.take(x, 0)

    args, kwargs, target = pytree.tree_map(own, (batch.args, batch.kwargs, batch.target))
    return Microbatch(args, kwargs, target)


def _rows(values: Iterable[Any]) -> int | None:
    """Return the number of rows of the batch: those of the first tensor that is to be split."""
    for value in values:
        if isinstance(value, list):
            continue
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.ndim:
                return leaf.shape[0]
    return None


def _split(name: str, value: Any, count: int, rows: int | None) -> list[Any]:
    """Return the parts of an argument."""
    if isinstance(value, list):
        return value
    leaves, tree = pytree.tree_flatten(value)
    parts = [_split_leaf(name, leaf, count, rows) for leaf in leaves]
    return [
        pytree.tree_unflatten([leaf_parts[number] for leaf_parts in parts], tree)
        for number in range(count)
    ]


def _split_leaf(name: str, leaf: Any, count: int, rows: int | None) -> list[Any]:
    if not isinstance(leaf, Tensor) or leaf.ndim == 0:
        return [leaf] * count
    if leaf.shape[0] == rows:
        if isinstance(leaf, ShardedTensor):
            return _split_sharded(name, leaf, count)
        return list(leaf.tensor_split(count))
    if leaf.shape[0] == 1:
        return [leaf] * count
    raise ValueError(
        f"{name} has {leaf.shape[0]} rows, and the batch {rows}: give a list with one tensor for "
        f"each of the {count} microbatches"
    )


def _split_sharded(name: str, x: ShardedTensor, count: int) -> list[ShardedTensor]:
    """Split each rank's rows: nothing is moved, and the rows of a microbatch are not neighbours."""
    axes = x.spec.dims[0] if x.spec.dims else ()
    ranks = x.mesh.size(axes) if axes else 1
    if ranks > 1 and x.shape[0] % (ranks * count):
        raise ValueError(
            f"{name} has {x.shape[0]} rows over {ranks} ranks, which are not split evenly into "
            f"{count} microbatches: give a list with one sharded tensor for each microbatch"
        )
    parts: list[ShardedTensor] = []
    for local in x._local.tensor_split(count):
        shape = (local.shape[0] * ranks, *x.shape[1:])
        layout = Layout.of(x.mesh, x.spec, shape, x.dtype)
        parts.append(ShardedTensor._make_guarded(local, layout))
    return parts
