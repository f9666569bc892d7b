"""current_world: the world that the calling thread runs in."""

from __future__ import annotations

from ..processes.process import process_world
from .world import World, active_world


def current_world() -> World:
    """Return the world this thread runs in: the simulated or null one if one is active, else that of the processes.

    Communication: none; it starts nothing (see `init_device_mesh`).
    """
    return active_world() or process_world()
