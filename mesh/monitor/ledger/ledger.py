"""The ledger: every collective of every rank, read from the pages, while the program runs or after it has crashed.

    ledger()               this rank's page, and those of the other ranks when asked for
    Ledger.read(folder)    the pages that the ranks of a job have left, whatever became of them

Reading is a copy: what ranks do meanwhile changes nothing in it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...comm.group import current_world
from ...text import table_lines
from ..diagnosis.verdict_text import call_text, fields_of
from ..recording.job_directory import is_dead, is_local, is_near, is_stopped, open_page, read_verdict
from ..recording.trace_buffer import RECORDS, H, Page, Record, State
from ..verdict import Verdict
from . import flight_recorder, trace_export

if TYPE_CHECKING:
    from .stragglers import StragglerReport

_LAST = 20  # entries in a table
_MARKS, _MARKS_END, _MARK_WORDS = 32, 128, 3  # in a page's header: of each marked step (its number, that of the next record, time)
_HEADINGS = ("time", "ms", "number", "over", "collective", "sent", "received", "line")
_NUMBERS = (1, 2, 5, 6)  # columns that are aligned to the right


class Entry(NamedTuple):
    """One collective of one rank.

    Attributes:
        rank: whose it is.
        record: how many collectives the rank had called before, on any group.
        group: the mesh axes of the group, "dp" or "dp,tp"; "ranks 0,2" where they are no axes.
        ranks: the group's, global.
        group_key, sequence: which collective it is: the same pair on all ranks. `sequence` counts those of the group, from 0.
        op: name of the `Group` method.
        reduction: "sum", "max" ...; "src=0" of a broadcast; else "".
        dtype: "float32".
        elements: of the buffer; None where ranks may pass different ones.
        layout: `f32[8, 4] @ P('dp') -> P()`; "" where the collective is no part of a redistribution.
        lineage: a hash of how the value was made; 0 where that is not known.
        bytes_sent, bytes_received: as in `CollectiveRecord`.
        place: file:line in the user's program.
        start, end: seconds since 1970; `end` is None while it is under way. On CUDA the host's part.
        step: as `mark_step` has said; None before the first mark that is still known.
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
        """`all_reduce(sum, float32, 4 elements) for f32[8] @ P('dp') -> P()`"""
        elements = "" if self.elements is None else str(self.elements)
        return call_text("\t".join((self.op, self.reduction, self.dtype, elements, self.layout)))


class Step(NamedTuple):
    """One step of a rank: its number, and when it began, in seconds since 1970."""

    number: int
    start: float


@dataclass(frozen=True, slots=True)
class RankLedger:
    """What one rank has called, and what has become of it.

    Attributes:
        rank, size: which of how many.
        host, pid: where it runs.
        state: "alive", "dead", "stopped" (by a signal), "raised" (an error), "ended", "lost" (its host cannot be reached); "unknown"
            in another container.
        doing: what the rank says that it does, or why it is lost.
        seen: when it last gave a sign of life, in seconds since 1970.
        blocked: the collective that it waits in; None when it does not wait.
        blocked_since: seconds since 1970.
        entries: its collectives, the oldest first; the newest 4096 are there.
        steps: as marked with `mark_step`, the oldest first; the newest 32 are there.
    """

    rank: int
    size: int
    host: str
    pid: int
    state: str
    doing: str
    seen: float
    blocked: Entry | None
    blocked_since: float | None
    entries: tuple[Entry, ...]
    steps: tuple[Step, ...]

    def report(self, last: int = _LAST) -> str:
        """The state of the rank, and a table of its last collectives."""
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
        return f"rank {self.rank} of {self.size}{where}: {self.state}{said}{step}{heard}, {len(self.entries)} collectives"

    def _waiting(self) -> list[str]:
        if self.blocked is None or self.blocked_since is None:
            return []
        entry, waited = self.blocked, max(0.0, self.seen - self.blocked_since)
        return [f"waiting for {waited:.1f} s in number {entry.sequence} over {entry.group}: {entry.text} at {entry.place}"]

    def __str__(self) -> str:
        return self.report()


