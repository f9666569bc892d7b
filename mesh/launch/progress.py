"""Time out while waiting for other ranks at start-up, and print which are missing."""

from __future__ import annotations

import sys
import time

FIRST_SAID_S = 5.0
SAID_BY_OTHERS_S = 30.0  # rank 0 prints for all, unless it is the one that is missing
SAID_EVERY_S = 10.0


class Progress:
    """How long one rank waits, and when it prints which ranks it waits for.

    Attributes:
        timeout: seconds.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self.timeout = timeout
        self._since = time.monotonic()
        self._next = FIRST_SAID_S if rank == 0 else SAID_BY_OTHERS_S

    @property
    def waited(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._since

    @property
    def left(self) -> float:
        """Seconds of the timeout that are left."""
        return max(0.0, self.timeout - self.waited)

    def is_over(self) -> bool:
        return self.waited > self.timeout

    def is_due(self) -> bool:
        """Return whether a message is due; the next one is due some seconds later."""
        if self.waited < self._next:
            return False
        self._next += SAID_EVERY_S
        return True

    def report(self, whom: str, why: str = "") -> None:
        print(
            f"waiting for {whom} ({self.waited:.0f} s){why and ': '}{why}",
            file=sys.stderr,
            flush=True,
        )
