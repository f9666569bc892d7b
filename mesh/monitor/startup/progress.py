"""Waiting for other ranks at start-up, and saying so."""

from __future__ import annotations

import sys
import time

FIRST_SAID_S = 5.0
SAID_BY_OTHERS_S = 30.0  # rank 0 speaks for all, unless it is the one that is missing
SAID_EVERY_S = 10.0


class Progress:
    """How long one rank waits, and when it says for whom.

    Attributes:
        timeout: seconds.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self.timeout = timeout
        self._since = time.monotonic()
        self._next = FIRST_SAID_S if rank == 0 else SAID_BY_OTHERS_S

    @property
    def waited(self) -> float:
        """Seconds."""
        return time.monotonic() - self._since

    def is_over(self) -> bool:
        return self.waited > self.timeout

    def is_due(self) -> bool:
        """Whether it is time to say something; then not for some seconds."""
        if self.waited < self._next:
            return False
        self._next += SAID_EVERY_S
        return True

    def say(self, whom: str, why: str = "") -> None:
        print(f"waiting for {whom} ({self.waited:.0f} s){why and ': '}{why}", file=sys.stderr, flush=True)
