"""`MeshLayouts`: a mesh's layouts, and answers of functions about them, kept as `mesh.cache`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from ...mesh.abstract_mesh import AbstractMesh
from .bounded_cache import keep

if TYPE_CHECKING:
    from .layout import Layout

_lock = threading.Lock()
_Function = TypeVar("_Function", bound=Callable[..., Any])
_MISSING = object()


class MeshLayouts:
    """The layouts of one mesh, and data computed once for all of them.

    Attributes:
        recent: the last two thousand, by the spelling in which they were asked for and by their
            normal one.
        alive: all that something refers to, by spec, shape and dtype.
        answers: function -> its answers by arguments, see `cached_on_mesh`.
        functions: mapped functions of the program -> what their calls on this mesh have in common.
        unmoved: operators that need no communication for any shape -> their results, filled by
            `ops/rules/propagation.py`.
    """

    __slots__ = ("alive", "answers", "functions", "recent", "unmoved")

    def __init__(self) -> None:
        self.recent: dict[Any, Layout] = {}
        self.alive: WeakValueDictionary[Any, Layout] = WeakValueDictionary()
        self.answers: dict[Any, dict[Any, Any]] = {}
        self.functions: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.unmoved: dict[Any, Any] = {}

    @staticmethod
    def of(mesh: AbstractMesh) -> MeshLayouts:
        """Return the layouts of a mesh, the same object at every call and in every thread."""
        layouts: Any = mesh.cache
        if layouts is None:
            with _lock:
                layouts = mesh.cache = mesh.cache or MeshLayouts()
        return layouts

    def forget_plans(self) -> None:
        """Drop what was computed from layouts and the mesh's topology, above all compiled plans."""
        for layout in (*self.recent.values(), *self.alive.values()):
            layout.caches.clear()


def cached_on_mesh(
    mesh_of: Callable[[Any], AbstractMesh], limit: int
) -> Callable[[_Function], _Function]:
    """Cache what a function of meshes or layouts answers, with the mesh of its first argument.

    A cache of the module, such as `functools.lru_cache`, would keep the meshes among its arguments
    alive, and their world with all its groups.

    Args:
        mesh_of: the first argument -> the mesh.
        limit: number of answers of one mesh, see `keep`.

    Returns:
        A decorator of a function that takes hashable positional arguments.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def cached(*args: Any) -> Any:
            layouts = MeshLayouts.of(mesh_of(args[0]))
            answers = layouts.answers.get(cached)
            if answers is None:
                answers = layouts.answers.setdefault(cached, {})
            answer = answers.get(args, _MISSING)
            return keep(answers, args, function(*args), limit) if answer is _MISSING else answer

        return cached  # type: ignore[return-value]

    return decorate
