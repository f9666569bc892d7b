"""Plain buffers of modules whose activations are sharded tensors: they count as replicated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ....mesh.device_mesh import DeviceMesh
from ...layout import Layout
from ...spec import P
from ...tensor import ShardedTensor


class ReplicatedBuffers:
    """Buffers that are sharded tensors for as long as a forward runs; what is written to them is written to the plain ones."""

    def __init__(self) -> None:
        self._changed: list[tuple[dict[str, Any], str, Tensor, ShardedTensor]] = []

    def wrap(self, modules: Iterable[nn.Module], mesh: DeviceMesh) -> None:
        for module in modules:
            for name, x in module._buffers.items():
                if x is not None and not isinstance(x, ShardedTensor):
                    wrapped = ShardedTensor._make(x, Layout.of(mesh, P(), x.shape, x.dtype))
                    self._changed.append((module._buffers, name, x, wrapped))
                    module._buffers[name] = wrapped

    def unwrap(self) -> None:
        """Put the plain ones back. Communication: for a buffer that the module has replaced by a split one, what makes it whole."""
        for table, name, plain, wrapped in self._changed:
            now = table.get(name)
            if now is wrapped:
                table[name] = plain
            elif isinstance(now, ShardedTensor):
                table[name] = now.full_tensor()
        self._changed = []
