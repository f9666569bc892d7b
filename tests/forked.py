"""Jobs of ranks that start and end as programs do: `Forked()(program, 4) -> [how each ended]`.

    client (the tests)     server                   supervisor of a job     rank of a job
      python -m     ---->    imports torch,
      tests.forked           shardmesh, modules
      a job as JSON ---->    imports its module,
                             fork             ---->   mounts, n x fork ---->  program(*args)
                                                      waits, kills           its output, result;
                                                      what hangs             the interpreter ends
      ended.json    <------------------------------   ended.json

Importing torch takes seconds, and so does its compiler, which optimizers and DDP import. So one
process imports them, and the module of each program, and forks the ranks of all jobs; it has one
thread, no process group and has run no backward when it forks. A rank returns from the main module,
or raises out of it, so that its interpreter ends as that of any program: uncaught error, threads,
exit functions, modules. If the system allows it, the server has a separate mount namespace, so that
jobs can have small or read-only folders.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
START_S = 180.0
_POLL_S = 0.02
_RESUMED_S = 30.0  # time limit of ranks to end after they were resumed
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# As root, and as another user.
_UNSHARE = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])


@dataclass(frozen=True)
class Job:
    """What the server is asked to run.

    Attributes:
        module, name: of the program.
        args: the arguments of each rank.
        env: the environment variables of each rank, besides those of the server.
        folder: folder for the ranks' output and results.
        limit_s: seconds after which ranks that have not ended are killed.
        holds: whether ranks whose program has returned a value wait until all ranks have returned
            one or ended, as where one of them serves the store.
        mounts: options of tmpfs mounts by folder.
    """

    module: str
    name: str
    args: list[list[Any]]
    env: list[dict[str, str]]
    folder: str
    limit_s: float
    holds: bool = False
    mounts: dict[str, str] = field(default_factory=dict)


@dataclass
class Ended:
    """How a rank ended.

    Attributes:
        pid: its process.
        status: its exit status, or minus a signal; None if it had to be killed at the time limit.
        output: everything it printed.
        value: what its program returned, as JSON.
    """

    pid: int
    status: int | None
    output: str
    value: Any


def by_hand(size: int, port: int = 0, **common: str) -> list[dict[str, str]]:
    """Return the environment of each rank, as a user sets it by hand."""
    port = port or free_port()
    shared = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **common,
    }
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(size)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def statuses(ended: Sequence[Ended]) -> list[int | None]:
    return [rank.status for rank in ended]


class Forked:
    """Runs jobs by a server; safe for several threads. All its processes end with it.

    Args:
        modules: modules that the server imports before it forks, besides those of programs.
        prefix: of the command that starts the server, such as one that enters another host; by
            default one that gives it mounts of its own, if the system allows it.
    """

    def __init__(self, *modules: str, prefix: Sequence[str] | None = None) -> None:
        settings = ("SHARDMESH_", "TORCHELASTIC_", "PYTEST_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self.can_mount = prefix is None and bool(_unshared())
        prefix = _unshared() if prefix is None else prefix
        self.folder = tempfile.TemporaryDirectory(prefix="shardmesh-forked-")
        self._server = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.forked", *modules],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )
        self._sending, self._jobs = threading.Lock(), 0

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server, and with it the supervisors and ranks of its jobs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()
        self.folder.cleanup()

    def __call__(
        self,
        program: Callable[..., Any],
        size: int,
        *args: Any,
        limit_s: float = 75.0,
        own: bool = True,
        mounts: dict[str, str] | None = None,
        **env: str,
    ) -> list[Ended]:
        """Run `program(*args)` on this many ranks, without a launcher.

        Args:
            limit_s: seconds after which ranks that have not ended are killed.
            own: put the monitor's files into a folder of this job.
            mounts: options of tmpfs mounts for the job, by folder: {"/dev/shm": "size=1m"}; "watch"
                is the job's folder. The test is skipped if mounting is not allowed.
        """
        if mounts and not self.can_mount:
            pytest.skip("this process may not mount anything")
        folder = self.new_folder()
        (folder / "watch").mkdir()
        watch = {"SHARDMESH_WATCH_DIR": str(folder / "watch")} if own else {}
        common = watch | {"LOCAL_WORLD_SIZE": str(size)} | env
        return self.run(
            program,
            [args] * size,
            by_hand(size, 0, **common),
            folder,
            limit_s=limit_s,
            mounts={str(folder / where): options for where, options in (mounts or {}).items()},
        )

    def new_folder(self, name: str = "job") -> Path:
        """Return a new folder for a job of this name, "12-name"."""
        with self._sending:
            self._jobs += 1
            folder = Path(self.folder.name, f"{self._jobs}-{name}")
        folder.mkdir()
        return folder

    def run(
        self,
        program: Callable[..., Any],
        args: Sequence[Sequence[Any]],
        env: list[dict[str, str]],
        folder: Path,
        *,
        limit_s: float,
        holds: bool = False,
        mounts: dict[str, str] | None = None,
    ) -> list[Ended]:
        """Run `program(*args[rank])` with `env[rank]` on each rank; see `Job`.

        Raises:
            RuntimeError: the server or the job's supervisor has ended.
        """
        each = [list(own) for own in args]
        job = Job(
            program.__module__,
            program.__name__,
            each,
            env,
            str(folder),
            limit_s,
            holds,
            mounts or {},
        )
        with self._sending:
            assert self._server.stdin
            self._server.stdin.write(json.dumps(asdict(job)) + "\n")
            self._server.stdin.flush()
        deadline = time.monotonic() + START_S + limit_s
        while not (folder / "ended.json").exists():
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the supervisor of {folder} has ended; exit status of the server: "
                    f"{self._server.poll()}"
                )
            time.sleep(_POLL_S)
        ended = json.loads((folder / "ended.json").read_text())
        return [_outcome(folder, rank, *known) for rank, known in enumerate(ended)]


def _outcome(folder: Path, rank: int, pid: int, status: int | None) -> Ended:
    output = (folder / f"{rank}.output").read_text(errors="replace")
    value = folder / f"{rank}.value"
    return Ended(pid, status, output, json.loads(value.read_text()) if value.exists() else None)


def _unshared() -> list[str]:
    """Return the command prefix that gives a process its own mounts; empty if the system does not
    allow it.
    """
    if shutil.which("unshare") is None:
        return []
    test = ["sh", "-c", "mount -t tmpfs none /mnt"]
    for command in _UNSHARE:
        if subprocess.run([*command, *test], capture_output=True, check=False).returncode == 0:
            return command
    return []


# -- in the server ---------------------------------------------------------------------------------


def serve() -> None:
    """Read jobs and fork a supervisor for each. Returns on the ranks, and at the end of input."""
    import torch
    import torch._dynamo

    import shardmesh  # noqa: F401

    for module in sys.argv[1:]:
        importlib.import_module(module)
    torch.set_num_threads(1)  # ranks share a few cores
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies of supervisors
    # Shells make background processes ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        _import(job.module)
        gc.freeze()  # or the exit of each rank takes 0.5 s to collect what was imported
        if os.fork() == 0:
            _end_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _supervise(job)


def _import(module: str) -> None:
    """Import the module of a program; an error is raised again on the ranks."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it may wait for processes of its own
    try:
        importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException:  # also that of `pytest.skip`
        pass
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):  # supervisors that have ended meanwhile
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _supervise(job: Job) -> None:
    """Start the ranks and wait for them. Returns only on the ranks, when their programs return."""
    os.setpgid(0, 0)
    supervisor = os.getpid()
    pids: list[int] = []
    with _mounted(job.mounts):
        while len(pids) < len(job.env):
            pid = os.fork()
            if pid == 0:
                break
            pids.append(pid)
        else:
            ended = _wait_for(job, pids)
    if os.getpid() != supervisor:
        _end_with_parent(supervisor)
        return _run(job, rank=len(pids))
    unfinished = Path(job.folder, "ending.json")
    unfinished.write_text(json.dumps(ended))
    unfinished.rename(Path(job.folder, "ended.json"))
    os.killpg(0, signal.SIGKILL)  # remaining children of the ranks, and this process


