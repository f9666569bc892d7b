"""Mixing plain and sharded tensors, and tensors on several meshes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import Replicate, Shard
from tests.device import DEVICE
from tests.sharding.ranks import collectives, every_rank, place, same_error

X = torch.arange(15.0, dtype=torch.float64).view(5, 3) / 7 - 1
F = nn.functional


# -- plain tensors beside sharded ones -------------------------------------------------------------

MIXED = {
    "add": lambda x: x + X,
    "reflected": lambda x: X * x,
    "matmul": lambda x: X.T @ x,
    "in place": lambda x: x.add_(X),
    "into a plain one": lambda x: X.clone().add_(x),
    "list": lambda x: torch.cat([x, X]),
    "keyword": lambda x: F.linear(x, weight=X),
    "index": lambda x: x[torch.tensor([0, 1])],
    "indexed": lambda x: X[x.long()],
    "setitem": lambda x: X.clone().__setitem__(slice(None), x),
    "where": lambda x: torch.where(X > 0, x, 0.0),
    "one element that requires grad": lambda x: (
        x + torch.ones(1, dtype=X.dtype, requires_grad=True)
    ),
    "into one element": lambda x: torch.ones(1, dtype=X.dtype).add_(x.sum()),
    "foreach": lambda x: torch._foreach_add([x], [X]),
    "out": lambda x: torch.add(x, x, out=X.clone()),
}


@pytest.mark.parametrize("use", MIXED)
def test_mixing_plain_and_sharded_tensors_raises(use):
    text = same_error((2,), lambda mesh: MIXED[use](place(mesh, X, Shard(0))), Exception)
    if use not in ("out", "into a plain one"):
        assert "distribute_tensor(t, mesh, placements)" in text
        assert "sm.ops.implicit_replication()" in text


@every_rank(2)
def test_plain_numbers_are_allowed(mesh):
    x = place(mesh, X, Shard(0))
    for number in (
        2,
        2.5,
        True,
        torch.tensor(2.5, dtype=torch.float64),
        torch.tensor(2),
        np.float64(2.5),
    ):
        assert torch.equal((x * number).full_tensor(), X * number)
        assert torch.equal((number + x).full_tensor(), number + X)
    assert (x * torch.tensor(2.0)).dtype == torch.float64


def test_plain_number_that_requires_grad_raises():
    text = same_error(
        (2,),
        lambda mesh: place(mesh, X, Shard(0)) * torch.tensor(2.0, requires_grad=True),
        RuntimeError,
    )
    assert "requires grad" in text
    assert "device_put(t, mesh, P())" in text


@every_rank(3)
def test_implicit_replication(mesh):
    """Plain tensors are treated as replicated; their gradients are reduced and equal on
    every rank.
    """
    w = torch.ones(3, 4, dtype=X.dtype, requires_grad=True)
    bias = torch.ones(4, dtype=X.dtype, requires_grad=True)
    with sm.ops.implicit_replication():
        y = place(mesh, X, Shard(0)) @ w
        with sm.ops.implicit_replication():
            y = torch.cat([y + bias, torch.ones(1, 4, dtype=X.dtype)])
        (F.linear(y, weight=torch.eye(4, dtype=X.dtype)) ** 2).sum().backward()
        z = torch.tensor(3.0, dtype=X.dtype, requires_grad=True)
        (place(mesh, X, Shard(0)) * z).sum().backward()
    v = torch.ones(3, 4, dtype=X.dtype, requires_grad=True)
    c = torch.ones(4, dtype=X.dtype, requires_grad=True)
    ((X @ v + c) ** 2).sum().backward()
    torch.testing.assert_close(w.grad, v.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(bias.grad, c.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(z.grad, X.sum(), rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="mixes a plain tensor"):
        y + torch.ones(6, 4, dtype=X.dtype)


@every_rank(2)
def test_implicit_replication_ends_with_an_exception(mesh):
    with pytest.raises(KeyError), sm.ops.implicit_replication():
        raise KeyError
    with pytest.raises(RuntimeError, match="mixes a plain tensor"):
        place(mesh, X, Shard(0)) + X


# -- meshes ----------------------------------------------------------------------------------------


def test_operands_on_two_meshes_raise():
    def program(mesh):
        place(mesh, X, Shard(0), Shard(1)) + place(mesh["a"], X, Shard(0))

    text = same_error((2, 2), program, ValueError)
    assert "DeviceMesh(cpu, a=2, b=2) and DeviceMesh(cpu, a=2)" in text


@every_rank(2, 2)
def test_the_same_mesh_made_twice_is_one_mesh(mesh):
    again = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))
    with collectives() as records:
        y = place(mesh, X, Shard(0), Replicate()) + place(again, X, Shard(0), Replicate())
    assert records == []
    assert torch.equal(y.full_tensor(), 2 * X)
