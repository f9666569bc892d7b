"""Interleaved timing of several implementations, for machines with other load.

    round 0   plain plain ...   DTensor DTensor ...   ours ours ...
    round 1   ours ours ...   plain plain ...   DTensor DTensor ...
    ...

Every implementation runs one short batch per round, in random order, so other load affects all of
them alike and none always runs after the same other one. The minimum over the rounds is the time
without disturbance, the median the typical time; differences are taken between minima, ratios
between medians.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

Call = Callable[[], Any]


@dataclass(frozen=True)
class Times:
    """Seconds per call, one entry per round."""

    rounds: tuple[float, ...]

    @property
    def best(self) -> float:
        """The fastest round."""
        return min(self.rounds)

    @property
    def median(self) -> float:
        """The middle round."""
        return statistics.median(self.rounds)

    def as_dict(self) -> dict[str, float]:
        """Return minimum and median in microseconds, for the JSON file."""
        return {"min_us": round(self.best * 1e6, 3), "median_us": round(self.median * 1e6, 3)}


def interleaved(
    calls: Mapping[str, Call],
    *,
    rounds: int = 60,
    batch_s: float = 4e-4,
    agree: Callable[[int], int] = lambda count: count,
    together: Call = lambda: None,
) -> dict[str, Times]:
    """Time each call in `rounds` batches of about `batch_s` seconds, in random order.

    Batches are short, so that some of them run undisturbed on a machine with other load. The order
    is the same on all ranks.

    Args:
        calls: what to time, by name.
        rounds: number of batches of each.
        batch_s: seconds that a batch should take.
        agree: makes the number of calls per batch equal on all ranks, for collective calls.
        together: called before each batch: a barrier, for collective calls.
    """
    counts = {name: _calls_per_batch(call, batch_s, agree) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    with _no_garbage_collection():
        for _ in range(rounds):
            for name in order.sample(list(calls), len(calls)):
                together()
                times[name].append(_batch(calls[name], counts[name]))
    return {name: Times(tuple(seconds)) for name, seconds in times.items()}


def joined(times: Sequence[Times]) -> Times:
    """Concatenate the rounds of several measurements of one thing."""
    return Times(tuple(seconds for t in times for seconds in t.rounds))


def slowest(times: Sequence[Times]) -> Times:
    """Return the time of the slowest rank in every round, given the times of each rank."""
    return Times(tuple(max(seconds) for seconds in zip(*(t.rounds for t in times), strict=True)))


def _calls_per_batch(call: Call, batch_s: float, agree: Callable[[int], int]) -> int:
    """Return how many calls fill a batch, and warm up caches. Makes the same number of calls on all
    ranks.
    """
    call()
    if agree(int(batch_s / _batch(call, 1))) <= 1:
        return 1
    return max(1, agree(int(batch_s / min(_batch(call, 2) for _ in range(5)))))


def _batch(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in repeat(None, count):
        call()
    return (time.perf_counter() - start) / count


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
