"""Run programs of the table on four processes each, and return the outcome of every rank.

    with Runner() as runner:
        outcome = runner.run(FAULTS["skips_a_redistribute"])
        outcome.ranks[0].error, outcome.ranks[0].latency_s
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from tests.faults.fault import RANKS, Fault
from tests.faults.zygote import Job

_START_S = 180.0
_POLL_S = 0.01
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class RankOutcome:
    """What one rank did.

    Attributes:
        error: class of the error that its program raised; "" where it came to its end or was killed.
        text: of the error.
        verdict: the error's, as a dict, or None.
        value: what the program returned.
        done: whether it returned.
        status: how the process ended: its exit status, or minus a signal; None if it had to be killed.
        latency_s: seconds from the fault to the error; None without one of both.
        output: what it printed, traceback included.
    """

    error: str
    text: str
    verdict: dict[str, Any] | None
    value: Any
    done: bool
    status: int | None
    latency_s: float | None
    output: str


@dataclass(frozen=True)
class Outcome:
    """What became of a job; `killed` are the ranks that hung."""

    ranks: list[RankOutcome]
    killed: list[int]


class Runner:
    """Owns the zygote; may be used by several threads. What it started has ended when its block is left.

    Args:
        table: the module that has the programs, as `FAULTS`: a mapping by their names.
    """

    def __init__(self, table: str = "tests.faults.programs") -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
        self._folder = tempfile.TemporaryDirectory(prefix="shardmesh-faults-")
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote", table],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=environment,
        )
        self._sending, self._jobs = threading.Lock(), 0
        assert self._zygote.stdout
        if self._zygote.stdout.readline() != "ready\n":
            raise RuntimeError(f"the zygote did not start: exit status {self._zygote.wait(_START_S)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._zygote.stdin
        assert self._zygote.stdout
        self._zygote.stdin.close()
        try:
            self._zygote.wait(10)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()
        self._zygote.stdout.close()
        self._folder.cleanup()

    def run(self, fault: Fault, way: str = "ours", *, healthy: bool = False, limit_s: float = 30.0) -> Outcome:
        """Runs a program, and waits for it.

        Args:
            way: see `Job`.
            healthy: no rank goes wrong.
            limit_s: seconds after which ranks that have not ended are killed.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with self._sending:
            self._jobs += 1
            folder = Path(self._folder.name, f"{self._jobs}-{fault.name}"[:60])
            folder.mkdir()
            job = Job(fault.name, way, () if healthy else fault.odd, str(folder), store.port, limit_s)
            self._send(job)
        return _outcome(folder, self._ended(folder, limit_s + 40))

    def _send(self, job: Job) -> None:
        assert self._zygote.stdin
        self._zygote.stdin.write(job.to_json() + "\n")
        self._zygote.stdin.flush()

    def _ended(self, folder: Path, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while not (folder / "ended.json").exists():
            if self._zygote.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the supervisor of {folder} is gone; zygote's exit status: {self._zygote.poll()}")
            time.sleep(_POLL_S)
        return json.loads((folder / "ended.json").read_text())


def _outcome(folder: Path, ended: dict[str, Any]) -> Outcome:
    notes = [_notes(folder / f"{rank}.notes") for rank in range(RANKS)]
    began = [note["when"] for rank in notes for note in rank if note["event"] == "fault"]
    fault = min(began, default=None)
    ranks = []
    for rank, events in enumerate(notes):
        output = (folder / f"{rank}.output").read_text(errors="replace")
        ranks.append(_rank_outcome(events, ended["statuses"].get(str(rank)), fault, output))
    return Outcome(ranks, ended["killed"])


def _notes(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _rank_outcome(events: list[dict[str, Any]], status: int | None, fault: float | None, output: str) -> RankOutcome:
    last = {event["event"]: event for event in events}
    error, done = last.get("error", {}), last.get("done", {})
    latency = None if fault is None or not error else error["when"] - fault
    return RankOutcome(
        error.get("error", ""),
        error.get("text", ""),
        error.get("verdict"),
        done.get("value"),
        bool(done),
        status,
        latency,
        output,
    )
