"""The mesh that is meant where none is given: the innermost `with mesh:` of this thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .device_mesh import DeviceMesh


class _Thread(threading.local):
    def __init__(self) -> None:
        self.meshes: list[DeviceMesh] = []


_thread = _Thread()


def enter(mesh: DeviceMesh) -> None:
    """From now on `mesh` is meant, until `leave`."""
    _thread.meshes.append(mesh)


def leave() -> None:
    """The mesh that was meant before is meant again."""
    _thread.meshes.pop()


def given_or_current(mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh, or where it is None the one of the innermost `with mesh:`.

    Raises: TypeError when there is neither.
    """
    if mesh is not None:
        return mesh
    if not _thread.meshes:
        raise TypeError("give the mesh that the tensor lies on, device_mesh=mesh, or call this inside `with mesh:`")
    return _thread.meshes[-1]
