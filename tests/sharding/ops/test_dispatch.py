"""The strategy cache: calls that may share a strategy, and calls that must not."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh.sharding.layout import bounded_cache
from tests.device import DEVICE


def _pending(mesh):
    """Return a tensor of ones whose sum over the axis is pending."""
    return sm.ShardedTensor.from_local(torch.full((4,), 1 / mesh.size()), mesh, [sm.Partial()])


def test_zero_and_other_floats_have_separate_strategies():
    """Filling with zero is linear, filling with anything else is not, and both are calls of the
    same types.
    """

    def rank():
        mesh = sm.init_device_mesh(DEVICE, (2,))
        x, mask = _pending(mesh), sm.zeros((4,), mesh, dtype=torch.bool)
        mask._local[:2] = True
        return [x.masked_fill(mask, value).tolist() for value in (0.0, 5.0, 0.0, 7.0)]

    for results in sm.simulate(2)(rank)():
        assert results == [[0, 0, 1, 1], [5, 5, 1, 1], [0, 0, 1, 1], [7, 7, 1, 1]]


def test_dropout_does_not_share_with_calls_without():
    def rank():
        mesh = sm.init_device_mesh(DEVICE, (2,))
        q = sm.randn((2, 2, 4, 8), mesh, [sm.Shard(0)])
        without, dropped = (
            F.scaled_dot_product_attention(q, q, q, dropout_p=p).full_tensor() for p in (0.0, 0.5)
        )
        return torch.equal(without, dropped)

    assert sm.simulate(2)(rank)() == [False, False]


def test_one_strategy_for_all_scalars():
    def rank():
        mesh = sm.init_device_mesh(DEVICE, (2,))
        x = sm.ones((4,), mesh, [sm.Shard(0)])
        for scale in (0.5, 0.25, 3.0):
            x * scale
        return len(sm.typeof(x).strategies)

    assert sm.simulate(2)(rank)() == [1, 1]


def test_the_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(bounded_cache, "LIMIT", 10)

    def rank():
        x = sm.ones((4,), sm.init_device_mesh(DEVICE, (2,)), [sm.Shard(0)])
        for i in range(50):
            assert x.expand(i, 4).sum().item() == 4 * i
        return len(sm.typeof(x).strategies)

    assert all(count <= 10 for count in sm.simulate(2)(rank)())


def test_bool_int_and_float_arguments_are_distinguished():
    def rank():
        x = sm.ones((4,), sm.init_device_mesh(DEVICE, (2,)), [sm.Shard(0)], dtype=torch.int64)
        return [(x * value).dtype for value in (True, 1, 1.0)]

    for dtypes in sm.simulate(2)(rank)():
        assert dtypes == [torch.int64, torch.int64, torch.float32]
