"""What training loops do around a step: accumulation, schedules, averages, evaluation, two models,
adapters. Values have the bits of eager mode, and the number of recordings is bounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.mesh.comm.current_world import current_world
from tests.device import DEVICE
from tests.sharding.parallel.compositions import whole

Jit = Callable[[Callable[..., Any]], Any]
Values = list[Any]


def net(*sizes: int, seed: int = 0) -> nn.Sequential:
    """Return layers with dropout, which draws in training mode."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for rows, columns in itertools.pairwise(sizes):
        layers += [nn.Linear(rows, columns), nn.Tanh(), nn.Dropout(0.1)]
    return nn.Sequential(*layers[:-2])


def sharded(model: nn.Module, mesh: sm.DeviceMesh, form: str) -> nn.Module:
    if form == "fsdp":
        return sm.parallel.fully_shard(model, mesh, units=nn.Linear, src_data_rank=None)
    return sm.parallel.data_parallel(model, mesh, src_data_rank=None)


def rows_of(i: int, columns: int = 4) -> Tensor:
    """Return this rank's rows of a step."""
    generator = torch.Generator().manual_seed(10 * i + current_world().rank)
    return torch.randn(3, columns, generator=generator)


def accumulation(mesh: sm.DeviceMesh, jit: Jit, form: str) -> tuple[Values, int]:
    """A changing number of microbatches, each a call; the norm is logged."""
    model = sharded(net(4, 8, 4), mesh, form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @jit
    def backward(x: Tensor, share: float) -> Tensor:
        loss = model(x).square().mean() * share
        loss.backward()
        return loss.detach()

    @jit
    def update() -> Tensor:
        norm = sm.training.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    values: Values = []
    for i, count in enumerate([1, 2, 4, 3, 1, 2, 4]):
        values += [backward(rows_of(10 * i + k), 1 / count) for k in range(count)]
        values.append(update())
    graphs = sum(len(getattr(f, "recorded", ())) for f in (backward, update))
    return [*values, *model.parameters()], graphs


def accumulation_inside(mesh: sm.DeviceMesh, jit: Jit, form: str) -> tuple[Values, int]:
    """A changing number of microbatches in one call."""
    model = sharded(net(4, 8, 4), mesh, form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @jit
    def step(micro_batches: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for x in micro_batches:
            loss = model(x).square().mean() / len(micro_batches)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    counts = [1, 2, 3, 2, 1, 3, 2, 1]
    values = [step([rows_of(10 * i + k) for k in range(n)]) for i, n in enumerate(counts)]
    return [*values, *model.parameters()], len(getattr(step, "recorded", ()))


def schedule(mesh: sm.DeviceMesh, jit: Jit, form: str) -> tuple[Values, int]:
    """A schedule outside, an average inside, an evaluation of the average's model between, the loss
    read in some steps only.
    """
    model = sharded(net(4, 8, 4), mesh, form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=20)
    average = sm.training.EMA(model, 0.9)

    @jit
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        loss = model(x).square().mean()
        loss.backward()
        norm = sm.training.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        average.update()
        optimizer.zero_grad()
        return loss.detach(), norm

    @jit
    def evaluate(x: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            loss = model(x).square().mean()
        model.train()
        return loss

    values: Values = []
    for i in range(9):
        results = step(rows_of(i))
        rates.step()
        values += results if i % 3 == 0 else ()
        if i % 4 == 3:
            values.append(evaluate(rows_of(50)))
    graphs = sum(len(getattr(f, "recorded", ())) for f in (step, evaluate))
    return [*values, *model.parameters()], graphs


def preferences(mesh: sm.DeviceMesh, jit: Jit, form: str) -> tuple[Values, int]:
    """A model and a frozen reference, as in direct preference optimization."""
    model = sharded(net(4, 8, 5), mesh, form)
    reference = sharded(net(4, 8, 5, seed=1), mesh, form).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def log_probability(of: nn.Module, x: Tensor) -> Tensor:
        return of(x).log_softmax(-1)[:, 0]

    @jit
    def step(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            before = log_probability(reference, chosen) - log_probability(reference, rejected)
        margin = log_probability(model, chosen) - log_probability(model, rejected)
        loss = -F.logsigmoid(0.1 * (margin - before)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), (margin.detach() > before).float().mean()

    values = [x for i in range(6) for x in step(rows_of(i), rows_of(50 + i))]
    return [*values, *model.parameters()], len(getattr(step, "recorded", ()))


def adversaries(mesh: sm.DeviceMesh, jit: Jit, form: str) -> tuple[Values, int]:
    """A generator and a discriminator, two optimizers in one step, random inputs."""
    generator, critic = (
        sharded(net(*sizes, seed=seed), mesh, form)
        for seed, sizes in enumerate([(4, 8, 6), (6, 8, 1)])
    )
    of_generator = torch.optim.Adam(generator.parameters(), 0.01)
    of_critic = torch.optim.Adam(critic.parameters(), 0.01)

    def loss_of(x: Tensor, label: float) -> Tensor:
        scores = critic(x)
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))

    @jit
    def step(real: Tensor) -> tuple[Tensor, Tensor]:
        of_critic.zero_grad()
        fake = generator(torch.randn(len(real), 4))
        loss = loss_of(real, 1.0) + loss_of(fake.detach(), 0.0)
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        deceived = loss_of(fake, 1.0)
        deceived.backward()
        of_generator.step()
        return loss.detach(), deceived.detach()

    values = [x for i in range(6) for x in step(rows_of(i, 6))]
    parameters = [*generator.parameters(), *critic.parameters()]
    return [*values, *parameters], len(getattr(step, "recorded", ()))


def frozen(mesh: sm.DeviceMesh, jit: Jit, form: str) -> tuple[Values, int]:
    """A layer that is frozen for some steps; the first graph is used again afterwards."""
    model = sharded(net(4, 8, 4), mesh, form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @jit
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    values = []
    for i in range(10):
        if i in (3, 7):
            model[0].requires_grad_(i == 7)
        values.append(step(rows_of(i)))
    return [*values, *model.parameters()], len(getattr(step, "recorded", ()))


# the most recordings that a rank makes
LOOPS: dict[Callable[..., tuple[Values, int]], int] = {
    accumulation: 3,
    accumulation_inside: 3,
    schedule: 2,
    preferences: 1,
    adversaries: 1,
    frozen: 2,
}


@pytest.mark.one_in(2, each=["loop", "form"])
@pytest.mark.parametrize("form", ["fsdp", "ddp"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_has_the_bits_of_eager(loop: Any, form: str) -> None:
    def main(jit: Jit) -> tuple[list[Tensor], int]:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
        sm.random.manual_seed(3)
        values, graphs = loop(mesh, jit, form)
        return [whole(x).detach() for x in values], graphs

    eager = sm.simulate(2)(main)(lambda f: f)
    results = sm.simulate(2)(main)(lambda f: sm.jit(f, backend="eager", fullgraph=True))
    for (expected, _), (values, graphs) in zip(eager, results, strict=True):
        assert len(values) == len(expected)
        assert all(map(torch.equal, values, expected))
        assert 0 < graphs <= LOOPS[loop]


def test_adapters_that_are_switched() -> None:
    """peft assigns new lists of names in every call of `set_adapter`."""
    peft = pytest.importorskip("peft")

    def main(jit: Jit) -> tuple[list[Tensor], int]:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
        config = peft.LoraConfig(r=2, target_modules=["0", "3"], init_lora_weights=False)
        model = peft.get_peft_model(net(4, 8, 4), config)
        model.add_adapter("two", config)
        sharded(model, mesh, "ddp")
        adapters = [p for name, p in model.named_parameters() if "lora" in name]
        optimizer = torch.optim.AdamW(adapters, lr=0.01)

        @jit
        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        values = []
        for i in range(12):
            model.set_adapter("default" if i % 4 < 2 else "two")
            values.append(step(rows_of(i)))
        return [whole(x).detach() for x in (*values, *adapters)], len(getattr(step, "recorded", ()))

    eager = sm.simulate(2)(main)(lambda f: f)
    results = sm.simulate(2)(main)(lambda f: sm.jit(f, backend="eager", fullgraph=True))
    for (expected, _), (values, graphs) in zip(eager, results, strict=True):
        assert all(map(torch.equal, values, expected))
        assert graphs <= 4
