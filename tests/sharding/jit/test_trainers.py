"""Classes that train a model, as programs write them: a step that is a method next to `train`,
`evaluate` and a log.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.sharding.jit.steps import runs


class Block(nn.Module):
    """A block of the program, with dropout."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(d, d), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(x).relu())


class Trainer:
    """A trainer in the manner of transformers: its step sets the mode of the model, and its `train`
    counts and logs.

    Attributes:
        run: the step, under `sm.jit` unless it is eager.
    """

    def __init__(self, model: nn.Module, eager: bool) -> None:
        self.model = model
        self.optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda i: 1 / (i + 1))
        self.state, self.log = {"step": 0, "epoch": 0.0}, [0.0]
        step = self.training_step
        self.run: Any = step if eager else sm.jit(step, backend="eager")

    def training_step(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        self.model.train()
        if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
            self.optimizer.train()
        loss = self.compute_loss(model, batch)
        loss.backward()
        sm.training.clip_grad_norm_(model.parameters(), 1.0)
        self.optimizer.step()
        model.zero_grad()
        return loss.detach()

    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return (model(batch["inputs"]) - batch["targets"]).square().mean()

    def evaluate(self, batch: dict[str, Any]) -> float:
        self.model.eval()
        with torch.no_grad():
            return self.compute_loss(self.model, batch).item()

    def train(self, batches: list[dict[str, Any]]) -> None:
        for i, batch in enumerate(batches):
            self.state["step"] += 1
            self.state["epoch"] = i / len(batches)
            self.log.append(self.run(self.model, batch).item())
            self.scheduler.step()
            if i % 3 == 2:
                self.log.append(self.evaluate(batch))


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_trainer_records_once(blocks: int) -> None:
    """The model's own class with one block, a class of torch with two."""

    def main(eager: bool) -> tuple[list[float], int, int]:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
        torch.manual_seed(0)
        model = Block() if blocks == 1 else nn.Sequential(Block(), Block())
        sm.parallel.fully_shard(model.to(DEVICE), mesh, axes="dp")
        torch.manual_seed(1)
        trainer = Trainer(model, eager)
        tensors = {"inputs": torch.randn(4, 8), "targets": torch.randn(4, 8)}
        batch = {name: sm.device_put(x, mesh, P("dp")) for name, x in tensors.items()}
        trainer.train([batch] * 15)  # with five evaluations
        if eager:
            return trainer.log, 0, 0
        return trainer.log, len(trainer.run.recorded), runs(trainer.run)

    log = sm.simulate(2)(main)(True)[0][0]
    # Neither the call that makes the state of the optimizer nor those after an evaluation.
    assert sm.simulate(2)(main)(False) == [(log, 1, 15 - 1 - 1 - 4)] * 2


class Optimizers:
    """Several optimizers, in the manner of torchtitan."""

    def __init__(self, models: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class CountingTrainer:
    """Counts steps in an attribute with the name of a method that its code calls."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.step = Block(), 0
        self.zero_grad: Any = None
        self.optimizers = Optimizers([self.model.eval()])

    def update(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizers.step()
        self.optimizers.zero_grad()
        return loss.detach()


def test_a_counter_with_the_name_of_a_method() -> None:
    trainer = CountingTrainer()
    update = sm.jit(trainer.update, backend="eager", fullgraph=True)
    for i in range(5):
        trainer.step = i
        update(torch.ones(2, 8))
    assert (len(update.recorded), runs(update)) == (1, 4)
    trainer.zero_grad = lambda: None  # may be what is called
    update(torch.ones(2, 8))
    assert len(update.recorded) == 2
