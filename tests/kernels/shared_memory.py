"""Processes that share CPU memory, as ranks of one node's GPUs do:
`SharedMemoryRanks(4)(fn, *args) -> [fn(peers, *args) of each rank]`.

    file   [ rank 0: buffer | signal pad ] [ rank 1: buffer | signal pad ] ...   mapped by all ranks

A group of ranks is a new file and new `Peers`; the processes are started once (forked from a server
that has imported torch and triton) and serve any number of groups. Kernels run in Triton's
interpreter; a rank that polls its signal pad sleeps a little after each poll, since there are more
ranks than cores.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from shardmesh.kernels.symmetric import MAX_PROGRAMS, PAD_BYTES, Peers, SymmetricMemoryError
from tests.pool import fork_context, let_server_end

MAX_RANKS = 8  # per group
LIMIT_S = 100.0  # far more than a call takes, even on a busy machine


@dataclass(frozen=True)
class SharedMemory:
    """Shared memory of a group, which every process can open."""

    path: str
    size: int
    nbytes: int
    spins: int
    poll_s: float


class RankError(RuntimeError):
    """A rank raised an unexpected exception."""


@dataclass
class Workers:
    """Processes that run pickled calls; started by the first call."""

    processes: list[BaseProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def __call__(self, calls: Sequence[bytes]) -> list[Any]:
        """Send one call to each of the first workers; return the replies, which are exceptions
        where a call raised.
        """
        if not self.processes:
            self._start()
        for pipe, call in zip(self.pipes, calls, strict=False):
            pipe.send_bytes(call)
        replies: dict[Connection, Any] = {}
        deadline = time.monotonic() + LIMIT_S
        while waiting := [pipe for pipe in self.pipes[: len(calls)] if pipe not in replies]:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise RankError(
                    f"ranks {[self.pipes.index(p) for p in waiting]} did not return within "
                    f"{LIMIT_S} s"
                )
            replies |= {pipe: pickle.loads(pipe.recv_bytes()) for pipe in ready}  # type: ignore[union-attr]
        return [replies[pipe] for pipe in self.pipes[: len(calls)]]

    def _start(self) -> None:
        context = fork_context(__name__, "shardmesh.kernels.symmetric.symmetric_triton")
        for rank in range(MAX_RANKS):
            own_pipe, worker_pipe = context.Pipe()
            process = context.Process(
                target=_serve, args=(worker_pipe, rank), name=f"shared-{rank}", daemon=True
            )
            process.start()
            worker_pipe.close()
            self.processes.append(process)
            self.pipes.append(own_pipe)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []


WORKERS = Workers()


class SharedMemoryRanks:
    """A group of ranks with shared memory, as a context manager.

    The timeout of a rank that waits for another is at least spins * poll_s seconds.
    """

    def __init__(
        self, size: int, nbytes: int = 1 << 22, spins: int = 1 << 18, poll_s: float = 1e-4
    ) -> None:
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        handle, path = tempfile.mkstemp(prefix="shardmesh-ranks-", dir=folder)
        os.ftruncate(handle, size * (nbytes + PAD_BYTES))
        os.close(handle)
        self.shared = SharedMemory(path, size, nbytes, spins, poll_s)

    def __enter__(self) -> SharedMemoryRanks:
        return self

    def __exit__(self, *_: object) -> None:
        Path(self.shared.path).unlink()

    def __call__(
        self, fn: Callable[..., Any], *args: Any, without: Sequence[int] = ()
    ) -> list[Any]:
        """Run `fn(peers, *args)` on every rank except those in `without`, whose result is None.

        A `SymmetricMemoryError` is returned, so that a test can check that of every rank; other
        exceptions are raised.
        """
        calls = [
            pickle.dumps((None if r in without else fn, self.shared, args))
            for r in range(self.shared.size)
        ]
        replies = WORKERS(calls)
        for rank, reply in enumerate(replies):
            if isinstance(reply, RankError):
                raise RankError(f"rank {rank} of {self.shared.size}: {reply}")
        return replies


# -- in a worker -----------------------------------------------------------------------------------


def _serve(pipe: Connection, rank: int) -> None:
    let_server_end()
    torch.set_num_threads(1)
    speed_up_interpreter()
    sleep_after_polls()
    while True:
        try:
            fn, shared, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        set_pause(partial(float, shared.poll_s))
        pipe.send_bytes(
            pickle.dumps(None if fn is None else _reply(fn, peers_of(shared, rank), args))
        )


def _reply(fn: Callable[..., Any], peers: Peers, args: Sequence[Any]) -> Any:
    try:
        return fn(peers, *args)
    except SymmetricMemoryError as error:
        return error
    except Exception:
        return RankError(traceback.format_exc())


@cache
def peers_of(shared: SharedMemory, rank: int) -> Peers:
    """Return this rank's view of the group's memory; epochs continue from call to call."""
    with open(shared.path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    step = shared.nbytes + PAD_BYTES
    base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    buffers = base + step * torch.arange(shared.size)
    return Peers(
        rank=rank,
        size=shared.size,
        buffer=torch.frombuffer(memory, dtype=torch.uint8, count=shared.nbytes, offset=rank * step),
        buffers=buffers,
        pads=buffers + shared.nbytes,
        epochs=torch.zeros(MAX_PROGRAMS, dtype=torch.int32),
        error=torch.zeros(shared.size, dtype=torch.int32),
        spins=shared.spins,
    )


_pause: list[Callable[[], float]] = [lambda: 0.0]


def set_pause(seconds: Callable[[], float]) -> None:
    """Set how long this rank sleeps after each poll of its signal pad, including the last, for the
    rest of the call.
    """
    _pause[0] = seconds


def sleep_after_polls() -> None:
    """Patch the interpreter of this process so that `set_pause` takes effect."""
    from triton.runtime.interpreter import InterpreterBuilder

    plain = InterpreterBuilder.create_atomic_rmw

    def with_pause(self: Any, op: Any, *args: Any) -> Any:
        result = plain(self, op, *args)
        if op.name == "ADD":  # our kernels use atomic adds only to poll
            time.sleep(_pause[0]())
        return result

    InterpreterBuilder.create_atomic_rmw = with_pause


def speed_up_interpreter() -> None:
    """Make Triton's interpreter four times as fast.

    Only kernels use Triton's language in these processes, so patch it once rather than at every
    call of a function in a kernel. Integer overflow is unchecked, as on a device.
    """
    from triton.language import standard
    from triton.runtime import interpreter

    from shardmesh.kernels.symmetric.symmetric_triton import all_reduce

    # They import the language under different names.
    scopes = [interpreter._patch_lang(fn.fn) for fn in (all_reduce, standard.zeros)]
    interpreter._patch_lang = lambda fn: scopes[0] and type(scopes[0])()
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