class Ledger:
    """The collectives of a job: see `ledger` and `Ledger.read`.

    Attributes:
        rank: the rank that asked; None for a ledger that was read from a folder.
        verdict: why the job could not go on, if it could not.
    """

    def __init__(self, pages: Mapping[int, Page], rank: int | None = None, verdict: Verdict | None = None) -> None:
        self.rank, self.verdict = rank, verdict
        self._pages = pages
        self._own = None if rank is None else read_page(pages[rank])

    @staticmethod
    def read(folder: str | Path) -> Ledger:
        """Ledger.read(folder) -> Ledger: of a job that runs or has run on this host, from the folder where its pages are.

        Args:
            folder: for example /dev/shm/shardmesh-1000-5f3a0c, as `python -m shardmesh ledger` shows it. It stays after a crash.

        Raises: FileNotFoundError when there are no pages in it.
        Communication: none.
        """
        found = [page for path in Path(folder).glob("rank*.page") if (page := open_page(path)) is not None]
        if not found:
            raise FileNotFoundError(f"{folder}: no pages of ranks (rank0.page, rank1.page ...) are there; give the folder of a job.")
        return Ledger({page.words[H.RANK]: page for page in found}, verdict=read_verdict(Path(folder)))

    @cached_property
    def ranks(self) -> dict[int, RankLedger]:
        """rank -> what it has called, for all ranks of the job whose pages are on this host; read when first asked for.

        Those of ranks on other hosts are copies, some 0.1 s old, in which the oldest collectives may be missing. In simulated and
        null worlds only the own rank is there.
        """
        found = {rank: read_page(page) for rank, page in sorted(self._pages.items()) if rank != self.rank}
        if self._own is not None:
            found[self._own.rank] = self._own
        return dict(sorted(found.items()))

    @property
    def entries(self) -> tuple[Entry, ...]:
        """This rank's collectives, the oldest first; all ranks' in a ledger that was read from a folder."""
        if self._own is not None:
            return self._own.entries
        return tuple(sorted((e for found in self.ranks.values() for e in found.entries), key=lambda e: e.start))

    def collectives(self) -> Iterator[dict[int, Entry]]:
        """Each collective as rank -> its part in it, for the ranks that have come to it."""
        found: dict[tuple[int, int], dict[int, Entry]] = {}
        for rank, its in self.ranks.items():
            for entry in its.entries:
                found.setdefault((entry.group_key, entry.sequence), {})[rank] = entry
        return iter(found.values())

    def report(self, last: int = _LAST) -> str:
        """All ranks: what became of each, its last collectives, and why the job could not go on."""
        parts = [found.report(last) for found in self.ranks.values()]
        if self.verdict is not None:
            parts.append(f"why the job could not go on ({self.verdict.kind}):\n{self.verdict.text}")
        return "\n\n".join(parts)

    def stragglers(self) -> StragglerReport:
        """Who waited for whom: see `straggler_report`."""
        from .stragglers import StragglerReport

        return StragglerReport.of(self)

    def save_trace(self, path: str | Path) -> None:
        """Writes the collectives of all ranks for ui.perfetto.dev or chrome://tracing.

        A rank is a process there, a group a thread. Arrows lead from the rank that came last to those that waited for it. One rank
        writes what all have done.
        """
        trace_export.save_trace(self, path)

    def save_flight_recorder(self, folder: str | Path) -> None:
        """Writes a file per rank as torch's Flight Recorder does, for `torchfrtrace <folder>`; and the same as JSON."""
        flight_recorder.save(self, folder)

    def __str__(self) -> str:
        return self.report() if self._own is None else self._own.report()

    def __repr__(self) -> str:
        return f"Ledger(rank={self.rank}, ranks={sorted(self._pages)})"


def ledger() -> Ledger:
    """ledger() -> Ledger: the collectives that this rank has called so far, and, when asked for, those of the others.

    It may be read at any time, also by another thread, or where an error was caught. `print(sm.ledger())` shows the last 20;
    `.entries` has the last 4096, `.ranks` those of the job's other ranks, `.save_trace(path)` writes all of them for Perfetto.

    Communication: none; pages of other ranks lie in memory that the host shares.

    >>> import torch
    >>> import shardmesh as sm
    >>> with sm.null_world(4):
    ...     mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    ...     mesh.group("tp").all_reduce(torch.ones(10))
    ...     entry = sm.ledger().entries[-1]
    >>> entry.op, entry.group, entry.reduction, entry.dtype, entry.elements
    ('all_reduce', 'tp', 'sum', 'float32', 10)
    """
    world = current_world()
    watch = world.watch
    if watch is None:
        return Ledger({world.rank: world.page}, world.rank)
    pages = {rank: page for rank in range(world.size) if (page := watch.board.of(rank)) is not None}
    return Ledger(pages, world.rank, watch.standing())


def mark_step(step: int | None = None) -> None:
    """mark_step(step): what this rank calls from here on belongs to this step of the program.

    The straggler report, the trace and the table of `python -m shardmesh ledger` show it.

    Args:
        step: its number; by default one more than the last.

    Raises: ValueError for a negative number.
    Communication: none. About 5 us.

    >>> import shardmesh as sm
    >>> with sm.null_world(4):
    ...     for step in range(3):
    ...         sm.mark_step(step)
    ...     [s.number for s in sm.ledger().ranks[0].steps]
    [0, 1, 2]
    """
    words = current_world().page.words
    number = words[H.STEP] + 1 if step is None else step
    if number < 0:
        raise ValueError(f"mark_step({step}): write a step from 0 on.")
    times = words[_MARKS + 2 : _MARKS_END : _MARK_WORDS].tolist()
    at = _MARKS + times.index(min(times)) * _MARK_WORDS  # where the oldest one is
    words[H.STEP] = words[at] = number
    words[at + 1], words[at + 2] = words[H.RECORDS], time.monotonic_ns()


