"""launch: run a function in several local processes, `results = launch(train, 4)`.

```
parent                                   child of rank r (one of nprocs)
  TCPStore on a free port  <-----------    dist.init_process_group() connects as a client
  spawn with RANK=r, ...   ----------->    fn(*args, **kwargs)
  results[r] or LaunchError <- pipe ---    its result, or its traceback
```

The children have the environment variables of `torchrun`, so the same function runs under either.
The parent owns the rendezvous store (as torchrun's agent does) and lets the system choose its port,
so no other program can take it meanwhile. However the call ends (a result, an error, a timeout,
Ctrl-C, a killed parent), every child ends.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing as mp
import os
import pickle
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Literal, TypeVar, overload

import torch.distributed as dist

from ..monitor.recording.cleanup import remove_jobs_of
from .child_process import RESULT, RankFailure, callable_name, child_main
from .job_store import loopback_listener
from .preemption import unhandled_signals

T = TypeVar("T")

_HOST = "127.0.0.1"
_TERM_GRACE_S = 5.0  # from SIGTERM, which a child may catch to save its work, to SIGKILL
# after a failure, wait this long for earlier ones: a killed rank breaks its peers' connections
_FIRST_FAILURE_S = 0.5
# check exit statuses as well as pipes, which a child's own children can hold open after it died
_POLL_S = 1.0
_MOST_PROCESSES, _MOST_PER_CORE = 64, 4  # that a command starts on one host
_NO_GUARD_EXIT = 79  # exit status of a rank that called launch() while it imported the script
JOINS = "SHARDMESH_ELASTIC_JOIN"  # "1" for a process that joins an elastic job that runs
_RESERVED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    JOINS,
)

_environ_lock = threading.Lock()


class LaunchError(RuntimeError):
    """A rank of `launch` failed; `__cause__` is its exception where that can be pickled.

    Attributes:
        rank: the first rank that failed.
        signal: the signal that killed it, or None.
        exitcode: its exit status, or None if it raised.
        traceback: its traceback as text, or "".
    """

    def __init__(
        self,
        message: str,
        rank: int,
        signal: int | None = None,
        exitcode: int | None = None,
        tb: str = "",
    ):
        super().__init__(message)
        self.rank, self.signal, self.exitcode, self.traceback = rank, signal, exitcode, tb

    def __reduce__(self):
        return type(self), (self.args[0], self.rank, self.signal, self.exitcode, self.traceback)


class LaunchTimeoutError(LaunchError, TimeoutError):
    """`launch` exceeded its timeout; `rank` is the first rank that had not finished."""


@overload
def launch(
    fn: Callable[..., T],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    elastic: Literal[False] = False,
    restarts: int = 0,
) -> list[T]: ...


@overload
def launch(
    fn: Callable[..., T],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    elastic: bool,
    restarts: int = 0,
) -> list[T | None]: ...


def launch(
    fn: Callable[..., T],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    elastic: bool = False,
    restarts: int = 0,
) -> list[T] | list[T | None]:
    """launch(fn, nprocs, args) -> [fn(*args) on rank 0, ..., on rank nprocs - 1].

    Run `fn(*args, **kwargs)` in `nprocs` new local processes, each with the environment variables
    of torchrun: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and
    OMP_NUM_THREADS (the CPUs divided among the ranks) unless it is set. The function, its arguments
    and results are pickled. A default process group that `fn` does not destroy is destroyed. The
    children ignore Ctrl-C; the parent ends them. SIGTERM and SIGHUP are forwarded to the children,
    which may save their work (`reached_preemption`) and return; otherwise they end, and so does the
    parent.

    Args:
        fn: an importable function (not a lambda, not nested, not typed into a notebook).
        nprocs: number of processes on this machine.
        args: positional arguments, the same on every rank.
        kwargs: keyword arguments, the same on every rank.
        timeout: seconds from the start of the processes to the end of the last one; None for no
            limit.
        env: environment variables to set in the children.
        elastic: do not end the others when a rank fails, for a function that goes on without it
            (`sm.elastic.run`). What has happened to it is printed, and its result is None.
        restarts: with `elastic`, how often in all a rank that has failed is started again, which
            joins the others (`SHARDMESH_ELASTIC_JOIN=1`). Its result is then that of the new
            process.

    Raises:
        LaunchError: a rank raised (its traceback is in the message), was killed or exited; the
            others are ended. With `elastic`, all ranks have failed.
        LaunchTimeoutError: some rank had not finished in time.
        ValueError, TypeError: `fn` or its arguments cannot be pickled; bad `nprocs`, `env` or
            `restarts`.
        RuntimeError: called in a process that is itself a rank.
        SystemExit: SIGTERM or SIGHUP has ended the ranks; its code is 143 or 129. A second one ends
            them at once.

    Communication: none; the children rendezvous through a store in this process.

    Example:
        >>> import shardmesh as sm, operator
        >>> sm.launch(operator.add, 2, (20, 22))  # doctest: +SKIP
        [42, 42]
    """
    _check_call(fn, nprocs, env)
    if restarts < 0 or (restarts and not elastic):
        raise ValueError(
            f"launch(restarts={restarts}, elastic={elastic}): write a number from 0 on, and "
            "elastic=True; a job that is not elastic ends with its first failure"
        )
    payload = _pickle_call(fn, tuple(args), dict(kwargs or {}))
    store = _local_store()
    shared = _shared_environment(nprocs, store.port) | dict(env or {})
    ranks: list[_LocalRank] = []
    with _forwarding_signals(ranks) as signals:
        try:
            for rank in range(nprocs):
                _start(ranks, rank, shared=shared, payload=payload)
            start_again = partial(_start, ranks, shared=shared | {JOINS: "1"}, payload=payload)
            _wait(ranks, timeout, elastic, restarts, start_again, signals)
            if not elastic or _has_ended_by(ranks, signals) or all(r.failure for r in ranks):
                _raise_first_failure(ranks, signals, elastic)
            return [None if r.failure else pickle.loads(r.result) for r in ranks]
        except (KeyboardInterrupt, SystemExit):  # nothing to find out afterwards
            _end(ranks)
            pids = {r.process.pid for r in ranks if r.process.pid is not None}
            remove_jobs_of(pids, os.environ | shared)
            raise
        finally:
            _end(ranks)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_process_count(nprocs: int, cores: int) -> None:
    """Raise ValueError for more processes than a command starts on one host: 64, or 4 a core."""
    if nprocs > (most := max(_MOST_PROCESSES, _MOST_PER_CORE * cores)):
        raise ValueError(f"{nprocs} processes are more than a command starts on one host ({most})")


def _local_store() -> dist.TCPStore:
    """Return a store at a free port that is reached from this host only."""
    listening = loopback_listener(_HOST, 0)
    port = listening.getsockname()[1]
    return dist.TCPStore(
        _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


# -- checks of the call ----------------------------------------------------------------------------


def _check_call(fn: object, nprocs: object, env: Mapping[str, str] | None) -> None:
    with _environ_lock:  # another thread's launch() may have set RANK for a child
        rank = os.environ.get("RANK")
    if rank is not None:
        # a rank is importing the script: let the parent report it, once
        if getattr(mp.current_process(), "_inheriting", False):
            raise SystemExit(_NO_GUARD_EXIT)
        raise RuntimeError(
            f"launch() was called in a process that is already rank {rank} of "
            f"{os.environ.get('WORLD_SIZE', '?')} (RANK is set by torchrun or by launch itself). "
            "Call the function directly here, or put the launch() call under `if __name__ == "
            "'__main__':` so that the ranks, which import this script, do not run it again."
        )
    if not callable(fn):
        raise TypeError(
            f"launch() needs a function, got {fn!r}: write launch(train, 4, args), not "
            "launch(train(), 4)"
        )
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"launch() needs nprocs >= 1, got {nprocs!r}")
    if clash := sorted(set(env or ()) & set(_RESERVED)):
        raise ValueError(f"launch() sets {', '.join(clash)} for every rank: remove them from env=")


def _pickle_call(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    _check_reachable(fn)
    name = callable_name(fn)
    to_module = (
        "move it to the top level of a module (a lambda or a nested function cannot be imported by "
        "name)"
    )
    to_data = "pass plain data or tensors, and build the rest inside the function"
    for value, what, fix in (
        (fn, f"the function {name}", to_module),
        ((args, kwargs), f"the arguments of {name}", to_data),
    ):
        try:
            pickle.dumps(value)
        except Exception as error:
            raise ValueError(
                f"launch() cannot send {what} to another process: {error}. Instead, {fix}."
            ) from error
    return pickle.dumps((fn, args, kwargs))


def _check_reachable(fn: object) -> None:
    """Raise ValueError for a function of `__main__` if a child cannot run that script again."""
    while isinstance(fn, partial):
        fn = fn.func
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    runs_again = not spec.name.endswith("__main__") if spec else hasattr(main, "__file__")
    if getattr(fn, "__module__", None) == "__main__" and not runs_again:
        raise ValueError(
            f"launch() cannot send {callable_name(fn)} to another process: it is defined in a "
            "notebook, a REPL or `python -c`, which the new processes cannot import. Move it to a "
            ".py file and import it from there, or run it on simulated ranks of this process with "
            "simulate(n)(fn)(*args)."
        )


# -- environment -----------------------------------------------------------------------------------


def _shared_environment(nprocs: int, port: int) -> dict[str, str]:
    """Return the environment variables that are the same for all ranks."""
    return {
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "GROUP_RANK": "0",
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // nprocs))),
        # With this the env:// rendezvous makes every rank a client of the parent's store, as under
        # torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),  # identifies the job
    }


@contextlib.contextmanager
def _spawning(environment: Mapping[str, str]) -> Iterator[None]:
    """Set the environment and signal mask of a child, which spawn copies from this process.

    They must be set before the child's first import (OMP_NUM_THREADS is read when libgomp loads),
    so not in the child itself. SIGINT is blocked so that Ctrl-C neither interrupts this function
    nor prints one traceback per child that is still importing torch.
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


