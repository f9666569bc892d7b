"""The ledger: every collective of every rank, read from the trace buffers.

While the program runs or after it has crashed.

    ledger()               this rank's trace buffer, and on request those of the other ranks
    Ledger.read(folder)    the trace buffers that the ranks of a job have left

A ledger is a copy: it does not change while the ranks go on.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ...comm.current_world import current_world
from ...comm.recording.call_text import fields_of
from ...comm.recording.recorder import step_bits
from ...comm.recording.trace_buffer import (
    GROUPS,
    MARK_WORDS,
    MARKS,
    RECORDS,
    Header,
    RankState,
    Record,
    TraceBuffer,
)
from ...text import shortened, whole_number
from ..monitor import monitor_of
from ..recording.files import trace_files
from ..recording.job_directory import (
    is_dead,
    is_local,
    is_near,
    is_stopped,
    open_buffer,
    read_verdict,
)
from ..torch_calls import recorder as torch_recorder
from ..verdict import Verdict
from . import flight_recorder, trace_export
from .entries import LAST, LedgerEntry, MarkedStep, RankLedger, collectives_of

# words of a trace buffer's header
_MARKS, _MARKS_END = Header.MARKED_STEPS, Header.MARKED_STEPS + MARKS * MARK_WORDS


class Ledger:
    """The collectives of a job: see `ledger` and `Ledger.read`.

    Attributes:
        rank: the rank that asked; None for a ledger that was read from a folder.
        verdict: why the job could not go on; None if it could.
        damage: what is wrong with the file that has the verdict; "" if nothing is.
    """

    damage = ""

    def __init__(
        self,
        buffers: Mapping[int, TraceBuffer],
        rank: int | None = None,
        verdict: Verdict | None = None,
    ) -> None:
        self.rank, self.verdict = rank, verdict
        self._buffers = buffers
        self._own = None if rank is None else read_buffer(buffers[rank])

    @staticmethod
    def read(folder: str | Path) -> Ledger:
        """Ledger.read(folder) -> Ledger of a job that runs or has run on this host.

        From the folder with its trace buffers.

        Args:
            folder: for example /dev/shm/shardmesh-1000-5f3a0c, as `python -m shardmesh ledger`
                shows it. It stays after a crash.

        Raises: FileNotFoundError when there are no trace buffers in it.

        Communication: none.
        """
        paths = trace_files(Path(folder))
        buffers = {path: buffer for path in paths if (buffer := open_buffer(path)) is not None}
        if not buffers:
            others = " that only you can write" if paths else ""
            raise FileNotFoundError(
                f"{shortened(str(folder))} contains no trace buffers (rank0.trace, rank1.trace "
                f"...){others}: give the folder of a job of yours."
            )
        ledger = Ledger({buffer.words[Header.RANK]: buffer for buffer in buffers.values()})
        try:
            ledger.verdict = read_verdict(Path(folder))
        except (OSError, ValueError) as error:
            ledger.damage = (
                f"{shortened(str(folder))}/verdict.json cannot be read ({type(error).__name__}: "
                f"{shortened(str(error))})"
            )
        return ledger

    @cached_property
    def ranks(self) -> dict[int, RankLedger]:
        """rank -> its collectives, for ranks with trace buffers on this host; read on first access.

        Those of ranks on other hosts are copies, about 0.1 s old, in which the oldest collectives
        may be missing. In simulated and null worlds there is only the caller's rank.
        """
        ledgers = {
            rank: read_buffer(buffer)
            for rank, buffer in sorted(self._buffers.items())
            if rank != self.rank
        }
        if self._own is not None:
            ledgers[self._own.rank] = self._own
        return dict(sorted(ledgers.items()))

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """This rank's collectives, the oldest first; of all ranks if read from a folder."""
        if self._own is not None:
            return self._own.entries
        entries: list[LedgerEntry] = []
        for rank_ledger in self.ranks.values():
            entries += rank_ledger.entries
        return tuple(sorted(entries, key=lambda entry: entry.start))

    def collectives(self) -> Iterator[dict[int, LedgerEntry]]:
        """Yield each collective as a dict from rank to its entry.

        For the ranks that have called it.
        """
        return collectives_of(self.ranks)

    def report(self, last: int = LAST) -> str:
        """Return the state and last collectives of all ranks, and why the job could not go on."""
        parts = [rank_ledger.report(last) for rank_ledger in self.ranks.values()]
        if self.verdict is not None:
            parts.append(f"why the job could not go on ({self.verdict.kind}):\n{self.verdict.text}")
        return "\n\n".join(parts)

    def save_trace(self, path: str | Path) -> None:
        """Write the collectives of all ranks as a trace for ui.perfetto.dev or chrome://tracing.

        A rank is a process there, a group a thread. Arrows lead from the rank that arrived last to
        those that waited for it. Call it on one rank, which writes the collectives of all.
        """
        trace_export.save_trace(self.ranks, path)

    def save_flight_recorder(self, folder: str | Path) -> None:
        """Write a file per rank in the format of torch's Flight Recorder, and the same as JSON.

        `torchfrtrace <folder>` reads them.
        """
        flight_recorder.save(self.ranks, folder)

    def __str__(self) -> str:
        return self.report() if self._own is None else self._own.report()

    def __repr__(self) -> str:
        return f"Ledger(rank={self.rank}, ranks={sorted(self._buffers)})"


