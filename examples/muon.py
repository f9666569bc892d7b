"""Muon with owners: each matrix is orthogonalised once, by one rank, and all travel there and back in two collectives.

    momentum, rows split            by owner                         orthogonalised, rows split
    rank 0   [A0] [B0] [C0]         rank 0   [A]                     rank 0   [A0] [B0] [C0]
    rank 1   [A1] [B1] [C1]   ->    rank 1      [B]            ->    rank 1   [A1] [B1] [C1]
    rank 2   [A2] [B2] [C2]         rank 2         [C]               rank 2   [A2] [B2] [C2]
                     one all_to_all                  one all_to_all

To be owned is a layout like any other: rows in parts of lengths (0, rows, 0), written P("fsdp", sizes={"fsdp": (0, rows, 0)}). So
`redistribute_many` plans both ways, with exact sizes, whatever the shapes; `newton_schulz` sees the one whole matrix, or none of it.
Owners are chosen so that all have about equally much to multiply.

Muon: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", https://kellerjordan.github.io/posts/muon

    python examples/muon.py                         4 ranks simulated in this process
    python examples/muon.py --launch 4              4 local processes
    torchrun --nproc-per-node 4 examples/muon.py    the same, started by torchrun
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import shardmesh as sm
from shardmesh import P

STEPS, RATE, MOMENTUM, WIDTH = 20, 0.02, 0.95, 24
QUINTIC = 3.4445, -4.7750, 2.0315  # a x + b x^3 + c x^5 takes singular values in (0, 1] to about 1; from the same source
STORED = P("fsdp")
Params = dict[str, Tensor]


def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """Plain PyTorch: about the nearest matrix whose singular values are 1: U V^T for x = U S V^T."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.mT, steps).mT
    a, b, c = QUINTIC
    x = x / (x.norm() + 1e-7)  # then no singular value is above 1
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def update(
    params: Params, grads: Params, momentum: Params, orthogonal: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> tuple[Params, Params]:
    """Parameters and momentum after one step, of plain tensors or sharded ones; `orthogonal` is `newton_schulz` of all matrices."""
    momentum = {name: m.lerp(grads[name], 1 - MOMENTUM) for name, m in momentum.items()}
    ahead = [g.lerp(momentum[name], MOMENTUM) for name, g in grads.items()]  # Nesterov's
    directions = zip(grads, orthogonal(ahead), strict=True)
    return {name: params[name] - RATE * max(1, d.shape[0] / d.shape[1]) ** 0.5 * d for name, d in directions}, momentum


# -- what makes it work with owners ------------------------------------------------------------------------------------


def by_owners(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    """`newton_schulz` of matrices that lie as `STORED`, and so do the results. Communication: two all_to_all."""
    specs = owners(tuple(tuple(m.shape) for m in matrices), sm.get_mesh().size("fsdp"))
    return sm.redistribute_many(work(specs)(sm.redistribute_many(matrices, specs)), [STORED] * len(matrices))


@functools.cache
def owners(shapes: tuple[tuple[int, int], ...], ranks: int) -> tuple[P, ...]:
    """The layout of each matrix at its owner: the largest goes first, to the rank with the least to do so far."""
    loads, owner = [0] * ranks, {}
    for i in sorted(range(len(shapes)), key=lambda i: -cost(shapes[i])):
        owner[i] = loads.index(min(loads))
        loads[owner[i]] += cost(shapes[i])
    return tuple(P("fsdp", sizes={"fsdp": tuple(m * (r == owner[i]) for r in range(ranks))}) for i, (m, _) in enumerate(shapes))


def cost(shape: tuple[int, int]) -> int:
    """Multiplications in a step of `newton_schulz`."""
    short, long = sorted(shape)
    return 2 * short * short * long + short**3


@functools.cache  # a mapped function remembers the layouts that it has seen: make it once
def work(specs: tuple[P, ...]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """`newton_schulz` of what this rank owns."""

    @sm.shard_map(in_specs=(list(specs),), out_specs=list(specs))
    def owned(parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return [newton_schulz(part) if len(part) else part for part in parts]

    return owned


# -- a model -----------------------------------------------------------------------------------------------------------


def model(params: Params, x: Tensor) -> Tensor:
    """Plain PyTorch: a residual MLP of two blocks, whose weights are all matrices."""
    x = F.linear(x, params["embed"])
    for i in range(2):
        x = x + F.linear(F.silu(F.linear(F.rms_norm(x, x.shape[-1:]), params[f"up{i}"])), params[f"down{i}"])
    return F.linear(x, params["head"])


def loss_of(params: Params, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(params, x), y)


def loss_sharded(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Every weight is gathered to compute with, and its gradient scattered."""
    return loss_of(dict(zip(params, sm.redistribute_many(list(params.values()), [P()] * len(params)), strict=True)), x, y)


def train(loss_of: Callable, params: Params, x: Tensor, y: Tensor, orthogonal: Callable) -> tuple[Params, list[Tensor], sm.CommReport]:
    """Parameters after `STEPS` steps, the losses on the way, and what the last update communicated."""
    momentum, losses = {name: torch.zeros_like(p) for name, p in params.items()}, []
    for step in range(STEPS):
        loss, grads = sm.value_and_grad(loss_of)(params, x, y)
        # The first time, the mapped function lets ranks compare the shapes of their results as well.
        with sm.comm_budget(launches=2 if step else None) as used:
            params, momentum = update(params, grads, momentum, orthogonal)
        losses.append(loss)
    return params, losses, used


def problem(rows: int) -> tuple[Params, Tensor, Tensor]:
    """Parameters to begin with, and a function to learn: every rank draws the same."""
    random = torch.Generator().manual_seed(0)
    blocks = {f"{name}{i}": shape for i in range(2) for name, shape in (("up", (50, WIDTH)), ("down", (WIDTH, 50)))}
    shapes = {"embed": (WIDTH, 7), **blocks, "head": (7, WIDTH)}  # 50 and 7 rows over 4 ranks: uneven parts
    params = {name: torch.randn(shape, generator=random) / shape[1] ** 0.5 for name, shape in shapes.items()}
    x = torch.randn(rows, 7, generator=random)
    return params, x, torch.sin(x.cumsum(1))


def main(ranks: int = 4) -> float:
    """Train on a mesh of this many ranks, and compare; the largest difference of a parameter or loss."""
    mesh = sm.init_device_mesh("cpu", (ranks,), axis_names=("fsdp",))
    params, x, y = problem(rows=16 * ranks)
    expected, expected_losses, _ = train(loss_of, params, x, y, lambda matrices: [newton_schulz(m) for m in matrices])
    with sm.set_mesh(mesh):
        placed = {name: sm.device_put(p, mesh, STORED) for name, p in params.items()}
        batch = [sm.device_put(t, mesh, P("fsdp")) for t in (x, y)]
        trained, losses, used = train(loss_sharded, placed, *batch, by_owners)
    pairs = [(trained[name].full_tensor(), expected[name]) for name in params]
    pairs += [(loss.full_tensor(), other) for loss, other in zip(losses, expected_losses, strict=True)]
    difference = max((ours - plain).abs().max().item() for ours, plain in pairs)
    if mesh.get_rank() == 0:
        calls = ", ".join(f"{calls} {op} ({size} bytes received)" for op, (calls, size) in used.by_op.items())
        print(f"Muon on {ranks} ranks: loss {losses[0].item():.4f} -> {losses[-1].item():.4f}; an update is {calls}")
        print(f"largest difference from one process, of any parameter or loss: {difference:.1e}")
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Muon with one owner for each matrix, compared with one process")
    parser.add_argument("--launch", type=int, metavar="N", help="run on N local processes; else 4 ranks are simulated")
    processes = parser.parse_args().launch
    if "RANK" in os.environ:  # torchrun has started the ranks
        main(int(os.environ["WORLD_SIZE"]))
    elif processes:
        sm.launch(main, processes, (processes,))
    else:
        sm.simulate(4, prints="first")(main)(4)
