"""Start a function on several local processes: `results = launch(train, 4)`.

```
parent                                   child of rank r (one of nprocs)
  TCPStore on a free port  <-----------    dist.init_process_group() connects as a client
  spawn with RANK=r, ...   ----------->    fn(*args, **kwargs)
  results[r] or LaunchError <- pipe ---    its result, or its traceback
```

The children see the environment that `torchrun` makes, so the same function runs under either. The parent owns the
rendezvous store (as torchrun's agent does) and lets the system choose its port, so no port is ever picked first and
bound later. Whatever ends the call (a result, an error, a timeout, Ctrl-C, a killed parent) ends every child.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import math
import multiprocessing as mp
import os
import pickle
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from ..monitor.termination import notify_peers

T = TypeVar("T")

_HOST = "127.0.0.1"
_TERM_GRACE_S = 5.0  # from SIGTERM, which a child may catch to save its work, to SIGKILL
_SETTLE_S = 0.5  # a killed rank breaks its peers' connections: wait this long to see which came first
_POLL_S = 1.0  # a child's own children can hold its pipes open after it died: look at its exit status as well
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SIGTERM_EXIT = 128 + signal.SIGTERM  # what shells report of a process that SIGTERM has ended
_NO_GUARD_EXIT = 79  # of a rank that came upon launch() while it imported the script
_RESULT, _FAILURE = b"+", b"-"  # what a child's message starts with
_RESERVED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

_environ_lock = threading.Lock()


class LaunchError(RuntimeError):
    """A rank of `launch` failed; `__cause__` is its exception where that can be pickled.

    Attributes:
        rank: the first rank that failed.
        signal: the signal that killed it, or None.
        exitcode: its exit status, or None where it raised.
        traceback: its traceback as text, or "".
    """

    def __init__(self, message: str, rank: int, signal: int | None = None, exitcode: int | None = None, tb: str = ""):
        super().__init__(message)
        self.rank, self.signal, self.exitcode, self.traceback = rank, signal, exitcode, tb

    def __reduce__(self):
        return type(self), (self.args[0], self.rank, self.signal, self.exitcode, self.traceback)


class LaunchTimeoutError(LaunchError, TimeoutError):
    """`launch` ran into its timeout; `rank` is the first rank that had not finished."""


def launch(
    fn: Callable[..., T],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """launch(fn, nprocs, args) -> [fn(*args) on rank 0, ..., on rank nprocs - 1]

    Runs `fn(*args, **kwargs)` in `nprocs` fresh local processes, each with the environment that torchrun would give
    it: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and OMP_NUM_THREADS (the CPUs divided
    among the ranks) unless it is set. Function, arguments and results travel by pickle, by value. A default process
    group that `fn` leaves behind is destroyed. The children ignore Ctrl-C; the parent ends them. SIGTERM goes on to the children,
    which may save their work first (`reached_preemption`) and return; where they do not, they end, and so does the parent.

    Args:
        fn: an importable function (not a lambda, not nested, not typed into a notebook).
        nprocs: number of processes on this machine.
        args: positional arguments, the same on every rank.
        kwargs: keyword arguments, the same on every rank.
        timeout: seconds from the start of the processes to the end of the last one; None waits for ever.
        env: environment variables to set in the children.

    Raises:
        LaunchError: a rank raised (its traceback is in the message), was killed or exited; the others are ended.
        LaunchTimeoutError: some rank had not finished in time.
        ValueError, TypeError: `fn` or its arguments cannot travel to another process; bad `nprocs` or `env`.
        RuntimeError: called in a process that is itself a rank.
        SystemExit: SIGTERM has ended the ranks; its code is 143. A second SIGTERM ends them at once.

    Communication: none of its own; the children rendezvous through a store in this process.

    Example:
        >>> import shardmesh as sm, operator
        >>> sm.launch(operator.add, 2, (20, 22))  # doctest: +SKIP
        [42, 42]
    """
    _check_call(fn, nprocs, env)
    payload = _pickle_call(fn, tuple(args), dict(kwargs or {}))
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    shared = _shared_environment(nprocs, store.port) | dict(env or {})
    ranks: list[_Rank] = []
    with _passing_sigterm_on(ranks) as passed_on:
        try:
            for rank in range(nprocs):
                _start(ranks, rank, shared, payload)
            _follow(ranks, timeout)
            _raise_first_failure(ranks, passed_on)
            return [pickle.loads(r.result) for r in ranks]
        finally:
            _end(ranks)


# ------------------------------------------------------------------------------------------------ checks of the call


def _check_call(fn: object, nprocs: object, env: Mapping[str, str] | None) -> None:
    with _environ_lock:  # not while another thread's launch() lends its environment to a child
        rank = os.environ.get("RANK")
    if rank is not None:
        if getattr(mp.current_process(), "_inheriting", False):  # a rank imports the script; the parent says what is wrong, once
            raise SystemExit(_NO_GUARD_EXIT)
        raise RuntimeError(
            f"launch() was called in a process that is already rank {rank} of "
            f"{os.environ.get('WORLD_SIZE', '?')} (RANK is set by torchrun or by launch itself). Call the function "
            "directly here, or put the launch() call under `if __name__ == '__main__':` so that the ranks, "
            "which import this script, do not run it again."
        )
    if not callable(fn):
        raise TypeError(f"launch() needs a function, got {fn!r}: write launch(train, 4, args), not launch(train(), 4)")
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"launch() needs nprocs >= 1, got {nprocs!r}")
    if clash := sorted(set(env or ()) & set(_RESERVED)):
        raise ValueError(f"launch() sets {', '.join(clash)} itself for every rank: leave them out of env=")


def _pickle_call(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    _check_reachable(fn)
    to_module = "move it to the top level of a module (a lambda or a nested function has no name to import it by)"
    _try_pickle(fn, f"the function {_name(fn)}", to_module)
    to_data = "pass plain data or tensors, and build the rest inside the function"
    _try_pickle((args, kwargs), f"the arguments of {_name(fn)}", to_data)
    return pickle.dumps((fn, args, kwargs))


def _try_pickle(value: object, what: str, instead: str) -> None:
    try:
        pickle.dumps(value)
    except Exception as error:
        raise ValueError(f"launch() cannot send {what} to another process: {error}. Instead, {instead}.") from error


def _check_reachable(fn: object) -> None:
    """What is defined in `__main__` reaches a child only if the child can run the same script again."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    runs_again = not spec.name.endswith("__main__") if spec else hasattr(main, "__file__")
    if getattr(fn, "__module__", None) == "__main__" and not runs_again:
        raise ValueError(
            f"launch() cannot send {_name(fn)} to another process: it is defined in a notebook, a REPL or `python -c`, "
            "which the new processes cannot import. Move it to a .py file and import it from there, or run it on "
            "simulated ranks of this process with simulate(n)(fn)(*args)."
        )


