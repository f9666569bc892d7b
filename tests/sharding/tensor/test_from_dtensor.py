"""torch's meshes and DTensors, passed where ours are expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.distributed.tensor import parallel

import shardmesh as sm
from shardmesh import P, Replicate, Shard
from shardmesh.parallel import (
    colwise,
    data_parallel,
    distribute_module,
    fully_shard,
    parallelize,
    rowwise,
)
from shardmesh.sharding.tensor.from_dtensor import from_dtensor
from tests.pool import Pool
from tests.sharding.ranks import collectives


def grid() -> Any:
    return torch_init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _meshes() -> None:
    mesh, whole = grid(), numbers(4, 6)
    ours = sm.DeviceMesh.from_torch(mesh)
    spec, placements = P("dp", "tp"), [Shard(0), Shard(1)]
    part = sm.distribute_tensor(whole, ours, placements).to_local()
    made = {
        "distribute_tensor": sm.distribute_tensor(whole, mesh, placements),
        "device_put": sm.device_put(whole, mesh, spec),
        "from_local": sm.from_local(part, mesh, placements),
        "DTensor.from_local": sm.compat.DTensor.from_local(
            part, device_mesh=mesh, placements=placements
        ),
        "redistribute": sm.device_put(whole, ours).redistribute(mesh, placements),
        "redistribute by name": sm.device_put(whole, ours).redistribute(
            device_mesh=mesh, placements=placements
        ),
        "shard_map": sm.shard_map(lambda x: x.clone(), mesh=mesh, in_specs=(spec,), out_specs=spec)(
            sm.device_put(whole, ours, spec)
        ),
        "local_map": sm.compat.local_map(torch.clone, placements, (placements,), device_mesh=mesh)(
            sm.device_put(whole, ours, spec)
        ),
        "from_callback": sm.make_array_from_callback(
            (4, 6), mesh, spec, lambda index: whole[index]
        ),
    }
    with sm.set_mesh(mesh) as current:
        assert current is sm.get_mesh() is ours
    for name, x in made.items():
        assert (x.mesh, x.spec) == (ours, spec), name
        assert torch.equal(x.full_tensor(), whole), name
    for x in (
        sm.zeros((4, 6), mesh, spec),
        sm.zeros(4, 6, device_mesh=mesh, placements=placements),
        sm.randint(9, (4, 6), mesh, spec),
    ):
        assert (x.mesh, x.spec) == (ours, spec)


def test_functions_accept_torchs_mesh(world4: Pool) -> None:
    world4(_meshes)


def _modules() -> None:
    mesh, x = grid(), numbers(4, 8)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))

    expected = model()(x)
    plan = {"0": sm.compat.ColwiseParallel(), "1": sm.compat.RowwiseParallel()}
    for made in (
        sm.compat.parallelize_module(model(), mesh["tp"], plan),
        parallelize(model(), mesh["tp"], {"0": colwise(), "1": rowwise()}),
        fully_shard(model(), mesh=mesh["dp"]),
        data_parallel(model(), mesh),
        distribute_module(model(), mesh),
    ):
        with sm.ops.implicit_replication():
            y = made(x)
        torch.testing.assert_close(
            y.full_tensor() if isinstance(y, sm.compat.DTensor) else y, expected
        )


def test_modules_on_torchs_mesh(world4: Pool) -> None:
    world4(_modules)


def _dtensors() -> None:
    mesh, whole = grid(), numbers(4, 6)
    ours = sm.DeviceMesh.from_torch(mesh)
    for placements in (
        [Shard(0), Replicate()],
        [Shard(1), Shard(0)],
        [Replicate(), Replicate()],
        [Shard(0), Shard(0)],
    ):
        own = [
            theirs.Shard(p.dim) if isinstance(p, Shard) else theirs.Replicate() for p in placements
        ]
        x: Any = theirs.distribute_tensor(whole, mesh, own)
        with collectives() as records:
            same = [
                sm.distribute_tensor(x, ours, placements),
                sm.distribute_tensor(x, mesh, own),
                sm.device_put(x, mesh, sm.typeof(from_dtensor(x)).spec),
                sm.redistribute(x, placements),
            ]
        assert records == []
        for y in same:
            assert (y.mesh, y.placements) == (ours, tuple(placements))
            assert torch.equal(y.to_local(), x.to_local())
        assert torch.equal(
            sm.distribute_tensor(x, mesh, [Replicate(), Shard(1)]).full_tensor(), whole
        )
    pending: Any = theirs.DTensor.from_local(
        torch.ones(3), mesh, [theirs.Partial(), theirs.Partial("avg")]
    )
    assert sm.redistribute(pending, P()).to_local().tolist() == [2.0] * 3
    with pytest.raises(TypeError, match="got torch's DTensor; use redistribute"):
        sm.from_local(x, ours, placements)
    with pytest.raises(RuntimeError, match="torch's DTensor"):
        torch.add(sm.zeros((4, 6), ours), x)


def test_dtensors_are_converted_without_communication(world4: Pool) -> None:
    world4(_dtensors)


def _gradients() -> None:
    mesh, whole = grid(), numbers(4, 6)
    for placements in (
        [theirs.Replicate(), theirs.Shard(0)],
        [theirs.Shard(1), theirs.Replicate()],
    ):
        x: Any = theirs.distribute_tensor(whole, mesh, placements).requires_grad_()
        y = sm.redistribute(x, mesh, [Shard(0), Shard(0)])
        (y * y).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad.full_tensor(), 2 * whole)


def test_gradients_reach_the_dtensor(world4: Pool) -> None:
    world4(_gradients)


def _two_dims() -> None:
    """Convert a parameter with a _StridedShard, from torch's fully_shard over tensor
    parallelism.
    """
    mesh = grid()
    linear = nn.Linear(6, 8)
    for p in linear.parameters():
        dist.broadcast(p.detach(), 0)
    whole = linear.weight.detach().clone()
    parallel.parallelize_module(linear, mesh["tp"], parallel.ColwiseParallel())
    fsdp.fully_shard(linear, mesh=mesh["dp"])
    weight: Any = linear.weight.detach()
    y = sm.redistribute(weight)
    assert y.placements == (Shard(0, order=1), Shard(0, order=0))
    assert torch.equal(y.full_tensor(), whole)


def test_strided_shards_split_after_the_later_axes(world4: Pool) -> None:
    world4(_two_dims)


def _back() -> None:
    """Run the block of docs/from_dtensor.md."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    d: Any = theirs.distribute_tensor(numbers(8, 4), mesh, [theirs.Shard(0), theirs.Replicate()])
    y = sm.distribute_tensor(d, mesh, [Shard(0), Shard(1)])  # type: ignore[arg-type]
    back = theirs.DTensor.from_local(
        y.to_local(), y.mesh.to_torch(), [theirs.Shard(0), theirs.Shard(1)]
    )
    assert torch.equal(back.full_tensor(), numbers(8, 4))


def test_conversion_back_to_torch(world4: Pool) -> None:
    world4(_back)