def ledger() -> Ledger:
    """ledger() -> Ledger of the collectives that this rank has called so far.

    On request, also of those of the other ranks.

    Call it at any time, also on another thread, or where an error was caught.
    `print(sm.monitor.ledger())` shows the last 20; `.entries` has the last 4096, `.ranks` those of
    the job's other ranks, `.save_trace(path)` writes all of them for Perfetto.

    Communication: none; trace buffers of other ranks are in memory that the host shares.

    >>> import torch
    >>> import shardmesh as sm
    >>> with sm.debug.null_world(4):
    ...     mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    ...     mesh.group("tp").all_reduce(torch.ones(10))
    ...     entry = sm.monitor.ledger().entries[-1]
    >>> entry.op, entry.group, entry.reduction, entry.dtype, entry.elements
    ('all_reduce', 'tp', 'sum', 'float32', 10)
    """
    world = current_world()
    monitor = monitor_of(world)
    if monitor is None:
        return Ledger({world.rank: world.trace_buffer}, world.rank)
    buffers = {
        rank: buffer
        for rank in range(world.size)
        if (buffer := monitor.directory.buffer_of(rank)) is not None
    }
    return Ledger(buffers, world.rank, monitor.standing())


def mark_step(step: int | None = None, *, compare: bool = True) -> None:
    """mark_step(step): mark the start of a step or request, to which later collectives belong.

    Ranks that meet in a collective must be in the same step: if one of them skips a step, or leaves
    it by an error that it catches alone, all raise a `CollectiveMismatchError` that names the
    ranks, their steps and lines, where they would otherwise exchange values of different steps.
    Compared are the collectives of the thread that marks, not messages between two ranks; a rank
    that has marked no step may be in any. The straggler report, the trace and the table of
    `python -m shardmesh ledger` show steps, too.

    Args:
        step: its number; by default one more than that of the last.
        compare: False where ranks count different things, as actors and a learner that meet now and
            then.

    Raises: ValueError for a negative number.

    Communication: none. About 5 us.

    >>> import shardmesh as sm
    >>> with sm.debug.null_world(4):
    ...     for step in range(3):
    ...         sm.monitor.mark_step(step)
    ...     [s.number for s in sm.monitor.ledger().ranks[0].steps]
    [0, 1, 2]
    """
    world = current_world()
    words = world.trace_buffer.words
    number = words[Header.STEP] + 1 if step is None else step
    if number < 0:
        raise ValueError(f"mark_step: step must be an integer >= 0 or None, got {step!r}")
    times = words[_MARKS + 2 : _MARKS_END : MARK_WORDS].tolist()
    at = _MARKS + times.index(min(times)) * MARK_WORDS  # the slot of the oldest mark
    words[Header.STEP] = words[at] = number
    words[at + 1], words[at + 2] = words[Header.RECORDS], time.monotonic_ns()
    origin = (None, step_bits(number)) if compare else None
    world.comm_context.origin = origin
    monitor = monitor_of(world)
    if monitor is not None:
        torch_recorder.mark_step(monitor, origin)


# -- reading a trace buffer ------------------------------------------------------------------------


