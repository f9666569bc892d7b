"""set_mesh and get_mesh: the mesh that functions use if none is given.

sm.set_mesh(a)          a
with b:                 . b
    sm.set_mesh(c)      . c
                        a           the end of a block restores the mesh before it
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from .comm.current_world import current_world
from .current_mesh import mesh_context, with_mesh, world_text
from .device_mesh import DeviceMesh, as_device_mesh


class set_mesh:
    """set_mesh(mesh): use this mesh from now on where none is passed.

    As `with set_mesh(mesh):`, until the block ends.

    As in JAX it takes effect when it is called. It applies to this thread (this rank of
    `simulate`); ranks of a `simulate` called from here have their own world, and set their own
    mesh. `with mesh:` does the same for a block.

    Args:
        mesh: a `DeviceMesh` of the world that runs here, or torch's own; None for no mesh.

    Raises:
        TypeError: something else.
        MeshError: a mesh of another world.

    Communication: none.

    Example:
        >>> with sm.set_mesh(mesh):
        ...     x = sm.zeros((4, 8), P("dp"))
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = None if mesh is None else as_device_mesh(mesh)
        if self.mesh is not None and not isinstance(self.mesh, DeviceMesh):
            raise TypeError(
                f"set_mesh takes a DeviceMesh, as init_device_mesh makes it, or None; got {mesh!r}"
            )
        self._before = mesh_context.get()
        mesh_context.set(with_mesh(self.mesh, self._before.before))

    def __enter__(self) -> DeviceMesh | None:
        return self.mesh

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        mesh_context.set(self._before)

    def __repr__(self) -> str:
        return f"set_mesh({self.mesh!r})"


def get_mesh() -> DeviceMesh | None:
    """get_mesh() -> the mesh used where none is given, None if none is set (JAX: an empty mesh).

    Communication: none.

    Example:
        >>> with mesh:
        ...     assert sm.get_mesh() is mesh
    """
    world = None
    for reference in mesh_context.get().meshes:
        mesh = reference()
        if mesh is not None:
            world = current_world() if world is None else world
            if mesh.world is world:
                return mesh
    return None


def given_or_current(mesh: Any) -> DeviceMesh:
    """Return the mesh, converted if it is one of torch's own.

    If it is None, the one of `set_mesh` or the innermost `with mesh:`.

    Raises: TypeError when there is neither.
    """
    if mesh is not None:
        return mesh if type(mesh) is not TorchMesh else as_device_mesh(mesh)
    current = get_mesh()
    if current is not None:
        return current
    elsewhere = ""
    meshes = [mesh for reference in mesh_context.get().meshes if (mesh := reference()) is not None]
    if meshes:
        world_name = world_text(current_world())
        elsewhere = (
            f"; {meshes[-1]!r} is set, but it is a mesh of another world "
            f"({world_text(meshes[-1].world)}), and this runs in {world_name}: set one here"
        )
    raise TypeError(
        "give the mesh of the tensor, device_mesh=mesh, or call this inside `with mesh:` or after "
        f"sm.set_mesh(mesh){elsewhere}"
    )
