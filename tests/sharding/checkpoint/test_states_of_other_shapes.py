"""Optimizers whose states have other shapes than their parameters continue bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "rows and columns": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "history": lambda parameters: torch.optim.LBFGS(parameters, 0.1, max_iter=3),
}
FORMS = {"ddp": sm.parallel.data_parallel, "fsdp": sm.parallel.fully_shard}


def build(mesh: sm.DeviceMesh, form: str, kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    model = FORMS[form](layers, mesh, src_data_rank=None)
    return {"model": model, "optimizer": OPTIMIZERS[kind](model.parameters())}


def train(state: dict[str, Any], mesh: sm.DeviceMesh, steps: range) -> list[float]:
    losses: list[float] = []
    for step in steps:
        rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        x = sm.distribute_tensor(rows, mesh, P("dp"), src_data_rank=None)

        def closure(x: Any = x) -> Any:
            state["optimizer"].zero_grad()
            loss = (state["model"](x) ** 2).mean()
            loss.backward()
            return loss

        losses.append(float(state["optimizer"].step(closure)))
    return losses


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("by_name", [False, True])
def test_a_run_from_a_checkpoint_has_the_same_losses(
    kind: str, form: str, by_name: bool, tmp_path: Path
):
    @sm.simulate(2)
    def running() -> tuple[list[float], list[float]]:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("dp",))

        def tree(state: dict[str, Any]) -> dict[str, Any]:
            return sm.checkpoint.state_dict(**state) if by_name else state

        state = build(mesh, form, kind)
        train(state, mesh, range(2))
        sm.checkpoint.save(tree(state), tmp_path)
        again = build(mesh, form, kind)
        loaded = sm.checkpoint.load(tmp_path, tree(again))
        if by_name:
            sm.checkpoint.load_state_dict(again["model"], loaded, again["optimizer"])
        return train(state, mesh, range(2, 5)), train(again, mesh, range(2, 5))

    for expected, losses in running():
        assert losses == expected
