"""A pool of worker processes for tests: `pool(fn, *args) -> [fn(*args) on rank 0, 1, ...]`.

Importing torch takes seconds, so one process imports it and forks the workers, which live as long
as the test session. The last rank of a pool is spawned: it has another hash seed and other
addresses than the forked ones, which have these in common, so that a program whose collectives
follow the order of a set does not pass. Ranks share one gloo default group, in the environment of a
launched rank. `fn` must be a top-level function of a test module.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from shardmesh.mesh.errors import WatchError
from shardmesh.mesh.launch.child_process import end_with_parent, pickled_exception
from shardmesh.mesh.launch.local_processes import _shared_environment, _spawning
from shardmesh.mesh.monitor.recording.cleanup import remove_jobs_of
from tests import device
from tests.forked import set_environment

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
START_TIMEOUT_S = 100.0
_ATTEMPTS = 3  # to connect to the other ranks
_SETTLE_S = 3.0  # time limit of the other ranks after one rank failed
_IMPORTS = ("torch._dynamo",)  # of a worker before its first call, as they take seconds


def fork_context(*modules: str) -> ForkServerContext:
    """Return a context whose processes are forked from one that has imported these modules, and
    has one thread; the modules of the first call in this process. Not for processes that use CUDA.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["pytest", *modules])
    # The server inherits the environment at its start; it uses no CUDA.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    return context


def let_server_end() -> None:
    """Close a forked process's copy of the pipe by which its server sees the test process end.

    The server reads the end of that pipe when no process has it, and its workers end with it. With
    a copy in each of them neither would end after a SIGKILL of the test process.
    """
    server = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


class WorkerError(RuntimeError):
    """A worker died, hung, or raised an exception that cannot be pickled."""


@dataclass(frozen=True)
class Reply:
    """Reply of a rank: a value, or the text of an error, and the error itself if it can be
    pickled.
    """

    value: Any = None
    error: str = ""
    when: float = 0.0
    exception: bytes | None = None


@dataclass
class Worker:
    process: BaseProcess
    pipe: Connection
    stacks: Path  # where the worker writes its stacks on SIGUSR1
    reply: Reply | None = None

    def read(self) -> None:
        try:
            self.reply = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(START_TIMEOUT_S)
            self.reply = Reply(error=f"died (exit code {self.process.exitcode})", when=-1.0)


@dataclass
class Pool:
    size: int
    device: str = field(default_factory=lambda: device.DEVICE)
    workers: list[Worker] = field(default_factory=list)
    store: dist.TCPStore | None = None
    environment: dict[str, str] = field(default_factory=dict)
    folder: tempfile.TemporaryDirectory | None = None

    def __call__(
        self, fn: Callable[..., T], *args: Any, timeout: float = CALL_TIMEOUT_S, **kwargs: Any
    ) -> list[T]:
        """Run `fn(*args, **kwargs)` on every rank. Raises the exception of the first rank that
        failed, with a note naming its rank.
        """
        call = pickle.dumps((fn, args, kwargs))
        if not self.workers:
            self.start()
        # Also on Ctrl-C, which leaves the workers inside a call.
        with self._closing_on(BaseException):
            replies = self._call(call, timeout)
        self._close_if_diverged(replies)
        _raise_first(replies)
        return [reply.value for reply in replies]

    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="shardmesh-pool-")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.environment = _shared_environment(self.size, self.store.port)
        with self._closing_on(BaseException):
            for rank in range(self.size):
                self._start_worker(rank)
            replies = self._replies(START_TIMEOUT_S)
        self._close_if_diverged(replies)
        _raise_first(replies)

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.pipe.close()
        remove_jobs_of(
            {worker.process.pid for worker in self.workers if worker.process.pid is not None}
        )
        self.workers, self.store = [], None
        if self.folder:
            self.folder.cleanup()

    def _start_worker(self, rank: int) -> None:
        assert self.store
        assert self.folder
        is_on_cpu = self.device == "cpu"
        is_forked = is_on_cpu and rank < self.size - 1
        context: Any = fork_context(__name__, *_IMPORTS) if is_forked else mp.get_context("spawn")
        own_pipe, worker_pipe = context.Pipe()
        stacks = Path(self.folder.name) / str(rank)
        environment = self.environment | {
            "RANK": str(rank),
            # Gloo ranks can share an accelerator.
            "LOCAL_RANK": str(rank if is_on_cpu else 0),
            device.VARIABLE: self.device,
            "OMP_NUM_THREADS": "1",
        }
        if is_on_cpu:
            environment["TRITON_INTERPRET"] = "1"  # as of the server
        process = context.Process(
            target=_serve,
            args=(dict(os.environ) | environment, worker_pipe, str(stacks)),
            name=f"pool{self.size}-{rank}",
        )
        with _spawning(environment):
            process.start()
            self.workers.append(Worker(process, own_pipe, stacks))
        worker_pipe.close()

    def _call(self, call: bytes, timeout: float) -> list[Reply]:
        for worker in self.workers:
            worker.reply = None
            with contextlib.suppress(OSError):  # a dead worker; reading its pipe reports it
                worker.pipe.send_bytes(call)
        return self._replies(timeout)

    def _replies(self, timeout: float) -> list[Reply]:
        deadline = time.monotonic() + timeout
        while waiting := {w.pipe: w for w in self.workers if w.reply is None}:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._time_out(list(waiting.values()), timeout)
            for pipe in ready:
                worker = waiting[pipe]  # type: ignore[index]
                worker.read()
                if worker.reply and worker.reply.error:
                    deadline = min(deadline, time.monotonic() + _SETTLE_S)
        return [w.reply for w in self.workers if w.reply]

    def _time_out(self, late: list[Worker], timeout: float) -> None:
        """Give late ranks a reply with their stacks, so that `_replies` returns."""
        for worker in late:
            with contextlib.suppress(OSError):
                os.kill(worker.process.pid or 0, signal.SIGUSR1)
        # Faulthandler writes from the signal handler, even if the main thread is blocked.
        time.sleep(0.5)
        for worker in late:
            stacks = worker.stacks.read_text() if worker.stacks.exists() else ""
            limit = f"{timeout} s, or {_SETTLE_S} s after another rank failed"
            worker.reply = Reply(
                error=f"did not return ({limit}); its stacks:\n{stacks}", when=float("inf")
            )

    def _close_if_diverged(self, replies: list[Reply]) -> None:
        """Close the pool, so that the next call starts a new one, if the ranks diverged: one died,
        hung or raised alone.
        """
        # No collective runs after a verdict.
        if any(isinstance(_exception(r), WatchError) for r in replies):
            self.close()
            return
        kinds = {
            (bool(r.error), type(_exception(r)), r.when in (-1.0, float("inf"))) for r in replies
        }
        if len(kinds) > 1 or any(r.when in (-1.0, float("inf")) for r in replies):
            self.close()

    @contextlib.contextmanager
    def _closing_on(self, kind: type[BaseException]):
        try:
            yield
        except kind:
            self.close()
            raise


