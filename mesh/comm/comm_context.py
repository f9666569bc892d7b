"""What the collectives that a thread calls are part of: a step, the computation of a value."""

from __future__ import annotations

import threading
from typing import Any


class CommContext(threading.local):
    """What the collectives that this thread calls are part of, set by their callers.

    A world has one for the library's collectives; a monitor has one for the program's own calls on
    torch's groups, once a thread has marked a step.

    Attributes:
        lineage: how the value was computed, see `sharding/lineage.py`; 0 if unknown.
        loss: (the lineage, the meshes) of the values from which the running backward has begun, if
            not all ranks of the world have them; see `loss_context`.
        origin: (file:line of the program that the monitor records, None for the line on the stack;
            the bits of the step that this thread has marked, see `step_bits`, 0 for none); None for
            neither.
        roots: number of values that have entered the program in this thread, by kind.
    """

    lineage: int = 0
    loss: tuple[int, tuple[Any, ...]] = (0, ())
    origin: tuple[str | None, int] | None = None

    def __init__(self) -> None:
        self.roots: dict[Any, Any] = {}


class NoContext:
    """The context of calls of which nothing is known; it is read faster than a `CommContext`."""

    lineage = 0
    origin = None


NO_CONTEXT = NoContext()
