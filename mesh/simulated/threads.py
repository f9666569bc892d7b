"""Threads that run simulated ranks, kept from one run to the next, and where in the user's program they are."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterable

from ..comm.call_site import _INNER, frame_of_thread


class RankEnded(BaseException):
    """Unwinds a rank because the run is over. Not an Exception, so that no handler of the program keeps it."""


class Worker(threading.Thread):
    """A thread that runs one rank after another: making a thread takes longer than many a simulated program.

    It waits at its gate, which is the one where its rank waits for the baton.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.gate = threading.Lock()
        self.gate.acquire()
        self.job: Callable[[], None] = _nothing
        self.last = False
        self.start()

    def run(self) -> None:
        while not self.last:
            self.gate.acquire()
            # Taken first: when the last rank has passed the baton on, the next run may give this worker a job at once.
            job, self.job = self.job, _nothing
            trace = sys.gettrace()
            try:
                job()
            except RankEnded:
                return  # an interrupt that came when the rank had just ended
            if sys.gettrace() is not trace:  # a debugger of this rank must not trace the next one
                sys.settrace(trace)
            del job  # an idle worker must not keep the arguments of its last rank alive

    def place(self) -> str | None:
        """file:line of the user's program where this thread is now, None outside it.

        The stack is read when somebody asks, which is when a run has gone wrong: nothing is noted down on the way.
        """
        frame = frame_of_thread(self.ident)
        while frame is not None and frame.f_code.co_filename.startswith(_INNER):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename == threading.__file__:
            return None
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def interrupt(self) -> None:
        """Unwinds what runs here, at its next bytecode."""
        if self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(RankEnded))


def _nothing() -> None:
    """What an idle worker has to do."""


_idle: list[Worker] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # threads do not survive a fork


def hire(n: int) -> list[Worker]:
    return [_idle.pop() if _idle else Worker() for _ in range(n)]


def dismiss(workers: Iterable[Worker], *, failed: bool) -> None:
    """Keeps them for the next run, those that are not at their last job; after a failure none, since what torch keeps for a
    thread (a mode that was left by an exception) may be anything."""
    staying = [worker for worker in workers if not worker.last]
    if not failed:
        _idle.extend(staying)
        return
    for worker in staying:
        worker.last = True
        worker.gate.release()
