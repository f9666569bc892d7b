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
    for rank, end in enumerate(outcome.ranks):
        if not end.done or end.status != 0:
            yield (
                f"rank {rank} of a healthy program: exit status {end.status}, {end.error} "
                f"{end.text} {end.output[-600:]}"
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
        end = outcome.ranks[rank]
        if "busy" in fault.ends or "frozen" in fault.ends:
            if end.status in (0, None) or end.done:
                yield (
                    f"outlier rank {rank} was not ended by the monitor: exit status "
                    f"{end.status}, {_result_text(end)}"
                )
        elif not {end.error, end.status} & set(fault.ends):
            yield (
                f"outlier rank {rank} ended with {end.status} {_result_text(end)} instead of "
                f"{fault.ends}"
            )
    for rank in range(RANKS):
        if _others_end_first(fault) and rank not in fault.outliers and not outcome.ranks[rank].done:
            yield f"rank {rank} did not end normally: {_result_text(outcome.ranks[rank])}"


def _result_text(end: RankOutcome) -> str:
    if end.error:
        return f"{end.error} {end.text}"
    return f"returned {end.value}" if end.done else end.output[-600:]


def _wrong_errors(fault: Fault, outcome: Outcome) -> Iterator[str]:
    raising = ranks_that_raise(fault)
    texts = {
        outcome.ranks[rank].text for rank in raising if outcome.ranks[rank].error in fault.errors
    }
    for rank in raising:
        end = outcome.ranks[rank]
        if _prints_at_exit(end, texts):
            continue
        if end.error not in fault.errors:
            yield (
                f"rank {rank}: {'/'.join(fault.errors)} expected; exit status {end.status}, "
                f"{_result_text(end)}"
            )
        else:
            yield from (f"rank {rank}: {problem}" for problem in _wrong_verdict(fault, end))
    if len(texts) > 1:
        yield f"{len(texts)} different texts"


def _prints_at_exit(end: RankOutcome, texts: set[str]) -> bool:
    """Return whether the rank printed the verdict at exit: it finished before the diagnosis, or the
    monitor ended it inside a C call.
    """
    return (
        not end.error
        and bool(end.status)
        and any(text.splitlines()[0] in end.output for text in texts)
    )


def _wrong_verdict(fault: Fault, end: RankOutcome) -> Iterator[str]:
    verdict = end.verdict or {"kind": "", "ranks": [], "field": "", "seen": []}
    if verdict["kind"] not in fault.kinds:
        yield f"verdict {verdict['kind']!r} instead of {fault.kinds}"
    if tuple(verdict["ranks"]) != fault.named:
        yield f"names ranks {verdict['ranks']} instead of {list(fault.named)}: {end.text}"
    if fault.fields and verdict["field"] not in fault.fields:
        yield f"field {verdict['field']!r} instead of {fault.fields}"
    for words in fault.says:
        if words not in end.text:
            yield f"the text lacks {words!r}: {end.text}"
    if verdict["field"] in INTERRUPTIONS:  # nothing is wrong with any line
        return
    for mark in ("outlier", "others"):
        places = fault.places(mark)
        if places and not any(_names_line(end.text, place) for place in places):
            yield f"the text does not name the line of the {mark}, {places[0]}: {end.text}"


def _names_line(text: str, place: str) -> bool:
    """Return whether a text has this file:line, in our format or in that of tracebacks."""
    file, _, line = place.rpartition(":")
    return re.search(rf'{re.escape(file)}(:|", line ){line}\b', text) is not None
