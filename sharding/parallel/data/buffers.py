"""Module buffers during a forward: on the mesh of the activations, as parameters are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import Layout
from ...layout.spec import P
from ...redistribute.autograd import redistribute_local
from ...tensor.sharded_tensor import ShardedTensor


def any_sharded(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of the modules has a buffer that is a sharded tensor."""
    return any(isinstance(x, ShardedTensor) for module in modules for x in module._buffers.values())


class _Changed(NamedTuple):
    table: dict[str, Any]
    name: str
    original: Tensor
    in_use: Tensor


class BuffersInUse:
    """Replace buffers during a forward.

    With sharded activations plain ones become replicated, and sharded ones are projected to the
    mesh of the activations. The replacements share memory, so in-place writes reach the originals.
    """

    def __init__(self) -> None:
        self._changed: list[_Changed] = []

    def wrap(self, modules: Iterable[nn.Module], mesh: DeviceMesh) -> None:
        """Replace all buffers by sharded tensors on this mesh."""
        self._replace(
            modules,
            lambda x: (
                _on_mesh(x, mesh)
                if isinstance(x, ShardedTensor)
                else ShardedTensor._make(x, Layout.of(mesh, P(), x.shape, x.dtype))
            ),
        )

    def project(
        self, modules: Iterable[nn.Module], mesh_of: Callable[[DeviceMesh], DeviceMesh | None]
    ) -> None:
        """Replace sharded buffers by tensors on a part of their mesh.

        Args:
            mesh_of: a buffer's mesh -> the part of it; None for a plain tensor.
        """
        self._replace(
            modules, lambda x: _on_mesh(x, mesh_of(x.mesh)) if isinstance(x, ShardedTensor) else x
        )

    def _replace(self, modules: Iterable[nn.Module], in_use: Callable[[Tensor], Tensor]) -> None:
        for module in modules:
            for name, x in module._buffers.items():
                if x is not None and (replacement := in_use(x)) is not x:
                    self._changed.append(_Changed(module._buffers, name, x, replacement))
                    module._buffers[name] = replacement

    def unwrap(self) -> None:
        """Restore the buffers. Communication: an all_gather of a split one that the module set."""
        for table, name, original, in_use in self._changed:
            now = table.get(name)
            if now is in_use:
                table[name] = original
            elif isinstance(now, ShardedTensor) or (
                now is not None and isinstance(original, ShardedTensor)
            ):
                table[name] = _like_original(now, original)
        self._changed = []


def _on_mesh(x: ShardedTensor, mesh: DeviceMesh | None) -> Tensor:
    """Return the buffer on a part of its mesh; the buffer itself if another axis splits it."""
    if mesh is x.mesh or not set(x.spec.axes) <= set(() if mesh is None else mesh.axis_names):
        return x
    return (
        x._local
        if mesh is None
        else ShardedTensor._make(x._local, Layout.of(mesh, x.spec, x.shape, x.dtype))
    )


def _like_original(now: Tensor, original: Tensor) -> Tensor:
    """Return a new buffer that the module set, in the layout of the one that it replaced."""
    if not isinstance(original, ShardedTensor):
        return now.full_tensor() if isinstance(now, ShardedTensor) else now
    layout = Layout.of(original.mesh, original.spec, now.shape, now.dtype)
    if isinstance(now, ShardedTensor):
        if now.mesh is original.mesh:
            return now
        now = redistribute_local(
            now._local.detach(),
            now._layout,
            Layout.of(now.mesh, original.spec, now.shape, now.dtype),
        )
    return ShardedTensor._make_guarded(now, layout)
