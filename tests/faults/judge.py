"""Comparison of the outcome of a job with the table."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.faults.fault import RANKS, Fault
from tests.faults.runner import Outcome, RankOutcome


def problems(fault: Fault, outcome: Outcome) -> list[str]:
    """What is not as it should be, in words; nothing if all is well. How long it takes is what benchmarks/faults.py measures."""
    if not fault.kinds:
        return [*_hanging(outcome), *_false_alarms(outcome)]
    return [*_hanging(outcome), *_wrong_ends(fault, outcome), *_wrong_verdicts(fault, outcome)]


def _hanging(outcome: Outcome) -> Iterator[str]:
    for rank in outcome.killed:
        yield f"rank {rank} hung and had to be killed: {outcome.ranks[rank].output[-1500:]}"


def _false_alarms(outcome: Outcome) -> Iterator[str]:
    for rank, found in enumerate(outcome.ranks):
        if not found.done or found.status != 0:
            yield f"rank {rank} of a healthy program: exit status {found.status}, {found.error} {found.text} {found.output[-600:]}"


def told(fault: Fault) -> list[int]:
    """The ranks that must raise the verdict."""
    if _is_over_before(fault):
        return list(fault.odd)
    return [rank for rank in range(RANKS) if not (fault.ends and rank in fault.odd)]


def _is_over_before(fault: Fault) -> bool:
    """Whether the others have come to their ends before the odd rank calls what nobody else does."""
    return fault.ends == ("RankLostError",)


def _wrong_ends(fault: Fault, outcome: Outcome) -> Iterator[str]:
    for rank in fault.odd if fault.ends else ():
        found = outcome.ranks[rank]
        if "busy" in fault.ends or "frozen" in fault.ends:
            if found.status in (0, None) or found.done:
                yield f"odd rank {rank} was not ended by the watch: exit status {found.status}, {_said(found)}"
        elif not {found.error, found.status} & set(fault.ends):
            yield f"odd rank {rank} ended with {found.status} {_said(found)} instead of {fault.ends}"
    for rank in range(RANKS):
        if _is_over_before(fault) and rank not in fault.odd and not outcome.ranks[rank].done:
            yield f"rank {rank} did not come to its end: {_said(outcome.ranks[rank])}"


def _said(found: RankOutcome) -> str:
    if found.error:
        return f"{found.error} {found.text}"
    return f"returned {found.value}" if found.done else found.output[-600:]


def _wrong_verdicts(fault: Fault, outcome: Outcome) -> Iterator[str]:
    texts = {outcome.ranks[rank].text for rank in told(fault) if outcome.ranks[rank].error in fault.errors}
    for rank in told(fault):
        found = outcome.ranks[rank]
        if _hears_at_its_end(found, texts):
            continue
        if found.error not in fault.errors:
            yield f"rank {rank}: {'/'.join(fault.errors)} expected; exit status {found.status}, {_said(found)}"
        else:
            yield from (f"rank {rank}: {problem}" for problem in _wrong_words(fault, found))
    if len(texts) > 1:
        yield f"{len(texts)} different texts"


def _hears_at_its_end(found: RankOutcome, texts: set[str]) -> bool:
    """Whether the rank's part was done, and rightly, before anybody could know, or the watch ended it in a call of C's; either way
    it prints the verdict."""
    return not found.error and bool(found.status) and any(text.splitlines()[0] in found.output for text in texts)


def _wrong_words(fault: Fault, found: RankOutcome) -> Iterator[str]:
    verdict = found.verdict or {"kind": "", "ranks": [], "field": "", "seen": []}
    if verdict["kind"] not in fault.kinds:
        yield f"verdict {verdict['kind']!r} instead of {fault.kinds}"
    if tuple(verdict["ranks"]) != fault.blamed:
        yield f"blames {verdict['ranks']} instead of {list(fault.blamed)}: {found.text}"
    if fault.fields and verdict["field"] not in fault.fields:
        yield f"field {verdict['field']!r} instead of {fault.fields}"
    for words in fault.says:
        if words not in found.text:
            yield f"does not say {words!r}: {found.text}"
    for mark in ("odd", "rest"):
        places = fault.places(mark)
        if places and not any(_names(found.text, place) for place in places):
            yield f"does not name the line of the {mark}, {places[0]}: {found.text}"


def _names(text: str, place: str) -> bool:
    """Whether a text has this file:line, in our spelling or in that of tracebacks."""
    file, _, line = place.rpartition(":")
    return re.search(rf'{re.escape(file)}(:|", line ){line}\b', text) is not None
