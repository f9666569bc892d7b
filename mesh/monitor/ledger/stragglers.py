"""Find stragglers: which rank waited for which, step by step, from the ledger alone.

rank 0   all_reduce |========|           waits  8 ms
rank 1     all_reduce |======|           waits  6 ms        both wait for rank 2, which arrived last
rank 2             all_reduce |          0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...text import table_lines
from .entries import LedgerEntry
from .ledger import Ledger, ledger

_LINES = 10  # lines of the program in the table
_COLUMNS = 16  # ranks in the tables


class Wait(NamedTuple):
    """One rank's wait for another in one collective.

    Attributes:
        rank, awaited: who waited, and for whom.
        seconds: how long.
        entry: the collective, as the rank that waited called it.
    """

    rank: int
    awaited: int
    seconds: float
    entry: LedgerEntry


@dataclass(slots=True)
class Waits:
    """Sums of waits: `between[rank, awaited]` in seconds."""

    between: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, wait: Wait) -> None:
        pair = (wait.rank, wait.awaited)
        self.between[pair] = self.between.get(pair, 0.0) + wait.seconds

    @property
    def total(self) -> float:
        return sum(self.between.values())

    @property
    def by_rank(self) -> dict[int, float]:
        """rank -> how long it waited."""
        return self._sums(0)

    @property
    def for_rank(self) -> dict[int, float]:
        """rank -> how long others waited for it."""
        return self._sums(1)

    def _sums(self, which: int) -> dict[int, float]:
        sums: dict[int, float] = {}
        for pair, seconds in self.between.items():
            sums[pair[which]] = sums.get(pair[which], 0.0) + seconds
        return dict(sorted(sums.items()))

    @property
    def straggler(self) -> int | None:
        """The rank that others waited for longest; None if no rank waited."""
        seconds_of = self.for_rank
        return max(seconds_of, key=lambda rank: seconds_of[rank]) if self.total else None


class StragglerReport:
    """What `straggler_report` returns; `print` it for tables.

    Attributes:
        ranks: those that are known.
        all: the waits of all steps.
        steps: step -> the waits in it; the step None is before the first `mark_step` that is still
            known.
        lines: (file:line, collective) -> the waits there, the longest first.
        left_out: number of collectives that are not counted, as not all ranks have called them, or
            trace buffers are missing.
    """

    def __init__(self, ranks: list[int], waits: list[Wait], left_out: int) -> None:
        self.ranks, self.left_out = ranks, left_out
        self.all = Waits()
        self.steps: dict[int | None, Waits] = {}
        lines: dict[tuple[str, str], Waits] = {}
        for wait in waits:
            self.all.add(wait)
            self.steps.setdefault(wait.entry.step, Waits()).add(wait)
            lines.setdefault(
                (wait.entry.place, f"{wait.entry.op} over {wait.entry.group}"), Waits()
            ).add(wait)
        self.lines = dict(sorted(lines.items(), key=lambda line: -line[1].total))

    @staticmethod
    def of(ledger: Ledger) -> StragglerReport:
        waits: list[Wait] = []
        left_out = 0
        for parts in ledger.collectives():
            if len(parts) < len(next(iter(parts.values())).ranks):
                left_out += 1
            else:
                waits += _waits(parts)
        return StragglerReport(
            list(ledger.ranks), sorted(waits, key=lambda wait: wait.entry.start), left_out
        )

    def report(self) -> str:
        """Return three tables in milliseconds.

        Each step; who waited for whom in all of them; the lines with the longest waits.

        Of more than 16 ranks, only those that were waited for longest have columns.
        """
        if not self.steps:
            return f"no collective that all ranks have come to ({self.left_out} others)"
        left_out = (
            f"\nleft out, as not all ranks have come to them: {self.left_out}"
            if self.left_out
            else ""
        )
        return (
            "\n\n".join(["\n".join(part) for part in (self._steps(), self._ranks(), self._lines())])
            + left_out
        )

    def _latest_ranks(self) -> list[int]:
        late = self.all.for_rank
        return sorted(sorted(self.ranks, key=lambda rank: -late.get(rank, 0.0))[:_COLUMNS])

    def _steps(self) -> list[str]:
        shown = self._latest_ranks()
        heads = ["step", "waited for", "share", "all wait ms", *(f"rank {rank}" for rank in shown)]
        named = [*self.steps.items(), ("all", self.all)]
        rows = []
        for step, waits in named:
            cells = [_ms(waits.by_rank.get(rank, 0.0)) for rank in shown]
            rows.append(["" if step is None else str(step), *_most(waits), *cells])
        return table_lines([heads, *rows], range(2, len(heads)))

    def _ranks(self) -> list[str]:
        between = self.all.between
        shown = self._latest_ranks()
        heads = ["ms waited by", *(f"for rank {rank}" for rank in shown)]
        rows = [
            [f"rank {rank}", *(_ms(between.get((rank, other), 0.0)) for other in shown)]
            for rank in shown
        ]
        return table_lines([heads, *rows], range(1, len(heads)))

    def _lines(self) -> list[str]:
        heads = ["collective", "waited for", "share", "all wait ms", "line"]
        rows = [
            [what, *_most(waits), place]
            for (place, what), waits in list(self.lines.items())[:_LINES]
        ]
        return table_lines([heads, *rows], (2, 3))

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        return f"StragglerReport(steps={len(self.steps)}, straggler={self.all.straggler})"


def _waits(parts: Mapping[int, LedgerEntry]) -> list[Wait]:
    """Return each rank's wait for the last one to arrive.

    A rank that left before that (the source of a broadcast) waited until it left.
    """
    last = max(parts.values(), key=lambda entry: entry.start)
    return [
        Wait(
            rank,
            last.rank,
            max(0.0, (last.start if e.end is None else min(last.start, e.end)) - e.start),
            e,
        )
        for rank, e in parts.items()
        if e is not last
    ]


def _most(waits: Waits) -> list[str]:
    """Return the rank that was waited for longest, its share of all waiting, and the total."""
    total, who = waits.total, waits.straggler
    return (
        ["-", "", _ms(0.0)]
        if who is None
        else [f"rank {who}", f"{waits.for_rank[who] / total:.0%}", _ms(total)]
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def straggler_report() -> StragglerReport:
    """straggler_report() -> StragglerReport: which rank waited for which.

    In the last collectives, in ms, step by step.

    In each collective the others wait for the rank that arrives last; a rank waits from its own
    arrival until then. Call `mark_step` at the top of the training loop to separate steps; else
    there is only one. It counts what the ledger still has: the last 4096 collectives of each rank,
    in the last 32 steps.

    Computation between the start and the end of an asynchronous collective counts as waiting, too.
    On CUDA it is the hosts that wait, which run ahead of their devices: use torch.profiler there.
    Between hosts it is as exact as their clocks agree.

    Communication: none; see `ledger`. In simulated and null worlds there are no other ranks' times.

    >>> import shardmesh as sm
    >>> with sm.debug.null_world(1):
    ...     print(sm.monitor.straggler_report())
    no collective that all ranks have come to (0 others)
    """
    return StragglerReport.of(ledger())