@contextlib.contextmanager
def _mounted(mounts: dict[str, str]) -> Iterator[None]:
    """Mount while the supervisor is in the block."""
    supervisor = os.getpid()
    for folder, options in mounts.items():
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)
    yield
    for folder in mounts if os.getpid() == supervisor else ():
        subprocess.run(["umount", "--lazy", folder], check=True)


def _wait_for(job: Job, pids: list[int]) -> list[tuple[int, int | None]]:
    """Wait for the ranks; return the process and the exit status of each.

    Ranks that are stopped are resumed when all others have ended.
    """
    status_of: dict[int, int | None] = {}
    stopped: set[int] = set()
    deadline = time.monotonic() + job.limit_s
    while len(status_of) < len(pids) and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid not in pids:
            time.sleep(_POLL_S)
        elif os.WIFSTOPPED(status):
            stopped.add(pid)
        else:
            status_of[pid] = os.waitstatus_to_exitcode(status)
            stopped.discard(pid)
        if stopped and len(status_of) + len(stopped) == len(pids):
            deadline = min(deadline, time.monotonic() + _RESUMED_S)
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            stopped.clear()
        if job.holds and all(
            pid in status_of or Path(job.folder, f"{rank}.value").exists()
            for rank, pid in enumerate(pids)
        ):
            break
    for pid in set(pids) - set(status_of):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [(pid, status_of.get(pid)) for pid in pids]


def _run(job: Job, rank: int) -> None:
    """Run a rank, which returns from the main module."""
    output = os.open(Path(job.folder, f"{rank}.output"), os.O_CREAT | os.O_WRONLY)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    set_environment(job.env[rank])
    result = getattr(importlib.import_module(job.module), job.name)(*job.args[rank])
    if result is not None:
        unfinished = Path(job.folder, f"{rank}.returned")
        unfinished.write_text(json.dumps(result))
        unfinished.rename(Path(job.folder, f"{rank}.value"))
    while job.holds:
        signal.pause()


def set_environment(env: Mapping[str, str]) -> None:
    """Set variables in a process that was forked after it had imported the library."""
    from shardmesh.mesh import settings

    os.environ.update(env)
    current = settings.settings()  # as the environment at the import says
    for name, value in asdict(settings.from_environment(os.environ)).items():
        setattr(current, name, value)


def _end_with_parent(parent: int | None = None) -> None:
    with contextlib.suppress(AttributeError, OSError):  # not on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    serve()
