"""Ranks that had no part of a state take over its structure and values, before they get parts.

A rank outside of the mesh takes no steps. Its optimizers have no states, and its numbers are those
of the beginning. So a rank of the mesh sends it what a tree of state is, without the parts:

    rank 0, in the mesh    {"w": f32[8] @ P("dp"), "lr": 0.1}
    rank 3, a spare        {"w": its part of the same layout, which is empty, "lr": 0.1}

It has no objects either, since these are built on a mesh. Where all ranks take part, in a recovery
or with a checkpoint, a rank of the mesh tells it which leaves its objects have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...mesh.comm.agreement import facts_of
from ...mesh.comm.null import NullWorld
from ...mesh.comm.thread_context import thread_context
from ...mesh.comm.world import World
from ...mesh.device_mesh import DeviceMesh
from ...mesh.topology import Topology
from ..checkpoint.plan import WantedTree, WholeTensor
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
    """A tree of leaves with a `SentLayout` for each sharded tensor or layout.

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

    Layouts, and other tensors, that are wanted and not there yet are told as well.

    Args:
        size: of the world of their meshes.
    """
    meshes: list[Any] = []
    numbers: dict[int, int] = {}  # id of a mesh -> its place among them

    def sent(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, WholeTensor):
            return WholeTensor(None, leaf.device)
        layout = leaf._layout if isinstance(leaf, ShardedTensor) else leaf
        if not isinstance(layout, Layout):
            return leaf
        number = numbers.setdefault(id(layout.mesh), len(meshes))
        if number == len(meshes):
            meshes.append(layout.mesh)
        return SentLayout(number, layout.spec, tuple(layout.shape), layout.dtype)

    structure = map_leaves(tree, sent)
    sent_meshes = [
        SentMesh(mesh.device_type, mesh.ranks.tolist(), mesh.axis_names, mesh.topology)
        for mesh in meshes
    ]
    return SentTree(structure, sent_meshes, size)


def with_empty_parts(sent: SentTree, own: Any, world: World | None = None) -> Any:
    """Return the tree that another rank has sent, on a rank that has no part of it.

    Args:
        own: this rank's tree, whose values of `PerRank` stay.
        world: that of the meshes; by default one of which this rank is none.
    """
    own_values: Mapping[str, Any] = {name_of(path): leaf for path, leaf in leaves(own)}
    layouts = _layouts(sent, world)

    def leaf(path: Any, value: Any) -> Any:
        if isinstance(value, PerRank):
            return own_values.get(name_of(path), value)
        if not isinstance(value, SentLayout):
            return value
        layout = layouts(value)
        mesh: Any = layout.mesh
        part = torch.empty(layout.local_shape, dtype=value.dtype, device=mesh.device)
        return ShardedTensor._make_guarded(part, layout)

    return map_leaves(sent.tree, leaf)


def told_by_mesh(mesh: DeviceMesh, fact: Any) -> Any:
    """Return what the lowest rank of a mesh tells all ranks of its world.

    Args:
        fact: that of this rank; only that of the lowest one matters.

    Communication: one all_gather of small objects over all ranks of the world.
    """
    world = mesh.world
    return facts_of(world.group(range(world.size)), int(mesh.ranks.min()), fact)


def has_outside(mesh: DeviceMesh) -> bool:
    """Return whether there are ranks outside of the mesh."""
    return mesh.ranks.size < mesh.world.size


def wanted_outside(mesh: DeviceMesh, like: Any, wanted: Callable[[Any], Any]) -> Any:
    """Return what a rank recovers or loads into: `like`, or outside of the mesh its leaves.

    Args:
        mesh: on which `like` was made.
        like: objects; of any kind outside of the mesh.
        wanted: returns their leaves, or None for None: it may communicate with all ranks.

    Communication: that of `wanted` and of `told_by_mesh`; none if there are no ranks outside.
    """
    if not has_outside(mesh):
        return like
    is_inside = mesh.coordinate is not None
    tree = wanted(like if is_inside else None)
    sent = told_by_mesh(mesh, without_parts(tree, mesh.world.size) if is_inside else None)
    if is_inside:
        return like
    layouts = _layouts(sent, mesh.world)
    tree = map_leaves(
        sent.tree, lambda _, want: layouts(want) if isinstance(want, SentLayout) else want
    )
    return WantedTree(tree)


def _layouts(sent: SentTree, world: World | None) -> Callable[[SentLayout], Layout]:
    """Return a function for the layouts that were sent, in a world, as of `with_empty_parts`."""
    meshes = _outside(sent, world or NullWorld(sent.size, sent.size + 1))
    return lambda one: Layout.of(meshes[one.mesh], one.spec, one.shape, one.dtype)


def _outside(sent: SentTree, world: World) -> list[DeviceMesh]:
    """Return the meshes on a rank that is in none of them: it holds no part of anything."""
    meshes: list[DeviceMesh] = []
    with thread_context.setting(world=world):
        for one in sent.meshes:
            mesh = DeviceMesh(one.device_type, one.ranks, axis_names=one.axis_names)
            mesh.topology = one.topology
            meshes.append(mesh)
    return meshes
