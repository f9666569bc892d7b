"""The mesh that is meant where none is given: that of `set_mesh`, or of the innermost `with mesh:`.

    sm.set_mesh(a)          a
    with b:                 . b
        sm.set_mesh(c)      . c
                            a           the end of a block puts back what was before it

It is kept in a context variable, one mesh for each world. So each thread has its own; the ranks of `simulate` begin with what
their caller has; and a mesh of another world, whose ranks are not those that run here, never counts: inside `simulate` and
`null_world` none is meant until one is set there, and after them the one before is meant again.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from .comm.current_world import current_world
from .comm.world import World
from .errors import MeshError

if TYPE_CHECKING:
    from .device_mesh import DeviceMesh


class _Meant(NamedTuple):
    """What is meant from some point on.

    Attributes:
        meshes: at most one for each world; weakly, since each lives as long as its world and must not keep that alive.
        before: what was meant before the innermost `with mesh:`; None outside of all.
    """

    meshes: tuple[weakref.ref[DeviceMesh], ...] = ()
    before: Any = None


_NOTHING = _Meant()
_meant: ContextVar[_Meant] = ContextVar("shardmesh_mesh", default=_NOTHING)


class set_mesh:
    """set_mesh(mesh): from now on this mesh is meant where none is given; as `with set_mesh(mesh):`, until the block ends.

    As in JAX it takes effect when it is called. It holds in this thread (this rank of `simulate`); ranks of a `simulate`
    called from here have a world of their own, and set their own mesh. `with mesh:` does the same for a block.

    Args:
        mesh: a `DeviceMesh` of the world that runs here, or torch's own; None for none at all.

    Raises:
        TypeError: something else.
        MeshError: a mesh of another world.

    Communication: none.

    Example:
        >>> with sm.set_mesh(mesh):
        ...     x = sm.zeros((4, 8), P("dp"))
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = None if mesh is None else _converted(mesh)
        self._before = _meant.get()
        _meant.set(_with(self.mesh, self._before.before))

    def __enter__(self) -> DeviceMesh | None:
        return self.mesh

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        _meant.set(self._before)

    def __repr__(self) -> str:
        return f"set_mesh({self.mesh!r})"


def get_mesh() -> DeviceMesh | None:
    """get_mesh() -> the mesh that is meant where none is given, or None where none is set (JAX returns an empty mesh).

    Communication: none.

    Example:
        >>> with mesh:
        ...     assert sm.get_mesh() is mesh
    """
    here = None
    for reference in _meant.get().meshes:
        mesh = reference()
        if mesh is not None:
            here = current_world() if here is None else here
            if mesh.world is here:
                return mesh
    return None


def enter(mesh: DeviceMesh) -> None:
    """From now on `mesh` is meant, until `leave`."""
    _meant.set(_with(mesh, _meant.get()))


def leave() -> None:
    """What was meant before the last `enter` is meant again."""
    before = _meant.get().before
    _meant.set(_NOTHING if before is None else before)


def given_or_current(mesh: Any) -> DeviceMesh:
    """The mesh, converted if it is one of torch's own, or where it is None the one of `set_mesh` or the innermost `with mesh:`.

    Raises: TypeError when there is neither.
    """
    if mesh is not None:
        return mesh if type(mesh) is not TorchMesh else _converted(mesh)
    found = get_mesh()
    if found is None:
        raise TypeError(
            "give the mesh that the tensor lies on, device_mesh=mesh, or call this inside `with mesh:` or after "
            f"sm.set_mesh(mesh){_of_other_worlds()}"
        )
    return found


def _converted(mesh: Any) -> Any:
    from .device_mesh import as_device_mesh  # which builds on this file

    return as_device_mesh(mesh)


def _with(mesh: DeviceMesh | None, before: Any) -> _Meant:
    """What is meant now, with this mesh for its world.

    Raises: TypeError, MeshError: it is no mesh of this world.
    """
    here = current_world()
    others = tuple(r for r in _meant.get().meshes if (other := r()) is not None and other.world is not here)
    if mesh is None:
        return _Meant(others, before)
    from .device_mesh import DeviceMesh  # which builds on this file

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"set_mesh takes a DeviceMesh, as init_device_mesh makes it, or None; got {mesh!r}")
    if mesh.world is not here:
        raise MeshError(
            f"{mesh!r} is a mesh of another world ({_named(mesh.world)}), and this runs in {_named(here)}: make the mesh there, with "
            "init_device_mesh or DeviceMesh inside the function that runs on each rank"
        )
    return _Meant((*others, weakref.ref(mesh)), before)


def _of_other_worlds() -> str:
    """Words for one who has set a mesh, but in another world."""
    set_elsewhere = [mesh for reference in _meant.get().meshes if (mesh := reference()) is not None]
    if not set_elsewhere:
        return ""
    mesh, here = set_elsewhere[-1], _named(current_world())
    return f"; {mesh!r} is set, but it is a mesh of another world ({_named(mesh.world)}), and this runs in {here}: set one here"


def _named(world: World) -> str:
    """A world for an error, by the same words on every rank."""
    return f"{type(world).__name__} of size {world.size}"
