"""current_world: the world that the calling thread runs in."""

from __future__ import annotations

from collections.abc import Callable

from .thread_context import thread_context
from .world import World

_find_process_world: Callable[[], World] | None = None


def register_process_world(find: Callable[[], World]) -> None:
    """Set the function that returns the world of this process's ranks.

    `mesh.processes` does so, which this layer does not import.
    """
    global _find_process_world
    _find_process_world = find


def current_world() -> World:
    """Return the world this thread runs in: a simulated or null one, else the processes'.

    Communication: none; it starts nothing (see `init_device_mesh`).
    """
    world = thread_context.world
    if world is not None:
        return world
    if _find_process_world is None:
        raise RuntimeError(
            "no world is active and shardmesh.mesh.processes was not imported: import shardmesh"
        )
    return _find_process_world()
