"""Tensors without values: parts on "meta" of tensors whose mesh has devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P, Partial, Replicate, Shard
from shardmesh.parallel import colwise, data_parallel, distribute_module, fully_shard, rowwise
from tests.device import DEVICE
from tests.sharding.ranks import collectives, every_rank, place


def on_meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@every_rank(2, 2)
def test_tensors_on_meta_are_placed_without_communication(mesh):
    with collectives() as records:
        for x in (
            sm.distribute_tensor(on_meta(5, 4), mesh, [Shard(0), Shard(1)]),
            sm.device_put(on_meta(5, 4), mesh, P("a", "b")),
            sm.from_local(
                on_meta(3 - mesh.coordinate[0], 2), mesh, [Shard(0), Shard(1)], shape=(5, 4)
            ),
        ):
            assert (x.shape, x.spec, x.is_meta, x.device.type) == (
                (5, 4),
                P("a", "b"),
                True,
                "meta",
            )
            assert x.to_local().is_meta
            assert x.to_local().shape == (3 - mesh.coordinate[0], 2)
        for target in ([Replicate(), Replicate()], [Shard(1), Shard(0)], [Shard(0), Replicate()]):
            assert x.redistribute(target).to_local().is_meta
    assert records == []
    assert sm.distribute_tensor(on_meta(4).requires_grad_(), mesh).requires_grad


@every_rank(4)
def test_a_forward_and_backward_on_meta_communicates_nothing(mesh):
    x = sm.distribute_tensor(on_meta(8, 4).requires_grad_(), mesh, [Shard(1)])
    w = sm.distribute_tensor(on_meta(4, 6).requires_grad_(), mesh, [Shard(0)])
    with collectives() as records:
        (x @ w).relu().sum().backward()
    assert records == []
    assert (x.grad.placements, x.grad.is_meta, w.grad.shape) == ((Shard(1),), True, (4, 6))


@every_rank(4)
def test_new_tensors_are_on_the_device_that_was_asked_for(mesh):
    meta = sm.distribute_tensor(on_meta(6, 2), mesh, [Shard(0)])
    real = place(mesh, torch.ones(6, 2), Shard(0))
    makers: list[Any] = [
        torch.empty_like,
        torch.zeros_like,
        torch.ones_like,
        torch.rand_like,
        torch.randn_like,
    ]
    for make in (*makers, lambda x, **where: torch.full_like(x, 3.0, **where)):
        assert make(meta).is_meta
        assert make(real, device="meta").is_meta
        for made in (make(meta, device=DEVICE), make(real), make(real, device=DEVICE)):
            assert (made.device.type, made.placements, made.to_local().shape) == (
                DEVICE,
                (Shard(0),),
                real.to_local().shape,
            )
    assert torch.ones_like(meta, device=DEVICE).sum().item() == 12
    for make in (torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.Tensor.new_ones):
        assert make(real, (3,), device="meta").is_meta
        assert make(meta, (3,)).is_meta
        assert make(meta, (3,), device=DEVICE).device.type == DEVICE
    with pytest.raises(ValueError, match="cannot be made on mps"):
        torch.zeros_like(real, device="mps")


@every_rank(2)
def test_to_meta_and_back(mesh):
    x: Any = place(mesh, torch.ones(4, 2), Shard(0))
    for y in (x.to("meta"), x.to(torch.device("meta"), torch.float64), x.to(device="meta")):
        assert (y.is_meta, y.placements) == (True, (Shard(0),))
    assert x.to(DEVICE).device.type == DEVICE
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        x.to("meta").to(DEVICE)
    module: Any = nn.Linear(4, 2)
    sm.parallel.parallelize(module, mesh, {"": colwise()})
    assert module.to("meta").weight.is_meta
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        module.to(DEVICE)


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))


def filled(module: Any) -> Any:
    """Fill the module with the same values for any layout of its parameters."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            whole = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
            p.copy_(whole)
    return module


def parallelize_module(model: nn.Module, mesh: sm.DeviceMesh) -> nn.Module:
    return sm.compat.parallelize_module(
        model, mesh, {"0": sm.compat.ColwiseParallel(), "2": sm.compat.RowwiseParallel()}
    )


def parallelize(model: nn.Module, mesh: sm.DeviceMesh) -> nn.Module:
    return sm.parallel.parallelize(model, mesh, {"0": colwise(), "2": rowwise()})


WAYS = {
    "parallelize_module": parallelize_module,
    "parallelize": parallelize,
    "distribute_module": distribute_module,
    "fully_shard": fully_shard,
    "data_parallel": data_parallel,
}


@pytest.mark.parametrize("way", WAYS)
def test_to_empty_gives_the_parts_memory(way):
    @every_rank(2)
    def program(mesh):
        torch.manual_seed(0)
        x = torch.randn(4, 8, dtype=torch.float64)
        plain = filled(blocks().double())
        plain(x).square().sum().backward()
        with torch.device("meta"):
            model: Any = blocks().double()
        model = WAYS[way](model, mesh)
        assert all(p.is_meta for p in model.parameters())
        with collectives() as records:
            model.to_empty(device=DEVICE)
        assert records == []
        assert all(p.device.type == DEVICE and not p.to_local().is_meta for p in model.parameters())
        filled(model)
        with sm.ops.implicit_replication():
            y = model(x)
        y.square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)

    program()


@every_rank(2)
def test_a_pending_tensor_on_meta(mesh):
    x = sm.from_local(on_meta(3), mesh, [Partial()])
    assert x.redistribute([Shard(0)]).to_local().shape == (2 - mesh.coordinate[0],)
