"""Pulls: read the boxes of a tensor from the staging areas of the peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..box import Box, box_origin, box_shape, row_major_strides
from ..copy import Pack, pack_many
from ..strided import COMPUTED, SPAN, Placed, Table, View, alignment, make_tables, merge_views
from .peers import Peers, check, check_if_done

Place = tuple[int, int]  # a rank of the group, element offset in its staging area


class Pull:
    """Boxes of a tensor read from the peers' staging areas: what `compile_pull` returns.

    Attributes:
        shape: of the tensor.
        sources: box -> where the contributions to it begin: (rank, element offset).
        kind: how contributions are combined.
    """

    __slots__ = ("_tables", "kind", "shape", "sources")

    def __init__(self, shape: Sequence[int], sources: Mapping[Box, Sequence[Place]], kind: str) -> None:
        self.shape, self.sources, self.kind = tuple(shape), dict(sources), kind
        self._tables: dict[tuple, list[Table]] = {}

    def tables(self, out: Tensor, dtype: torch.dtype, scale: float | None, rank: int, size: int) -> list[Table]:
        """The launches that fill `out` (made once for each kind of it)."""
        aligned = alignment([out])
        key = (out.stride(), out.dtype, dtype, aligned, scale is None, rank, size)
        if key not in self._tables:
            raw = dtype == out.dtype and scale is None
            placed = self._placed(out.stride(), rank, size)
            self._tables[key] = make_tables(placed, False, (dtype.itemsize, out.dtype.itemsize), aligned, raw)
        return self._tables[key]

    def _placed(self, strides: Sequence[int], rank: int, size: int) -> list[Placed]:
        """Copies from the next rank first: at any time each is read by one other, not all of them the same one."""
        in_turn = sorted(self.sources.items(), key=lambda item: (item[1][0][0] - rank) % size)
        return [_placed(strides, box, places) for box, places in in_turn]


def compile_pull(shape: Sequence[int], sources: Mapping[Box, Sequence[Place]], kind: str = "sum") -> Pull:
    """`compile_pull(shape, {box: [(rank, offset), ...]}, kind) -> Pull`: what to read from whom, decided once.

    Args:
        shape: of the result.
        sources: for each box of the result, where the contributions to it begin, each row-major: a rank of the group and
            an element offset in its staging area. One is copied, several are combined in the order given. Boxes that
            are left out are left as they are.
        kind: "sum", "max", "min" or "product".
    """
    return Pull(shape, sources, kind)


def exchange(
    peers: Peers, packs: Sequence[Pack], tensors: Sequence[Tensor], pulls: Sequence[Pull], outs: Sequence[Tensor],
    dtype: torch.dtype, scale: float | None = None,
) -> None:  # fmt: skip
    """`exchange(peers, packs, tensors, pulls, outs, dtype)`: packs the tensors into the staging area, then `pull_many`.

    Nothing is packed over what a late peer may still read: the group's errors are looked at first.
    """
    check(peers)
    for pull, out in zip(pulls, outs, strict=True):
        _check_out(pull, out, dtype, scale)
    pack_many(packs, tensors, peers.staging(dtype))
    pull_many(peers, pulls, outs, dtype, scale)


def pull_many(
    peers: Peers, pulls: Sequence[Pull], outs: Sequence[Tensor], dtype: torch.dtype, scale: float | None = None
) -> None:
    """`pull_many(peers, pulls, outs, dtype)`: every rank calls it when its part is packed; fills `outs`, of any strides.

    Args:
        dtype: of what lies in the staging areas. 16-bit floats are combined and scaled in float32, and rounded once.
        scale: what results are multiplied by.

    Raises:
        SymmetricMemoryError: a rank is missing.
        ValueError: an `out` has another shape than its pull, or a dtype that cannot be computed with.
    """
    from ..strided_triton import run  # imports triton
    from .symmetric_triton import launch_meeting

    check(peers)
    for pull, out in zip(pulls, outs, strict=True):
        _check_out(pull, out, dtype, scale)
    launch_meeting(peers)
    for pull, out in zip(pulls, outs, strict=True):
        for table in pull.tables(out, dtype, scale, peers.rank, peers.size):
            run(table, peers.staging(dtype), out, peers.staged, pull.kind, scale, (True, False))
    launch_meeting(peers)
    check_if_done(peers)


def _check_out(pull: Pull, out: Tensor, dtype: torch.dtype, scale: float | None) -> None:
    if out.shape != pull.shape:
        raise ValueError(f"a pull of shape {pull.shape} was given a tensor of shape {tuple(out.shape)}")
    computes = out.dtype != dtype or scale is not None or any(len(places) > 1 for places in pull.sources.values())
    if computes and not {out.dtype, dtype} <= COMPUTED:
        raise ValueError(f"{dtype} cannot be combined, scaled or cast to {out.dtype} on the way: only copied")
    if scale is not None and torch.float64 in (dtype, out.dtype):
        raise ValueError("float64 cannot be scaled on the way: kernels take the factor as float32; scale before or after")
    if dtype.itemsize > 8:
        raise ValueError(f"{dtype} is not read from peers: give it as torch.view_as_real, with one more dim")


def _placed(strides: Sequence[int], box: Box, places: Sequence[Place]) -> Placed:
    shape = box_shape(box)
    origin = sum(o * s for o, s in zip(box_origin(box), strides, strict=True))
    sizes, steps, flat_steps = merge_views(shape, strides, row_major_strides(shape))
    if len(places) == 1:
        ((rank, offset),) = places
        return Placed(rank, View(sizes, steps, origin, flat_steps, offset))
    starts = tuple([rank * SPAN + offset for rank, offset in places])
    return Placed(0, View(sizes, steps, origin, flat_steps, starts[0]), starts)
