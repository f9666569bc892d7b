"""all_gather, all_to_all and reduce_scatter of tensors cut as by `torch.chunk`, as pulls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from torch import Tensor

from ..box import Box, box_shape, box_size, full_box
from ..copy import Pack, compile_pack
from .peers import Peers
from .pull import Pull, exchange


def all_gather(peers: Peers, x: Tensor, out: Tensor, dim: int) -> Tensor:
    """`all_gather(peers, x, out, dim) -> out`: concatenate the ranks' x.

    They are chunks of out as `torch.chunk` cuts it.
    """
    return _exchange(peers, _gather(tuple(out.shape), dim, peers.rank, peers.size), x, out)


def all_to_all(peers: Peers, x: Tensor, out: Tensor, src: int, dst: int) -> Tensor:
    """`all_to_all(peers, x, out, src, dst) -> out`: move a split from one dim to another.

    From a chunk of a tensor along `src` to its chunk along `dst`.
    """
    whole = [*x.shape]
    whole[src] = out.shape[src]
    return _exchange(peers, _turn(tuple(whole), src, dst, peers.rank, peers.size), x, out)


def reduce_scatter(
    peers: Peers, x: Tensor, out: Tensor, dim: int, scale: float | None = None
) -> Tensor:
    """`reduce_scatter(peers, x, out, dim) -> out`: this rank's chunk of the sum of all x.

    Along `dim`; cast to out's dtype.
    """
    return _exchange(peers, _scatter(tuple(x.shape), dim, peers.rank, peers.size), x, out, scale)


def _exchange(
    peers: Peers, ways: tuple[Pack, Pull], x: Tensor, out: Tensor, scale: float | None = None
) -> Tensor:
    pack, pull = ways
    exchange(peers, [pack], [x], [pull], [out], x.dtype, scale)
    return out


@lru_cache(maxsize=1024)
def _gather(whole: tuple[int, ...], dim: int, rank: int, size: int) -> tuple[Pack, Pull]:
    chunks = _chunks(whole, dim, size)
    part_shape = box_shape(chunks[rank])
    return _pack_of(part_shape, [full_box(part_shape)]), Pull(
        whole, {box: [(r, 0)] for r, box in enumerate(chunks)}, "sum"
    )


@lru_cache(maxsize=1024)
def _turn(whole: tuple[int, ...], src: int, dst: int, rank: int, size: int) -> tuple[Pack, Pull]:
    if (src - dst) % len(whole) == 0:
        raise ValueError(
            f"all_to_all from dim {src} to dim {dst} of {len(whole)}: the dims must differ"
        )
    source_shapes = [box_shape(box) for box in _chunks(whole, src, size)]
    target_shape = box_shape(_chunks(whole, dst, size)[rank])
    sources = {
        box: [(r, _start(source_shapes[r], dst, rank, size))]
        for r, box in enumerate(_chunks(target_shape, src, size))
        if box_size(box)
    }
    pack = _pack_of(source_shapes[rank], _chunks(source_shapes[rank], dst, size))
    return pack, Pull(target_shape, sources, "sum")


@lru_cache(maxsize=1024)
def _scatter(whole: tuple[int, ...], dim: int, rank: int, size: int) -> tuple[Pack, Pull]:
    chunks = _chunks(whole, dim, size)
    part_shape, start = box_shape(chunks[rank]), _start(whole, dim, rank, size)
    return _pack_of(whole, chunks), Pull(
        part_shape, {full_box(part_shape): [(r, start) for r in range(size)]}, "sum"
    )


def _chunks(shape: Sequence[int], dim: int, parts: int) -> list[Box]:
    """Return the boxes of `torch.chunk`, with empty ones at the end."""
    if not -len(shape) <= dim < len(shape):
        raise IndexError(f"dim {dim} of a tensor of shape {tuple(shape)}: it has {len(shape)} dims")
    dim %= len(shape)
    step = -(-shape[dim] // parts)
    cuts = [(min(i * step, shape[dim]), min((i + 1) * step, shape[dim])) for i in range(parts)]
    box = full_box(shape)
    return [(*box[:dim], cut, *box[dim + 1 :]) for cut in cuts]


def _pack_of(shape: Sequence[int], boxes: Sequence[Box]) -> Pack:
    """Return a pack of consecutive boxes, at the start of a buffer that may be longer."""
    return compile_pack(shape, boxes, list(accumulate(map(box_size, boxes[:-1]), initial=0)))


def _start(shape: Sequence[int], dim: int, number: int, parts: int) -> int:
    """Return the start of chunk `number` in the layout of `_pack_of`."""
    return sum(map(box_size, _chunks(shape, dim, parts)[:number]))
