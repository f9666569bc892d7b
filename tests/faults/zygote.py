"""The process from which the ranks of faulty programs are forked, so that they need not import torch.

    Runner (the tests)              zygote                       supervisor of a job           rank of a job
      python -m ...zygote  ----->     imports torch, shardmesh, the table
      one line of JSON     ----->     fork                ----->   4 x fork             ----->   program(at)
                                                                   waits, kills the late         its notes, its stderr;
      ended.json           <-------------------------------------  ended.json                    then the interpreter ends

The zygote has one thread, no process group and has run no gradient when it forks. A rank returns from `main` or raises out of
it, so that its interpreter ends as that of any program: exit functions, threads and all.
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

from tests.faults.at import At, AtTorch, Notes, quiet
from tests.faults.fault import RANKS, Fault

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_S = 0.003
_TO_END_S = 30.0  # how long ranks may take to end after an odd one that had been frozen goes on


@dataclass(frozen=True)
class Job:
    """One run of a program.

    Attributes:
        fault: its name.
        way: "ours", "torch", or "detail" for torch with TORCH_DISTRIBUTED_DEBUG=DETAIL.
        odd: the ranks that go wrong; none to see what should come out.
        folder: where the ranks' notes and output go.
        port: of the job's store.
        limit_s: seconds after which it is killed.
    """

    fault: str
    way: str
    odd: tuple[int, ...]
    folder: str
    port: int
    limit_s: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    importlib.import_module("torch._dynamo")  # torch does so in the first optimizer, which takes seconds
    table = importlib.import_module(sys.argv[1]).FAULTS
    quiet()
    gc.freeze()  # what was imported is no garbage when a rank ends: looking through it took 0.5 s of each
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors that have ended leave no zombies
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have what they start in the background ignore it
    print("ready", flush=True)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        if os.fork() == 0:
            _end_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return supervise(job, table)


def supervise(job: Job, table: Mapping[str, Fault]) -> None:
    """Starts the ranks and waits for them. Returns on the ranks alone, when their programs have."""
    os.setpgid(0, 0)
    parent = os.getpid()
    ranks: dict[int, int] = {}
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            _end_with_parent(parent)
            return run(job, rank, table[job.fault])
        ranks[pid] = rank
    _write_ended(job, _follow(job, ranks))
    os.killpg(0, signal.SIGKILL)  # what the ranks have started and left behind, and this process


def _follow(job: Job, ranks: dict[int, int]) -> dict[str, Any]:
    """How each rank ended: its exit status, or minus a signal; and those that had to be killed."""
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
            deadline = min(deadline, time.monotonic() + _TO_END_S)
            _go_on(stopped)
    late = sorted(set(ranks) - set(statuses))
    for pid in late:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {
        "statuses": {ranks[pid]: status for pid, status in statuses.items()},
        "killed": [ranks[pid] for pid in late],
    }


def _go_on(stopped: set[int]) -> None:
    """Those that froze hear last what has become of the job."""
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    stopped.clear()


def _write_ended(job: Job, ended: dict[str, Any]) -> None:
    unfinished = Path(job.folder, "ending.json")
    unfinished.write_text(json.dumps(ended))
    unfinished.rename(Path(job.folder, "ended.json"))


def run(job: Job, rank: int, fault: Fault) -> None:
    """The life of a rank."""
    _redirect(Path(job.folder, f"{rank}.output"))
    notes = Notes(str(Path(job.folder, f"{rank}.notes")))
    os.environ.update(_environment(job, rank))
    faulthandler.dump_traceback_later(job.limit_s - 1)  # of one that hangs
    at = (At if job.way == "ours" else AtTorch)(rank, RANKS, rank in job.odd, notes)
    at.stalls = fault.stalls
    try:
        at.start(fault.mesh)
        value = fault.program(at)
    except BaseException as error:
        notes.add("error", **_described(error))
        raise
    notes.add("done", value=value)


def _described(error: BaseException) -> dict[str, Any]:
    verdict = getattr(error, "verdict", None)
    return {
        "error": type(error).__name__,
        "text": str(error),
        "verdict": None if verdict is None else asdict(verdict),
    }


def _environment(job: Job, rank: int) -> dict[str, str]:
    """What `launch` would set."""
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
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL" if job.way == "detail" else "OFF",
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
