"""Let a process whose program has returned exit with status 1 all the same.

Its job has failed, or work that nobody waited for.

Python has no call for it. Exit functions run first, and output is flushed; the process ends when
the interpreter clears its modules, or where `launch` ends its children. The destructors of torch's
objects, which would wait for collectives under way, do not run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


class LastWord:
    """End the process when it is cleared with its module; a forked child is left alone."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __del__(
        self, end: Callable[[int], Any] = os._exit, pid: Callable[[], int] = os.getpid
    ) -> None:
        if pid() == self._pid:
            end(1)


_last_word: LastWord | None = None


def fail() -> None:
    """Make the exit status of this process 1: work that was left to a thread has failed."""
    global _last_word
    if not has_failed():
        _last_word = LastWord()


def has_failed() -> bool:
    """Return whether `fail` was called in this process."""
    return _last_word is not None and _last_word._pid == os.getpid()
