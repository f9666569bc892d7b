"""LoRA: freeze the weights of a model and train small matrices next to them; all are sharded over
the ranks between uses.

    y = x W' + x A' B'        W is frozen and gathered for use; A and B are trained, and only they
                              have gradients and optimizer state

LoRA: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models",
https://arxiv.org/abs/2106.09685

    python examples/lora.py                         4 ranks simulated in this process
    python examples/lora.py --launch 4              4 local processes
    torchrun --nproc-per-node 4 examples/lora.py    the same, started by torchrun
"""

from __future__ import annotations

import argparse
import copy
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm

STEPS, RATE, WIDTH, HIDDEN, RANK, BLOCKS, ROWS = 20, 0.02, 16, 42, 2, 3, 24


class LoRA(nn.Module):
    """A frozen linear layer plus a trained low-rank one, in plain PyTorch."""

    def __init__(self, inner: nn.Linear, rank: int = RANK) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inner.in_features) / inner.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + F.linear(F.linear(x, self.a), self.b)


class LoRABlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.up, self.down = LoRA(nn.Linear(WIDTH, HIDDEN)), LoRA(nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def train(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return the loss of each step on the given rows: this rank's, or all of them in one
    process.
    """
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), RATE)
    losses = []
    for _ in range(STEPS):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model, inputs and targets, equal on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(ROWS, WIDTH)
        return nn.Sequential(*[LoRABlock() for _ in range(BLOCKS)]), x, x.flip(1).sin()


def local_rows(x: Tensor, mesh: sm.DeviceMesh) -> Tensor:
    """Return this rank's rows, as its data loader would."""
    return x.chunk(mesh.size())[mesh.get_rank()]


def mean_of(losses: list[Tensor], mesh: sm.DeviceMesh) -> list[Any]:
    """Return the losses of the whole batch; ranks have equal numbers of rows."""
    each = sm.from_local(torch.stack(losses), mesh, [sm.Partial("avg")] * mesh.ndim)
    return each.full_tensor().tolist()


def main(ranks: int = 4) -> float:
    """Train on a mesh of `ranks` ranks and return the largest difference of a loss from one
    process.
    """
    mesh = sm.init_device_mesh("cpu", (ranks,), axis_names=("fsdp",))
    model, x, y = problem()
    expected = [loss.item() for loss in train(copy.deepcopy(model), x, y)]
    sm.parallel.fully_shard(model, mesh, units=LoRABlock)
    with sm.debug.comm_budget() as used:
        losses = mean_of(train(model, local_rows(x, mesh), local_rows(y, mesh)), mesh)
    difference = max(abs(ours - other) for ours, other in zip(losses, expected, strict=True))
    if mesh.get_rank() == 0:
        trained, total = (
            sum(p.numel() for p in model.parameters() if p.requires_grad or every)
            for every in (False, True)
        )
        print(
            f"LoRA: {trained:,} of {total:,} parameters trained, loss {losses[0]:.4f} -> "
            f"{losses[-1]:.4f}; in {STEPS} steps {used.by_op}"
        )
        print(f"largest difference from one process, of any loss: {difference:.1e}")
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="LoRA with weights sharded over the ranks, compared with one process"
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
