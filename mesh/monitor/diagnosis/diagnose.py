"""Find out from the records of a group's ranks why one of its collectives cannot complete.

mismatch   two ranks call different collectives       the smaller party is at fault; none if equal
left       one has ended its program                  the smaller of those that left and that wait
lost       one has died
deadlock   each waits for one that waits elsewhere    as for a mismatch
messages   of a permute or an all_to_all do not fit   the rank with the largest share of such
stall      one keeps the others waiting too long
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ...comm.recording.recorder import Recorder
from ...comm.recording.trace_buffer import ON_DEVICE, Header, RankState
from ...settings import monotonic_ns, settings
from ..job import Job
from ..recording.job_directory import JobDirectory, is_dead
from ..verdict import Verdict
from . import verdict_text
from .members import (
    STABLE_NS,
    Member,
    agree,
    blocked_for_long,
    has_ended,
    have_all_come,
    is_lost,
    lost_ranks,
    may_go_on,
    members_waited_for,
    outliers,
    parties,
    read_members,
    waiting_with,
)
from .votes import minority, worst_correspondent

_LOW32 = (1 << 32) - 1
# how long to wait for ranks whose votes may still decide which of those that differ is the outlier
_TO_COME_NS = 10_000_000_000
# how long to wait, after one has ended its program, for others to end or arrive
_TO_END_NS = 500_000_000
# an attribute of errors of torch's: the recorder, and the number of the call that ranks missed
_MISSED = "_shardmesh_missed"


def diagnose(
    job: Job, recorder: Recorder, sequence: int, since: int, is_waiting: bool = True
) -> Verdict | None:
    """Return the verdict on a collective that this rank has called at the time `since`.

    None if nothing is known to be wrong.

    Args:
        is_waiting: whether this rank waits for it; False if it may call other collectives
            meanwhile.
    """
    members = read_members(job.directory, recorder, sequence)
    waited = monotonic_ns() - since
    if not agree(members):
        return (
            verdict_text.mismatch(recorder, sequence, members, outliers(members))
            if _is_decided(members, waited)
            else None
        )
    # what it sent may have been lost
    if any(
        m.buffer is not None and m.buffer.words[Header.STATE] == RankState.LOST for m in members
    ):
        return lost(job, recorder, sequence)
    missing = [m for m in members if m.came is False and (m.buffer is not None or job.sees_all)]
    if not missing:
        return None
    return (
        _gone(job, recorder, sequence, members, missing, waited)
        or (_wait_cycle(job, members, waited) if is_waiting else None)
        or _stall(job, recorder, sequence, missing, since)
    )


def first_missed(recorder: Recorder, sequence: int, missing: Iterable[Member]) -> int:
    """Return the first collective up to this one that one of these ranks has not called.

    Devices wait there while their hosts run ahead.
    """
    buffers = [
        (m.buffer, m.buffer.find_group(recorder.key)) for m in missing if m.buffer is not None
    ]
    called = [0 if number is None else buffer.group_called(number) for buffer, number in buffers]
    first = min([sequence, *called])
    return first if recorder.keeps(first) else sequence


def _is_decided(members: Sequence[Member], waited: int) -> bool:
    """Return True once the majority is decided.

    Missing ranks cannot change it, will not arrive, or the grace period has expired.
    """
    largest = max(map(len, parties(members)))
    if have_all_come(members) or 2 * largest > len(members) or waited > _TO_COME_NS:
        return True
    return waited > STABLE_NS and not any(_may_come(m) for m in members if m.came is False)


def _may_come(m: Member) -> bool:
    """Return whether a rank, as far as is known, runs and is not blocked in another collective."""
    if m.buffer is None:
        return True
    words = m.buffer.words
    # a device may only be slow
    is_blocked = not words[Header.BLOCKED] & ON_DEVICE and blocked_for_long(m.buffer) is not None
    return words[Header.STATE] == RankState.RUNNING and not is_blocked and not is_dead(m.buffer)


def _gone(
    job: Job,
    recorder: Recorder,
    sequence: int,
    members: Sequence[Member],
    missing: Sequence[Member],
    waited: int,
) -> Verdict | None:
    """Return the verdict on members that will never arrive."""
    if any(map(is_lost, missing)):
        return lost(job, recorder, first_missed(recorder, sequence, filter(is_lost, missing)))
    left = [m for m in missing if has_ended(m)]
    undecided = len(missing) > len(left)
    if not left or (undecided and waited < _TO_END_NS):
        return None
    sequence = first_missed(recorder, sequence, left)
    members = read_members(job.directory, recorder, sequence)
    waiting = [m.rank for m in members if m.came]
    return verdict_text.left(
        recorder, sequence, members, left, minority([waiting, [m.rank for m in left]])
    )


def lost(job: Job, recorder: Recorder, sequence: int) -> Verdict | None:
    """Return the verdict on all ranks that died or cannot be reached, if there are any."""
    gone = lost_ranks(job.directory)
    return (
        verdict_text.lost(recorder, sequence, read_members(job.directory, recorder, sequence), gone)
        if gone
        else None
    )


def wrong_route(job: Job, recorder: Recorder, sequence: int) -> Verdict | None:
    """Return the verdict on messages of this collective without a sender or receiver.

    Among the ranks that have arrived.
    """
    members = read_members(job.directory, recorder, sequence)
    messages = [(src, dst, _fits(members, src, dst)) for src, dst in _messages(members)]
    if all(fits for *_, fits in messages):
        return None
    return verdict_text.wrong_route(
        recorder, sequence, members, worst_correspondent([m.rank for m in members], messages)
    )


def wrong_splits(job: Job, recorder: Recorder, sequence: int) -> Verdict | None:
    """Return the verdict on ranks of this all_to_all that send what others do not expect.

    Among those that have arrived.
    """
    members = read_members(job.directory, recorder, sequence)
    shown = {
        place: m.buffer.splits(m.number, len(members))
        for place, m in enumerate(members)
        if m.came and m.route and m.buffer is not None
    }
    messages: list[tuple[int, int, bool]] = []
    for src, dst in itertools.product(shown, repeat=2):
        sent, expected = shown[src][0][dst], shown[dst][1][src]
        if sent != expected or (sent and src != dst):
            messages.append((src, dst, sent == expected))
    if all(fits for *_, fits in messages):
        return None
    return verdict_text.wrong_splits(
        recorder, sequence, members, shown, worst_correspondent([m.rank for m in members], messages)
    )


def may_show_splits(job: Job, recorder: Recorder, sequence: int, waited: int) -> bool:
    """Return whether a rank may still show how much it sends in this all_to_all.

    Before the grace period expires.
    """
    members = read_members(job.directory, recorder, sequence)
    silent = [m for m in members if not m.route]
    return waited <= _TO_COME_NS and agree(members) and any(m.came or _may_come(m) for m in silent)


def _messages(members: Sequence[Member]) -> set[tuple[int, int]]:
    """Return (sender, receiver) by place, as either end states, where both have arrived."""
    said = set()
    for place, m in enumerate(members):
        if m.came and m.route >> 32:
            said.add((place, (m.route >> 32) - 1))
        if m.came and m.route & _LOW32:
            said.add(((m.route & _LOW32) - 1, place))
    return {(src, dst) for src, dst in said if members[src].came and members[dst].came}


def _fits(members: Sequence[Member], src: int, dst: int) -> bool:
    """Return whether both ends know of the message and agree on its size."""
    sender, receiver = members[src], members[dst]
    if sender.route >> 32 != dst + 1 or receiver.route & _LOW32 != src + 1:
        return False
    sent, expected = sender.record, receiver.record
    return sent is None or expected is None or sent.sent == expected.received


def _wait_cycle(job: Job, members: Sequence[Member], waited: int) -> Verdict | None:
    """Return the verdict on a deadlock: all missing ranks are blocked, in the end on this one."""
    return None if waited < STABLE_NS else _cycle(job, [m for m in members if m.came is False])


def device_cycle(job: Job) -> Verdict | None:
    """Return the verdict on devices that wait for each other.

    In collectives that the hosts have called in different orders.
    """
    if not job.buffer.words[Header.BLOCKED] & ON_DEVICE:
        return None
    ahead = members_waited_for(job.directory, job.directory.rank)
    return _cycle(job, ahead) if ahead else None


def _cycle(job: Job, ahead: list[Member]) -> Verdict | None:
    """Return the verdict on a deadlock of the ranks that this one waits for.

    They all wait themselves, and so do those they wait for.
    """
    reached = {job.directory.rank}
    while ahead:
        m = ahead.pop()
        if m.came is False and may_go_on(m.buffer):
            return None
        if m.rank in reached:
            continue
        reached.add(m.rank)
        awaited_members = members_waited_for(job.directory, m.rank)
        if not awaited_members:
            return None  # it still runs, or nothing is known of it
        ahead += awaited_members
    return verdict_text.deadlock(job.directory, waiting_with(job.directory, reached))


def _stall(
    job: Job, recorder: Recorder, sequence: int, missing: Sequence[Member], since: int
) -> Verdict | None:
    timeout_ns = settings().timeout * 1e9
    if monotonic_ns() - since < timeout_ns or job.ns_since(since) < timeout_ns:
        return None
    sequence = first_missed(recorder, sequence, missing)
    return verdict_text.stall(
        job,
        recorder,
        sequence,
        read_members(job.directory, recorder, sequence),
        monotonic_ns() - since,
    )


# -- torch's own timeouts --------------------------------------------------------------------------


def note_missing(
    directory: JobDirectory, recorder: Recorder, sequence: int, error: BaseException
) -> None:
    """Record on an error of torch's, such as a timeout, that ranks had not called a collective."""
    if any(m.came is False for m in read_members(directory, recorder, sequence)):
        error.__dict__[_MISSED] = recorder, sequence


def out_of_time(job: Job, error: BaseException | None) -> Verdict | None:
    """Return the verdict on missing ranks, where torch's own time for a call ran out.

    This error, or one of its causes, says so.
    """
    while error is not None and _MISSED not in error.__dict__:
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    recorder, sequence = error.__dict__[_MISSED]
    members = read_members(job.directory, recorder, sequence)
    record = next((m.record for m in members if m.rank == job.directory.rank), None)
    if record is None or have_all_come(members):
        return None
    return verdict_text.stall(job, recorder, sequence, members, monotonic_ns() - record.start)