def _name(fn: object) -> str:
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"


# ------------------------------------------------------------------------------------------------------- environment


def _shared_environment(nprocs: int, port: int) -> dict[str, str]:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "GROUP_RANK": "0",
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cpus // nprocs))),
        # env:// rendezvous then makes every rank a client of the parent's store, as under torchrun
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),  # by which a rank of another job is told apart
    }


@contextlib.contextmanager
def _spawning(environment: Mapping[str, str]) -> Iterator[None]:
    """The environment and signal mask that a child is born with: spawn copies them from this process.

    They must be there before the child's first import (OMP_NUM_THREADS is read when libgomp loads), so setting them in
    the child would be too late. SIGINT is blocked so that Ctrl-C neither interrupts the bookkeeping here nor prints one
    traceback per child that is still importing torch.
    """
    with _environ_lock:
        before = {name: os.environ.get(name) for name in environment}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.environ.update(environment)
        try:
            yield
        finally:
            os.environ.update({name: value for name, value in before.items() if value is not None})
            for name in (name for name, value in before.items() if value is None):
                del os.environ[name]
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# -------------------------------------------------------------------------------------------------------- the parent


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a rank failed. `when` is the machine's monotonic clock, so failures of several ranks can be ordered."""

    summary: str
    when: float
    traceback: str = ""
    pickled: bytes | None = None
    signal: int | None = None
    exitcode: int | None = None

    @property
    def exception(self) -> BaseException | None:
        return pickle.loads(self.pickled) if self.pickled else None

    @property
    def is_of_sigterm(self) -> bool:
        """Whether SIGTERM ended the rank: killed it, or made it raise SystemExit(143)."""
        error = self.exception
        return self.signal == signal.SIGTERM or (isinstance(error, SystemExit) and error.code == _SIGTERM_EXIT)


