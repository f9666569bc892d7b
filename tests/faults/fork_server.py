"""A fork server for the ranks of faulty programs, so that they do not import torch again.

    Runner (the tests)    fork server              supervisor of a job    rank of a job
      python -m ...  -->    imports torch,
      fork_server           shardmesh, the table
      one line of    -->    fork              -->     4 x fork      -->    program(ctx)
      JSON                                            waits, kills         its events, its stderr;
                                                      hanging ranks        then the interpreter ends
      ended.json     <-----------------------------   ended.json

The fork server has one thread, no process group and has run no backward when it forks. A rank
returns from `main` or raises out of it, so that its interpreter ends as that of any program, with
exit functions and threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.faults.fault import RANKS, Fault
from tests.faults.rank_context import EventLog, RankContext, TorchRankContext

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_S = 0.003
_EXIT_S = 30.0  # time limit of ranks to end after a frozen outlier was resumed


@dataclass(frozen=True)
class Job:
    """One run of a program.

    Attributes:
        fault: name of the fault.
        backend: "ours", "torch", or "detail" for torch with TORCH_DISTRIBUTED_DEBUG=DETAIL.
        outliers: the ranks that diverge; none to get the expected results.
        folder: folder for the ranks' events and output.
        port: port of the job's store.
        limit_s: seconds after which hanging ranks are killed.
    """

    fault: str
    backend: str
    outliers: tuple[int, ...]
    folder: str
    port: int
    limit_s: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    # Otherwise the first optimizer imports it, which takes seconds.
    importlib.import_module("torch._dynamo")
    table = importlib.import_module(sys.argv[1]).FAULTS
    torch.set_num_threads(1)  # four ranks share a few cores
    gc.freeze()  # or the exit of each rank takes 0.5 s to collect what was imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies of supervisors
    # Shells make background processes ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("ready", flush=True)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        if os.fork() == 0:
            _end_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return supervise(job, table)


def supervise(job: Job, table: Mapping[str, Fault]) -> None:
    """Start the ranks and wait for them. Returns only on the ranks, when their programs return."""
    os.setpgid(0, 0)
    parent = os.getpid()
    ranks: dict[int, int] = {}
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            _end_with_parent(parent)
            return run(job, rank, table[job.fault])
        ranks[pid] = rank
    _write_ended(job, _wait_for(job, ranks))
    os.killpg(0, signal.SIGKILL)  # remaining children of the ranks, and this process


def _wait_for(job: Job, ranks: dict[int, int]) -> dict[str, Any]:
    """Return the exit status of each rank, or minus a signal, and the ranks that hung and were
    killed.
    """
    statuses: dict[int, int] = {}
    stopped: set[int] = set()
    deadline = time.monotonic() + job.limit_s
    while len(statuses) < len(ranks) and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            stopped.add(pid)
        elif pid:
            statuses[pid] = os.waitstatus_to_exitcode(status)
            stopped.discard(pid)
        else:
            time.sleep(_POLL_S)
        if stopped and len(statuses) + len(stopped) == len(ranks):
            deadline = min(deadline, time.monotonic() + _EXIT_S)
            for pid in stopped:  # frozen ranks resume last, when the others have ended
                os.kill(pid, signal.SIGCONT)
            stopped.clear()
    late = sorted(set(ranks) - set(statuses))
    for pid in late:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {
        "statuses": {ranks[pid]: status for pid, status in statuses.items()},
        "killed": [ranks[pid] for pid in late],
    }


def _write_ended(job: Job, ended: dict[str, Any]) -> None:
    unfinished = Path(job.folder, "ending.json")
    unfinished.write_text(json.dumps(ended))
    unfinished.rename(Path(job.folder, "ended.json"))


def run(job: Job, rank: int, fault: Fault) -> None:
    """Run a program on a rank."""
    _redirect(Path(job.folder, f"{rank}.output"))
    events = EventLog(str(Path(job.folder, f"{rank}.events")))
    os.environ.update(_environment(job, rank))
    faulthandler.dump_traceback_later(job.limit_s - 1)  # of one that hangs
    ctx = (RankContext if job.backend == "ours" else TorchRankContext)(
        rank, RANKS, rank in job.outliers, events
    )
    ctx.short_timeout = fault.has_short_timeout
    try:
        ctx.start(fault.mesh)
        value = fault.program(ctx)
    except BaseException as error:
        events.add("error", **_described(error))
        raise
    events.add("done", value=value)


def _described(error: BaseException) -> dict[str, Any]:
    verdict = getattr(error, "verdict", None)
    return {
        "error": type(error).__name__,
        "text": str(error),
        "verdict": None if verdict is None else asdict(verdict),
    }


def _environment(job: Job, rank: int) -> dict[str, str]:
    """Return the variables that `launch` sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"faults-{job.port}",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL" if job.backend == "detail" else "OFF",
        "SHARDMESH_WATCH_DIR": job.folder,
    }


def _redirect(output: Path) -> None:
    with open(os.devnull, "rb") as nothing, output.open("wb") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _end_with_parent(parent: int | None = None) -> None:
    with contextlib.suppress(AttributeError, OSError):  # not on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
