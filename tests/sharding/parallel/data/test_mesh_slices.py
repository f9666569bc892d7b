"""Tensor parallelism on one slice of a mesh and data parallelism on another, as with torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P, ShardedTensor
from shardmesh.compat import ColwiseParallel, RowwiseParallel
from shardmesh.mesh.device_mesh import common_mesh
from shardmesh.parallel import data_parallel, fully_shard
from tests.sharding.ranks import every_rank, on_mesh

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
WRAP = {
    "fully_shard": lambda model, mesh: fully_shard(model, mesh),
    "HSDP": lambda model, mesh: fully_shard(model, mesh),
    "ZeRO-1": lambda model, mesh: data_parallel(model, mesh, optimizer=mesh.axis_names[-1]),
    "DDP": lambda model, mesh: data_parallel(model, mesh),
}


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 5), nn.LayerNorm(5)).double()


@pytest.mark.parametrize("form", WRAP)
def test_slices_of_one_mesh(form):
    shape, data = ((2, 2, 2), ("a", "b")) if form == "HSDP" else ((2, 2), ("a",))

    def main(mesh):
        dp, tp = mesh[data], mesh[mesh.axis_names[-1]]
        made, plain, x = make(), make(), torch.randn(8, 5, dtype=torch.float64)
        sm.compat.parallelize_module(made, tp, PLAN)
        WRAP[form](made, dp)
        place, places = dp.index_along(dp.axis_names), dp.size()
        for _ in range(2):
            made(x.chunk(places)[place]).square().mean().backward()
            plain(x).square().mean().backward()
        for p, q in zip(made.parameters(), plain.parameters(), strict=True):
            assert isinstance(p, ShardedTensor)
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-14)

    on_mesh(shape, main)


@every_rank(2, 2)
def test_unrelated_meshes_raise(mesh):
    made = sm.compat.parallelize_module(make(), mesh["b"], PLAN)
    other = sm.DeviceMesh(mesh.device_type, [[0, 1], [2, 3]], axis_names=("x", "y"))["x"]
    with pytest.raises(ValueError, match="pass the mesh that has the axes of both"):
        fully_shard(made, other)


@every_rank(2, 2, 2)
def test_the_common_mesh_keeps_the_order_of_axes(mesh):
    assert common_mesh([mesh["c"], mesh["a"]]) is mesh["a", "c"]
    assert common_mesh([mesh["b", "c"], mesh["a"]]) is mesh
    assert common_mesh([mesh["a"]]) is mesh["a"]
    x = sm.device_put(torch.ones(4), common_mesh([mesh["c"], mesh["a"]]), P(("a", "c")))
    assert x.to_local().shape == (1,)
