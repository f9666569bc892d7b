"""Load balance of causal attention: a sequence's order over ranks, and each rank's blocks.

    10 positions over 2 ranks, contiguous   0 1 2 3 4 | 5 6 7 8 9   rank 1 computes 40 of 55 pairs
    in 4 pieces, balanced                   0 1 2 8 9 | 3 4 5 6 7   rank i has the pieces i and
                                                                    3 - i: 25 and 30 pairs

Queries of piece p attend to p + 1 pieces, so the pieces i and 2n-1-i of n ranks cost 2n + 1
together for every i.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor

from ...layout.layout import Layout
from ...layout.spec import Cut
from ...lineage import comm_context, mixed, seed_of
from ...ops.rules.decomposition_utils import from_parts, with_dim
from ...redistribute.interval_exchange import Interval, IntervalExchange
from ...tensor.autograd.local_part import known_local
from ...tensor.sharded_tensor import ShardedTensor

Runs = tuple[Interval, ...]  # the positions that a rank holds, as intervals in memory order


class Block(NamedTuple):
    """Ranges of local query and key rows in which each query attends to each key.

    Attributes:
        diagonal: both have the same positions, and each query attends to the keys up to its own.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    diagonal: bool


@lru_cache(4096)
def causal_blocks(queries: Runs, keys: Runs) -> tuple[Block, ...]:
    """Return the blocks that a causal mask leaves: keys up to each query's own position.

    queries 2 3 4 5, keys 0 1 2 3      2 | x x \\ .
                                       3 | x x x \\     4 by 2 whole, 2 by 2 diagonal, 2 by 2 whole
                                       4 | x x x x
                                       5 | x x x x
    """
    blocks: list[Block] = []
    for k_place, (k_start, k_stop) in _with_offsets(keys):
        for q_place, (q_start, q_stop) in _with_offsets(queries):
            both = max(k_start, q_start), min(k_stop, q_stop)
            pieces = [
                ((q_start, q_stop), (k_start, min(k_stop, q_start)), False),
                (both, both, True),
                ((max(k_stop, q_start), q_stop), both, False),
            ]
            for rows, cols, diagonal in pieces:
                if rows[0] < rows[1] and cols[0] < cols[1]:
                    _append_block(
                        blocks,
                        Block(
                            *_shift(rows, q_place - q_start),
                            *_shift(cols, k_place - k_start),
                            diagonal,
                        ),
                    )
    return tuple(blocks)


def _with_offsets(runs: Runs) -> Iterator[tuple[int, Interval]]:
    return zip(accumulate((stop - start for start, stop in runs), initial=0), runs, strict=False)


def _shift(interval: Interval, by: int) -> Interval:
    return interval[0] + by, interval[1] + by


def _append_block(blocks: list[Block], new: Block) -> None:
    """Append a block, or merge it with the last one of the preceding queries and same keys."""
    last = blocks[-1] if blocks else new
    if last[1:4] == (new.q_start, new.k_start, new.k_stop) and not (last.diagonal or new.diagonal):
        blocks[-1] = last._replace(q_stop=new.q_stop)
    else:
        blocks.append(new)


# -- balanced --------------------------------------------------------------------------------------


def contiguous(sizes: Sequence[int]) -> list[Runs]:
    """Return the positions of each rank, for a sequence in contiguous parts of these sizes."""
    return [((start, stop),) for start, stop in pairwise(accumulate(sizes, initial=0))]


