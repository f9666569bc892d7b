"""Synchronised batch norms on sharded batches: by the rule of batch norm, whose statistics are those of the whole batch."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..tensor.sharded_tensor import ShardedTensor


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """convert_sync_batchnorm(module) -> the module, whose `nn.SyncBatchNorm`s take sharded batches as well, on any device.

    Batch norms of sharded batches need no synchronisation of their own: `nn.BatchNorm1d`, `2d` and `3d` give the statistics of the
    whole batch already, with one small all_reduce forward and one backward. A model that has been made with
    `nn.SyncBatchNorm.convert_sync_batchnorm` would call torch's own collectives on the wrappers, and fail; after this it does as the
    others do. Plain batches are treated as before.

    Args:
        module: any module; it is changed in place. Parameters, buffers and names stay.

    Communication: none here.

    Example:
        >>> model = sm.convert_sync_batchnorm(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    """
    for submodule in module.modules():
        if type(submodule) is nn.SyncBatchNorm:
            submodule.__class__ = _ByRule
    return module


class _ByRule(nn.SyncBatchNorm):
    """A synchronised batch norm that leaves sharded batches to the rule of `F.batch_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, ShardedTensor):
            return _BatchNorm.forward(self, input)
        return super().forward(input)

    def _get_name(self) -> str:
        return "SyncBatchNorm"
