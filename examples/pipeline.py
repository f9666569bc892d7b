"""Pipeline parallelism: each rank has some layers of a model, and microbatches pass from rank to
rank, forward and back.

    1f1b on 4 ranks, 6 microbatches; time from left to right

    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- F4 B1--- F5 B2--- .  B3--- .  B4--- .  B5---
    rank 1  .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- F5 B3--- .  B4--- .  B5--- .  .
    rank 2  .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- .  B5--- .  .  .  .
    rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- .  .  .  .  .  .

The model is not written for it: `sm.parallel.pipeline` runs its forward on each rank, where the
layers of other ranks are not computed. docs/pipeline.md has other schedules, and layers inside of
the stages; the same pipeline written by hand, as a loop over `ppermute`, is in docs/functional.md.

    python examples/pipeline.py                         4 ranks simulated in this process
    python examples/pipeline.py --launch 4              4 local processes
    torchrun --nproc-per-node 4 examples/pipeline.py    the same, started by torchrun
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm

BLOCKS, WIDTH, VOCABULARY = 6, 16, 32
MICROBATCHES, ROWS, LENGTH = 6, 12, 5
STEPS = 3


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predicts a token from the one before: [rows length] -> [rows vocabulary length]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)


def make_model() -> Model:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return Model()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return ids and the ids that follow; some targets count nothing."""
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=random)
    targets = ids[:, 1:].clone()
    targets[: ROWS // 3, 2:] = -100  # padding
    return ids[:, :-1], targets


def train(optimizer: torch.optim.Optimizer, backward: Callable[[int], Tensor]) -> list[float]:
    """Return the loss of each step."""
    losses: list[float] = []
    for step in range(STEPS):
        losses.append(backward(step).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_single() -> list[float]:
    """Train in one process."""
    model = make_model()

    def backward(step: int) -> Tensor:
        ids, targets = batch(step)
        loss = F.cross_entropy(model(ids), targets)
        loss.backward()
        return loss

    return train(torch.optim.AdamW(model.parameters(), lr=1e-2), backward)


def train_pipeline(mesh: sm.DeviceMesh) -> list[float]:
    """Train in stages over the axis "pp"."""
    ranks = mesh.size("pp")
    first_blocks = [f"blocks.{BLOCKS * rank // ranks}" for rank in range(1, ranks)]
    pipe = sm.parallel.pipeline(
        make_model(), mesh, split=first_blocks, schedule="1f1b", microbatches=MICROBATCHES
    )

    def backward(step: int) -> Tensor:
        ids, targets = batch(step)
        return pipe.step(ids, targets, loss_fn=F.cross_entropy)

    return train(torch.optim.AdamW(pipe.parameters(), lr=1e-2), backward)


def main(ranks: int = 4) -> float:
    """Compare the losses with one process; return the largest difference."""
    mesh = sm.init_device_mesh("cpu", (ranks,), axis_names=("pp",))
    ours, expected = train_pipeline(mesh), train_single()
    difference = max(abs(x - y) for x, y in zip(ours, expected, strict=True))
    if mesh.get_rank() == 0:
        timeline = sm.parallel.make_schedule("1f1b", ranks, MICROBATCHES).simulate()
        print(
            f"{MICROBATCHES} microbatches, {ranks} stages, idle for "
            f"{timeline.bubble / timeline.makespan:.0%} of the time at equal costs: losses "
            f"{', '.join(f'{loss:.4f}' for loss in ours)}"
        )
        print(f"largest difference from the losses of one process: {difference:.1e}")
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A model in stages, compared with one process")
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
