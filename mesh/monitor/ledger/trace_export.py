"""Export the ledger for ui.perfetto.dev and chrome://tracing: a process per rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from ...comm.report import save_events, trace_event
from .entries import LedgerEntry, RankLedger, collectives_of

_STEPS = 0  # thread of a rank's steps; those of groups follow
# a group, and which of its threads: collectives that overlap are on several
_Lane = tuple[int, int]


def save_trace(ranks: Mapping[int, RankLedger], path: str | Path) -> None:
    save_events(events(ranks), path)


def events(ranks: Mapping[int, RankLedger]) -> list[dict[str, Any]]:
    """Return all ranks' collectives and steps as events of Chrome's trace format.

    Times are in microseconds since 1970.
    """
    traces = {rank: _RankTrace(its) for rank, its in ranks.items()}
    slices = [event for trace in traces.values() for event in trace.events()]
    return slices + list(_arrows(ranks, traces))


class _RankTrace:
    """One rank's part of the trace.

    Attributes:
        threads: record -> the thread on which its event is.
    """

    def __init__(self, ledger: RankLedger) -> None:
        self._ledger = ledger
        self._names = {_STEPS: "steps"}
        self.threads: dict[int, int] = {}
        free: dict[_Lane, float] = {}  # since when
        numbers: dict[_Lane, int] = {}
        for entry in ledger.entries:
            place = next(i for i in count() if free.get((entry.group_key, i), 0.0) <= entry.start)
            lane = (entry.group_key, place)
            free[lane] = self.end(entry)
            self.threads[entry.record] = thread = numbers.setdefault(lane, len(numbers) + 1)
            self._names[thread] = entry.group if place == 0 else f"{entry.group} ({place + 1})"

    def end(self, entry: LedgerEntry) -> float:
        """Return when it ended, in seconds; if under way, the rank's last sign of life."""
        return max(entry.start, self._ledger.seen) if entry.end is None else entry.end

    def events(self) -> Iterator[dict[str, Any]]:
        its = self._ledger
        yield self._metadata_event(
            "process_name", 0, f"rank {its.rank} ({its.host or 'simulated'}, {its.state})"
        )
        yield {
            "name": "process_sort_index",
            "ph": "M",
            "pid": its.rank,
            "args": {"sort_index": its.rank},
        }
        for thread, name in self._names.items():
            yield self._metadata_event("thread_name", thread, name)
        for entry in its.entries:
            yield self._event(entry)
        yield from self._steps()

    def _metadata_event(self, what: str, thread: int, name: str) -> dict[str, Any]:
        return {
            "name": what,
            "ph": "M",
            "pid": self._ledger.rank,
            "tid": thread,
            "args": {"name": name},
        }

    def _event(self, entry: LedgerEntry) -> dict[str, Any]:
        name = entry.op if not entry.layout else f"{entry.op} ({entry.layout})"
        event = trace_event(
            name,
            entry.op,
            entry.rank,
            self.threads[entry.record],
            entry.start * 1e6,
            _details(entry),
        )
        return event | {"dur": (self.end(entry) - entry.start) * 1e6}

    def _steps(self) -> Iterator[dict[str, Any]]:
        steps = self._ledger.steps
        ends = [step.start for step in steps[1:]] + [
            max(self._ledger.seen, *(self.end(e) for e in self._ledger.entries), 0.0)
        ]
        for step, end in zip(steps, ends, strict=False):
            event = trace_event(
                f"step {step.number}",
                "step",
                self._ledger.rank,
                _STEPS,
                step.start * 1e6,
                {"step": step.number},
            )
            yield event | {"dur": max(0.0, end - step.start) * 1e6}


def _details(entry: LedgerEntry) -> dict[str, Any]:
    return {
        "collective": f"{entry.group_key:016x}/{entry.sequence}",  # the same on all ranks
        "line": entry.place,
        "axis": entry.group,
        "ranks": list(entry.ranks),
        "reduction": entry.reduction,
        "dtype": entry.dtype,
        "elements": entry.elements,
        "bytes_received": entry.bytes_received,
        "bytes_sent": entry.bytes_sent,
        "lineage": f"{entry.lineage:016x}",
        "step": entry.step,
        "under way": entry.is_under_way,
    }


def _arrows(
    ranks: Mapping[int, RankLedger], traces: Mapping[int, _RankTrace]
) -> Iterator[dict[str, Any]]:
    """Yield arrows from the last rank to arrive at a collective to those that waited there."""
    ids = count()
    for parts in collectives_of(ranks):
        last = max(parts.values(), key=lambda entry: entry.start)
        for rank, entry in parts.items():
            if entry.start < last.start < traces[rank].end(entry):
                arrow = {"name": "waited for", "cat": "wait", "id": next(ids)}
                yield arrow | _end_of_arrow("s", last, traces, last.start)
                yield arrow | _end_of_arrow("f", entry, traces, last.start) | {"bp": "e"}


def _end_of_arrow(
    phase: str, entry: LedgerEntry, traces: Mapping[int, _RankTrace], when: float
) -> dict[str, Any]:
    return {
        "ph": phase,
        "pid": entry.rank,
        "tid": traces[entry.rank].threads[entry.record],
        "ts": when * 1e6,
    }
