"""`MeshLayouts`: the layouts of one mesh, which it keeps as `mesh.cache`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ...mesh.abstract_mesh import AbstractMesh

if TYPE_CHECKING:
    from .layout import Layout

_lock = threading.Lock()


class MeshLayouts:
    """The layouts of one mesh, and data computed once for all of them.

    Attributes:
        recent: the last few thousand, by the spelling in which they were asked for and by their normal one.
        alive: all that something refers to, by spec, shape and dtype.
        unmoved: operators that need no communication for any shape -> their results, filled by `ops/rules/propagation.py`.
    """

    __slots__ = ("alive", "recent", "unmoved")

    def __init__(self) -> None:
        self.recent: dict[Any, Layout] = {}
        self.alive: WeakValueDictionary[Any, Layout] = WeakValueDictionary()
        self.unmoved: dict[Any, Any] = {}

    @staticmethod
    def of(mesh: AbstractMesh) -> MeshLayouts:
        """Return the layouts of a mesh, the same object at every call and in every thread."""
        found: Any = mesh.cache
        if found is None:
            with _lock:
                found = mesh.cache = mesh.cache or MeshLayouts()
        return found

    def forget_plans(self) -> None:
        """Drop the compiled plans of all layouts."""
        for layout in (*self.recent.values(), *self.alive.values()):
            layout.runners.clear()
