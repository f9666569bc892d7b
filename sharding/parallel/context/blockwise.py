"""Blockwise attention by an online softmax: the state is the output so far and its log-sum-exp.

    scores    block 1   block 2    (out, lse) of block 1, (out, lse) of block 2, merged one by one:
    queries   q k1'     q k2'      both weighted by exp(lse - total lse)

A softmax over all keys then needs one block at a time (Milakov and Gimelshein 2018, "Online
normalizer calculation for softmax"), and its gradients need the final output and lse only (Dao et
al. 2022, "FlashAttention", section 3.1).

Tensor names: q [... h*g l e], k [... h s e], v [... h s f]; g query heads share a head of keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .flash import FlashKernel, kernel_for
from .load_balance import Block

_SCORES = 1 << 22  # the number of scores in memory at a time: 16 MiB in float32


class OnlineSoftmaxState:
    """The state of an online softmax: the result over the blocks so far.

    Attributes:
        out: the weighted values [... l f]; zero before the first block.
        lse: the log of the sum of all exp(score) [... l]; -inf before the first block.
    """

    def __init__(self, q: Tensor, v: Tensor) -> None:
        wide = _wide(q.dtype)
        self.out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        self.lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide)

    def merge(self, start: int, stop: int, out: Tensor, lse: Tensor) -> None:
        """Merge the result of another block for the queries from `start` to `stop`."""
        rows = slice(start, stop)
        before = self.lse[..., rows]
        total = torch.logaddexp(before, lse)
        rescaled = self.out[..., rows, :] * (before - total).exp()[..., None]
        self.out[..., rows, :] = rescaled + out * (lse - total).exp()[..., None]
        self.lse[..., rows] = total


def attend(
    state: OnlineSoftmaxState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Sequence[Block],
    scale: float,
) -> None:
    """Update the state with these blocks of the local keys."""
    for block in blocks:
        parts = _parts(block, q, k, v)
        out, lse = (kernel_for(*parts, block.diagonal) or _MATMUL).forward(
            *parts, scale, block.diagonal
        )
        state.merge(block.q_start, block.q_stop, out, lse)


class AttentionGrads(NamedTuple):
    """Sums of gradients, in at least float32."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def zeros(cls, *tensors: Tensor) -> AttentionGrads:
        return cls(
            *[
                torch.zeros_like(x, dtype=_wide(x.dtype), memory_format=torch.contiguous_format)
                for x in tensors
            ]
        )


def attend_grads(
    into: AttentionGrads,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    blocks: Sequence[Block],
    scale: float,
) -> None:
    """Add the contribution of these blocks to the gradients.

    Args:
        into: the gradients of q, k and v.
        grad: the gradient of `out`.
        out, lse: the final output, and the lse over all keys.
    """
    for block in blocks:
        rows, keys = slice(block.q_start, block.q_stop), slice(block.k_start, block.k_stop)
        parts = _parts(block, q, k, v)
        back = (kernel_for(*parts, block.diagonal) or _MATMUL).backward
        grads = back(
            grad[..., rows, :], *parts, out[..., rows, :], lse[..., rows], scale, block.diagonal
        )
        into.q[..., rows, :] += grads[0]
        into.k[..., keys, :] += grads[1]
        into.v[..., keys, :] += grads[2]


def _parts(block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, keys = slice(block.q_start, block.q_stop), slice(block.k_start, block.k_stop)
    return q[..., rows, :], k[..., keys, :], v[..., keys, :]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# -- by matrix products, if torch has no kernel ----------------------------------------------------


def _by_matmul(
    q: Tensor, k: Tensor, v: Tensor, scale: float, diagonal: bool
) -> tuple[Tensor, Tensor]:
    """Return output and lse of one block, computed for some queries at a time."""
    q, k, v = (x.to(_wide(x.dtype)) for x in (q, k, v))
    outs, lses = [], []
    for rows, keys in _tiles(q, k, diagonal):
        scores = _scores(q[..., rows, :], k[..., keys, :], scale, rows, diagonal)
        lse = scores.logsumexp(-1)
        outs.append(_ungroup_heads((scores - lse[..., None]).exp() @ v[..., keys, :], q, rows))
        lses.append(_ungroup_heads(lse[..., None], q, rows)[..., 0])
    return torch.cat(outs, -2), torch.cat(lses, -1)


def _grads_by_matmul(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    diagonal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value by matrix products.

    With p the weights and d = p (grad v' - sum(grad out)): grad_v = p' grad, grad_q = d k scale,
    grad_k = d' q scale.
    """
    grad, q, k, v, out = (x.to(_wide(x.dtype)) for x in (grad, q, k, v, out))
    level = (grad * out).sum(-1, keepdim=True)
    grad_q, grad_k, grad_v = [], torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in _tiles(q, k, diagonal):
        grouped = [_group_heads(x[..., rows, :], k) for x in (q, grad, level, lse[..., None])]
        q_rows, grad_rows, level_rows, lse_rows = grouped
        weights = (
            _scores(q[..., rows, :], k[..., keys, :], scale, rows, diagonal) - lse_rows
        ).exp()
        pull = weights * (grad_rows @ v[..., keys, :].mT - level_rows)
        grad_v[..., keys, :] += weights.mT @ grad_rows
        grad_k[..., keys, :] += pull.mT @ q_rows * scale
        grad_q.append(_ungroup_heads(pull @ k[..., keys, :] * scale, q, rows))
    return torch.cat(grad_q, -2), grad_k, grad_v


def _tiles(q: Tensor, k: Tensor, diagonal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield some rows of q at a time, and the keys that they attend to."""
    rows, keys = q.shape[-2], k.shape[-2]
    step = max(1, _SCORES // max(1, math.prod(q.shape[:-2]) * keys))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        yield slice(start, stop), slice(0, stop if diagonal else keys)


def _scores(q: Tensor, k: Tensor, scale: float, rows: slice, diagonal: bool) -> Tensor:
    """Return the scores of some query rows with the keys up to the last they attend to.

    Rows are grouped as by `_group_heads`.
    """
    scores = _group_heads(q, k) @ k.mT * scale
    if not diagonal:
        return scores
    position = torch.arange(k.shape[-2], device=q.device)
    hidden = position > position[rows][:, None]
    return scores.masked_fill(hidden.repeat(_group(q, k), 1), -math.inf)


def _group(q: Tensor, k: Tensor) -> int:
    return q.shape[-3] // k.shape[-3] if k.shape[-3] else 1


def _group_heads(x: Tensor, k: Tensor) -> Tensor:
    """Fold query heads that share a key head into the rows: `... (h g) l e -> ... h (g l) e`."""
    group = _group(x, k)
    return (
        x if group == 1 else x.reshape(*x.shape[:-3], k.shape[-3], group * x.shape[-2], x.shape[-1])
    )


def _ungroup_heads(x: Tensor, q: Tensor, rows: slice) -> Tensor:
    return x.reshape(*q.shape[:-2], rows.stop - rows.start, x.shape[-1])


_MATMUL = FlashKernel(_by_matmul, _grads_by_matmul)
