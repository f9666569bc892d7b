"""Wall and CPU time per call of several implementations, interleaved, on every rank of a job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from measure import Call, Times, interleaved, slowest


@dataclass(frozen=True)
class Cost:
    """Seconds per call of one implementation on a rank, one entry per round.

    Attributes:
        wall: elapsed time.
        cpu: CPU time of all threads of the process.
        watchdog: CPU time of the watchdog's thread.
    """

    wall: Times
    cpu: Times
    watchdog: Times

    def as_dict(self) -> dict[str, Any]:
        """Return the times for the JSON file."""
        return {
            "wall": self.wall.as_dict(),
            "cpu": self.cpu.as_dict(),
            "watchdog": self.watchdog.as_dict(),
        }


Costs = dict[str, Cost]


class Batch:
    """Several calls in a row of one implementation; records the CPU time of each batch.

    Attributes:
        cpu: seconds of CPU time per call of this process, one entry per batch.
        watchdog: the same for the watchdog's thread.
    """

    def __init__(self, prepare: Call, call: Call, count: int) -> None:
        self._prepare, self._call, self._count = prepare, call, count
        self.cpu: list[float] = []
        self.watchdog: list[float] = []

    def __call__(self) -> None:
        self._prepare()
        # Reading the thread's time takes a while, so it is outside the span of the process's CPU
        # time.
        watchdog, cpu = watchdog_cpu_s(), time.process_time()
        for _ in repeat(None, self._count):
            self._call()
        self.cpu.append((time.process_time() - cpu) / self._count)
        self.watchdog.append((watchdog_cpu_s() - watchdog) / self._count)

    def cost(self, batches: Times) -> Cost:
        """Return the times per call, given the wall times of the batches; drop the CPU times of
        warm-up batches.
        """
        cpu, watchdog = (
            Times(tuple(seconds[-len(batches.rounds) :])) for seconds in (self.cpu, self.watchdog)
        )
        return Cost(
            Times(tuple(seconds / self._count for seconds in batches.rounds)), cpu, watchdog
        )


def time_interleaved(
    calls: Mapping[str, Call],
    prepare: Callable[[str], None],
    rounds: int,
    count: int,
    together: Call,
) -> Costs:
    """Time `count` calls in a row of each implementation, in each round.

    Args:
        calls: what to time, by name.
        prepare: called with the name before each batch; excluded from the CPU time, and short
            compared with the calls.
        rounds: number of batches of each.
        count: number of calls per batch.
        together: called before each batch: a barrier, for collective calls.
    """
    batches = {name: Batch(partial(prepare, name), call, count) for name, call in calls.items()}
    wall = interleaved(batches, rounds=rounds, batch_s=0, together=together)
    return {name: batch.cost(wall[name]) for name, batch in batches.items()}


def watchdog_cpu_s() -> float:
    """Return the CPU time used by the watchdog's thread; 0 without a watchdog, or where the system
    does not report it.
    """
    thread = next((t for t in threading.enumerate() if t.name == "shardmesh-watchdog"), None)
    try:
        return (
            0.0
            if thread is None
            else int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
            / 1e9
        )
    except OSError:
        return 0.0


@dataclass(frozen=True)
class TimedCase:
    """The costs of one benchmark case.

    Attributes:
        section: the section of the benchmark.
        name: the name of the case.
        collectives: number of collectives per call on each rank.
        costs: by implementation.
    """

    section: str
    name: str
    collectives: int
    costs: Costs

    def as_dict(self) -> dict[str, Any]:
        """Return the case for the JSON file."""
        costs = {who: cost.as_dict() for who, cost in self.costs.items()}
        return {
            "section": self.section,
            "case": self.name,
            "collectives": self.collectives,
            "costs": costs,
        }

    def times(self) -> dict[str, Times]:
        """Return the wall times by implementation."""
        return {who: cost.wall for who, cost in self.costs.items()}


def merge_ranks(ranks: Sequence[TimedCase]) -> TimedCase:
    """Merge the measurements of several ranks: the slowest rank of each round, and the mean of CPU
    times.
    """
    costs = {}
    for who in ranks[0].costs:
        each = [case.costs[who] for case in ranks]
        costs[who] = Cost(
            slowest([c.wall for c in each]),
            _mean([c.cpu for c in each]),
            _mean([c.watchdog for c in each]),
        )
    return TimedCase(ranks[0].section, ranks[0].name, ranks[0].collectives, costs)


def _mean(times: Sequence[Times]) -> Times:
    return Times(
        tuple(sum(seconds) / len(times) for seconds in zip(*(t.rounds for t in times), strict=True))
    )
