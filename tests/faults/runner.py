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
from tests.faults.fork_server import Job

_START_S = 180.0
_POLL_S = 0.01
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class RankOutcome:
    """The outcome of one rank.

    Attributes:
        error: class of the error that its program raised; "" if it returned or was killed.
        text: text of the error.
        verdict: verdict of the error as a dict, or None.
        value: what the program returned.
        done: whether it returned.
        status: exit status of the process, or minus a signal; None if it hung and was killed.
        latency_s: seconds from the fault to the error; None if either is missing.
        output: everything it printed, with tracebacks.
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
    """Outcome of a job; `killed` are the ranks that hung."""

    ranks: list[RankOutcome]
    killed: list[int]


class Runner:
    """Runs jobs by a fork server; safe for several threads. All its processes have ended when the
    `with` block is left.

    Args:
        table: module with a mapping `FAULTS` of programs by name.
    """

    def __init__(self, table: str = "tests.faults.programs") -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path]),
            "OMP_NUM_THREADS": "1",
        }
        self._folder = tempfile.TemporaryDirectory(prefix="shardmesh-faults-")
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.fork_server", table],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=environment,
        )
        self._sending, self._jobs = threading.Lock(), 0
        assert self._server.stdout
        if self._server.stdout.readline() != "ready\n":
            raise RuntimeError(
                f"the fork server did not start: exit status {self._server.wait(_START_S)}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stdout.close()
        self._folder.cleanup()

    def run(
        self, fault: Fault, backend: str = "ours", *, healthy: bool = False, limit_s: float = 30.0
    ) -> Outcome:
        """Run a program and wait for it.

        Args:
            backend: see `Job`.
            healthy: run it without outliers.
            limit_s: seconds after which hanging ranks are killed.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with self._sending:
            self._jobs += 1
            folder = Path(self._folder.name, f"{self._jobs}-{fault.name}"[:60])
            folder.mkdir()
            job = Job(
                fault.name,
                backend,
                () if healthy else fault.outliers,
                str(folder),
                store.port,
                limit_s,
            )
            self._send(job)
        return _outcome(folder, self._ended(folder, limit_s + 40))

    def _send(self, job: Job) -> None:
        assert self._server.stdin
        self._server.stdin.write(job.to_json() + "\n")
        self._server.stdin.flush()

    def _ended(self, folder: Path, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while not (folder / "ended.json").exists():
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the supervisor of {folder} has ended; exit status of the fork server: "
                    f"{self._server.poll()}"
                )
            time.sleep(_POLL_S)
        return json.loads((folder / "ended.json").read_text())


def _outcome(folder: Path, ended: dict[str, Any]) -> Outcome:
    logs = [_events(folder / f"{rank}.events") for rank in range(RANKS)]
    fault = min(
        (event["when"] for log in logs for event in log if event["event"] == "fault"), default=None
    )
    ranks = []
    for rank, events in enumerate(logs):
        output = (folder / f"{rank}.output").read_text(errors="replace")
        ranks.append(_rank_outcome(events, ended["statuses"].get(str(rank)), fault, output))
    return Outcome(ranks, ended["killed"])


def _events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _rank_outcome(
    events: list[dict[str, Any]], status: int | None, fault: float | None, output: str
) -> RankOutcome:
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
