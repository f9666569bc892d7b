"""Processes that share CPU memory, as ranks of one node's GPUs do: `Ranks(4)(fn, *args) -> [fn(peers, *args) of each rank]`.

    file   [ rank 0: buffer | signal pad ] [ rank 1: buffer | signal pad ] ...     mapped by every rank, anywhere

A group of ranks is a new file and new `Peers`; the processes are started once (forked from a server that has imported torch
and triton) and serve any number of groups. Kernels run in Triton's interpreter, where a rank that looks at its signal pad
sleeps a little after each look: there are more ranks than cores.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
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

import pytest
import torch

from shardmesh.kernels.symmetric import MAX_PROGRAMS, PAD_BYTES, Peers, SymmetricMemoryError

MOST = 8  # ranks of a group
LIMIT_S = 100.0  # far more than a call takes, on a machine that is busy with other things


@dataclass(frozen=True)
class Shared:
    """One group's memory, as every process can open it."""

    path: str
    size: int
    nbytes: int
    spins: int
    look_s: float


class RankError(RuntimeError):
    """A rank raised something else than what the test asked about."""


@dataclass
class Workers:
    """Processes that call what they are sent, pickled; started by the first call."""

    processes: list[BaseProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def __call__(self, calls: Sequence[bytes]) -> list[Any]:
        """Sends one call to each of the first workers: what each answers (an exception where it raised one)."""
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
                raise RankError(f"ranks {[self.pipes.index(p) for p in waiting]} did not return within {LIMIT_S} s")
            replies |= {pipe: pickle.loads(pipe.recv_bytes()) for pipe in ready}  # type: ignore[union-attr]
        return [replies[pipe] for pipe in self.pipes[: len(calls)]]

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([__name__, "pytest", "shardmesh.kernels.symmetric.symmetric_triton"])
        with pytest.MonkeyPatch.context() as patch:  # the server takes the environment of its first child
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setenv("OMP_NUM_THREADS", "1")
            for rank in range(MOST):
                mine, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, rank), name=f"shared-{rank}", daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(mine)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []


WORKERS = Workers()


class Ranks:
    """A group of ranks with memory of its own, in a `with` block.

    A rank waits for another for at least spins * look_s seconds.
    """

    def __init__(self, size: int, nbytes: int = 1 << 22, spins: int = 1 << 18, look_s: float = 1e-4) -> None:
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        handle, path = tempfile.mkstemp(prefix="shardmesh-ranks-", dir=folder)
        os.ftruncate(handle, size * (nbytes + PAD_BYTES))
        os.close(handle)
        self.shared = Shared(path, size, nbytes, spins, look_s)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        Path(self.shared.path).unlink()

    def __call__(self, fn: Callable[..., Any], *args: Any, without: Sequence[int] = ()) -> list[Any]:
        """`fn(peers, *args)` on every rank but those in `without`; None for those.

        A `SymmetricMemoryError` is returned, so that a test can look at every rank's; another exception is raised here.
        """
        calls = [pickle.dumps((None if r in without else fn, self.shared, args)) for r in range(self.shared.size)]
        replies = WORKERS(calls)
        for rank, reply in enumerate(replies):
            if isinstance(reply, RankError):
                raise RankError(f"rank {rank} of {self.shared.size}: {reply}")
        return replies


# -- in a worker -------------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, rank: int) -> None:
    torch.set_num_threads(1)
    hasten_interpreter()
    sleep_at_looks()
    while True:
        try:
            fn, shared, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        pausing(partial(float, shared.look_s))
        pipe.send_bytes(pickle.dumps(None if fn is None else _answer(fn, peers_of(shared, rank), args)))


def _answer(fn: Callable[..., Any], peers: Peers, args: Sequence[Any]) -> Any:
    try:
        return fn(peers, *args)
    except SymmetricMemoryError as error:
        return error
    except Exception:
        return RankError(traceback.format_exc())


@cache
def peers_of(shared: Shared, rank: int) -> Peers:
    """This rank's view of the group's memory; epochs go on from call to call."""
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


def pausing(seconds: Callable[[], float]) -> None:
    """For the rest of the call: how long this rank sleeps after each look at its signal pad, the last one included."""
    _pause[0] = seconds


def sleep_at_looks() -> None:
    """Makes this process one that `pausing` works on."""
    from triton.runtime.interpreter import InterpreterBuilder

    plain = InterpreterBuilder.create_atomic_rmw

    def patient(self: Any, how: Any, *args: Any) -> Any:
        found = plain(self, how, *args)
        if how.name == "ADD":  # kernels here add for nothing else
            time.sleep(_pause[0]())
        return found

    InterpreterBuilder.create_atomic_rmw = patient


def hasten_interpreter() -> None:
    """Here nothing but kernels uses Triton's language, so it becomes the interpreter's once, not at every call of a function
    within a kernel; and integers are as unchecked as on a device. A quarter of the time remains."""
    from triton.language import standard
    from triton.runtime import interpreter

    from shardmesh.kernels.symmetric.symmetric_triton import all_reduce

    scopes = [interpreter._patch_lang(fn.fn) for fn in (all_reduce, standard.zeros)]  # they name the language differently
    interpreter._patch_lang = lambda fn: scopes[0] and type(scopes[0])()
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

