"""Batch norms of a batch that is split over ranks: the statistics are those of the whole batch,
whichever module computes them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.training.batch_norm import convert_sync_batchnorm
from tests.device import DEVICE
from tests.sharding.ranks import on_mesh

MODULES = [nn.BatchNorm2d, nn.SyncBatchNorm]
STEPS = 3


def model_of(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), kind(4), nn.ReLU()).to(DEVICE, torch.float64)


def data(step, rows):
    return torch.randn(
        rows, 2, 5, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64
    ).to(DEVICE)


def trained(model, put, rows):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(put(data(step, rows))) * 1.5).square().mean().backward()
        optimizer.step()
    model.eval()
    out = model(put(data(9, rows))).detach()
    return {"out": out, **{name: x.detach() for name, x in model.state_dict().items()}}


def whole(x):
    return x.full_tensor() if isinstance(x, sm.ShardedTensor) else x


def run_on(mesh, kind, rows, spec):
    model = convert_sync_batchnorm(
        sm.parallel.distribute_module(model_of(kind), mesh, src_data_rank=None)
    )
    found = trained(model, lambda x: sm.distribute_tensor(x, mesh, spec, src_data_rank=None), rows)
    return {name: whole(x).cpu() for name, x in found.items()}


def check(found, rows):
    expected = trained(model_of(nn.BatchNorm2d), lambda x: x, rows)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x.cpu(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("rows", [8, 5, 2])
def test_statistics_of_the_whole_batch(kind, rows):
    """Also uneven parts, and ranks without rows."""
    for found in on_mesh((2, 2), lambda mesh: run_on(mesh, kind, rows, P(("a", "b")))):
        check(found, rows)


def _on_processes(kind):
    return run_on(sm.init_device_mesh(DEVICE, (4,), axis_names=("a",)), kind, 5, P("a"))


@pytest.mark.parametrize("kind", MODULES)
def test_on_processes(world4, kind):
    """Cases in which torch's SyncBatchNorm synchronizes."""
    for found in world4(_on_processes, kind):
        check(found, 5)


def test_converted_modules(monkeypatch):
    # Or the plain module would want a GPU.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    model = nn.Sequential(
        nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.Sequential(nn.SyncBatchNorm(3, affine=False))
    )
    text, names = repr(model), list(model.state_dict())
    x = torch.randn(4, 3)
    expected = model(x)
    assert convert_sync_batchnorm(model) is model
    assert (repr(model), list(model.state_dict())) == (text, names)
    assert isinstance(model[2][0], nn.SyncBatchNorm)
    assert type(model[0]) is nn.BatchNorm1d
    torch.testing.assert_close(model(x), expected)
