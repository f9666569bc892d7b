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
from typing import TYPE_CHECKING

from ...comm.recording.trace_buffer import ON_DEVICE, Header, RankState
from ...settings import monotonic_ns, settings
from ..recording.job_directory import is_dead
from ..verdict import Verdict
from . import verdict_text
from .members import (
    STABLE_NS,
    Member,
    agree,
    awaited,
    blocked_for_long,
    has_ended,
    have_all_come,
    is_lost,
    lost_ranks,
    may_go_on,
    outliers,
    parties,
    read_members,
)
from .votes import minority, worst_correspondent

if TYPE_CHECKING:
    from ...comm.recording.recorder import Recorder
    from ..monitor import Monitor

_LOW32 = (1 << 32) - 1
# how long to wait for ranks whose votes may still decide which of those that differ is the outlier
_TO_COME_NS = 10_000_000_000
# how long to wait, after one has ended its program, for others to end or arrive
_TO_END_NS = 500_000_000


def diagnose(
    monitor: Monitor, recorder: Recorder, sequence: int, since: int, is_waiting: bool = True
) -> Verdict | None:
    """Return the verdict on a collective that this rank has called at the time `since`; None if
    nothing is known to be wrong.

    Args:
        is_waiting: whether this rank waits for it; False if it may call other collectives
            meanwhile.
    """
    members = read_members(monitor, recorder, sequence)
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
        return lost(monitor, recorder, sequence)
    missing = [m for m in members if m.came is False and (m.buffer is not None or monitor.sees_all)]
    if not missing:
        return None
    return (
        _gone(monitor, recorder, sequence, members, missing, waited)
        or (_wait_cycle(monitor, members, waited) if is_waiting else None)
        or _stall(monitor, recorder, sequence, missing, since)
    )


def first_missed(recorder: Recorder, sequence: int, missing: Iterable[Member]) -> int:
    """Return the first collective up to this one that one of these ranks has not called: where
    devices wait while their hosts run ahead.
    """
    buffers = [
        (m.buffer, m.buffer.find_group(recorder.key)) for m in missing if m.buffer is not None
    ]
    called = [0 if number is None else buffer.group_called(number) for buffer, number in buffers]
    first = min([sequence, *called])
    return first if recorder.keeps(first) else sequence


def _is_decided(members: Sequence[Member], waited: int) -> bool:
    """Return True once missing ranks cannot change the majority, will not arrive, or the grace
    period has expired.
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
    monitor: Monitor,
    recorder: Recorder,
    sequence: int,
    members: Sequence[Member],
    missing: Sequence[Member],
    waited: int,
) -> Verdict | None:
    """Return the verdict on members that will never arrive."""
    if any(map(is_lost, missing)):
        return lost(monitor, recorder, first_missed(recorder, sequence, filter(is_lost, missing)))
    left = [m for m in missing if has_ended(m)]
    undecided = len(missing) > len(left)
    if not left or (undecided and waited < _TO_END_NS):
        return None
    sequence = first_missed(recorder, sequence, left)
    members = read_members(monitor, recorder, sequence)
    waiting = [m.rank for m in members if m.came]
    return verdict_text.left(
        recorder, sequence, members, left, minority([waiting, [m.rank for m in left]])
    )


def lost(monitor: Monitor, recorder: Recorder, sequence: int) -> Verdict | None:
    """Return the verdict on all ranks that died or cannot be reached, if there are any."""
    gone = lost_ranks(monitor.directory)
    return (
        verdict_text.lost(recorder, sequence, read_members(monitor, recorder, sequence), gone)
        if gone
        else None
    )


def wrong_route(monitor: Monitor, recorder: Recorder, sequence: int) -> Verdict | None:
    """Return the verdict on messages of this collective that have no sender or no receiver, among
    the ranks that have arrived.
    """
    members = read_members(monitor, recorder, sequence)
    messages = [(src, dst, _fits(members, src, dst)) for src, dst in _messages(members)]
    if all(fits for *_, fits in messages):
        return None
    return verdict_text.wrong_route(
        recorder, sequence, members, worst_correspondent([m.rank for m in members], messages)
    )


def wrong_splits(monitor: Monitor, recorder: Recorder, sequence: int) -> Verdict | None:
    """Return the verdict on ranks of this all_to_all that send what others do not expect, among
    those that have arrived.
    """
    members = read_members(monitor, recorder, sequence)
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


def may_show_splits(monitor: Monitor, recorder: Recorder, sequence: int, waited: int) -> bool:
    """Return whether a rank that has not shown yet how much it sends in this all_to_all may do so
    before the grace period expires.
    """
    members = read_members(monitor, recorder, sequence)
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


def _wait_cycle(monitor: Monitor, members: Sequence[Member], waited: int) -> Verdict | None:
    """Return the verdict on a deadlock: all missing ranks are blocked, in the end on this one."""
    return None if waited < STABLE_NS else _cycle(monitor, [m for m in members if m.came is False])


def device_cycle(monitor: Monitor) -> Verdict | None:
    """Return the verdict on devices that wait for each other, in collectives that the hosts have
    called in different orders.
    """
    if not monitor.buffer.words[Header.BLOCKED] & ON_DEVICE:
        return None
    ahead = awaited(monitor.directory, monitor.directory.rank)
    return _cycle(monitor, ahead) if ahead else None


def _cycle(monitor: Monitor, ahead: list[Member]) -> Verdict | None:
    """Return the verdict on a deadlock if these ranks, which this one waits for, all wait
    themselves, and so do those they wait for.
    """
    reached = {monitor.directory.rank}
    while ahead:
        m = ahead.pop()
        if m.came is False and may_go_on(m.buffer):
            return None
        if m.rank in reached:
            continue
        reached.add(m.rank)
        awaited_members = awaited(monitor.directory, m.rank)
        if not awaited_members:
            return None  # it still runs, or nothing is known of it
        ahead += awaited_members
    stuck = [
        (rank, buffer.stuck)
        for rank in sorted(reached)
        if (buffer := monitor.directory.buffer_of(rank)) is not None
    ]
    return verdict_text.deadlock(
        monitor.directory, [(rank, record) for rank, record in stuck if record is not None]
    )


def _stall(
    monitor: Monitor, recorder: Recorder, sequence: int, missing: Sequence[Member], since: int
) -> Verdict | None:
    timeout_ns = settings().timeout * 1e9
    if monotonic_ns() - since < timeout_ns or monitor.ns_since(since) < timeout_ns:
        return None
    sequence = first_missed(recorder, sequence, missing)
    return verdict_text.stall(
        monitor,
        recorder,
        sequence,
        read_members(monitor, recorder, sequence),
        monotonic_ns() - since,
    )
