"""`cached_on_mesh`: answers of functions about meshes and layouts, kept with the mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ...mesh.abstract_mesh import AbstractMesh
from .bounded_cache import keep
from .layout import MeshLayouts

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MISSING = object()


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