@dataclass(slots=True)
class _Rank:
    """The parent's side of one child: its process, its pipe, and what it reported."""

    rank: int
    process: BaseProcess
    pipe: Connection
    reading: bool = True
    done: bool = False
    result: bytes = b""
    failure: _Failure | None = None

    def update(self) -> None:
        exitcode = self.process.exitcode  # before the pipe: what an ended child wrote is then already there
        if self.reading and self.pipe.poll():
            self._read()
        if exitcode is None:
            return
        self.done, self.reading = True, False
        if self.failure is None and (exitcode or not self.result):
            self.failure = _exit_failure(exitcode, "after" if self.result else "before")

    def _read(self) -> None:
        self.reading = False
        with contextlib.suppress(EOFError, OSError):  # ended before it could report: the exit status tells why
            message = self.pipe.recv_bytes()
            if message[:1] == _RESULT:
                self.result = message[1:]
            else:
                self.failure, self.done = pickle.loads(message[1:]), True

    @property
    def waitables(self) -> list:
        return [self.process.sentinel, self.pipe] if self.reading else [self.process.sentinel]


def _exit_failure(exitcode: int, when: str) -> _Failure:
    if exitcode < 0:
        name = {s.value: s.name for s in signal.Signals}.get(-exitcode, f"signal {-exitcode}")
        hint = " (the kernel does this when memory runs out)" if -exitcode == signal.SIGKILL else ""
        return _Failure(
            f"was killed by {name} {when} its function returned{hint}",
            time.monotonic(),
            signal=-exitcode,
            exitcode=exitcode,
        )
    summary = f"exited with code {exitcode} {when} its function returned; what it printed is above"
    if exitcode == _NO_GUARD_EXIT:
        summary = "imported the script, and with it ran its launch() call again; put that call under `if __name__ == '__main__':`"
    return _Failure(summary, time.monotonic(), exitcode=exitcode)


def _start(ranks: list[_Rank], rank: int, shared: Mapping[str, str], payload: bytes) -> None:
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe(duplex=True)
    process = context.Process(target=_child_main, args=(os.getpid(), theirs, payload), name=f"rank{rank}")
    with _spawning({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}):
        process.start()
        ranks.append(_Rank(rank, process, mine))
    theirs.close()


