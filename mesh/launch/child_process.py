"""The child's side of `launch`: call the function, send its result or exception to the parent."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

import torch.distributed as dist

from ..monitor import exit_status
from ..monitor.process_hooks import notify_peers

RESULT, FAILURE = b"+", b"-"  # the first byte of a child's message
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a rank failed. `when`, on the machine's monotonic clock, orders failures of ranks."""

    summary: str
    when: float
    traceback: str = ""
    pickled: bytes | None = None
    signal: int | None = None
    exitcode: int | None = None

    @property
    def exception(self) -> BaseException | None:
        return pickle.loads(self.pickled) if self.pickled else None

    def is_of(self, number: int) -> bool:
        """Return whether this signal killed the rank, or made it raise SystemExit(128 + number)."""
        error = self.exception
        return self.signal == number or (
            isinstance(error, SystemExit) and error.code == 128 + number
        )


def callable_name(fn: object) -> str:
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"


def child_main(parent: int, pipe: Connection, payload: bytes) -> None:
    """Run a pickled call and send the result or the failure through the pipe.

    Args:
        parent: the parent's process id.
        payload: the pickled function, positional and keyword arguments.
    """
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # the parent blocked it before spawning
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        pipe.send_bytes(RESULT + _run(payload))
        _exit()
    except BaseException as error:
        notify_peers(error)  # to the other ranks, at once
        text = "".join(
            traceback.format_exception(
                error.with_traceback(_without_this_file(error.__traceback__))
            )
        )
        failure = RankFailure(
            f"raised {type(error).__name__}: {error}",
            time.monotonic(),
            text,
            pickled_exception(error),
        )
        pipe.send_bytes(FAILURE + pickle.dumps(failure))
        # Wait to be ended by the parent. Exiting now would break the peers' connections and obscure
        # which error was first.
        pipe.poll(None)


def _exit() -> None:
    """Exit normally (join threads, run exit functions), but do not finalize the interpreter.

    A remaining thread of torch occasionally aborts the process there.
    """
    # as multiprocessing does: it also lets the workers of thread pools end
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(exit_status.has_failed()))


def _run(payload: bytes) -> bytes:
    fn, args, kwargs = pickle.loads(payload)
    try:
        result = fn(*args, **kwargs)
    except SystemExit as leave:
        if leave.code not in (None, 0):
            raise
        result = None
    if dist.is_initialized():
        dist.destroy_process_group()
    try:
        return pickle.dumps(result)
    except Exception as error:
        error.add_note(
            f"{callable_name(fn)} returned a {type(result).__name__} that cannot be sent back to "
            "the parent"
        )
        raise


def _without_this_file(tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the user's first frame on, or all of it where there is none."""
    inner = tb
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    return inner or tb


def pickled_exception(error: BaseException) -> bytes | None:
    """Return the pickled exception; None if it cannot be restored (it holds an open file, ...)."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def end_with_parent(parent: int) -> None:
    """End this process when the parent ends, even by SIGKILL."""
    if sys.platform == "linux":  # this also works while a call in this process holds the GIL
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_exit_after_parent, name="shardmesh-parent", daemon=True).start()


def _exit_after_parent() -> None:
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
