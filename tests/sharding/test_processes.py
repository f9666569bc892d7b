"""Redistribution, operators and training on real gloo processes."""

from __future__ import annotations

import random

import torch

import shardmesh as sm
from shardmesh.parallel import distribute_module, shard_parameter
from shardmesh.sharding.redistribute.autograd import redistribute_local
from tests.device import DEVICE
from tests.sharding import reference

SHAPES = [(), (0, 3), (1, 5), (4, 4), (5, 7), (8, 2, 3), (13,), (3, 1, 6)]
KINDS = ["sum", "sum", "avg", "max", "min", "product"]


def _random_spec(choose: random.Random, names: tuple[str, ...], ndim: int, kind: str) -> sm.P:
    dims: list[list[str]] = [[] for _ in range(ndim)]
    pending = []
    for axis in choose.sample(names, len(names)):
        what = choose.randint(-2, ndim - 1)
        if what >= 0:
            dims[what].append(axis)
        elif what == -2:
            pending.append(axis)
    return sm.P(*map(tuple, dims), unreduced=dict.fromkeys(pending, kind))


def _random_moves(mesh_shape: tuple[int, ...], count: int) -> int:
    """Move random tensors between random layouts; returns how many collectives that took."""
    mesh = sm.init_device_mesh(DEVICE, mesh_shape, axis_names=("a", "b", "c")[: len(mesh_shape)])
    choose, launches = random.Random(0), 0
    for number in range(count):
        shape, kind = choose.choice(SHAPES), choose.choice(KINDS)
        src = sm.Layout.of(
            mesh, _random_spec(choose, mesh.axis_names, len(shape), kind), shape, torch.float64
        )
        dst = src.replace(_random_spec(choose, mesh.axis_names, len(shape), kind))
        parts = reference.contributions(mesh, src.spec, shape, seed=number)
        moved = redistribute_local(reference.local_part(parts, src), src, dst)
        whole = redistribute_local(moved, dst, dst.replicated)
        torch.testing.assert_close(whole, reference.value(parts, src.spec), rtol=1e-12, atol=1e-12)
        launches += sm.debug.plan(src, dst).launches
    return launches


def test_random_moves_on_four_processes(world4):
    for mesh_shape in [(4,), (2, 2), (1, 4)]:
        counts = world4(_random_moves, mesh_shape, 150)
        assert len(set(counts)) == 1
        assert counts[0] > 50


def _dtypes() -> None:
    mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("x",))
    for dtype in [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.float64,
    ]:
        whole = torch.arange(30).reshape(6, 5).to(dtype)
        x = sm.distribute_tensor(whole, mesh, [sm.Shard(0)])
        assert torch.equal(x.redistribute([sm.Shard(1)]).full_tensor(), whole), dtype


def test_every_dtype_moves(world4):
    world4(_dtypes)


def _train(placement) -> list[float]:
    """Run five AdamW steps of a two-layer network; return the losses."""
    torch.manual_seed(0)
    mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("dp", "tp"))
    layers = torch.nn.Sequential(
        torch.nn.Linear(10, 14), torch.nn.GELU(), torch.nn.Linear(14, 3)
    ).double()
    x, y = torch.randn(7, 10, dtype=torch.float64), torch.randint(0, 3, (7,))
    if placement is not None:
        layers = distribute_module(
            layers, mesh, lambda name, module, mesh: _shard_linear(module, mesh, placement)
        )
        x, y = sm.device_put(x, mesh, sm.P("dp")), sm.device_put(y, mesh, sm.P("dp"))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.05, foreach=True)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(layers(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _shard_linear(module, mesh, spec) -> None:
    if isinstance(module, torch.nn.Linear):
        shard_parameter(module, "weight", mesh, spec)
        shard_parameter(module, "bias", mesh, sm.P(spec.dims[0] if spec.dims else None))


def test_training_equals_one_process(world4):
    for spec in [sm.P(), sm.P("tp"), sm.P(None, "tp"), sm.P("dp", "tp"), sm.P(("tp", "dp"))]:
        expected = world4(_train, None)[0]
        for losses in world4(_train, spec):
            torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
