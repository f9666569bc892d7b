"""Behavior expected by programs written for DTensor, with torch 2.13's results on four
processes.
"""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from shardmesh import Partial, Replicate, Shard
from tests.device import DEVICE
from tests.sharding.ranks import collectives, every_rank, on_mesh, place, same_error

X = torch.arange(32.0).view(8, 4)


@every_rank(4)
def test_torchs_own_layout_attribute(mesh):
    x = place(mesh, X, Shard(0))
    torch.testing.assert_close(x, x.clone())
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(x, x + 1)
    for reduce in (torch.masked.sum, torch.masked.amax, torch.masked.mean):
        torch.testing.assert_close(reduce(x, 0, mask=x > 3).full_tensor(), reduce(X, 0, mask=X > 3))
    torch.testing.assert_close(torch.masked.softmax(x, 1).full_tensor(), torch.masked.softmax(X, 1))
    assert torch.empty(2, layout=x.layout).layout is torch.strided


@every_rank(4)
def test_a_local_leaf_is_written_in_place(mesh):
    for placements in ([Shard(0)], [Replicate()]):
        leaf = torch.ones(2, 3, requires_grad=True)
        x = sm.from_local(
            leaf, mesh, placements, shape=(8, 3) if placements == [Shard(0)] else (2, 3)
        )
        assert x.add_(1) is x
        assert leaf.tolist() == [[2.0] * 3] * 2
        (x * 3).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [[3.0] * 3] * 2


@every_rank(4)
def test_a_plain_tensor_of_one_element_counts_as_a_number(mesh):
    x = place(mesh, X, Shard(0))
    for one in (torch.full((1,), 2.0), torch.full((1, 1), 2.0)):
        for y, expected in (
            (one + x, one + X),
            (x * one, X * one),
            (torch.where(x > 3, x, one), torch.where(X > 3, X, one)),
        ):
            assert y.placements == (Shard(0),)
            torch.testing.assert_close(y.full_tensor(), expected)
    assert (place(mesh, X.sum(), Replicate()) + torch.ones(1, 1)).shape == (1, 1)
    with pytest.raises(RuntimeError, match="mixes a plain tensor"):
        x * torch.ones(1, requires_grad=True)
    with pytest.raises(RuntimeError, match="mixes a plain tensor"):
        torch.ones(1).add_(place(mesh, torch.ones(1), Replicate()))
    with pytest.raises(RuntimeError, match="on 'meta', which has no value"):
        x * torch.ones(1, device="meta")


@every_rank(4)
def test_new_tensors_of_the_same_shape_have_the_same_layout(mesh):
    x = place(mesh, X, Shard(0))
    for made, value in (
        (x.new_full((8, 4), 3.0), 3),
        (x.new_zeros(8, 4), 0),
        (x.new_ones(x.shape, dtype=torch.int64), 1),
        (x.new_empty(8, 4).fill_(2), 2),
        (x.new(8, 4).fill_(2), 2),
        (x.new(x.shape).fill_(2), 2),
    ):
        assert made.placements == (Shard(0),)
        assert made.to_local().shape == (2, 4)
        assert made.full_tensor().tolist() == [[value] * 4] * 8
    assert x.new_zeros((8, 2)).placements == (Replicate(),)
    assert x.new().shape == (0,)
    assert sm.from_local(X, mesh, [Partial()]).new_full((8, 4), 3.0).placements == (Replicate(),)


@pytest.mark.parametrize(
    ("shape", "dim", "to"),
    [
        ((1, 2, 4), 0, (1, 8)),
        ((2, 1, 4), 1, (2, 1, 2, 2)),
        ((8, 1), 1, (2, 4, 1)),
        ((1, 8), 0, (1, 1, 8)),
        ((1, 1), 1, (1, 1, 1)),
    ],
)
def test_a_view_keeps_the_split_of_a_dim_of_length_one(shape, dim, to):
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)

    def program(mesh):
        x = place(mesh, whole, Shard(dim), grad=True)
        with collectives() as records:
            y = x.view(to)
        assert records == []
        assert y.to_local().numel() == (whole.numel() if mesh.coordinate == (0,) else 0) or dim == 1
        torch.testing.assert_close(y.full_tensor(), whole.view(to))
        (y * 2).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), torch.full(shape, 2.0))

    on_mesh((4,), program)


def test_shapes_and_equality_on_ranks_outside_a_mesh():
    def program():
        mesh = sm.DeviceMesh(DEVICE, [0, 2], axis_names=("x",))
        x = sm.from_local(torch.ones(3, 4), mesh, [Shard(0)])
        assert x.shape == (6, 4)
        assert x.to_local().shape == ((3, 4) if mesh.coordinate else (0,))
        assert x.equal(x)
        assert not x.equal(x[:3])
        return x.equal(x + 1)

    assert sm.simulate(4)(program)() == [False, True, False, True]


def test_filling_a_pending_tensor_raises():
    text = same_error(
        (4,), lambda mesh: sm.from_local(torch.ones(3), mesh, [Partial()]).fill_(8.0), Exception
    )
    assert "fill_ writes into f32[3] @ P(None, unreduced={'a'})" in text
    assert "redistribute it first, or use the out-of-place form" in text
