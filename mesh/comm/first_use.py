"""What the library installs in torch, installed by the first call that needs it.

    import shardmesh                  registers what to install; torch is as it was
    x.requires_grad_()                the first sharded leaf: runs what waits for it, once

`docs/patches.md` lists what is installed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class FirstUse:
    """Functions to call before a program first does something.

    Attributes:
        waiting: the functions; empty once they have been called, so that callers can skip `begin`.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self._lock = threading.RLock()

    def before(self, install: Callable[[], None]) -> None:
        """Call `install` once, before the first use; if there was one, before the next."""
        with self._lock:
            self.waiting.append(install)

    def begin(self) -> None:
        """Call the functions that wait. Other threads wait until they have run."""
        if self.waiting:
            with self._lock:
                while self.waiting:
                    self.waiting[0]()
                    del self.waiting[0]


first_leaf = FirstUse()  # a ShardedTensor gets a gradient, or asks for one
first_block = FirstUse()  # a block begins that changes what functions do: current mesh, bound axes