@lru_cache(1024)
def balanced_runs(length: int, ranks: int) -> tuple[Runs, ...]:
    """Return the positions of each rank for a balanced sequence.

    The pieces i and 2n-1-i of 2n pieces of almost equal length.
    """
    count = 2 * ranks
    bounds = list(
        accumulate([length // count + (i < length % count) for i in range(count)], initial=0)
    )
    pieces = list(pairwise(bounds))
    return tuple((pieces[i], pieces[count - 1 - i]) for i in range(ranks))


def balanced_sizes(length: int, ranks: int) -> tuple[int, ...]:
    """Return the number of positions of each rank."""
    return tuple(sum(stop - start for start, stop in runs) for runs in balanced_runs(length, ranks))


def _slice_of_intervals(order: Sequence[Interval], start: int, stop: int) -> list[Interval]:
    """Return the part from `start` to `stop` of the concatenation of these intervals."""
    intervals = []
    for place, (a, b) in _with_offsets(tuple(order)):
        low, high = max(a, a + start - place), min(b, a + stop - place)
        if low < high:
            intervals.append((low, high))
    return intervals


def _inverse(order: Sequence[Interval]) -> list[Interval]:
    """Return where each interval, in sequence order, is in the reordered sequence."""
    return [
        (place, place + b - a)
        for place, (a, b) in sorted(_with_offsets(tuple(order)), key=lambda x: (x[1], x[0]))
    ]


def balance_sequence(
    x: ShardedTensor, dim: int, axis: str | tuple[str, ...] = "cp"
) -> ShardedTensor:
    """balance_sequence(x, dim, "cp") -> x reordered so that causal attention costs ranks the same.

        x over 2 ranks   0 1 2 3 4 | 5 6 7 8 9    2n pieces; rank i gets the pieces i and 2n-1-i
                         0 1 2 8 9 | 3 4 5 6 7

    Balance everything that depends on the position: tokens, labels, and the positions for rotary or
    learned embeddings, `balance_sequence(sm.arange(s, device_mesh=mesh), 0, "cp")`. Operators on
    each position alone, and a loss that is a mean over positions, give the same in any order; pass
    `balanced=True` to attention.

    Args:
        x: a sharded tensor.
        dim: the dim of the sequence.
        axis: the axis, or axes, major to minor, that split the sequence afterwards. The dim must be
            split over them, or not at all.

    Returns:
        The tensor, with the dim split over the axis into parts that differ by at most two
        positions.

    Raises:
        ValueError: on every rank, before any communication: an unknown axis, or one that splits
            another dim, or a dim that others split.

    Communication: one all_to_all over the axis, the same backward; none if the dim is whole.

    Example:
        >>> tokens, labels = (sm.parallel.balance_sequence(x, 1, "cp") for x in (tokens, labels))
    """
    axes, dim = checked_axes("balance_sequence", x, dim, axis)
    size = x.shape[dim]
    ranks = x.mesh.size(axes)
    sizes = balanced_sizes(size, ranks)
    order = [run for runs in balanced_runs(size, ranks) for run in runs]
    target = with_dim(x._layout, dim, [Cut(axes, sizes)], size)
    return _reorder("balance_sequence", x, target, dim, order)


def unbalance_sequence(
    x: ShardedTensor, dim: int, axis: str | tuple[str, ...] = "cp"
) -> ShardedTensor:
    """unbalance_sequence(x, dim, "cp") -> x with a dim in its order before `balance_sequence`.

    It is split evenly over the axis.

    Args, Raises, Communication: as for `balance_sequence`.

    Example:
        >>> logits = sm.parallel.unbalance_sequence(logits, 1, "cp")
    """
    axes, dim = checked_axes("unbalance_sequence", x, dim, axis)
    size = x.shape[dim]
    order = [run for runs in balanced_runs(size, x.mesh.size(axes)) for run in runs]
    target = with_dim(x._layout, dim, [Cut((a,)) for a in axes], size)
    return _reorder("unbalance_sequence", x, target, dim, _inverse(order))


def _reorder(
    name: str, x: ShardedTensor, target: Layout, dim: int, order: list[Interval]
) -> ShardedTensor:
    known_local(x)
    fetch = IntervalExchange(
        x._layout, target, dim, lambda start, stop: _slice_of_intervals(order, start, stop)
    )
    lineage = mixed(seed_of(name), [x])

    def reorder(local: Tensor) -> Tensor:
        out = fetch(local)
        return out.view_as(out) if out is local else out

    with comm_context(x.mesh.world, lineage):
        out = from_parts(target, reorder, x)
    out._lineage = lineage
    return out


def checked_axes(
    name: str, x: Any, dim: int, axis: str | tuple[str, ...]
) -> tuple[tuple[str, ...], int]:
    """Return the axes as a tuple, and the dim counted from the front.

    Raises:
        TypeError, ValueError: see `balance_sequence`.
    """
    if not isinstance(x, ShardedTensor):
        raise TypeError(
            f"{name}: expected a ShardedTensor, got {type(x).__name__}; place it with "
            "sm.device_put(x, mesh, P(...)) first"
        )
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    if not axes or any(a not in x.mesh.axis_names for a in axes):
        raise ValueError(
            f"{name}: axis={axis!r} is not on the mesh of {x._layout}; use one of "
            f"{x.mesh.axis_names}"
        )
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"{name}: dim={dim} of {x._layout}, which has {x.ndim} dims; give one from {-x.ndim} "
            f"to {x.ndim - 1}"
        )
    dim %= x.ndim
    taken = [a for a in axes if x._layout.dim_of.get(a, dim) != dim or a in x._layout.pending]
    if taken:
        raise ValueError(
            f"{name}: axis {taken[0]!r} cannot split dim {dim} of {x._layout}, since it is in use; "
            "redistribute first"
        )
    if x.spec.dims[dim] not in ((), axes):
        raise ValueError(
            f"{name}: dim {dim} of {x._layout} is split over {x.spec.dims[dim]} and must be split "
            f"over {axes} alone; redistribute first"
        )
    return axes, dim