# -- the parent ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _LocalRank:
    """The parent's view of one child.

    Attributes:
        pipe: on which it reports its result or failure.
        reading: whether a report may still come.
        done: whether it has reported a failure or its process has ended.
        result: pickled, b"" until it has reported one.
        failure: why it failed, None if it has not.
        before: the failures of the processes that were this rank before.
    """

    rank: int
    process: BaseProcess
    pipe: Connection
    reading: bool = True
    done: bool = False
    result: bytes = b""
    failure: RankFailure | None = None
    before: tuple[RankFailure, ...] = ()

    def update(self) -> None:
        """Take over what the child has reported, and how its process has ended."""
        # read before the pipe: then all that an ended child wrote is there
        exitcode = self.process.exitcode
        if self.reading and self.pipe.poll():
            self._read()
        if exitcode is None:
            return
        self.done, self.reading = True, False
        if self.failure is None and (exitcode or not self.result):
            self.failure = _exit_failure(exitcode, "after" if self.result else "before")

    def _read(self) -> None:
        self.reading = False
        # it ended without a report; the exit status has the reason
        with contextlib.suppress(EOFError, OSError):
            message = self.pipe.recv_bytes()
            if message[:1] == RESULT:
                self.result = message[1:]
            else:
                self.failure, self.done = pickle.loads(message[1:]), True

    @property
    def waitables(self) -> list:
        return [self.process.sentinel, self.pipe] if self.reading else [self.process.sentinel]


