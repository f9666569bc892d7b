"""What users see of a fault, in a few words, and how soon.

    torch       "nothing", "wrong result", "hang", "connection closed", "abort" ...; the odd rank named or not
    shardmesh   the error, whom it blames and what it says that differs, or what is wrong with that
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.faults.fault import RANKS, Fault
from tests.faults.judge import problems, told
from tests.faults.runner import Outcome, RankOutcome

WRONG, NOTHING, HANG = "wrong result", "nothing", "hang"
CLOSED, MISMATCH, MISSING, ABORT = "connection closed", "mismatch reported", "missing rank reported", "abort"
# What an error of torch's means, by words in it; the first that fits.
_MEANINGS = {
    "mismatch between collectives": MISMATCH,
    "failed to pass monitoredBarrier": MISSING,
    "imed out": HANG,
    "imeout": HANG,
    "losed by peer": CLOSED,
    "reset by peer": CLOSED,
    "onnection refused": CLOSED,
    "connectFullMesh": CLOSED,
    "roken pipe": CLOSED,
}


@dataclass(frozen=True)
class Seen:
    """What users of torch see.

    Attributes:
        words: what happens on any of the ranks, but for those that the fault itself ends.
        named: whether a message names the odd ranks.
        line: whether it names a line of the program beside their own.
    """

    words: tuple[str, ...]
    named: bool
    line: bool

    @property
    def text(self) -> str:
        """For the table."""
        named = " (names the rank)" if self.named else ""
        return "; ".join(self.words) + named


def seen(fault: Fault, outcome: Outcome, expected: Sequence[Any]) -> Seen:
    """What one of torch's runs shows; `expected` is what the ranks return where nothing is wrong."""
    ranks = [rank for rank in range(RANKS) if not (fault.ends and rank in fault.odd)]
    words = {word for rank in ranks for word in _words(outcome, rank, expected[rank])}
    text = "\n".join(outcome.ranks[rank].text + outcome.ranks[rank].output for rank in ranks)
    line = any(place in text for place in _odd_lines(fault))
    return Seen(tuple(sorted(words or {NOTHING}, key=_order)), _names(fault, text), line)


def _order(word: str) -> int:
    known = (HANG, WRONG, MISMATCH, MISSING, CLOSED)
    return known.index(word) if word in known else len(known)


def _words(outcome: Outcome, rank: int, expected: Any) -> Iterable[str]:
    found = outcome.ranks[rank]
    if found.error:
        yield next((meaning for words, meaning in _MEANINGS.items() if words in found.text), found.error)
    elif rank in outcome.killed:
        yield HANG
    elif found.status and found.status < 0:
        yield ABORT
    elif found.done and found.value != expected:
        yield WRONG


def _names(fault: Fault, text: str) -> bool:
    """Whether torch's DETAIL says so much: it shows the calls of two ranks that differ, or lists those that did not come."""
    differing = set(re.findall(r"Rank (\d+) is running collective", text))
    missing = re.search(r"Ranks ([\d, ]+) failed to pass", text)
    return {str(rank) for rank in fault.odd} <= differing | set(re.findall(r"\d+", missing[1]) if missing else ())


def _odd_lines(fault: Fault) -> list[str]:
    return [place for place in fault.places("odd") if place not in fault.places("rest")]


# -- ours --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ours:
    """Several runs of a fault under the watch.

    Attributes:
        text: what the ranks are told.
        latencies_s: seconds from the fault to the error, of every rank in every run.
        wrong: what was not as it should be, of all runs.
        words: what else happens on any rank in any run, as in `Seen`.
        named, line: whether the odd ranks and a line of theirs are named, on all ranks in all runs.
    """

    text: str
    latencies_s: tuple[float, ...]
    wrong: tuple[str, ...]
    words: frozenset[str]
    named: bool
    line: bool


def ours(fault: Fault, outcomes: Sequence[Outcome], expected: Sequence[Any]) -> Ours:
    """What all runs of ours show."""
    wrong = tuple(problem for outcome in outcomes for problem in problems(fault, outcome))
    ranks = [outcome.ranks[rank] for outcome in outcomes for rank in told(fault)]
    latencies = tuple(rank.latency_s for rank in ranks if rank.latency_s is not None)
    words = frozenset(word for outcome in outcomes for word in seen(fault, outcome, expected).words)
    named, line = not wrong and bool(fault.blamed), not wrong and bool(fault.places("odd"))
    return Ours("wrong" if wrong else _message(fault, ranks), latencies, wrong, words, named, line)


def _message(fault: Fault, ranks: Sequence[RankOutcome]) -> str:
    found = next(rank for rank in ranks if rank.error)
    verdict = found.verdict or {}
    blamed = verdict.get("ranks") or []
    whom = f"rank{'s' * (len(blamed) > 1)} {', '.join(map(str, blamed))}" if blamed else "equal votes"
    field = f", {verdict['field']}" if verdict.get("field") and fault.fields else ""
    return f"`{found.error}`: {whom}{field}"


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is not below `percent` of them."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