def _follow(ranks: Sequence[_Rank], timeout: float | None) -> None:
    """Reads the reports until every rank is done, or one failed and its peers had a moment to show who was first."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    settled = math.inf
    while late := [r for r in ranks if not r.done]:
        left = min(deadline, settled) - time.monotonic()
        if left <= 0 and settled < math.inf:
            return
        if left <= 0:
            raise LaunchTimeoutError(_timeout_message(late, len(ranks), timeout), late[0].rank)
        wait([w for r in late for w in r.waitables], min(left, _POLL_S))
        for r in late:
            r.update()
        if settled == math.inf and any(r.failure for r in ranks):
            settled = time.monotonic() + _SETTLE_S


def _timeout_message(late: Sequence[_Rank], nprocs: int, timeout: float | None) -> str:
    names = ", ".join(str(r.rank) for r in late)
    return f"launch() ran into its timeout of {timeout} s: of {nprocs} ranks, not finished: {names}; all were ended"


@contextlib.contextmanager
def _passing_sigterm_on(ranks: Sequence[_Rank]) -> Iterator[list[int]]:
    """Inside, SIGTERM goes on to the ranks, and the parent follows them as before; the signals that came are in the list.

    A second one ends everything. What the program itself does on SIGTERM is left alone.
    """
    passed_on: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed_on.append(number)
        if len(passed_on) > 1:
            raise SystemExit(_SIGTERM_EXIT)
        for r in ranks:
            r.process.terminate()

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield passed_on
        return
    signal.signal(signal.SIGTERM, pass_on)
    try:
        yield passed_on
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise_first_failure(ranks: Sequence[_Rank], passed_on: Sequence[int]) -> None:
    failed = [(r.rank, r.failure) for r in ranks if r.failure]
    if not failed:
        return
    failed.sort(key=lambda f: (f[1].exitcode is None, f[1].when))  # one that died first: its peers' errors follow
    (rank, failure), *others = failed
    if passed_on and failure.is_of_sigterm:
        print(f"shardmesh: launch: SIGTERM has ended {len(failed)} of {len(ranks)} ranks", file=sys.stderr)
        raise SystemExit(_SIGTERM_EXIT)
    lines = [f"rank {rank} of {len(ranks)} {failure.summary}"]
    if failure.traceback:
        lines += ["", f"--- traceback of rank {rank} ---", failure.traceback.rstrip()]
    if others and failure.exitcode != _NO_GUARD_EXIT:
        lines += ["", "after it:", *(f"  rank {r} {f.summary}" for r, f in others)]
    error = LaunchError("\n".join(lines), rank, failure.signal, failure.exitcode, failure.traceback)
    raise error from failure.exception


def _end(ranks: Sequence[_Rank]) -> None:
    try:
        alive = [r.process for r in ranks if r.process.exitcode is None]
        for process in alive:
            process.terminate()
        deadline = time.monotonic() + _TERM_GRACE_S
        for process in alive:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:  # also when a second Ctrl-C cuts the grace short
        for r in ranks:
            r.process.kill()
            r.process.join()
            r.pipe.close()


# --------------------------------------------------------------------------------------------------------- the child


def _child_main(parent: int, pipe: Connection, payload: bytes) -> None:
    _end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked since birth
    try:
        pipe.send_bytes(_RESULT + _run(payload))
        _leave()
    except BaseException as error:
        notify_peers(error)  # the other ranks, now
        pipe.send_bytes(_FAILURE + pickle.dumps(_raised(error)))
        # The parent ends this process. Leaving now would break the peers' connections and blur which error was first.
        pipe.poll(None)


def _leave() -> None:
    """End well (the program's threads and exit functions first), but without taking the interpreter apart: a thread of torch's
    that is still there would, now and then, abort the process."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


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
        error.add_note(f"{_name(fn)} returned a {type(result).__name__} that cannot be sent back to the parent")
        raise


def _raised(error: BaseException) -> _Failure:
    text = "".join(traceback.format_exception(error.with_traceback(_below_this_file(error.__traceback__))))
    return _Failure(f"raised {type(error).__name__}: {error}", time.monotonic(), text, _pickled_exception(error))


def _below_this_file(tb: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on; the whole of it where the error arose here."""
    inner = tb
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    return inner or tb


def _pickled_exception(error: BaseException) -> bytes | None:
    """The exception as bytes, or None where it does not survive the trip (a custom __init__, an open file, ...)."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _end_with_parent(parent: int) -> None:
    """No orphans: this process ends when the parent does, even by SIGKILL."""
    if sys.platform == "linux":  # works also while this process is stuck in a call that holds the GIL
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_exit_after_parent, name="shardmesh-parent-watch", daemon=True).start()


def _exit_after_parent() -> None:
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
