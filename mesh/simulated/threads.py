"""The threads of simulated ranks, which are reused from run to run."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable

import torch

from ..comm.call_site import frames_of_thread, is_inner


class RankEnded(BaseException):
    """Unwinds a rank because the run has ended.

    Not an Exception, so that handlers of the program do not catch it.
    """


class Worker(threading.Thread):
    """A thread that runs ranks in turn, since starting one takes longer than many programs.

    Both the idle worker and its rank, in a collective, wait at `gate`, a lock that the scheduler
    releases.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.gate = threading.Lock()
        self.gate.acquire()
        self.job: Callable[[], None] = _do_nothing
        self.last = False
        self.start()

    def run(self) -> None:
        while not self.last:
            self.gate.acquire()
            # Read before the job ends: then the next run may give this worker a job at once.
            job, self.job = self.job, _do_nothing
            trace = sys.gettrace()
            try:
                job()
            except RankEnded:
                return  # interrupted when the rank had just ended
            if sys.gettrace() is not trace:  # a debugger of this rank must not trace the next one
                sys.settrace(trace)
            del job  # an idle worker must not keep the arguments of its last rank alive

    def line(self) -> str | None:
        """Return file:line of the program where this thread is, or None. For error messages."""
        outer = (frame for frame in frames_of_thread(self.ident) if not is_inner(frame.f_code))
        frame = next(outer, None)
        if frame is None or frame.f_code.co_filename == threading.__file__:
            return None
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def interrupt(self) -> None:
        """Raise RankEnded in this thread, at its next bytecode."""
        if self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self.ident), ctypes.py_object(RankEnded)
            )


def _do_nothing() -> None:
    """Do nothing, as the task of an idle worker."""


_idle: list[Worker] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # threads do not survive a fork


@functools.cache
def _replace_device_guard() -> None:
    """Let torch replace CUDA's device guard, without a GPU, in a thread that outlives workers.

    torch's build for CUDA does so when the first fake tensors are made, and torch 2.11 frees the
    replacement when that thread ends (c10::impl::ensureCUDADeviceGuardSet). If that is a worker,
    the next fake tensors crash the process.
    """
    replace = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if replace is not None and torch.version.cuda is not None and torch.cuda.device_count() == 0:
        replace()


def acquire(n: int) -> list[Worker]:
    """Return n workers that have no job, idle ones first."""
    _replace_device_guard()
    return [_idle.pop() if _idle else Worker() for _ in range(n)]


def release(workers: Iterable[Worker], *, failed: bool) -> None:
    """Keep the workers for the next run, or end them after a failure.

    An exception may have left torch's state of a thread (modes) in disorder.
    """
    running = [worker for worker in workers if not worker.last]
    if not failed:
        _idle.extend(running)
        return
    for worker in running:
        worker.last = True
        worker.gate.release()
