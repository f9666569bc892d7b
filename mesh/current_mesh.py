"""The current mesh of each context, as `set_mesh` and `with mesh:` set it.

`context.py` has the functions that read it.

It is kept in a context variable, one mesh per world. So each thread has its own, simulated ranks
start with their caller's, and the mesh of another world is never current: inside `simulate` and
`null_world` there is no current mesh until one is set there, and after them the one before is
current again.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from .comm.current_world import current_world
from .comm.first_use import first_block
from .comm.world import World
from .errors import MeshError


class MeshOfWorld(Protocol):
    """What a current mesh has."""

    @property
    def world(self) -> World: ...


class CurrentMesh:
    """A reference to a current mesh that keeps the mesh alive, but not its world.

    The world keeps the mesh, as long as this is alive.

    Call it for the mesh; None if its world is gone.
    """

    __slots__ = ("__weakref__", "_mesh")

    def __init__(self, mesh: MeshOfWorld) -> None:
        self._mesh = weakref.ref(mesh)
        mesh.world.current_meshes[self] = mesh

    def __call__(self) -> Any:
        return self._mesh()


class MeshContext(NamedTuple):
    """The current meshes from some point of a program on.

    Attributes:
        meshes: at most one per world.
        before: the state before the innermost `with mesh:`; None outside of all.
    """

    meshes: tuple[CurrentMesh, ...] = ()
    before: Any = None


_EMPTY = MeshContext()
mesh_context: ContextVar[MeshContext] = ContextVar("shardmesh_mesh", default=_EMPTY)


def enter(mesh: MeshOfWorld) -> None:
    """Make `mesh` current until `leave`. Raises: MeshError when it belongs to another world."""
    mesh_context.set(with_mesh(mesh, mesh_context.get()))


def leave() -> None:
    """Restore the state before the last `enter`."""
    before = mesh_context.get().before
    mesh_context.set(_EMPTY if before is None else before)


def with_mesh(mesh: MeshOfWorld | None, before: MeshContext | None) -> MeshContext:
    """Return the present state with `mesh` as the current mesh of its world, or with none.

    Raises: MeshError when the mesh belongs to another world.
    """
    world = current_world()
    others = tuple(
        r
        for r in mesh_context.get().meshes
        if (other := r()) is not None and other.world is not world
    )
    if mesh is None:
        return MeshContext(others, before)
    if mesh.world is not world:
        raise MeshError(
            f"{mesh!r} is a mesh of another world ({world_text(mesh.world)}), and this runs in "
            f"{world_text(world)}: make the mesh there, with init_device_mesh or DeviceMesh inside "
            "the function that runs on each rank"
        )
    first_block.begin()
    return MeshContext((*others, CurrentMesh(mesh)), before)


def world_text(world: World) -> str:
    """Return a description of a world for errors, the same on every rank."""
    return f"{type(world).__name__} of size {world.size}"
