"""Ranks that had no part of a state take over its structure and values, before they get parts.

A rank outside of the mesh takes no steps. Its optimizers have no states, and its numbers are those
of the beginning. So a rank of the mesh sends it what a tree of state is, without the parts:

    rank 0, in the mesh    {"w": f32[8] @ P("dp"), "lr": 0.1}
    rank 3, a spare        {"w": its part of the same layout, which is empty, "lr": 0.1}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...mesh.comm.null import NullWorld
from ...mesh.comm.thread_context import thread_context
from ...mesh.device_mesh import DeviceMesh
from ...mesh.topology import Topology
from ..checkpoint.tree import Leaf, PerRank, leaves, map_leaves, name_of
from ..layout.layout import Layout
from ..layout.partition_spec import P
from ..tensor.sharded_tensor import ShardedTensor


@dataclass(frozen=True)
class SentLayout(Leaf):
    """The layout of a sharded tensor on the mesh of the job, as it is sent."""

    spec: P
    shape: tuple[int, ...]
    dtype: torch.dtype


def without_parts(tree: Any, mesh: DeviceMesh) -> Any:
    """Return a tree of leaves with a `SentLayout` for each sharded tensor.

    Raises:
        ValueError: a tensor is not on this mesh.
    """

    def sent(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, ShardedTensor):
            return leaf
        if leaf.mesh is not mesh:
            raise ValueError(
                f"{name_of(path)!r} is on {leaf.mesh}, and spare ranks take over state on the mesh "
                f"of the job alone, {mesh}"
            )
        return SentLayout(leaf.spec, tuple(leaf.shape), leaf.dtype)

    return map_leaves(tree, sent)


class SentMesh(NamedTuple):
    """The mesh of the job, as it is sent to a rank that was in another world."""

    device_type: str
    ranks: list[Any]
    axis_names: tuple[str, ...]
    topology: Topology
    size: int

    @staticmethod
    def of(mesh: DeviceMesh) -> SentMesh:
        """Return a mesh to send."""
        return SentMesh(
            mesh.device_type, mesh.ranks.tolist(), mesh.axis_names, mesh.topology, mesh.world.size
        )

    def outside(self) -> DeviceMesh:
        """Return the same mesh on a rank that is not of its world: it holds no part of anything."""
        world = NullWorld(self.size, self.size + 1)
        with thread_context.setting(world=world):
            mesh = DeviceMesh(self.device_type, self.ranks, axis_names=self.axis_names)
        mesh.topology = self.topology
        return mesh


def with_empty_parts(sent: Any, mesh: DeviceMesh, own: Any) -> Any:
    """Return the tree that another rank has sent, on a rank outside of the mesh.

    Args:
        own: this rank's tree, whose values of `PerRank` stay.
    """
    own_values: Mapping[str, Any] = {name_of(path): leaf for path, leaf in leaves(own)}

    def leaf(path: Any, value: Any) -> Any:
        if isinstance(value, PerRank):
            return own_values.get(name_of(path), value)
        if not isinstance(value, SentLayout):
            return value
        layout = Layout.of(mesh, value.spec, value.shape, value.dtype)
        part = torch.empty(layout.local_shape, dtype=value.dtype, device=mesh.device)
        return ShardedTensor._make_guarded(part, layout)

    return map_leaves(sent, leaf)