def _exception(reply: Reply) -> BaseException | None:
    return pickle.loads(reply.exception) if reply.exception else None


def _raise_first(replies: list[Reply]) -> None:
    failed = sorted((reply.when, rank) for rank, reply in enumerate(replies) if reply.error)
    if not failed:
        return
    texts = [f"rank {rank} of {len(replies)} {replies[rank].error}" for _, rank in failed]
    error = _exception(replies[failed[0][1]]) or WorkerError("\n".join(texts))
    if not isinstance(error, WorkerError):
        error.add_note("\n".join(texts))
    raise error


# ---------------------------------------------------------------------------------- inside a worker


def _serve(environment: dict[str, str], pipe: Connection, stacks: str) -> None:
    """Run a worker: reply once when ready, then once per call.

    Args:
        environment: all of it; a forked worker has that of the server, which is older.
    """
    let_server_end()
    end_with_parent(os.getppid())  # the fork server, which ends with the test process; or that
    for module in _IMPORTS:
        importlib.import_module(module)
    gc.freeze()  # what was imported: a collection would copy the memory of the server
    os.environ.clear()
    set_environment(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)  # noqa: SIM115 - stays open
    warnings.filterwarnings("error", module=r"(shardmesh|tests)(\.|$)")
    torch.set_num_threads(1)
    device.set_default_device()
    calls = 0
    _reply(pipe, _ensure_group, calls)
    while True:
        message = pipe.recv_bytes()
        calls += 1
        _reply(pipe, _run, message, calls)


def _run(message: bytes, calls: int) -> Any:
    _ensure_group(calls)
    fn, args, kwargs = pickle.loads(message)
    return fn(*args, **kwargs)


def _ensure_group(calls: int) -> None:
    """Create the default group if the last call destroyed it, under a new prefix, since the store
    keeps old keys.
    """
    if dist.is_initialized():
        return
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    for left in reversed(range(_ATTEMPTS)):
        try:
            return _connect(dist.PrefixStore(f"call{calls}/{left}", store))
        except RuntimeError:
            if not left:
                raise


def _connect(store: dist.Store) -> None:
    """Create the default group, or raise on every rank: on a busy machine gloo sometimes fails to
    connect to all ranks.
    """
    rank, size, failed = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=5)
        )
    except RuntimeError as error:
        failed = error
    store.set(f"connected{rank}", "no" if failed else "yes")
    if not all(store.get(f"connected{other}") == b"yes" for other in range(size)):
        if dist.is_initialized():
            dist.destroy_process_group()
        raise failed or RuntimeError("another rank cannot reach all others")


def _reply(pipe: Connection, fn: Callable[..., Any], *args: Any) -> None:
    try:
        message = pickle.dumps(Reply(fn(*args)))
    except BaseException as error:
        text = "raised\n" + "".join(traceback.format_exception(error))
        message = pickle.dumps(Reply(None, text, time.monotonic(), pickled_exception(error)))
    pipe.send_bytes(message)
