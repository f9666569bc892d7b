"""Muon with owners: each matrix is orthogonalized once, on one rank; two collectives move all
matrices there and back.

    momentum, rows sharded          by owner                         orthogonalized, rows sharded
    rank 0   [A0] [B0] [C0]         rank 0   [A]                     rank 0   [A0] [B0] [C0]
    rank 1   [A1] [B1] [C1]   ->    rank 1      [B]            ->    rank 1   [A1] [B1] [C1]
    rank 2   [A2] [B2] [C2]         rank 2         [C]               rank 2   [A2] [B2] [C2]
                     one all_to_all                  one all_to_all

Ownership is an ordinary layout: rows in parts of lengths (0, rows, 0), written P("fsdp",
sizes={"fsdp": (0, rows, 0)}). `redistribute_many` therefore does both moves, for any shapes. Owners
are chosen to balance the cost of the multiplications.

Muon: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon

    python examples/muon.py                         4 ranks simulated in this process
    python examples/muon.py --launch 4              4 local processes
    torchrun --nproc-per-node 4 examples/muon.py    the same, started by torchrun
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh import P

STEPS, RATE, MOMENTUM, WIDTH = 20, 0.02, 0.95, 24
QUINTIC = (
    3.4445,
    -4.7750,
    2.0315,
)  # a x + b x^3 + c x^5 maps singular values up to 1 to about 1; Jordan's coefficients
STORED = P("fsdp")
Tree = Any  # of tensors


def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """Approximate the nearest matrix whose singular values are 1, U V^T for x = U S V^T, in plain
    PyTorch.
    """
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.mT, steps).mT
    a, b, c = QUINTIC
    x = x / (x.norm() + 1e-7)  # so that no singular value exceeds 1
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def update(params: Tree, grads: Tree, momentum: Tree, orthogonal: Callable) -> tuple[Tree, Tree]:
    """Return the parameters, a tree of matrices, and their momentum after one step; `orthogonal` is
    `newton_schulz` on a list.
    """
    momentum = pytree.tree_map(lambda m, g: m.lerp(g, 1 - MOMENTUM), momentum, grads)
    # Nesterov's.
    ahead, tree = pytree.tree_flatten(
        pytree.tree_map(lambda m, g: g.lerp(m, MOMENTUM), momentum, grads)
    )
    directions = pytree.tree_unflatten(orthogonal(ahead), tree)
    params = pytree.tree_map(
        lambda p, d: p - RATE * max(1, p.shape[0] / p.shape[1]) ** 0.5 * d, params, directions
    )
    return params, momentum


def loss_of(params: Tree, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a residual MLP whose weights are all matrices, in plain PyTorch."""
    x = F.linear(x, params["embed"])
    for block in params["blocks"]:
        x = x + F.linear(F.silu(F.linear(F.rms_norm(x, x.shape[-1:]), block["up"])), block["down"])
    return F.mse_loss(F.linear(x, params["head"]), y)


# -- what makes it work with owners ----------------------------------------------------------------


def by_owners(matrices: list[sm.ShardedTensor]) -> list[sm.ShardedTensor]:
    """Apply `newton_schulz` to matrices laid out as `STORED`; the results have the same layout.
    Communication: two all_to_all.
    """
    specs = owners(tuple(tuple(m.shape) for m in matrices), matrices[0].mesh.size("fsdp"))
    owned = mapped(specs)(*sm.redistribute_many(matrices, specs))
    return sm.redistribute_many(owned, [STORED] * len(owned))


@functools.cache
def owners(shapes: tuple[tuple[int, int], ...], ranks: int) -> tuple[P, ...]:
    """Return the layout of each matrix on its owner, assigning the largest first, each to the least
    loaded rank.
    """
    specs, loads, work = {}, [0] * ranks, [m * n * min(m, n) for m, n in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: -work[i]):
        owner = loads.index(min(loads))
        loads[owner] += work[i]
        specs[i] = P(
            "fsdp",
            sizes={"fsdp": tuple(shapes[i][0] if rank == owner else 0 for rank in range(ranks))},
        )
    return tuple(specs[i] for i in range(len(shapes)))


@functools.cache  # a mapped function caches what it has seen, so create it once
def mapped(at: tuple[P, ...]) -> Callable:
    """Return `newton_schulz` as a function of matrices on their owners; on other ranks they have no
    rows.
    """
    return sm.shard_map(
        lambda *ms: tuple(newton_schulz(m) if len(m) else m for m in ms), in_specs=at, out_specs=at
    )


def loss_sharded(params: Tree, x: Tensor, y: Tensor) -> Tensor:
    """Return the same loss for weights laid out as `STORED`: they are gathered for use, and their
    gradients reduce-scattered.
    """
    leaves, tree = pytree.tree_flatten(params)
    return loss_of(
        pytree.tree_unflatten(sm.redistribute_many(leaves, [P()] * len(leaves)), tree), x, y
    )


def train(
    loss_of: Callable, params: Tree, x: Tensor, y: Tensor, orthogonal: Callable
) -> tuple[Tree, list, list]:
    """Return the parameters after `STEPS` steps, and the loss and the communication of each
    step.
    """
    momentum, losses, uses = pytree.tree_map(torch.zeros_like, params), [], []
    for step in range(STEPS):
        loss, grads = sm.value_and_grad(loss_of)(params, x, y)
        with sm.debug.comm_budget(
            launches=2 if step else None
        ) as used:  # the first call also exchanges the shapes of results
            params, momentum = update(params, grads, momentum, orthogonal)
        losses.append(loss)
        uses.append(used)
    return params, losses, uses


def problem(rows: int) -> tuple[Tree, Tensor, Tensor]:
    """Return initial parameters, inputs and targets, equal on every rank."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    blocks = [{"up": draw(50, WIDTH), "down": draw(WIDTH, 50)} for _ in range(2)]
    # 50 and 7 rows: uneven parts.
    params = {"embed": draw(WIDTH, 7), "blocks": blocks, "head": draw(7, WIDTH)}
    x = draw(rows, 7)
    return pytree.tree_map(lambda w: w / w.shape[1] ** 0.5, params), x, torch.sin(x.cumsum(1))


def main(ranks: int = 4) -> float:
    """Train on a mesh of `ranks` ranks and return the largest difference of a parameter or loss
    from one process.
    """
    mesh = sm.init_device_mesh("cpu", (ranks,), axis_names=("fsdp",))
    plain = problem(rows=16 * ranks)
    expected, expected_losses, _ = train(
        loss_of, *plain, orthogonal=lambda ahead: [newton_schulz(m) for m in ahead]
    )
    params, x, y = pytree.tree_map(lambda t: sm.device_put(t, mesh, STORED), plain)
    trained, losses, uses = train(loss_sharded, params, x, y, by_owners)
    both = zip(
        pytree.tree_leaves((losses, trained)),
        pytree.tree_leaves((expected_losses, expected)),
        strict=True,
    )
    pairs = [(ours.full_tensor(), other) for ours, other in both]
    difference = max((ours - other).abs().max().item() for ours, other in pairs)
    if mesh.get_rank() == 0:
        print(
            f"Muon: loss {pairs[0][0]:.4f} -> {pairs[STEPS - 1][0]:.4f}; collectives in an update: "
            f"{uses[-1].by_op}"
        )
        print(f"largest difference from one process, of any parameter or loss: {difference:.1e}")
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Muon with one owner for each matrix, compared with one process"
    )
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
