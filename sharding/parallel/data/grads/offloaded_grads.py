"""Gradients of parameters on the host.

Copied while backward continues, and added to `.grad` at its end.

device   backward 3 | backward 2 | backward 1 |
copies                grads 3      grads 2      grads 1
host     launches ...                                    waits for one event, adds to `.grad`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .....kernels.transfer.host_copies import CopyStream
from ....autograd import engine_hooks
from ....tensor.autograd import leaf_grads
from ....tensor.sharded_tensor import ShardedTensor
from .averaging import Grads


class OffloadedGrads:
    """The gradients of a model that are on their way to the host.

    Args:
        device: from where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._waiting = device, []
        self._stream: CopyStream | None = None

    def __reduce__(self) -> Any:
        return OffloadedGrads, (self._device,)

    def start(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Start copying a tensor to pinned memory; return the copy, whose values come later."""
        self._stream = self._stream or CopyStream(self._device)
        return self._stream.to_host(x.to(dtype))

    def defer(self, leaves: Sequence[ShardedTensor], grads: Grads, nodes: Sequence[Any]) -> Grads:
        """Keep gradients on the host for the end of backward; return those that autograd needs now.

        Args:
            leaves, grads: of a unit.
            nodes: of the leaves' gradients, which autograd calls.
        """
        parts = list(grads)
        for i, (leaf, grad, node) in enumerate(zip(leaves, grads, nodes, strict=True)):
            if grad is not None and grad.device.type == "cpu" and _is_simple(leaf, node):
                self._waiting.append((leaf, grad))
                parts[i] = None
        if any(part is not None and part.device.type == "cpu" for part in parts):
            self.synchronize()
        return parts

    def finish(self) -> None:
        """Wait for all copies and add the gradients to `.grad`: backward has ended."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.synchronize()
        for leaf, grad in waiting:
            leaf_grads.add(leaf, grad)

    def drop(self) -> None:
        """Drop what a failed backward left."""
        self._waiting = []

    def synchronize(self) -> None:
        """Wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()


def _is_simple(leaf: ShardedTensor, node: Any) -> bool:
    """Return whether autograd would do no more with a gradient than add it to `.grad`."""
    local = leaf._local
    return (
        not local._backward_hooks
        and not local._post_accumulate_grad_hooks
        and engine_hooks.accumulates(node)
    )
