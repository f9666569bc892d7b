"""Jobs of ranks that start and end as separate programs do:
`Forked()(program, 4) -> [outcome of each rank]`.

Importing torch takes seconds, so one process imports it and forks the ranks. A rank runs a function
of `forked_ranks.py`, and then its interpreter ends as that of any program: uncaught error, threads,
exit functions, modules. If the system allows it, the process has a separate mount namespace, so
that jobs can have small or read-only folders.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardmesh.mesh import settings
from tests.mesh.monitor.starter import ROOT, by_hand, is_readable

START_S = 40.0
# As root, and as another user.
_UNSHARE = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])


def unshared() -> list[str]:
    """Return the command prefix that gives a process its own mounts; empty if the system does not
    allow it.
    """
    if shutil.which("unshare") is None:
        return []
    test = "mount -t tmpfs none /mnt"
    for command in _UNSHARE:
        if (
            subprocess.run(
                [*command, "sh", "-c", test], capture_output=True, check=False
            ).returncode
            == 0
        ):
            return command
    return []


@dataclass
class Ended:
    """How a rank ended.

    Attributes:
        status: its exit status, or minus a signal; None if it had to be killed at the time limit.
        output: everything it printed.
    """

    status: int | None
    output: str


class Forked:
    def __init__(self) -> None:
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("SHARDMESH_", "TORCHELASTIC_", "PYTEST_"))
        }
        env = kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        prefix = unshared()
        self.can_mount = bool(prefix)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.mesh.monitor.forked"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )
        self.folder = tempfile.TemporaryDirectory(prefix="shardmesh-forked-")
        self._jobs = 0

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
        assert self.process.stdin
        assert self.process.stdout
        if mounts and not self.can_mount:
            pytest.skip("this process may not mount anything")
        self._jobs += 1
        folder = Path(self.folder.name, str(self._jobs))
        (folder / "watch").mkdir(parents=True)
        common = (
            ({"SHARDMESH_WATCH_DIR": str(folder / "watch")} if own else {})
            | {"LOCAL_WORLD_SIZE": str(size)}
            | env
        )
        job = {
            "module": program.__module__,
            "name": program.__name__,
            "args": args,
            "env": by_hand(size, 0, **common),
            "folder": str(folder),
            "limit_s": limit_s,
            "mounts": {str(folder / where): how for where, how in (mounts or {}).items()},
        }
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        assert is_readable(self.process.stdout, START_S + limit_s), "the job hangs"
        ended = json.loads(self.process.stdout.readline())
        return [Ended(ended[str(r)], (folder / f"{r}.output").read_text()) for r in range(size)]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.folder.cleanup()


# ------------------------------------------------------------------------ in the process that forks


def serve() -> None:
    import torch

    import shardmesh  # noqa: F401

    torch.set_num_threads(1)
    importlib.import_module("tests.mesh.monitor.forked_ranks")
    gc.freeze()  # or the exit of each rank takes 0.5 s to collect what was imported
    replies = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        job = json.loads(line)
        ranks: dict[int, int] = {}
        with mounted(job["mounts"]):
            for rank in range(len(job["env"])):
                pid = os.fork()
                if pid == 0:
                    break
                ranks[pid] = rank
            else:
                print(json.dumps(_wait_for(ranks, job["limit_s"])), file=replies, flush=True)
                continue
        return _run(job, rank)


@contextlib.contextmanager
def mounted(mounts: dict[str, str]) -> Iterator[None]:
    here = os.getpid()
    for folder, options in mounts.items():
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)
    yield
    for folder in mounts if os.getpid() == here else ():
        subprocess.run(["umount", "--lazy", folder], check=True)


def _run(job: dict[str, Any], rank: int) -> None:
    """Run a rank, which returns from the main module."""
    output = os.open(Path(job["folder"], f"{rank}.output"), os.O_CREAT | os.O_WRONLY)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    os.environ.update(job["env"][rank])
    given = settings.from_environment(os.environ)
    here = settings.settings()  # as it was when the modules were imported
    here.mode = given.mode
    here.warn = given.warn
    here.timeout = given.timeout
    here.exit_s = given.exit_s
    here.torch_calls = given.torch_calls
    getattr(importlib.import_module(job["module"]), job["name"])(*job["args"])


def _wait_for(ranks: dict[int, int], limit_s: float) -> dict[int, int | None]:
    """Wait for the ranks and return their exit statuses."""
    began = time.monotonic()
    found: dict[int, int | None] = {}
    while len(found) < len(ranks) and time.monotonic() - began < limit_s:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            found[ranks[pid]] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.01)
    for pid, rank in ranks.items():
        if rank not in found:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            found[rank] = None
    return found


def statuses(ended: Sequence[Ended]) -> list[int | None]:
    return [rank.status for rank in ended]


if __name__ == "__main__":
    serve()
