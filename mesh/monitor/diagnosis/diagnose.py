"""Find out from the records of a group's ranks why one of its collectives cannot complete.

mismatch   two ranks call different collectives       the smaller party is at fault; none if equal
left       one has ended its program                  the smaller of those that left and that wait
lost       one has died
deadlock   each waits for one that waits elsewhere    as for a mismatch
messages   of a permute or an all_to_all do not fit   the rank with the largest share of such
stall      one keeps the others waiting too long
"""

from __future__ import annotations

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
    members,
    outliers,
    parties,
)
from .votes import minority, worst_correspondent

if TYPE_CHECKING:
    from ...comm.recording.recorder import Recorder
    from ..monitor import Monitor

_LOW32 = (1 << 32) - 1
# how long to wait for ranks whose votes may still decide which of those that differ is the outlier
_TO_COME_NS = 10_000_000_000
# How long to wait, after one has ended its program, for others to end or arrive.
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
    found = members(monitor, recorder, sequence)
    waited = monotonic_ns() - since
    if not agree(found):
        return (
            verdict_text.mismatch(recorder, sequence, found, outliers(found))
            if _is_decided(found, waited)
            else None
        )
    # What it sent may have been lost.
    if any(m.buffer is not None and m.buffer.words[Header.STATE] == RankState.LOST for m in found):
        return lost(monitor, recorder, sequence)
    missing = [m for m in found if m.came is False and (m.buffer is not None or monitor.sees_all)]
    if not missing:
        return None
    return (
        _gone(monitor, recorder, sequence, found, missing, waited)
        or (_wait_cycle(monitor, found, waited) if is_waiting else None)
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


def _is_decided(found: Sequence[Member], waited: int) -> bool:
    """Return whether missing ranks cannot change the majority or arrive, or the time is over."""
    largest = max(map(len, parties(found)))
    if have_all_come(found) or 2 * largest > len(found) or waited > _TO_COME_NS:
        return True
    return waited > STABLE_NS and not any(_may_come(m) for m in found if m.came is False)


def _may_come(m: Member) -> bool:
    """Return whether a rank still runs, as far as known, and not in another collective."""
    if m.buffer is None:
        return True
    words = m.buffer.words
    # A device may only be slow.
    is_blocked = not words[Header.BLOCKED] & ON_DEVICE and blocked_for_long(m.buffer) is not None
    return words[Header.STATE] == RankState.RUNNING and not is_blocked and not is_dead(m.buffer)


def _gone(
    monitor: Monitor,
    recorder: Recorder,
    sequence: int,
    found: Sequence[Member],
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
    found = members(monitor, recorder, sequence)
    waiting = [m.rank for m in found if m.came]
    return verdict_text.left(
        recorder, sequence, found, left, minority([waiting, [m.rank for m in left]])
    )


def lost(monitor: Monitor, recorder: Recorder, sequence: int) -> Verdict | None:
    """Return the verdict on all ranks of the job that died or cannot be reached, if any."""
    gone = lost_ranks(monitor.directory)
    return (
        verdict_text.lost(recorder, sequence, members(monitor, recorder, sequence), gone)
        if gone
        else None
    )


def wrong_route(monitor: Monitor, recorder: Recorder, sequence: int) -> Verdict | None:
    """Return the verdict on messages of this collective that have no sender or no receiver, among
    the ranks that have arrived.
    """
    found = members(monitor, recorder, sequence)
    messages = [(src, dst, _fits(found, src, dst)) for src, dst in _messages(found)]
    if all(fits for *_, fits in messages):
        return None
    return verdict_text.wrong_route(
        recorder, sequence, found, worst_correspondent([m.rank for m in found], messages)
    )


def wrong_splits(monitor: Monitor, recorder: Recorder, sequence: int) -> Verdict | None:
    """Return the verdict on ranks of this all_to_all that send what others do not expect, among
    those that have arrived.
    """
    found = members(monitor, recorder, sequence)
    shown = {
        place: m.buffer.splits(m.number, len(found))
        for place, m in enumerate(found)
        if m.came and m.route and m.buffer is not None
    }
    pairs = [(src, dst, shown[src][0][dst], shown[dst][1][src]) for src in shown for dst in shown]
    messages = [
        (src, dst, sent == expected)
        for src, dst, sent, expected in pairs
        if sent != expected or (sent and src != dst)
    ]
    if all(fits for *_, fits in messages):
        return None
    return verdict_text.wrong_splits(
        recorder, sequence, found, shown, worst_correspondent([m.rank for m in found], messages)
    )


def _messages(found: Sequence[Member]) -> set[tuple[int, int]]:
    """Return (place of the sender, of the receiver), as either end states, where both arrived."""
    said = set()
    for place, m in enumerate(found):
        if m.came and m.route >> 32:
            said.add((place, (m.route >> 32) - 1))
        if m.came and m.route & _LOW32:
            said.add(((m.route & _LOW32) - 1, place))
    return {(src, dst) for src, dst in said if found[src].came and found[dst].came}


def _fits(found: Sequence[Member], src: int, dst: int) -> bool:
    """Return whether both ends know of the message and agree on its size."""
    sender, receiver = found[src], found[dst]
    if sender.route >> 32 != dst + 1 or receiver.route & _LOW32 != src + 1:
        return False
    sent, expected = sender.record, receiver.record
    return sent is None or expected is None or sent.sent == expected.received


def _wait_cycle(monitor: Monitor, found: Sequence[Member], waited: int) -> Verdict | None:
    """Return the verdict on a deadlock: all missing ranks wait, in the end for this rank."""
    return None if waited < STABLE_NS else _cycle(monitor, [m for m in found if m.came is False])


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
        found = awaited(monitor.directory, m.rank)
        if not found:
            return None  # it still runs, or nothing is known of it
        ahead += found
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
        monitor, recorder, sequence, members(monitor, recorder, sequence), monotonic_ns() - since
    )