def _exit_failure(exitcode: int, when: str) -> RankFailure:
    """Return the failure of a rank whose process ended "before" or "after" its function did."""
    if exitcode < 0:
        name = {s.value: s.name for s in signal.Signals}.get(-exitcode, f"signal {-exitcode}")
        hint = " (the kernel does this when memory runs out)" if -exitcode == signal.SIGKILL else ""
        return RankFailure(
            f"was killed by {name} {when} its function returned{hint}",
            time.monotonic(),
            signal=-exitcode,
            exitcode=exitcode,
        )
    summary = f"exited with code {exitcode} {when} its function returned; what it printed is above"
    if exitcode == _NO_GUARD_EXIT:
        summary = (
            "ran the script's launch() call again when it imported the script; put that call under "
            "`if __name__ == '__main__':`"
        )
    return RankFailure(summary, time.monotonic(), exitcode=exitcode)


def _start(
    ranks: list[_LocalRank], rank: int, *, shared: Mapping[str, str], payload: bytes
) -> None:
    """Start the process of a rank: the first one, or another one in its place."""
    context = mp.get_context("spawn")
    parent_end, child_end = context.Pipe(duplex=True)
    process = context.Process(
        target=child_main, args=(os.getpid(), child_end, payload), name=f"rank{rank}"
    )
    with _spawning({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}):
        process.start()
        before = [*ranks[rank].before, ranks[rank].failure] if rank < len(ranks) else []
        failures = tuple(failure for failure in before if failure is not None)
        ranks[rank : rank + 1] = [_LocalRank(rank, process, parent_end, before=failures)]
    child_end.close()