def read_buffer(buffer: TraceBuffer) -> RankLedger:
    """Copy the contents of a trace buffer."""
    words = buffer.words
    clock = words[Header.CLOCK] or time.time_ns() - time.monotonic_ns()
    marks = _marks(buffer)
    groups = [_Group.read(buffer, number) for number in range(min(words[Header.GROUPS], GROUPS))]
    reader = _Reader(words[Header.RANK], clock, groups, marks)
    entries = tuple(reader.entry(record) for record in _records(buffer))
    blocked, since = buffer.blocked, words[Header.BLOCKED_SINCE]
    return RankLedger(
        rank=words[Header.RANK],
        size=words[Header.SIZE],
        host=buffer.read_text(words[Header.HOST]),
        pid=words[Header.PID],
        state=_state(buffer),
        doing=buffer.read_text(words[Header.DOING]),
        seen=max(
            [
                ((words[Header.HEARTBEAT] or time.monotonic_ns()) + clock) / 1e9,
                *(e.end or e.start for e in entries[-1:]),
            ]
        ),
        blocked=None if blocked is None else reader.entry(blocked),
        blocked_since=None if blocked is None else (since + clock) / 1e9,
        entries=entries,
        steps=tuple(MarkedStep(step, (start + clock) / 1e9) for step, _, start in marks),
    )


def _records(buffer: TraceBuffer) -> list[Record]:
    """Return the records with a call.

    Copies of other hosts' buffers lack the oldest ones, as does a buffer without room for more
    text.
    """
    records = list(buffer.records())
    oldest = buffer.words[Header.RECORDS] - RECORDS
    complete = [record for record in records if record.number >= oldest and record.call]
    if len(complete) > 1 and complete[0].start > complete[1].start:  # it is being overwritten
        return complete[1:]
    return complete


def _marks(buffer: TraceBuffer) -> list[tuple[int, int, int]]:
    """Return (step, number of its first record, time) of the last steps, the oldest first."""
    words = buffer.words[_MARKS:_MARKS_END].tolist()
    marks = zip(words[::MARK_WORDS], words[1::MARK_WORDS], words[2::MARK_WORDS], strict=True)
    return sorted((mark for mark in marks if mark[2]), key=lambda mark: mark[2])


def _state(buffer: TraceBuffer) -> str:
    said = buffer.words[Header.STATE]
    if said == RankState.RUNNING:
        return (
            "alive"
            if not buffer.words[Header.PID] or not is_near(buffer)
            else _state_of_process(buffer)
        )
    return {RankState.RAISED: "raised", RankState.LOST: "lost"}.get(said, "ended")


def _state_of_process(buffer: TraceBuffer) -> str:
    if not is_local(buffer):
        return "unknown"
    return "dead" if is_dead(buffer) else "stopped" if is_stopped(buffer) else "alive"


class _Group(NamedTuple):
    """A group in a trace buffer: its axes, its ranks, and its key."""

    axes: str
    ranks: tuple[int, ...]
    key: int

    @staticmethod
    def read(buffer: TraceBuffer, number: int) -> _Group:
        axes, _, ranks = buffer.group_text(number).partition("\t")
        return _Group(
            axes,
            tuple(whole_number(rank) or 0 for rank in ranks.split(",") if rank),
            buffer.group_key(number),
        )


_NO_GROUP = _Group("?", (), 0)


class _Reader:
    """Convert the records of one trace buffer to ledger entries."""

    def __init__(
        self, rank: int, clock: int, groups: Sequence[_Group], marks: Sequence[tuple[int, int, int]]
    ) -> None:
        self._rank, self._clock, self._groups = rank, clock, groups
        self._steps: list[int | None] = [None, *(step for step, _, _ in marks)]
        self._firsts = [first for _, first, _ in marks]
        self._calls: dict[str, tuple[str, str, str, int | None, str]] = {}

    def entry(self, record: Record) -> LedgerEntry:
        axes, ranks, key = (
            self._groups[record.group] if record.group < len(self._groups) else _NO_GROUP
        )
        start = (record.start + self._clock) / 1e9
        end = (record.end + self._clock) / 1e9 if record.end else None
        return LedgerEntry(
            self._rank,
            record.number,
            axes,
            ranks,
            key,
            record.sequence,
            *self._call(record.call),
            record.lineage,
            record.sent,
            record.received,
            record.place,
            start,
            end,
            self._step(record.number),
        )

    def _call(self, text: str) -> tuple[str, str, str, int | None, str]:
        fields = self._calls.get(text)
        if fields is None:
            op, how, dtype, size, layout = fields_of(text)
            fields = self._calls[text] = (op, how, dtype, whole_number(size), layout)
        return fields

    def _step(self, number: int) -> int | None:
        return self._steps[bisect_right(self._firsts, number)]
