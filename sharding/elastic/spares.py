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
    """The layout of a sharded tensor, as it is sent.

    Attributes:
        mesh: the number of its mesh among those that are sent.
    """

    mesh: int
    spec: P
    shape: tuple[int, ...]
    dtype: torch.dtype


class SentMesh(NamedTuple):
    """A mesh of the job, as it is sent to a rank that was in another world."""

    device_type: str
    ranks: list[Any]
    axis_names: tuple[str, ...]
    topology: Topology


class SentTree(NamedTuple):
    """A tree of leaves with a `SentLayout` for each sharded tensor.

    Attributes:
        tree: the tree.
        meshes: those of the layouts.
        size: of their world.
    """

    tree: Any
    meshes: list[SentMesh]
    size: int


def without_parts(tree: Any, size: int) -> SentTree:
    """Return a tree of leaves without the parts of its sharded tensors.

    Args:
        size: of the world of their meshes.
    """
    meshes: list[Any] = []
    numbers: dict[int, int] = {}  # id of a mesh -> its place among them

    def sent(_: Any, leaf: Any) -> Any:
        if not isinstance(leaf, ShardedTensor):
            return leaf
        number = numbers.setdefault(id(leaf.mesh), len(meshes))
        if number == len(meshes):
            meshes.append(leaf.mesh)
        return SentLayout(number, leaf.spec, tuple(leaf.shape), leaf.dtype)

    structure = map_leaves(tree, sent)
    sent_meshes = [
        SentMesh(mesh.device_type, mesh.ranks.tolist(), mesh.axis_names, mesh.topology)
        for mesh in meshes
    ]
    return SentTree(structure, sent_meshes, size)


def with_empty_parts(sent: SentTree, own: Any) -> Any:
    """Return the tree that another rank has sent, on a rank that has no part of it.

    Args:
        own: this rank's tree, whose values of `PerRank` stay.
    """
    own_values: Mapping[str, Any] = {name_of(path): leaf for path, leaf in leaves(own)}
    meshes = _outside(sent)

    def leaf(path: Any, value: Any) -> Any:
        if isinstance(value, PerRank):
            return own_values.get(name_of(path), value)
        if not isinstance(value, SentLayout):
            return value
        mesh = meshes[value.mesh]
        layout = Layout.of(mesh, value.spec, value.shape, value.dtype)
        part = torch.empty(layout.local_shape, dtype=value.dtype, device=mesh.device)
        return ShardedTensor._make_guarded(part, layout)

    return map_leaves(sent.tree, leaf)


def _outside(sent: SentTree) -> list[DeviceMesh]:
    """Return the meshes on a rank that is not of their world: it holds no part of anything."""
    world = NullWorld(sent.size, sent.size + 1)
    meshes: list[DeviceMesh] = []
    with thread_context.setting(world=world):
        for one in sent.meshes:
            mesh = DeviceMesh(one.device_type, one.ranks, axis_names=one.axis_names)
            mesh.topology = one.topology
            meshes.append(mesh)
    return meshes
