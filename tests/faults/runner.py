"""Run programs of the table on four processes each, and return the outcome of every rank.

with Runner() as runner:
    outcome = runner.run(FAULTS["skips_a_redistribute"])
    outcome.ranks[0].error, outcome.ranks[0].latency_s
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from tests.faults import rank_program
from tests.faults.fault import RANKS, Fault
from tests.forked import Ended, Forked


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
        self._table, self._forked = table, Forked(table)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._forked.close()

    def run(
        self, fault: Fault, backend: str = "ours", *, healthy: bool = False, limit_s: float = 30.0
    ) -> Outcome:
        """Run a program and wait for it.

        Args:
            backend: see `rank_program.run`.
            healthy: run it without outliers.
            limit_s: seconds after which hanging ranks are killed.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        folder, outliers = self._forked.new_folder(fault.name), () if healthy else fault.outliers
        args = self._table, fault.name, backend, outliers, str(folder), limit_s
        environments = [
            rank_program.environment(rank, store.port, backend, str(folder))
            for rank in range(RANKS)
        ]
        ended = self._forked.run(
            rank_program.run, [args] * RANKS, environments, folder, limit_s=limit_s
        )
        return _outcome(folder, ended)


def _outcome(folder: Path, ended: Sequence[Ended]) -> Outcome:
    logs = [_events(folder / f"{rank}.events") for rank in range(RANKS)]
    fault = min(
        (event["when"] for log in logs for event in log if event["event"] == "fault"), default=None
    )
    ranks = [
        _rank_outcome(events, known.status, fault, known.output)
        for events, known in zip(logs, ended, strict=True)
    ]
    return Outcome(ranks, [rank for rank, known in enumerate(ended) if known.status is None])


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
