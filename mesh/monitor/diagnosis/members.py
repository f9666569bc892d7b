"""The state of each rank of a group in one collective.

Whether it has reached it, with which fingerprint, and what it is blocked on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...comm.recording.call_text import fields_of
from ...comm.recording.recorder import STEP_MARKED, Recorder, differ, same_call, step_of, unlike
from ...comm.recording.trace_buffer import (
    MAY_GO_ON,
    ON_DEVICE,
    SLOT_WORDS,
    Header,
    RankState,
    Record,
    TraceBuffer,
    row_of,
    slots_of,
)
from ...settings import monotonic_ns
from ...text import whole_number
from ..recording.job_directory import JobDirectory, is_dead
from .votes import connected_components, is_divided, minority

# A device completes one of these only together with those of all ranks of the group.
_OF_ALL = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
# ranks that have waited on each other for so long are taken to wait for good
STABLE_NS = 500_000_000


class Member(NamedTuple):
    """A rank of a group, as seen at one of the group's collectives.

    Attributes:
        rank: global rank.
        buffer: its trace buffer; None when nothing is known of the rank.
        came: whether it has called the collective; None when that is unknown, because it has called
            many more since.
        word: its fingerprint, if it has called; `lineage`, `number` (of the record) and `route`
            likewise.
    """

    rank: int
    buffer: TraceBuffer | None
    came: bool | None
    word: int = 0
    lineage: int = 0
    number: int = -1
    route: int = 0

    @property
    def record(self) -> Record | None:
        return None if self.buffer is None or self.number < 0 else self.buffer.record(self.number)

    @property
    def step(self) -> int | None:
        """The step, marked by `mark_step`, in which it has called; None if that is unknown."""
        record = self.record
        if self.buffer is None or record is None:
            return None
        return step_of(self.word, record.call, self.buffer.words[Header.STEP])


def member(directory: JobDirectory, group_key: int, rank: int, sequence: int) -> Member:
    """Return the state of one rank in the collective `sequence` of a group."""
    buffer = directory.buffer_of(rank)
    group = None if buffer is None else buffer.find_group(group_key)
    if buffer is None or group is None:
        return Member(rank, buffer, False if buffer is None or not buffer.is_full else None)
    called = buffer.group_called(group)
    at = row_of(group) + (sequence & (slots_of(group) - 1)) * SLOT_WORDS
    word, lineage, number, route = buffer.words[at : at + SLOT_WORDS]
    if word and word >> 48 == sequence & 0xFFFF:
        return Member(rank, buffer, True, word, lineage, number, route)
    return Member(rank, buffer, None if sequence < called else False)


def read_members(directory: JobDirectory, recorder: Recorder, sequence: int) -> list[Member]:
    """Return the state of each rank of the group, in order, in the collective `sequence`."""
    return [member(directory, recorder.key, rank, sequence) for rank in recorder.group.ranks]


def have_all_come(members: Iterable[Member]) -> bool:
    return all(m.came is not False for m in members)


def parties(members: Iterable[Member]) -> list[list[Member]]:
    """Return the members that have arrived, grouped by their calls."""
    come = [m for m in members if m.came]
    words = _words_in_steps(come)

    def alike(one: Member, other: Member) -> bool:
        return words[one.rank] == words[other.rank] and not unlike(one.lineage, other.lineage)

    return connected_components(come, alike)


def _words_in_steps(come: Sequence[Member]) -> dict[int, int]:
    """Return each rank's word of its step.

    Of those that have marked none, as in the step of most ranks that call the same.
    """
    marked = Counter(m.word for m in come if m.word & STEP_MARKED)
    words = {}
    for m in come:
        same = [word for word, _ in marked.most_common() if same_call(word, m.word)]
        words[m.rank] = same[0] if same else m.word
    return words


def agree(members: Iterable[Member]) -> bool:
    """Return whether all members that have arrived call the same."""
    return not is_divided(parties(members), _differ)


def _differ(one: Member, other: Member) -> bool:
    return not same_call(one.word, other.word) or differ(
        one.lineage, one.buffer, other.lineage, other.buffer
    )


def outliers(members: Iterable[Member]) -> tuple[int, ...]:
    """Return the ranks that call something else than the majority; none if votes are equal."""
    return minority([[m.rank for m in party] for party in parties(members)])


def lost_ranks(directory: JobDirectory) -> list[Member]:
    """Return the ranks of the job that died or cannot be reached."""
    return [m for m in _everyone(directory) if is_lost(m)]


def ended_ranks(directory: JobDirectory) -> list[Member]:
    """Return the ranks of the job whose program has ended."""
    return [m for m in _everyone(directory) if has_ended(m)]


def _everyone(directory: JobDirectory) -> list[Member]:
    return [Member(rank, directory.buffer_of(rank), False) for rank in range(directory.size)]


def has_ended(m: Member) -> bool:
    return m.buffer is not None and m.buffer.words[Header.STATE] in (
        RankState.ENDED,
        RankState.CLOSED,
    )


def is_lost(m: Member) -> bool:
    if m.buffer is None:
        return False
    state = m.buffer.words[Header.STATE]
    return state == RankState.LOST or (
        state in (RankState.RUNNING, RankState.RAISED) and is_dead(m.buffer)
    )


def members_waited_for(directory: JobDirectory, rank: int) -> list[Member]:
    """Return the ranks for which this one, or its device, has been waiting for some time.

    As they are in the collective in which it waits.

    A rank that has not called it is among them, and one that has but whose device waits in an
    earlier one.
    """
    buffer = directory.buffer_of(rank)
    record = None if buffer is None else _stuck_for_long(buffer)
    if buffer is None or record is None:
        return []
    ranks = _ranks_of(buffer, record)
    key = buffer.group_key(record.group)
    others = [member(directory, key, r, record.sequence) for r in ranks if r != rank]
    on_device = buffer.words[Header.BLOCKED] & ON_DEVICE and fields_of(record.call)[0] in _OF_ALL
    return [m for m in others if m.came is False or (on_device and _is_held_up(m))]


def _ranks_of(buffer: TraceBuffer, record: Record) -> list[int]:
    """Return the ranks of the group of a call."""
    ranks = buffer.group_text(record.group).partition("\t")[2].split(",")
    return [int(r) for r in ranks if whole_number(r) is not None]


def waiting_with(directory: JobDirectory, ranks: Iterable[int]) -> list[tuple[int, Record]]:
    """Return (rank, call) of ranks that wait in a call, and of those that wait in it with them.

    In the order of the ranks.
    """
    calls: dict[int, Record] = {}
    for rank in ranks:
        buffer = directory.buffer_of(rank)
        record = None if buffer is None else buffer.stuck
        if rank in calls or buffer is None or record is None:
            continue
        key = buffer.group_key(record.group)
        for other in {rank, *_ranks_of(buffer, record)}:
            call = _waits_in(directory.buffer_of(other), key, record.sequence)
            if call is not None:
                calls[other] = call
    return sorted(calls.items())


def _waits_in(buffer: TraceBuffer | None, key: int, sequence: int) -> Record | None:
    """Return the call that a rank is blocked in if it is this collective of this group."""
    record = None if buffer is None else buffer.stuck
    if buffer is None or record is None:
        return None
    is_it = buffer.group_key(record.group) == key and record.sequence == sequence
    return record if is_it else None


def awaited_ranks(directory: JobDirectory, rank: int) -> list[int]:
    """Return the ranks for which this one's main thread has been waiting for some time.

    On the host, or for its device.
    """
    return (
        []
        if may_go_on(directory.buffer_of(rank))
        else [m.rank for m in members_waited_for(directory, rank)]
    )


def may_go_on(buffer: TraceBuffer | None) -> bool:
    """Return whether a rank may call other collectives while its device waits."""
    return buffer is None or bool(buffer.words[Header.BLOCKED] & MAY_GO_ON)


def _is_held_up(m: Member) -> bool:
    """Return whether the rank's stream waits in an earlier collective.

    Then it cannot start this one, which its host has called.

    That the one waits for the other is certain only if the host called this one after the stream
    was made to wait for the earlier one.
    """
    if m.buffer is None or not m.buffer.words[Header.BLOCKED] & ON_DEVICE:
        return False
    first = _stuck_for_long(m.buffer)
    called = m.record
    return (
        first is not None
        and called is not None
        and 0 < first.end <= called.start
        and called.end > 0
    )


def blocked_for_long(buffer: TraceBuffer) -> Record | None:
    """Return the collective that a rank has been blocked in for some time, if any."""
    return None if may_go_on(buffer) else _stuck_for_long(buffer)


def _stuck_for_long(buffer: TraceBuffer) -> Record | None:
    return (
        buffer.stuck
        if monotonic_ns() - buffer.words[Header.BLOCKED_SINCE] >= STABLE_NS // 2
        else None
    )
