"""ShardedTensors that autograd saves, as hooks for saved tensors return them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .sharded_tensor import ShardedTensor


class _SavedWrapper(ShardedTensor):
    """A sharded argument of `torch.utils.checkpoint`; autograd's own nodes save local tensors.

    Autograd detaches the result of an unpack hook in C++, which would lose the `ShardedTensor`;
    this class restores it. Under a dispatch mode the call comes from Python, where
    `__torch_function__` would be first.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            # With its gradient history.
            return ShardedTensor._make_guarded(args[0]._local, args[0]._layout, args[0]._lineage)
        return super().__torch_dispatch__(func, types, args, kwargs)  # pyright: ignore


def wrapper_to_save(x: ShardedTensor) -> ShardedTensor:
    """Return what a hook for saved tensors returns, so that autograd passes on this tensor."""
    if not x._local.requires_grad:  # then autograd does not detach it
        return ShardedTensor._make_guarded(x._local, x._layout, x._lineage)
    out: Any = Tensor._make_subclass(_SavedWrapper, x._layout.meta, x._local.requires_grad)
    out._local, out._layout, out._lineage = x._local, x._layout, x._lineage
    return out
