"""The mesh and the placements among a function's arguments; with a mesh set, a bare `P` is enough.

f(t, mesh, P("dp"))                    on that mesh
f(t, NamedSharding(mesh, P("dp")))     the same
f(t, P("dp"))                          on the mesh of `set_mesh` or `with mesh:`
"""

from __future__ import annotations

from typing import Any

from ...mesh.context import get_mesh, given_or_current
from ...mesh.device_mesh import DeviceMesh, as_device_mesh, is_mesh
from ..layout.spec import P, Placement, Sharding, SpecLike
from ..trees import PrefixKind
from .sharded_tensor import ShardedTensor


def is_placement(x: Any) -> bool:
    """Return True for a `P`, a sharding or a list of placements, allowed in place of a mesh."""
    return isinstance(x, (P, Sharding)) or (
        isinstance(x, (list, tuple)) and any(isinstance(p, Placement) for p in x)
    )


# What specs for a tree of tensors are made of.
SPECS = PrefixKind(is_placement, "P(...) or a list of placements (P() for replicated)")


def mesh_and_spec(mesh: Any, placements: SpecLike, like: Any = None) -> tuple[DeviceMesh, SpecLike]:
    """Return the mesh, by default the one that is set, and the placements.

    Args:
        mesh: a mesh (torch's own is converted), None, or the placements in its place.
        placements: a `P` or one placement per axis; or a sharding, which has its own mesh.
        like: if it is a `ShardedTensor`, its mesh is the default where none is given or set.

    Raises:
        TypeError: no mesh given or set, placements given twice, or something that is neither.
        ValueError: a mesh and a sharding on another one.
    """
    if is_placement(mesh):
        if placements is not None:
            raise TypeError(
                f"got two placements, {mesh!r} and {placements!r}: give one, after the mesh or in "
                "its place"
            )
        mesh, placements = None, mesh
    if isinstance(placements, Sharding):
        if mesh is not None and as_device_mesh(mesh) != placements.mesh:
            raise ValueError(
                f"{placements!r} has another mesh than {mesh!r}: give the sharding alone"
            )
        mesh, placements = placements.mesh, placements.spec
    if mesh is not None and not is_mesh(mesh):
        raise TypeError(
            "expected a mesh: give a DeviceMesh or, with a mesh set, P(...) in its place; got "
            f"{mesh!r}"
        )
    if mesh is None and isinstance(like, ShardedTensor):
        return get_mesh() or like.mesh, placements
    return given_or_current(mesh), placements
