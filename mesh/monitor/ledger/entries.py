"""The entries of the ledger: what each rank has called, and its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from ...comm.recording.call_text import call_text
from ...text import table_lines

LAST = 20  # entries in a table
_HEADINGS = ("time", "ms", "number", "over", "collective", "sent", "received", "line")
_NUMBERS = (1, 2, 5, 6)  # columns that are aligned to the right


class LedgerEntry(NamedTuple):
    """One collective of one rank.

    Attributes:
        rank: that called it.
        record: how many collectives the rank had called before, on any group.
        group: the mesh axes of the group, "dp" or "dp,tp"; "ranks 0,2" where it is not along axes
            of a mesh.
        ranks: the group's, global.
        group_key, sequence: which collective it is: the same pair on all ranks. `sequence` counts
            those of the group, from 0.
        op: name of the `Group` method.
        reduction: "sum", "max" ...; "src=0" of a broadcast; else "".
        dtype: "float32".
        elements: of the buffer; None if ranks may pass different ones.
        layout: `f32[8, 4] @ P('dp') -> P()`; "" if the collective is not part of a redistribution.
        lineage: a hash of how the value was computed; 0 if that is unknown.
        bytes_sent, bytes_received: as in `CollectiveRecord`.
        place: file:line in the user's program.
        start, end: seconds since 1970; `end` is None while it is under way. On CUDA these are times
            of the host.
        step: the step marked by `mark_step`; None before the first mark that is still known.
    """

    rank: int
    record: int
    group: str
    ranks: tuple[int, ...]
    group_key: int
    sequence: int
    op: str
    reduction: str
    dtype: str
    elements: int | None
    layout: str
    lineage: int
    bytes_sent: int
    bytes_received: int
    place: str
    start: float
    end: float | None
    step: int | None

    @property
    def is_under_way(self) -> bool:
        return self.end is None

    @property
    def text(self) -> str:
        """Such as `all_reduce(sum, float32, 4 elements) for f32[8] @ P('dp') -> P()`."""
        elements = "" if self.elements is None else str(self.elements)
        return call_text("\t".join((self.op, self.reduction, self.dtype, elements, self.layout)))


class MarkedStep(NamedTuple):
    """A step of a rank: its number, and when it began, in seconds since 1970."""

    number: int
    start: float


@dataclass(frozen=True, slots=True)
class RankLedger:
    """What one rank has called, and its state.

    Attributes:
        rank, size: the rank, and the number of ranks.
        host, pid: where it runs.
        state: "alive", "dead", "stopped" (by a signal), "raised" (an error), "ended", "lost" (its
            host cannot be reached); "unknown" in another container.
        doing: what the rank reports to be doing, or why it is lost.
        seen: time of its last sign of life, in seconds since 1970.
        blocked: the collective that it is blocked in, if any.
        blocked_since: seconds since 1970.
        entries: its last 4096 collectives, the oldest first.
        steps: the last 32 steps marked with `mark_step`, the oldest first.
    """

    rank: int
    size: int
    host: str
    pid: int
    state: str
    doing: str
    seen: float
    blocked: LedgerEntry | None
    blocked_since: float | None
    entries: tuple[LedgerEntry, ...]
    steps: tuple[MarkedStep, ...]

    def report(self, last: int = LAST) -> str:
        """Return the state of the rank, and a table of its last collectives."""
        lines = [self._headline(), *self._waiting()]
        left_off = len(self.entries) - last
        if left_off > 0:
            lines.append(f"({left_off} earlier collectives are left off)")
        return "\n".join([*lines, *table(self.entries[-last:] if last > 0 else ())])

    def _headline(self) -> str:
        where = f" on {self.host}, process {self.pid}" if self.pid else ""
        said = f" ({self.doing})" if self.doing else ""
        step = f", in step {self.steps[-1].number}" if self.steps else ""
        heard = "" if self.state == "alive" else f", last sign of life {_clock(self.seen)}"
        return (
            f"rank {self.rank} of {self.size}{where}: {self.state}{said}{step}{heard}, "
            f"{len(self.entries)} collectives"
        )

    def _waiting(self) -> list[str]:
        if self.blocked is None or self.blocked_since is None:
            return []
        entry, waited = self.blocked, max(0.0, self.seen - self.blocked_since)
        return [
            f"waiting for {waited:.1f} s in number {entry.sequence} over {entry.group}: "
            f"{entry.text} at {entry.place}"
        ]

    def __str__(self) -> str:
        return self.report()


def collectives_of(ranks: Mapping[int, RankLedger]) -> Iterator[dict[int, LedgerEntry]]:
    """Yield each collective as a dict from rank to its entry, for the ranks that have called it."""
    collectives: dict[tuple[int, int], dict[int, LedgerEntry]] = {}
    for rank, its in ranks.items():
        for entry in its.entries:
            collectives.setdefault((entry.group_key, entry.sequence), {})[rank] = entry
    return iter(collectives.values())


# -- as text ---------------------------------------------------------------------------------------


def table(entries: Sequence[LedgerEntry]) -> list[str]:
    """Return the entries as a table."""
    return table_lines([_HEADINGS, *map(_row, entries)], _NUMBERS) if entries else []


def _row(entry: LedgerEntry) -> tuple[str, ...]:
    took = "under way" if entry.end is None else f"{(entry.end - entry.start) * 1e3:.3f}"
    moved = (str(entry.bytes_sent), str(entry.bytes_received))
    return (
        _clock(entry.start),
        took,
        str(entry.sequence),
        entry.group,
        entry.text,
        *moved,
        entry.place,
    )


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%H:%M:%S.%f")
