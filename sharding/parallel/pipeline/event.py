"""A time in which a rank of a pipeline is busy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .actions import Cell


@dataclass(frozen=True)
class Event:
    """A time in which a rank is busy.

    Attributes:
        cell: the action or overlap; None for a step of the optimizer.
        start: when it starts; the first action of the schedule starts at 0.
        end: when it ends.
    """

    cell: Cell | None
    start: float
    end: float


Events: TypeAlias = tuple[tuple[Event, ...], ...]
