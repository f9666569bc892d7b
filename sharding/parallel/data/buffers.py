"""Buffers of modules while a forward runs: on the mesh of the activations, as parameters are."""

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
    at_rest: Tensor
    in_use: Tensor


class BuffersInUse:
    """Buffers that stand in other forms for as long as a forward runs: plain ones count as replicated where activations are sharded
    tensors, and sharded ones are projected to the mesh of the activations. What is written to them is written to those at rest."""

    def __init__(self) -> None:
        self._changed: list[_Changed] = []

    def wrap(self, modules: Iterable[nn.Module], mesh: DeviceMesh) -> None:
        """Have all buffers be sharded tensors on this mesh."""
        self._put(modules, lambda x: _on_mesh(x, mesh) if isinstance(x, ShardedTensor) else _replicated(x, mesh))

    def project(self, modules: Iterable[nn.Module], mesh_of: Callable[[DeviceMesh], DeviceMesh | None]) -> None:
        """Have sharded buffers lie on part of their mesh.

        Args:
            mesh_of: from a buffer's mesh to the part of it that is meant; None for a plain tensor.
        """
        self._put(modules, lambda x: _on_mesh(x, mesh_of(x.mesh)) if isinstance(x, ShardedTensor) else x)

    def _put(self, modules: Iterable[nn.Module], in_use: Callable[[Tensor], Tensor]) -> None:
        for module in modules:
            for name, x in module._buffers.items():
                if x is not None and (found := in_use(x)) is not x:
                    self._changed.append(_Changed(module._buffers, name, x, found))
                    module._buffers[name] = found

    def unwrap(self) -> None:
        """Put those at rest back. Communication: for a buffer that the module has replaced by a split one, what makes it whole."""
        for table, name, at_rest, in_use in self._changed:
            now = table.get(name)
            if now is in_use:
                table[name] = at_rest
            elif isinstance(now, ShardedTensor) or (now is not None and isinstance(at_rest, ShardedTensor)):
                table[name] = _as_at_rest(now, at_rest)
        self._changed = []


def _replicated(x: Tensor, mesh: DeviceMesh) -> ShardedTensor:
    return ShardedTensor._make(x, Layout.of(mesh, P(), x.shape, x.dtype))


def _on_mesh(x: ShardedTensor, mesh: DeviceMesh | None) -> Tensor:
    """The buffer on part of its mesh; itself where it is split over another axis."""
    if mesh is x.mesh or not set(x.spec.axes) <= set(() if mesh is None else mesh.axis_names):
        return x
    return x._local if mesh is None else ShardedTensor._make(x._local, Layout.of(mesh, x.spec, x.shape, x.dtype))


def _as_at_rest(now: Tensor, at_rest: Tensor) -> Tensor:
    """A buffer that the module has put in the place of another one, in the form of that one."""
    if not isinstance(at_rest, ShardedTensor):
        return now.full_tensor() if isinstance(now, ShardedTensor) else now
    layout = Layout.of(at_rest.mesh, at_rest.spec, now.shape, now.dtype)
    if isinstance(now, ShardedTensor):
        if now.mesh is at_rest.mesh:
            return now
        now = redistribute_local(now._local.detach(), now._layout, Layout.of(now.mesh, at_rest.spec, now.shape, now.dtype))
    return ShardedTensor._make_guarded(now, layout)
