"""Short descriptions of the outcomes of a fault, and the latencies of errors.

torch       "nothing", "wrong result", "hang", "connection closed", "abort" ...; whether a message
            names the outlier
shardmesh   the error, the ranks that it names and the difference, or "wrong"
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.faults.expectations import problems, ranks_that_raise
from tests.faults.fault import RANKS, Fault
from tests.faults.runner import Outcome, RankOutcome

WRONG, NOTHING, HANG = "wrong result", "nothing", "hang"
CLOSED = "connection closed"
MISMATCH = "mismatch reported"
MISSING = "missing rank reported"
ABORT = "abort"
# Meaning of torch's errors by words in them; the first match counts.
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
class TorchOutcome:
    """The outcome of a fault with torch.

    Attributes:
        kinds: outcomes on any of the ranks, except those that the fault itself ends.
        named: whether a message names the outliers.
        line: whether it names a line of the outliers that the other ranks do not run.
    """

    kinds: tuple[str, ...]
    named: bool
    line: bool

    @property
    def text(self) -> str:
        """Text for the table."""
        named = " (names the rank)" if self.named else ""
        return "; ".join(self.kinds) + named


def torch_outcome(fault: Fault, outcome: Outcome, expected: Sequence[Any]) -> TorchOutcome:
    """Summarize a run with torch; `expected` is what the ranks return without the fault."""
    ranks = [rank for rank in range(RANKS) if not (fault.ends and rank in fault.outliers)]
    kinds = {kind for rank in ranks for kind in _kinds(outcome, rank, expected[rank])}
    text = "\n".join(outcome.ranks[rank].text + outcome.ranks[rank].output for rank in ranks)
    line = any(
        place in text for place in fault.places("outlier") if place not in fault.places("others")
    )
    return TorchOutcome(
        tuple(sorted(kinds or {NOTHING}, key=_order)), _names_outliers(fault, text), line
    )


def _order(kind: str) -> int:
    known = (HANG, WRONG, MISMATCH, MISSING, CLOSED)
    return known.index(kind) if kind in known else len(known)


def _kinds(outcome: Outcome, rank: int, expected: Any) -> Iterable[str]:
    rank_outcome = outcome.ranks[rank]
    if rank_outcome.error:
        yield next(
            (meaning for words, meaning in _MEANINGS.items() if words in rank_outcome.text),
            rank_outcome.error,
        )
    elif rank in outcome.killed:
        yield HANG
    elif rank_outcome.status and rank_outcome.status < 0:
        yield ABORT
    elif rank_outcome.done and rank_outcome.value != expected:
        yield WRONG


def _names_outliers(fault: Fault, text: str) -> bool:
    """Return whether torch's DETAIL names the outliers: it shows the calls of two different ranks,
    or lists missing ranks.
    """
    differing = set(re.findall(r"Rank (\d+) is running collective", text))
    missing = re.search(r"Ranks ([\d, ]+) failed to pass", text)
    return {str(rank) for rank in fault.outliers} <= differing | set(
        re.findall(r"\d+", missing[1]) if missing else ()
    )


# -- ours ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MonitoredOutcome:
    """The outcome of a fault with shardmesh, over several runs.

    Attributes:
        text: the error, the ranks that it names and the difference.
        latencies_s: seconds from the fault to the error, for every rank in every run.
        wrong: deviations from the expected outcome, in all runs.
        kinds: other outcomes on any rank in any run, as in `TorchOutcome`.
        named: whether all ranks in all runs name the outliers.
        line: whether all ranks in all runs name a line of theirs.
    """

    text: str
    latencies_s: tuple[float, ...]
    wrong: tuple[str, ...]
    kinds: frozenset[str]
    named: bool
    line: bool


def monitored_outcome(
    fault: Fault, outcomes: Sequence[Outcome], expected: Sequence[Any]
) -> MonitoredOutcome:
    """Summarize several runs with shardmesh."""
    wrong = tuple(problem for outcome in outcomes for problem in problems(fault, outcome))
    ranks = [outcome.ranks[rank] for outcome in outcomes for rank in ranks_that_raise(fault)]
    latencies = tuple(rank.latency_s for rank in ranks if rank.latency_s is not None)
    kinds = frozenset(
        kind for outcome in outcomes for kind in torch_outcome(fault, outcome, expected).kinds
    )
    named, line = not wrong and bool(fault.named), not wrong and bool(fault.places("outlier"))
    return MonitoredOutcome(
        "wrong" if wrong else _message(fault, ranks), latencies, wrong, kinds, named, line
    )


def _message(fault: Fault, ranks: Sequence[RankOutcome]) -> str:
    failed = next(rank for rank in ranks if rank.error)
    verdict = failed.verdict or {}
    named = verdict.get("ranks") or []
    ranks_text = (
        f"rank{'s' * (len(named) > 1)} {', '.join(map(str, named))}" if named else "equal votes"
    )
    field = f", {verdict['field']}" if verdict.get("field") and fault.fields else ""
    return f"`{failed.error}`: {ranks_text}{field}"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
