"""Comparison of the outcome of a job with the outcome that its fault expects."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardmesh.mesh.monitor.verdict import INTERRUPTIONS
from tests.faults.fault import RANKS, Fault
from tests.faults.runner import Outcome, RankOutcome


def problems(fault: Fault, outcome: Outcome) -> list[str]:
    """Return descriptions of all deviations; empty if there are none. benchmarks/faults.py measures
    the latency.
    """
    if not fault.kinds:
        return [*_hanging(outcome), *_false_alarms(outcome)]
    return [*_hanging(outcome), *_wrong_ends(fault, outcome), *_wrong_errors(fault, outcome)]


def _hanging(outcome: Outcome) -> Iterator[str]:
    for rank in outcome.killed:
        yield f"rank {rank} hung and was killed: {outcome.ranks[rank].output[-1500:]}"


def _false_alarms(outcome: Outcome) -> Iterator[str]:
    for rank, found in enumerate(outcome.ranks):
        if not found.done or found.status != 0:
            yield (
                f"rank {rank} of a healthy program: exit status {found.status}, {found.error} "
                f"{found.text} {found.output[-600:]}"
            )


def ranks_that_raise(fault: Fault) -> list[int]:
    """Return the ranks that must raise the verdict."""
    if _others_end_first(fault):
        return list(fault.outliers)
    return [rank for rank in range(RANKS) if not (fault.ends and rank in fault.outliers)]


def _others_end_first(fault: Fault) -> bool:
    """Return whether the other ranks end normally before the outlier makes its extra call."""
    return fault.ends == ("RankLostError",)


def _wrong_ends(fault: Fault, outcome: Outcome) -> Iterator[str]:
    for rank in fault.outliers if fault.ends else ():
        found = outcome.ranks[rank]
        if "busy" in fault.ends or "frozen" in fault.ends:
            if found.status in (0, None) or found.done:
                yield (
                    f"outlier rank {rank} was not ended by the monitor: exit status "
                    f"{found.status}, {_result_text(found)}"
                )
        elif not {found.error, found.status} & set(fault.ends):
            yield (
                f"outlier rank {rank} ended with {found.status} {_result_text(found)} instead of "
                f"{fault.ends}"
            )
    for rank in range(RANKS):
        if _others_end_first(fault) and rank not in fault.outliers and not outcome.ranks[rank].done:
            yield f"rank {rank} did not end normally: {_result_text(outcome.ranks[rank])}"


def _result_text(found: RankOutcome) -> str:
    if found.error:
        return f"{found.error} {found.text}"
    return f"returned {found.value}" if found.done else found.output[-600:]


def _wrong_errors(fault: Fault, outcome: Outcome) -> Iterator[str]:
    raising = ranks_that_raise(fault)
    texts = {
        outcome.ranks[rank].text for rank in raising if outcome.ranks[rank].error in fault.errors
    }
    for rank in raising:
        found = outcome.ranks[rank]
        if _prints_at_exit(found, texts):
            continue
        if found.error not in fault.errors:
            yield (
                f"rank {rank}: {'/'.join(fault.errors)} expected; exit status {found.status}, "
                f"{_result_text(found)}"
            )
        else:
            yield from (f"rank {rank}: {problem}" for problem in _wrong_verdict(fault, found))
    if len(texts) > 1:
        yield f"{len(texts)} different texts"


def _prints_at_exit(found: RankOutcome, texts: set[str]) -> bool:
    """Return whether the rank printed the verdict at exit: it finished before the diagnosis, or the
    monitor ended it inside a C call.
    """
    return (
        not found.error
        and bool(found.status)
        and any(text.splitlines()[0] in found.output for text in texts)
    )


def _wrong_verdict(fault: Fault, found: RankOutcome) -> Iterator[str]:
    verdict = found.verdict or {"kind": "", "ranks": [], "field": "", "seen": []}
    if verdict["kind"] not in fault.kinds:
        yield f"verdict {verdict['kind']!r} instead of {fault.kinds}"
    if tuple(verdict["ranks"]) != fault.named:
        yield f"names ranks {verdict['ranks']} instead of {list(fault.named)}: {found.text}"
    if fault.fields and verdict["field"] not in fault.fields:
        yield f"field {verdict['field']!r} instead of {fault.fields}"
    for words in fault.says:
        if words not in found.text:
            yield f"the text lacks {words!r}: {found.text}"
    if verdict["field"] in INTERRUPTIONS:  # nothing is wrong with any line
        return
    for mark in ("outlier", "others"):
        places = fault.places(mark)
        if places and not any(_names_line(found.text, place) for place in places):
            yield f"the text does not name the line of the {mark}, {places[0]}: {found.text}"


def _names_line(text: str, place: str) -> bool:
    """Return whether a text has this file:line, in our format or in that of tracebacks."""
    file, _, line = place.rpartition(":")
    return re.search(rf'{re.escape(file)}(:|", line ){line}\b', text) is not None