def _wait(
    ranks: Sequence[_LocalRank],
    timeout: float | None,
    elastic: bool,
    restarts: int,
    start_again: Callable[[int], None],
    signals: Sequence[int],
) -> None:
    """Read reports until every rank is done, or until shortly after the first failure.

    Args:
        elastic: whether to end only a rank that has failed.
        restarts: how many of those are started again, while others run.
        signals: that have been forwarded to the ranks: then they end, and none is started again.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    end = math.inf  # of the time for earlier failures, once there is one
    while late := [r for r in ranks if not r.done]:
        left = min(deadline, end) - time.monotonic()
        if left <= 0 and end < math.inf:
            return
        if left <= 0:
            unfinished = ", ".join(str(r.rank) for r in late)
            message = (
                f"launch() exceeded its timeout of {timeout} s: of {len(ranks)} ranks, not "
                f"finished: {unfinished}; all were ended"
            )
            raise LaunchTimeoutError(message, late[0].rank)
        wait([w for r in late for w in r.waitables], min(left, _POLL_S))
        for r in late:
            r.update()
            if elastic and r.failure:
                _end_one(r, r.failure, len(ranks))
                if restarts and not signals and any(not other.done for other in ranks):
                    restarts -= 1
                    start_again(r.rank)
        if not elastic and end == math.inf and any(r.failure for r in ranks):
            end = time.monotonic() + _FIRST_FAILURE_S


def _end_one(rank: _LocalRank, failure: RankFailure, size: int) -> None:
    """End a rank that has failed, so that the others see that it is gone, and print why."""
    rank.process.kill()
    rank.process.join()
    rank.done, rank.reading = True, False
    print(
        f"shardmesh: launch: rank {rank.rank} of {size} {failure.summary}",
        file=sys.stderr,
        flush=True,
    )


@contextlib.contextmanager
def _forwarding_signals(ranks: Sequence[_LocalRank]) -> Iterator[list[int]]:
    """Forward SIGTERM and SIGHUP to the ranks inside the block; yield the list of signals received.

    The parent keeps waiting for the ranks; a second signal ends everything. A handler of the
    program is left in place.
    """
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise SystemExit(128 + number)
        for r in ranks:
            with contextlib.suppress(ProcessLookupError):
                if r.process.exitcode is None and r.process.pid is not None:
                    os.kill(r.process.pid, number)

    numbers = unhandled_signals()
    for number in numbers:
        signal.signal(number, forward)
    try:
        yield received
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _has_ended_by(ranks: Sequence[_LocalRank], signals: Sequence[int]) -> bool:
    """Return whether the first signal that was forwarded has ended some rank."""
    return any(r.failure is not None and r.failure.is_of(signals[0]) for r in ranks if signals)


def _raise_first_failure(
    ranks: Sequence[_LocalRank], signals: Sequence[int], elastic: bool
) -> None:
    """Raise the LaunchError of the rank that failed first, if any has.

    Raises:
        SystemExit: the signal that this process was sent has ended it.
    """
    failed = [(r.rank, failure) for r in ranks for failure in (*r.before, r.failure) if failure]
    if not failed:
        return
    # ranks that died come first: they cause their peers' errors
    failed.sort(key=lambda f: (f[1].exitcode is None, f[1].when))
    if signals and elastic:  # ranks that were lost before are no failure of the job
        failed.sort(key=lambda f: not f[1].is_of(signals[0]))
    (rank, failure), *others = failed
    if signals and failure.is_of(signals[0]):
        name = signal.Signals(signals[0]).name
        failures = [r.failure for r in ranks]
        print(
            f"shardmesh: launch: {name} has ended {sum(map(bool, failures))} of {len(ranks)} ranks",
            file=sys.stderr,
        )
        raise SystemExit(128 + signals[0])
    lines = [f"rank {rank} of {len(ranks)} {failure.summary}"]
    if failure.traceback:
        lines += ["", f"--- traceback of rank {rank} ---", failure.traceback.rstrip()]
    if others and failure.exitcode != _NO_GUARD_EXIT:
        lines += ["", "after it:", *(f"  rank {r} {f.summary}" for r, f in others)]
    error = LaunchError("\n".join(lines), rank, failure.signal, failure.exitcode, failure.traceback)
    raise error from failure.exception


def _end(ranks: Sequence[_LocalRank]) -> None:
    """End all ranks.

    One that has reported its failure waits to be killed; others get SIGTERM and some time to save
    their work.
    """
    try:
        for r in ranks:
            if not r.done and r.process.exitcode is None:
                r.process.terminate()
        deadline = time.monotonic() + _TERM_GRACE_S
        while (late := [r for r in ranks if not r.done]) and time.monotonic() < deadline:
            wait([w for r in late for w in r.waitables], deadline - time.monotonic())
            for r in late:
                r.update()
    finally:  # also when a second Ctrl-C cuts the grace short
        for r in ranks:
            r.process.kill()
            r.process.join()
            r.pipe.close()
            r.done, r.reading = True, False
