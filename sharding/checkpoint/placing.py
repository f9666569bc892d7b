"""The write plan: each box of each leaf is written by one of the ranks that hold it, evenly; the
same plan on all ranks.

x @ P("tp", None) on (dp=2, tp=2)  rank 0 [0:4]  rank 1 [4:8]  rank 0 writes 0:4, rank 3 writes 4:8;
                                   rank 2 [0:4]  rank 3 [4:8]  ranks 1 and 2 write the next tensor
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.box import Box, box_shape, box_size, full_box
from ...mesh.comm.world import World
from ..layout.layout import Layout
from ..tensor.sharded_tensor import ShardedTensor
from .tree import PerRank

# The maximum size of a piece, so that a rank that needs some rows reads little more.
PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class WriteItem:
    """A piece and its writer.

    Attributes:
        box: its box of the global tensor; None for a value that is not a tensor.
        rank: the rank that writes it.
        shape, dtype: those of the whole tensor; None for a value.
    """

    name: str
    box: Box | None
    rank: int
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None


def make_write_plan(leaves: Mapping[str, Any], world: World) -> list[WriteItem]:
    """Return all pieces, in the order of the leaves; the same list on every rank."""
    found: list[WriteItem] = []
    load, boxes = [0] * world.size, {}
    for name, leaf in leaves.items():
        if isinstance(leaf, PerRank):
            found += [WriteItem(own_name(name, rank), None, rank) for rank in range(world.size)]
        elif isinstance(leaf, Tensor):
            found += _pieces(name, leaf, _held(leaf, world, boxes), load)
        else:
            found.append(WriteItem(name, None, 0))
    return found


def own_name(name: str, rank: int) -> str:
    """Return the name under which a rank's own value is stored."""
    return f"{name}.rank{rank}"


def _held(leaf: Tensor, world: World, known: dict[Layout, Any]) -> dict[Box, Sequence[int]]:
    """Return each non-empty box with the ranks that hold it. Plain tensors are equal everywhere."""
    if not isinstance(leaf, ShardedTensor):
        return {full_box(leaf.shape): range(world.size)} if leaf.numel() else {}
    if leaf._layout not in known:
        known[leaf._layout] = holders_of(leaf._layout)
    return known[leaf._layout]


def holders_of(layout: Layout) -> dict[Box, list[int]]:
    """Return each non-empty box of a layout with the ranks that hold it, in mesh order."""
    holders: dict[Box, list[int]] = {}
    for coordinate, box in layout.boxes():
        if box_size(box):
            holders.setdefault(box, []).append(int(layout.mesh.ranks[coordinate]))
    return holders


def _pieces(
    name: str, leaf: Tensor, held: Mapping[Box, Sequence[int]], load: list[int]
) -> Iterator[WriteItem]:
    """Yield the pieces of each box; the holder with the fewest bytes so far writes it."""
    if not held:
        # Nothing to write, but the index must have the tensor.
        yield WriteItem(name, (), -1, leaf.shape, leaf.dtype)
    for box, ranks in held.items():
        for piece in split_box(box, leaf.dtype.itemsize):
            rank = min(ranks, key=load.__getitem__)
            load[rank] += box_size(piece) * leaf.dtype.itemsize
            yield WriteItem(name, piece, rank, leaf.shape, leaf.dtype)


def split_box(box: Box, itemsize: int) -> Iterator[Box]:
    """Yield a box in pieces of about `PIECE_BYTES`, split along its first dim."""
    nbytes = box_size(box) * itemsize
    if not box or nbytes <= PIECE_BYTES:
        yield box
        return
    (start, stop), *rest = box
    rows = max(1, PIECE_BYTES // (math.prod(box_shape(tuple(rest))) * itemsize))
    for low in range(start, stop, rows):
        yield ((low, min(low + rows, stop)), *rest)
