"""`convert_sync_batchnorm`: `nn.SyncBatchNorm` on sharded batches, by the rule of batch norm."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..tensor.sharded_tensor import ShardedTensor


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """convert_sync_batchnorm(module) -> the module, for sharded batches.

    Its `nn.SyncBatchNorm`s then accept sharded batches, too, on any device.

    `nn.BatchNorm1d`, `2d` and `3d` use the statistics of the whole sharded batch already, with one
    small all_reduce forward and one backward. A model made with
    `nn.SyncBatchNorm.convert_sync_batchnorm` would call torch's collectives on `ShardedTensor`s and
    fail; after this call it behaves as the others. Plain batches are treated as before.

    Args:
        module: any module; it is changed in place. Parameters, buffers and names do not change.

    Communication: none here.

    Example:
        >>> model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        >>> model = sm.training.convert_sync_batchnorm(model)
    """
    for submodule in module.modules():
        if type(submodule) is nn.SyncBatchNorm:
            submodule.__class__ = _ShardedSyncBatchNorm
    return module


class _ShardedSyncBatchNorm(nn.SyncBatchNorm):
    """A SyncBatchNorm that uses the rule of `F.batch_norm` for sharded batches."""

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, ShardedTensor):
            return _BatchNorm.forward(self, input)
        return super().forward(input)

    def _get_name(self) -> str:
        return "SyncBatchNorm"
