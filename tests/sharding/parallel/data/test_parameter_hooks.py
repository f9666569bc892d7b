"""`param.register_hook` under each form of data parallelism: it gets the gradient, once, and may
change it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import data_parallel, fully_shard
from tests.device import DEVICE
from tests.sharding.ranks import on_mesh

ROWS = torch.arange(12.0, dtype=torch.float64).reshape(4, 3).cos()
FORMS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "DDP": data_parallel,
    "DDP of units": lambda model, mesh: data_parallel(model, mesh, units=nn.Linear),
    "ZeRO-1": lambda model, mesh: data_parallel(model, mesh, optimizer="a"),
    "ZeRO-2": lambda model, mesh: data_parallel(model, mesh, gradient="a", optimizer="a"),
    "FSDP": fully_shard,
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_hook_that_changes_the_gradient(form: str, sharded: bool) -> None:
    reference = net()
    reference[0].weight.register_hook(lambda grad: grad * 2)
    for _ in range(2):
        reference(ROWS).square().mean().backward()

    def program(mesh: Any) -> None:
        model, calls = FORMS[form](net().to(DEVICE), mesh), []
        model[0].weight.register_hook(lambda grad: calls.append(grad.shape) or grad * 2)
        x: Any = ROWS.to(DEVICE)
        x = sm.device_put(x, mesh, P("a")) if sharded else x.chunk(2)[mesh.get_rank()]
        for _ in range(2):
            model(x).square().mean().backward()
        assert calls == [(4, 3)] * 2
        for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
            grad = p.grad.full_tensor().cpu()
            torch.testing.assert_close(grad, expected.grad, rtol=1e-12, atol=1e-12)

    on_mesh((2,), program)
