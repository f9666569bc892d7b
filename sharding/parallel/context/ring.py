"""Ring attention: queries stay, keys and values pass from rank to rank until all had all.

               hop 0      hop 1        hop 2        hop 3
    rank 0   q0: k0 v0    q0: k3 v3    q0: k2 v2    q0: k1 v1      the next block is received
    rank 1   q1: k1 v1    q1: k0 v0    q1: k3 v3    q1: k2 v2      while the current one is computed
    rank 2   q2: k2 v2    q2: k1 v1    q2: k0 v0    q2: k3 v3
    rank 3   q3: k3 v3    q3: k2 v2    q3: k1 v1    q3: k0 v0

Backward passes the blocks around once more, since forward saves only the output and its
log-sum-exp. The gradient of a block follows it one hop behind; each rank adds its contribution, and
after the last hop it is on the block's own rank (Liu, Zaharia and Abbeel 2023, "Ring attention with
blockwise transformers").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....mesh.comm.pending import Pending
from ...autograd.engine_hooks import with_memory
from ...autograd.first_derivative import without_derivative
from ...lineage import backward_comm_context
from .blockwise import AttentionGrads, OnlineSoftmaxState, attend, attend_grads
from .load_balance import Block

_ONCE = (
    "the derivative of a gradient through ring attention (create_graph=True): its backward has no "
    "history; call F.scaled_dot_product_attention outside of context_parallel"
)


@dataclass(frozen=True)
class Ring:
    """The ranks of the ring, and the blocks that this rank computes.

    Attributes:
        mesh: of the queries.
        group: the ranks.
        order: by position in the ring, the rank's index in the group; this rank alone if it has all
            keys.
        place: the position of this rank.
        keys: by position, the length of the block of keys that starts there.
        blocks: by hop, the part of the current block that this rank's queries attend to.
        scale: the factor of scores.
    """

    mesh: Any
    group: Any
    order: tuple[int, ...]
    place: int
    keys: tuple[int, ...]
    blocks: tuple[Sequence[Block], ...]
    scale: float

    @property
    def size(self) -> int:
        return len(self.order)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return this rank's part of the attention; differentiable once.

        Communication: `size - 1` permutes, in each a block of keys and values; backward as many,
        and again as many with gradients, in at least float32.
        """
        return _RingAttention.apply(q, k, v, self)  # type: ignore[return-value]

    def passing(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the current keys and values, hop by hop; the next ones are received meanwhile."""
        current, like = (k, v), (k, v)
        block = _pack(k, v) if self.size > 1 else k
        for hop in range(1, self.size):
            pending = self.send(block, like, hop)
            yield current
            block = pending.wait()
            current = self.unpack(block, like, hop)
        yield current

    def send(self, block: Tensor, like: Sequence[Tensor], hop: int) -> Pending[Tensor]:
        """Give a block to the next rank, and return the one from the rank before.

        It is on this rank after `hop` hops.

        Args:
            block: flat.
            like: tensors with the shapes of the parts of a block, except for the number of keys.
        """
        received = block.new_empty(sum(_count(x, self._keys(hop)) for x in like))
        after, before = (self.order[(self.place + step) % self.size] for step in (1, -1))
        work = self.group.permute(received, block, dst=after, src=before, async_op=True)
        return Pending.after(work, lambda: received)

    def unpack(self, block: Tensor, like: Sequence[Tensor], hop: int) -> tuple[Tensor, Tensor]:
        """Return the two tensors packed into the block that this rank holds after `hop` hops."""
        keys = self._keys(hop)
        parts = block.split([_count(x, keys) for x in like])
        first, second = (
            part.view(*x.shape[:-2], keys, x.shape[-1]) for part, x in zip(parts, like, strict=True)
        )
        return first, second

    def _keys(self, hop: int) -> int:
        return self.keys[(self.place - hop) % self.size]


def _pack(*tensors: Tensor) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _count(x: Tensor, keys: int) -> int:
    """Return the number of elements of a tensor with that many keys."""
    return math.prod(x.shape[:-2]) * keys * x.shape[-1]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        state = OnlineSoftmaxState(q, v)
        for current, blocks in zip(ring.passing(k, v), ring.blocks, strict=True):
            attend(state, q, *current, blocks, ring.scale)
        out = state.out.to(q.dtype)
        ctx.ring, ctx.lineage = ring, ring.mesh.world.comm_context.lineage
        ctx.save_for_backward(q, k, v, out, state.lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad(), backward_comm_context(ctx.lineage, ctx.ring.mesh):
            input_grads = _ring_grads(ctx.ring, with_memory(grads[0]), *saved)
            gradients = [grad.to(x.dtype) for grad, x in zip(input_grads, saved, strict=False)]
        return *without_derivative(gradients, _ONCE), None


def _ring_grads(
    ring: Ring, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> AttentionGrads:
    """Pass the blocks once more, each followed by the summed gradients of earlier ranks."""
    own = AttentionGrads.zeros(q, k, v)
    following = Pending(partial(grad.new_zeros, (), dtype=own.k.dtype))
    for hop, current in enumerate(ring.passing(k, v)):
        hop_grads = AttentionGrads.zeros(q, *current)._replace(q=own.q) if hop else own
        attend_grads(hop_grads, grad, q, *current, out, lse, ring.blocks[hop], ring.scale)
        if hop:
            following = ring.send(
                _pack(hop_grads.k, hop_grads.v) + following.wait(), own[1:], hop + 1
            )
    if ring.size == 1:
        return own
    home = ring.unpack(following.wait(), own[1:], ring.size)
    return AttentionGrads(own.q, own.k + home[0], own.v + home[1])
