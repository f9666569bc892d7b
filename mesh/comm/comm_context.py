"""What the collectives that a thread calls are part of: a step, the computation of a value."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any


class LossOfSomeRanks:
    """The values from which the running backward has begun, if not all ranks have them.

    Attributes:
        lineage: theirs, as it is published.
        ranks: the ranks that have all of them.
    """

    __slots__ = ("lineage", "ranks")

    def __init__(self, lineage: int, ranks: frozenset[int]) -> None:
        self.lineage, self.ranks = lineage, ranks

    def lineage_on(self, ranks: Iterable[int]) -> int:
        """Return the lineage in collectives of these ranks; 0 if one of them is without a value."""
        return self.lineage if self.ranks.issuperset(ranks) else 0


class CommContext(threading.local):
    """What the collectives that this thread calls are part of, set by their callers.

    A world has one for the library's collectives; a monitor has one for the program's own calls on
    torch's groups, once a thread has marked a step.

    Attributes:
        lineage: how the value was computed, see `sharding/lineage.py`; 0 if unknown.
        loss: the values from which the running backward has begun, if not all ranks of the world
            have them, else None; see `lineage.loss_context`.
        origin: (file:line of the program that the monitor records, None for the line on the stack;
            the bits of the step that this thread has marked, see `step_bits`, 0 for none); None for
            neither.
        roots: number of values that have entered the program in this thread, by kind.
    """

    lineage: int = 0
    loss: LossOfSomeRanks | None = None
    origin: tuple[str | None, int] | None = None

    def __init__(self) -> None:
        self.roots: dict[Any, Any] = {}

    def lineage_on(self, ranks: Iterable[int]) -> int:
        """Return the lineage of collectives of these ranks; that of the loss if no other is set."""
        if self.lineage or self.loss is None:
            return self.lineage
        return self.loss.lineage_on(ranks)


class NoContext:
    """The context of calls of which nothing is known; it is read faster than a `CommContext`."""

    lineage = 0
    loss = None
    origin = None


NO_CONTEXT = NoContext()
