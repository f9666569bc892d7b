"""Pulls: read the boxes of a tensor from the staging areas of the peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..box import Box, box_origin, box_shape, row_major_strides
from ..copy import Pack, pack_many
from ..strided import COMPUTED, SPAN, PlacedView, Table, View, alignment, make_tables, merge_views
from .peers import Peers, check, check_if_done

Place = tuple[int, int]  # a rank of the group, element offset in its staging area


class Pull:
    """Reads boxes of a tensor from the peers' staging areas; made by `compile_pull`.

    Attributes:
        shape: of the tensor.
        sources: box -> the starts of its contributions: (rank, element offset).
        kind: how contributions are combined.
    """

    __slots__ = ("_tables", "kind", "shape", "sources")

    def __init__(
        self, shape: Sequence[int], sources: Mapping[Box, Sequence[Place]], kind: str
    ) -> None:
        self.shape, self.sources, self.kind = tuple(shape), dict(sources), kind
        self._tables: dict[tuple, list[Table]] = {}

    def tables(
        self, out: Tensor, dtype: torch.dtype, scale: float | None, rank: int, size: int
    ) -> list[Table]:
        """Return the tables that fill `out`, cached by its strides, dtype and alignment."""
        aligned = alignment([out])
        key = (out.stride(), out.dtype, dtype, aligned, scale is None, rank, size)
        if key not in self._tables:
            raw = dtype == out.dtype and scale is None
            placed = self._copies_in_turn(out.stride(), rank, size)
            self._tables[key] = make_tables(
                placed, False, (dtype.itemsize, out.dtype.itemsize), aligned, raw
            )
        return self._tables[key]

    def _copies_in_turn(self, strides: Sequence[int], rank: int, size: int) -> list[PlacedView]:
        """Return the copies, those from the next rank first.

        So at any time each rank is read by one other, not one by all.
        """
        in_turn = sorted(self.sources.items(), key=lambda item: (item[1][0][0] - rank) % size)
        return [_copy_of_box(strides, box, places) for box, places in in_turn]


def compile_pull(
    shape: Sequence[int], sources: Mapping[Box, Sequence[Place]], kind: str = "sum"
) -> Pull:
    """`compile_pull(shape, {box: [(rank, offset), ...]}, kind) -> Pull`: compile what to read.

    From which rank, computed once.

    Args:
        shape: of the result.
        sources: for each box of the result, the starts of the contributions to it, each row-major:
            a rank of the group and an element offset in its staging area. One is copied, several
            are combined in the order given. Elements in no box are not written.
        kind: "sum", "max", "min" or "product".
    """
    return Pull(shape, sources, kind)


def exchange(
    peers: Peers,
    packs: Sequence[Pack],
    tensors: Sequence[Tensor],
    pulls: Sequence[Pull],
    outs: Sequence[Tensor],
    dtype: torch.dtype,
    scale: float | None = None,
) -> None:
    """`exchange(peers, packs, tensors, pulls, outs, dtype)`: pack the tensors, then pull.

    They are packed into the staging area; then `pull_many`.

    The group's errors are checked first, so that nothing is overwritten that a late peer may still
    read.
    """
    _check(peers, pulls, outs, dtype, scale)
    pack_many(packs, tensors, peers.staging(dtype))
    _pull(peers, pulls, outs, dtype, scale)


def pull_many(
    peers: Peers,
    pulls: Sequence[Pull],
    outs: Sequence[Tensor],
    dtype: torch.dtype,
    scale: float | None = None,
) -> None:
    """`pull_many(peers, pulls, outs, dtype)`: fill `outs`, of any strides.

    Every rank calls it after packing.

    Args:
        dtype: of the data in the staging areas. 16-bit floats are combined and scaled in float32,
            and rounded once.
        scale: a factor on the results.

    Raises:
        SymmetricMemoryError: a rank is missing.
        ValueError: an `out` has another shape than its pull, or a dtype that cannot be computed
            with.
    """
    _check(peers, pulls, outs, dtype, scale)
    _pull(peers, pulls, outs, dtype, scale)


def _pull(
    peers: Peers,
    pulls: Sequence[Pull],
    outs: Sequence[Tensor],
    dtype: torch.dtype,
    scale: float | None,
) -> None:
    from ..strided_triton import run  # imports triton
    from .symmetric_triton import launch_barrier

    launch_barrier(peers)
    for pull, out in zip(pulls, outs, strict=True):
        for table in pull.tables(out, dtype, scale, peers.rank, peers.size):
            run(table, peers.staging(dtype), out, peers.staged, pull.kind, scale, (True, False))
    launch_barrier(peers)
    check_if_done(peers)


def _check(
    peers: Peers,
    pulls: Sequence[Pull],
    outs: Sequence[Tensor],
    dtype: torch.dtype,
    scale: float | None,
) -> None:
    check(peers)
    for pull, out in zip(pulls, outs, strict=True):
        _check_out(pull, out, dtype, scale)


def _check_out(pull: Pull, out: Tensor, dtype: torch.dtype, scale: float | None) -> None:
    if out.shape != pull.shape:
        raise ValueError(
            f"a pull of shape {pull.shape} was given a tensor of shape {tuple(out.shape)}"
        )
    computes = (
        out.dtype != dtype
        or scale is not None
        or any(len(places) > 1 for places in pull.sources.values())
    )
    if computes and not {out.dtype, dtype} <= COMPUTED:
        raise ValueError(
            f"{dtype} cannot be combined, scaled or cast to {out.dtype} by a pull, only copied"
        )
    if scale is not None and torch.float64 in (dtype, out.dtype):
        raise ValueError(
            "float64 cannot be scaled by a pull, as kernels take the factor as float32; scale "
            "before or after"
        )
    if dtype.itemsize > 8:
        raise ValueError(
            f"{dtype} cannot be pulled from peers: pass torch.view_as_real(x), with one more dim"
        )


def _copy_of_box(strides: Sequence[int], box: Box, places: Sequence[Place]) -> PlacedView:
    shape = box_shape(box)
    origin = sum(o * s for o, s in zip(box_origin(box), strides, strict=True))
    sizes, steps, flat_steps = merge_views(shape, strides, row_major_strides(shape))
    if len(places) == 1:
        ((rank, offset),) = places
        return PlacedView(rank, View(sizes, steps, origin, flat_steps, offset))
    starts = tuple([rank * SPAN + offset for rank, offset in places])
    return PlacedView(0, View(sizes, steps, origin, flat_steps, starts[0]), starts)
