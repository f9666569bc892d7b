"""Interleaved timing, for machines that do other things meanwhile.

    round 0   plain plain ...   DTensor DTensor ...   ours ours ...
    round 1   ours ours ...   plain plain ...   DTensor DTensor ...
    ...

Every contestant runs one short batch per round, in random order, so a busy spell hits all of them alike and none always
runs after the same other one. The minimum over the rounds is
the time without disturbance, the median is what one gets; differences are taken between minima, ratios between medians.
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
        """For the JSON file, in microseconds."""
        return {"min_us": round(self.best * 1e6, 3), "median_us": round(self.median * 1e6, 3)}


def interleaved(
    calls: Mapping[str, Call],
    *,
    rounds: int = 60,
    batch_s: float = 4e-4,
    agree: Callable[[int], int] = lambda count: count,
    together: Call = lambda: None,
) -> dict[str, Times]:
    """Time each call in `rounds` batches of about `batch_s` seconds, the contestants taking turns in random order.

    The batches are short, so that some of them run undisturbed on a machine with other work. The order is the same on all
    ranks.

    Args:
        calls: what to time, by name.
        rounds: how many batches of each.
        batch_s: seconds that a batch should take.
        agree: for calls that are collective, makes the ranks' numbers of calls per batch one number.
        together: called before each batch: a barrier, for calls that are collective.
    """
    counts = {name: _calls_per_batch(call, batch_s, agree) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    with _no_garbage_collection():
        for _ in range(rounds):
            for name in order.sample(list(calls), len(calls)):
                together()
                found[name].append(_batch(calls[name], counts[name]))
    return {name: Times(tuple(seconds)) for name, seconds in found.items()}


def joined(times: Sequence[Times]) -> Times:
    """The rounds of several measurements of one thing."""
    return Times(tuple(seconds for t in times for seconds in t.rounds))


def slowest(times: Sequence[Times]) -> Times:
    """Of the times of several ranks, in every round the rank that took longest."""
    return Times(tuple(max(seconds) for seconds in zip(*(t.rounds for t in times), strict=True)))


def _calls_per_batch(call: Call, batch_s: float, agree: Callable[[int], int]) -> int:
    """How many calls fill a batch; warms every cache on the way. The ranks make the same number of calls here, too."""
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
