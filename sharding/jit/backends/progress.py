"""Say on rank 0 that compiling takes long."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from ..program import Program

_PATIENCE_S = 2.0


class CompileProgress:
    """Compilations of one program: a context manager around each of them.

    Attributes:
        parts: how many there are.
    """

    def __init__(self, program: Program) -> None:
        self.parts = self._done = 0
        self._rank, self._name = program.rank, program.name
        self._seconds, self._is_shown = 0.0, False

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        self._timer = threading.Timer(max(0.0, _PATIENCE_S - self._seconds), self._show)
        self._timer.daemon = True
        if self._rank == 0 and not self._is_shown:
            self._timer.start()

    def __exit__(self, *error: Any) -> None:
        self._timer.cancel()
        self._done += 1
        self._seconds += time.perf_counter() - self._start
        if self._is_shown and self._done == self.parts:
            print(
                f"sm.jit: compiled {self._name} in {self._seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )

    def _show(self) -> None:
        self._is_shown = True
        print(
            f"sm.jit: compiling {self._name}, part {self._done + 1} of {self.parts} ...",
            file=sys.stderr,
            flush=True,
        )
