"""What tests of mapped functions share: tensors on a mesh, and comparing them with the plain computation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import shardmesh as sm


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def put(mesh: sm.DeviceMesh, tensor: Tensor, spec: sm.P | None = None, *, grad: bool = False) -> sm.ShardedTensor:
    """`tensor`, the same on every rank, laid out without communication; replicated where there is no spec."""
    x = sm.distribute_tensor(tensor, mesh, sm.P() if spec is None else spec, src_data_rank=None)
    return x.requires_grad_() if grad else x


def same(sharded: Any, whole: Tensor) -> None:
    """The sharded tensor holds this, with the same shape and dtype."""
    torch.testing.assert_close(sharded.full_tensor(), whole)


def same_gradients(sharded: list[Any], plain: list[Tensor], loss: Tensor, plain_loss: Tensor) -> None:
    """Both losses, and after backward all gradients, are the same; each gradient lies as its leaf."""
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
    """A plain copy that requires grad."""
    return tensor.detach().clone().requires_grad_()
