"""An optimizer created before its parameters are replaced raises in its step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P, Shard
from shardmesh.parallel import (
    colwise,
    data_parallel,
    distribute_module,
    fully_shard,
    materialize,
    parallelize,
    rowwise,
    shard_parameter,
)
from tests.sharding.ranks import every_rank, on_mesh


def _distribute(model, mesh):
    return distribute_module(model, mesh)


def _shard_parameter(model, mesh):
    shard_parameter(model[0], "weight", mesh, [Shard(0)])
    return model


REPLACING = {
    "fully_shard": fully_shard,
    "units": lambda model, mesh: fully_shard(model, mesh, units=nn.Linear),
    "data_parallel": data_parallel,
    "parallelize": lambda model, mesh: parallelize(model, mesh, {"0": colwise(), "1": rowwise()}),
    "parallelize_module": lambda model, mesh: sm.compat.parallelize_module(
        model, mesh, {"0": sm.compat.ColwiseParallel()}
    ),
    "distribute_module": _distribute,
    "shard_parameter": _shard_parameter,
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))


@pytest.mark.parametrize("replace", REPLACING)
def test_optimizer_created_before_sharding_raises(replace):
    def main(mesh):
        made = model()
        optimizer = torch.optim.AdamW(made.parameters())
        made = REPLACING[replace](made, mesh)
        with pytest.raises(
            RuntimeError,
            match=(
                r"AdamW.step\(\): parameter 0 of group 0, of shape \[6, 4\], is no longer in its "
                r"module"
            ),
        ):
            optimizer.step()
        torch.optim.AdamW(made.parameters()).step()

    on_mesh((2,), main)


@every_rank(2)
def test_an_optimizer_of_parameters_on_meta(mesh):
    with torch.device("meta"):
        made = fully_shard(model(), mesh)
    optimizer = torch.optim.SGD(made.parameters())
    materialize(made)
    with pytest.raises(RuntimeError, match="is no longer in its module"):
        optimizer.step()


@every_rank(2)
def test_optimizer_created_between_two_calls(mesh):
    made = parallelize(model(), mesh, {"0": colwise()})
    optimizer = torch.optim.SGD(list(made[0].parameters()), lr=0.1)
    before = made[0].weight
    parallelize(made, mesh, {"0": colwise()})
    assert made[0].weight is before
    optimizer.step()  # nothing was replaced


@every_rank(2)
def test_other_optimizers_step(mesh):
    plain = nn.Linear(2, 2)
    early = torch.optim.SGD(model().parameters(), lr=0.1)
    fully_shard(model(), mesh)
    plain(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    early.step()
    x = sm.device_put(torch.ones(4), mesh, P("a")).requires_grad_()
    torch.optim.SGD([x], lr=0.1).step()