# -- reading a page ----------------------------------------------------------------------------------------------------


def read_page(page: Page) -> RankLedger:
    """A copy of what a page says."""
    words = page.words
    clock = words[H.CLOCK] or time.time_ns() - time.monotonic_ns()
    marks = _marks(page)
    groups = [_Group.read(page, number) for number in range(words[H.GROUPS])]
    reader = _Reader(words[H.RANK], clock, groups, marks)
    entries = tuple(reader.entry(record) for record in _records(page))
    blocked, since = page.blocked, words[H.BLOCKED_SINCE]
    return RankLedger(
        rank=words[H.RANK],
        size=words[H.SIZE],
        host=page.read_text(words[H.HOST]),
        pid=words[H.PID],
        state=_state(page),
        doing=page.read_text(words[H.DOING]),
        seen=max([((words[H.HEARTBEAT] or time.monotonic_ns()) + clock) / 1e9, *(e.end or e.start for e in entries[-1:])]),
        blocked=None if blocked is None else reader.entry(blocked),
        blocked_since=None if blocked is None else (since + clock) / 1e9,
        entries=entries,
        steps=tuple(Step(step, (start + clock) / 1e9) for step, _, start in marks),
    )


def _records(page: Page) -> list[Record]:
    """Those with a call: a copy of another host's page lacks the oldest ones; and of a page that has no room for text left."""
    found = list(page.records())
    oldest = page.words[H.RECORDS] - RECORDS
    kept = [record for record in found if record.number >= oldest and record.call]
    if len(kept) > 1 and kept[0].start > kept[1].start:  # being overwritten just now
        return kept[1:]
    return kept


def _marks(page: Page) -> list[tuple[int, int, int]]:
    """(step, number of its first record, time) of the steps that are still known, the oldest first."""
    words = page.words[_MARKS:_MARKS_END].tolist()
    found = zip(words[::3], words[1::3], words[2::3], strict=True)
    return sorted((mark for mark in found if mark[2]), key=lambda mark: mark[2])


def _state(page: Page) -> str:
    said = page.words[H.STATE]
    if said == State.RUNNING:
        return "alive" if not page.words[H.PID] or not is_near(page) else _state_of_process(page)
    return {State.RAISED: "raised", State.LOST: "lost"}.get(said, "ended")


def _state_of_process(page: Page) -> str:
    if not is_local(page):
        return "unknown"
    return "dead" if is_dead(page) else "stopped" if is_stopped(page) else "alive"


class _Group(NamedTuple):
    """A group of a page: its axes, its ranks, and its key."""

    axes: str
    ranks: tuple[int, ...]
    key: int

    @staticmethod
    def read(page: Page, number: int) -> _Group:
        axes, _, ranks = page.group_text(number).partition("\t")
        return _Group(axes, tuple(int(rank) for rank in ranks.split(",") if rank), page.group_key(number))


_NO_GROUP = _Group("?", (), 0)


class _Reader:
    """Makes entries of the records of one page."""

    def __init__(self, rank: int, clock: int, groups: Sequence[_Group], marks: Sequence[tuple[int, int, int]]) -> None:
        self._rank, self._clock, self._groups = rank, clock, groups
        self._steps: list[int | None] = [None, *(step for step, _, _ in marks)]
        self._firsts = [first for _, first, _ in marks]
        self._calls: dict[str, tuple[str, str, str, int | None, str]] = {}

    def entry(self, record: Record) -> Entry:
        axes, ranks, key = self._groups[record.group] if record.group < len(self._groups) else _NO_GROUP
        start, end = (record.start + self._clock) / 1e9, (record.end + self._clock) / 1e9 if record.end else None
        return Entry(
            self._rank, record.number, axes, ranks, key, record.sequence, *self._call(record.call), record.lineage, record.sent,
            record.received, record.place, start, end, self._step(record.number),
        )  # fmt: skip

    def _call(self, text: str) -> tuple[str, str, str, int | None, str]:
        found = self._calls.get(text)
        if found is None:
            op, how, dtype, size, layout = fields_of(text)
            found = self._calls[text] = (op, how, dtype, int(size) if size.isdigit() else None, layout)
        return found

    def _step(self, number: int) -> int | None:
        return self._steps[bisect_right(self._firsts, number)]


# -- as text -----------------------------------------------------------------------------------------------------------


def table(entries: Sequence[Entry]) -> list[str]:
    """A line for each entry, below headings."""
    return table_lines([_HEADINGS, *map(_row, entries)], _NUMBERS) if entries else []


def _row(entry: Entry) -> tuple[str, ...]:
    took = "under way" if entry.end is None else f"{(entry.end - entry.start) * 1e3:.3f}"
    moved = (str(entry.bytes_sent), str(entry.bytes_received))
    return (_clock(entry.start), took, str(entry.sequence), entry.group, entry.text, *moved, entry.place)


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%H:%M:%S.%f")
