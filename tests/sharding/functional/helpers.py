"""Helpers for tests of mapped functions: tensors on a mesh, and comparison with the plain
computation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import shardmesh as sm


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random numbers that are the same on every rank."""
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def put(
    mesh: sm.DeviceMesh, tensor: Tensor, spec: sm.P | None = None, *, grad: bool = False
) -> sm.ShardedTensor:
    """Distribute `tensor`, which is the same on every rank, without communication; replicated
    without a spec.
    """
    x = sm.distribute_tensor(tensor, mesh, sm.P() if spec is None else spec, src_data_rank=None)
    return x.requires_grad_() if grad else x


def same(sharded: Any, whole: Tensor) -> None:
    """Assert that the sharded tensor has this value, shape and dtype."""
    torch.testing.assert_close(sharded.full_tensor(), whole)


def same_gradients(
    sharded: list[Any], plain: list[Tensor], loss: Tensor, plain_loss: Tensor
) -> None:
    """Assert equal losses, and after backward equal gradients with the layouts of their leaves."""
    same(loss, plain_loss)
    loss.backward()
    plain_loss.backward()
    for x, y in zip(sharded, plain, strict=True):
        assert y.grad is not None
        if isinstance(x, sm.ShardedTensor):
            assert sm.typeof(x.grad) is sm.typeof(x)
            same(x.grad, y.grad)
        else:
            torch.testing.assert_close(x.grad, y.grad)


def leaf(tensor: Tensor) -> Tensor:
    """Return a plain copy that requires grad."""
    return tensor.detach().clone().requires_grad_()
