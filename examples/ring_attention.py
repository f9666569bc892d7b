"""Ring attention: the sequence is sharded over the ranks, and blocks of keys and values are passed
around a ring of ranks.

    q, k, v: P(None, None, "sp") of [b h s e]

             at the start   after 1 hop   after 2 hops   after 3 hops
    rank 0   q0: k0 v0      q0: k3 v3     q0: k2 v2      q0: k1 v1      queries stay; each block of
    rank 1   q1: k1 v1      q1: k0 v0     q1: k3 v3      q1: k2 v2      keys and values is sent to
    rank 2   q2: k2 v2      q2: k1 v1     q2: k0 v0      q2: k3 v3      the next rank until all
    rank 3   q3: k3 v3      q3: k2 v2     q3: k1 v1      q3: k0 v0      queries have seen all keys

Each block updates an online softmax (Milakov and Gimelshein 2018, "Online normalizer calculation
for softmax"; on a ring: Liu, Zaharia and Abbeel 2023). A rank computes on one block while the next
is being sent: `sm.async_start` sends, `wait` receives. Scores are never stored; autograd saves the
received keys and values. With a causal mask, ranks also compute fully masked blocks, about half of
the work; assigning each rank early and late positions (load balancing) would avoid that.

    python examples/ring_attention.py                         4 ranks simulated in this process
    python examples/ring_attention.py --launch 4              4 local processes
    torchrun --nproc-per-node 4 examples/ring_attention.py    the same, started by torchrun
"""

from __future__ import annotations

import argparse
import math
import os
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import shardmesh as sm
from shardmesh import P

SEQUENCE = P(None, None, "sp")  # layout of queries, keys and values [b h s e]


class OnlineSoftmax(NamedTuple):
    """The state of a softmax over the keys seen so far, for each query.

    Attributes:
        max_score: the largest score [b h q 1].
        total: the sum of exp(score - max_score) [b h q 1].
        output: the sum of exp(score - max_score) * value [b h q e].
    """

    max_score: Tensor
    total: Tensor
    output: Tensor


@sm.remat  # recompute the scores in backward instead of storing those of every block
def add_block(
    state: OnlineSoftmax, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> OnlineSoftmax:
    """Return the softmax after another block of keys and values; `mask` [q k] is True where a key
    is hidden from a query.
    """
    score = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        score = score.masked_fill(mask, -math.inf)
    max_score = torch.maximum(
        state.max_score, score.amax(-1, keepdim=True)
    ).detach()  # cancels out: it needs no gradient
    weight, rescale = (score - max_score).exp(), (state.max_score - max_score).exp()
    return OnlineSoftmax(
        max_score,
        state.total * rescale + weight.sum(-1, keepdim=True),
        state.output * rescale + weight @ v,
    )


def ring_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Compute `F.scaled_dot_product_attention(q, k, v, is_causal=causal)` on one rank, given its
    part of the sequence.

    Parts [b h s e] must have equal lengths, since `ppermute` moves equal parts: pad the sequence to
    a multiple of the number of ranks.
    """
    own_rank, ranks, length = sm.axis_index("sp"), sm.axis_size("sp"), q.shape[2]
    position = torch.arange(length, device=q.device)
    ring = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    # A rank's own block comes first. It contains a key for every query, so max_score is finite
    # after it.
    state = OnlineSoftmax(
        torch.full_like(q[..., :1], -math.inf), torch.zeros_like(q[..., :1]), torch.zeros_like(q)
    )
    for hop in range(ranks):
        pending = sm.async_start(sm.ppermute, (k, v), "sp", ring) if hop < ranks - 1 else None
        offset = (
            (own_rank - hop) % ranks - own_rank
        ) * length  # position of the block's first key relative to our first query
        state = add_block(state, q, k, v, position + offset > position[:, None] if causal else None)
        if pending is not None:
            k, v = pending.wait()
    return state.output / state.total


# -- reference in one process ----------------------------------------------------------------------


def compare(mesh: sm.DeviceMesh, plain: list[Tensor], causal: bool) -> float:
    """Return the largest difference from `scaled_dot_product_attention`, of the output or the
    gradients of q, k and v.
    """
    q, k, v = plain
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    pull = torch.linspace(-1, 1, expected.numel()).view_as(expected)  # the gradient of the output
    expected_grads = torch.autograd.grad(expected, plain, pull)

    attend = sm.shard_map(
        partial(ring_attention, causal=causal), in_specs=(SEQUENCE,) * 3, out_specs=SEQUENCE
    )
    ours, back = sm.vjp(attend, *[sm.device_put(x.detach(), mesh, SEQUENCE) for x in plain])
    grads = back(sm.device_put(pull, mesh, SEQUENCE))
    pairs = zip([ours, *grads], [expected, *expected_grads], strict=True)
    return torch.stack([(x.full_tensor() - other).abs().max() for x, other in pairs]).max().item()


def main(ranks: int = 4) -> float:
    """Compare attention with and without a causal mask; return the largest difference."""
    mesh = sm.init_device_mesh("cpu", (ranks,), axis_names=("sp",))
    random = torch.Generator().manual_seed(0)  # every rank draws the same
    plain = [torch.randn(2, 3, 16 * ranks, 8, generator=random).requires_grad_() for _ in "qkv"]
    differences = {causal: compare(mesh, plain, causal) for causal in (False, True)}
    if mesh.get_rank() == 0:
        print(
            f"ring attention over {16 * ranks} positions on {ranks} ranks; largest difference, of "
            "output or gradients,"
        )
        for causal, difference in differences.items():
            print(f"  from scaled_dot_product_attention(is_causal={causal}): {difference:.1e}")
    return max(differences.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ring attention, compared with one process")
    parser.add_argument(
        "--launch",
        type=int,
        metavar="N",
        help="run on N local processes; else 4 ranks are simulated",
    )
    processes = parser.parse_args().launch
    if "RANK" in os.environ:  # torchrun has started the ranks
        main(int(os.environ["WORLD_SIZE"]))
    elif processes:
        sm.launch(main, processes, (processes,))
    else:
        sm.simulate(4, prints="first")(main)(4)
