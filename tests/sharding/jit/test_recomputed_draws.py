"""Recomputation draws the numbers of forward again, from torch's generator: so does the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from tests.device import DEVICE
from tests.sharding.parallel.compositions import whole

STEPS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Dropout(0.3), Block(), nn.Dropout(0.3))


def trained(jitted: str, form: str, backend: str = "eager") -> tuple[list[Tensor], int]:
    """Train; return losses, parameters and the next random numbers; and the number of graphs."""
    mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
    net: Any = model()
    if form == "fsdp":
        sm.parallel.fully_shard(net, mesh, units=Block, src_data_rank=None)
    elif form == "ddp":
        sm.parallel.data_parallel(net, mesh, src_data_rank=None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    called = sm.jit(net, backend=backend) if jitted == "module" else net

    def step(x: Tensor) -> Tensor:
        loss = called(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    f: Any = sm.jit(step, backend=backend, fullgraph=True) if jitted == "step" else step
    torch.manual_seed(1)
    values = [f(torch.ones(3, 4)) for _ in range(STEPS)]
    graphs = {"step": f, "module": called}.get(jitted)
    parameters = [whole(p).detach() for p in net.parameters()]
    return [*values, *parameters, torch.rand(2)], 0 if graphs is None else len(graphs.recorded)


@pytest.mark.parametrize(
    ("jitted", "form"),
    [
        ("step", "plain"),
        ("step", "ddp"),
        ("step", "fsdp"),
        ("module", "plain"),
        ("module", "ddp"),
    ],
)
def test_the_bits_of_eager(jitted: str, form: str) -> None:
    eager = sm.simulate(2)(trained)("", form)
    for (expected, _), (values, graphs) in zip(
        eager, sm.simulate(2)(trained)(jitted, form), strict=True
    ):
        assert all(map(torch.equal, values, expected))
        assert graphs >= 1


def test_the_graph_saves_and_restores_states() -> None:
    net = model()

    @sm.jit(backend="eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss.detach()

    for _ in range(2):
        step(torch.ones(3, 4))
    text = step.recorded[-1].as_text()
    assert (text.count("= restore_state("), text.count("= save_state(")) == (3, 3)


@pytest.mark.parametrize("draws", [False, True])
def test_a_state_that_is_not_known_is_refused(draws: bool) -> None:
    state = torch.get_rng_state()

    @sm.jit(backend="eager", fullgraph=True)
    def f(x: Tensor) -> Tensor:
        torch.set_rng_state(state)
        return torch.rand(3) * x if draws else x * 2

    torch.rand(1)
    with pytest.raises(sm.errors.JitError, match="after it was seeded inside"):
        f(torch.ones(3))
