"""Ring attention: the sequence is split over the ranks, and blocks of keys and values are passed around a ring of ranks.

    q, k, v: P(None, None, "sp") of [b h s e]

               at first       after 1 hop     after 2 hops    after 3 hops
    rank 0   q0: k0 v0        q0: k3 v3       q0: k2 v2       q0: k1 v1        queries stay; a block of keys and
    rank 1   q1: k1 v1        q1: k0 v0       q1: k3 v3       q1: k2 v2        values goes to the next rank, until
    rank 2   q2: k2 v2        q2: k1 v1       q2: k0 v0       q2: k3 v3        all queries have seen all keys
    rank 3   q3: k3 v3        q3: k2 v2       q3: k1 v1       q3: k0 v0

Each block is absorbed into a running softmax (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; around a
ring: Liu, Zaharia and Abbeel 2023). While a rank works on one block, the next is being sent: `sm.async_start` sends, `wait` receives.
Scores are never stored; for gradients, autograd saves the keys and values received. With a causal mask a rank also works on fully
masked blocks, about half of the work; assigning each rank early and late positions (load balancing) would avoid that.

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

SEQUENCE = P(None, None, "sp")  # how queries, keys and values [b h s e] lie


class Running(NamedTuple):
    """A softmax over the keys seen so far, for each query.

    Attributes:
        top: the largest score [b h q 1].
        total: the sum of exp(score - top) [b h q 1].
        mix: the sum of exp(score - top) * value [b h q e].
    """

    top: Tensor
    total: Tensor
    mix: Tensor


@sm.remat  # backward computes the scores again, rather than keeping those of every block
def absorb(seen: Running, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Running:
    """The running softmax after another block of keys and values; `hidden` [q k] are keys that a query must not see."""
    score = q @ k.mT / math.sqrt(q.shape[-1])
    if hidden is not None:
        score = score.masked_fill(hidden, -math.inf)
    top = torch.maximum(seen.top, score.amax(-1, keepdim=True)).detach()  # cancels out: it needs no gradient
    share, shrink = (score - top).exp(), (seen.top - top).exp()
    return Running(top, seen.total * shrink + share.sum(-1, keepdim=True), seen.mix * shrink + share @ v)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """`F.scaled_dot_product_attention(q, k, v, is_causal=causal)`, as each rank sees it: its own part of the sequence.

    Parts [b h s e] are equally long on all ranks, since `ppermute` moves equal parts: pad the sequence to a multiple of the ranks.
    """
    here, ranks, length = sm.axis_index("sp"), sm.axis_size("sp"), q.shape[2]
    place = torch.arange(length, device=q.device)
    ring = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    # Nothing seen yet. A rank's own block comes first and shows every query itself, so the top is a number from then on.
    seen = Running(torch.full_like(q[..., :1], -math.inf), torch.zeros_like(q[..., :1]), torch.zeros_like(q))
    for hop in range(ranks):
        coming = sm.async_start(sm.ppermute, (k, v), "sp", ring) if hop < ranks - 1 else None
        ahead = ((here - hop) % ranks - here) * length  # how far the block's first key is ahead of our first query
        seen = absorb(seen, q, k, v, place + ahead > place[:, None] if causal else None)
        if coming is not None:
            k, v = coming.wait()
    return seen.mix / seen.total


# -- the same in one process, to compare -------------------------------------------------------------------------------


def compare(mesh: sm.DeviceMesh, plain: list[Tensor], causal: bool) -> float:
    """The largest difference of the output, or of the gradient of q, k or v, from `scaled_dot_product_attention`."""
    q, k, v = plain
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    pull = torch.linspace(-1, 1, expected.numel()).view_as(expected)  # the gradient that arrives at the output
    expected_grads = torch.autograd.grad(expected, plain, pull)

    attend = sm.shard_map(partial(ring_attention, causal=causal), in_specs=(SEQUENCE,) * 3, out_specs=SEQUENCE)
    ours, back = sm.vjp(attend, *[sm.device_put(x.detach(), mesh, SEQUENCE) for x in plain])
    grads = back(sm.device_put(pull, mesh, SEQUENCE))
    pairs = zip([ours, *grads], [expected, *expected_grads], strict=True)
    return torch.stack([(x.full_tensor() - other).abs().max() for x, other in pairs]).max().item()


def main(ranks: int = 4) -> float:
    """Compare attention with and without a causal mask; the largest difference."""
    mesh = sm.init_device_mesh("cpu", (ranks,), axis_names=("sp",))
    random = torch.Generator().manual_seed(0)  # every rank draws the same
    plain = [torch.randn(2, 3, 16 * ranks, 8, generator=random).requires_grad_() for _ in "qkv"]
    differences = {causal: compare(mesh, plain, causal) for causal in (False, True)}
    if mesh.get_rank() == 0:
        print(
            f"ring attention over {16 * ranks} positions on {ranks} ranks; largest difference, of output or gradients,"
        )
        for causal, difference in differences.items():
            print(f"  from scaled_dot_product_attention(is_causal={causal}): {difference:.1e}")
    return max(differences.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ring attention, compared with one process")
    parser.add_argument("--launch", type=int, metavar="N", help="run on N local processes; else 4 ranks are simulated")
    processes = parser.parse_args().launch
    if "RANK" in os.environ:  # torchrun has started the ranks
        main(int(os.environ["WORLD_SIZE"]))
    elif processes:
        sm.launch(main, processes, (processes,))
    else:
        sm.simulate(4, prints="first")(main)(4)
