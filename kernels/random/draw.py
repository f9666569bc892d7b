"""Draw the elements of a box from a distribution: one kernel on a GPU, else torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..backend import wants_kernels
from ..box import Box, box_shape, check_boxes
from .elementary import cos_sin_turns, log, sqrt
from .philox import Distribution, Rows, philox_blocks, rows_of

# Blocks computed at a time. On the CPU 2**16 (0.5 MiB per temporary) was fastest of 2**10 ...
# 2**18: with fewer, calls take longer than arithmetic; with more, temporaries exceed the cache. On
# other devices few launches matter more (32 MiB each).
BLOCKS_AT_ONCE_CPU = 1 << 16
BLOCKS_AT_ONCE = 1 << 22
# torch.gather lacks these dtypes; use one of the same size.
_GATHERED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _blocks_of(start: Tensor, columns: int, per_block: int) -> tuple[Tensor, Tensor]:
    """Return the blocks of `columns` elements from each start on, and the first offsets.

    [rows, blocks], and the offsets in the first block.
    """
    shift = per_block.bit_length() - 1
    spanned = (columns + 2 * (per_block - 1)) >> shift  # enough for any offset
    return (start >> shift).unsqueeze(1) + torch.arange(spanned, device=start.device), start & (
        per_block - 1
    )


def by_blocks(
    shape: Sequence[int],
    box: Box,
    seed: int,
    stream: int,
    dtype: torch.dtype,
    device: torch.device | str,
    distribution: Distribution,
) -> Tensor:
    """Return the box, drawn from this distribution; one launch on a GPU.

    Raises:
        RuntimeError: a CUDA graph is being captured, whose replays would all draw the numbers of
            this call.
    """
    check_boxes(shape, [box])
    out = torch.empty(box_shape(box), dtype=dtype, device=device)
    if out.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "random numbers for a ShardedTensor while a CUDA graph is captured: seed and position "
            "are numbers of the host, so every replay would draw the same ones; draw before the "
            "capture and copy into a tensor that the graph reads, or use sm.jit(step, "
            "cudagraphs=True), which draws outside of its graphs"
        )
    if out.numel() == 0:
        return out
    if wants_kernels(out.device):
        from .random_triton import launch  # imports triton

        launch(out, rows_of(shape, box), seed, stream, distribution)
    elif not out.is_meta:
        _fill(out, rows_of(shape, box), seed, stream, distribution)
    return out


def _fill(out: Tensor, rows: Rows, seed: int, stream: int, distribution: Distribution) -> None:
    """Fill `out` with torch operations: the definition."""
    flat, done, per_block = out.view(-1), 0, distribution.per_block
    at_once = BLOCKS_AT_ONCE_CPU if out.device.type == "cpu" else BLOCKS_AT_ONCE
    aligned = all(stride % per_block == 0 for stride in rows.strides)
    for row, count, column, columns in rows.tiles(at_once * per_block):
        start = rows.starts(torch.arange(row, row + count, device=out.device)) + column
        blocks, offsets = _blocks_of(start, columns, per_block)
        values = distribution.make(philox_blocks(seed, stream, blocks)).view(count, -1)
        part = flat[done : done + count * columns].view(count, columns)
        if aligned or count == 1:
            offset = (rows.starts(row) + column) % per_block
            part.copy_(values[:, offset : offset + columns])
        else:
            at = offsets.unsqueeze(1) + torch.arange(columns, device=out.device)
            gathered = _GATHERED.get(out.dtype, out.dtype)
            torch.gather(values.view(gathered), 1, at, out=part.view(gathered))
        done += count * columns


def top53(words: Tensor) -> Tensor:
    """Return the top 53 bits of the two 64-bit numbers of each block: [..., 4] -> [..., 2]."""
    return (words[..., 1::2] << 21) | (words[..., ::2] >> 11)


def box_muller(m: Tensor, n: Tensor, bits: int) -> Tensor:
    """Return two independent normal numbers [..., 2] for two integers of `bits` bits [...]."""
    radius = sqrt(log((m + 1).to(torch.float64) * 2.0**-bits).mul_(-2))
    cos, sin = cos_sin_turns(n.to(torch.float64) * 2.0**-bits)
    return torch.stack((cos.mul_(radius), sin.mul_(radius)), dim=-1)
