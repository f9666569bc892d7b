"""From what the ranks of a group show, why one of its collectives cannot go on.

    at         what each member calls as this collective: fingerprint and lineage, or that it has not come yet
    mismatch   two differ                                    the smaller party is to blame, nobody when they are equal
    left       one has ended its program                     whichever are fewer: those that left, or those that wait
    lost       one has died
    deadlock   each waits for one that waits elsewhere       as for a mismatch
    messages   of a permute or an all_to_all do not fit      whoever has the largest share of messages that do not
    stall      one keeps the others waiting too long
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ..recording.job_directory import Board, is_dead
from ..recording.recorder import SLOT_WORDS, SLOTS, Seat, differ, row_of, unlike
from ..recording.trace_buffer import H, Page, Record, State
from ..settings import monotonic_ns, settings
from ..verdict import Verdict
from . import verdict_text

if TYPE_CHECKING:
    from ..monitor import Watch

T = TypeVar("T")

_LOW32 = (1 << 32) - 1
_TO_COME_NS = 10_000_000_000  # how long to wait for others whose votes may still decide which of the ranks that differ is odd
_TO_END_NS = 500_000_000  # how long, where one has ended its program, for others to end or come
_STABLE_NS = 500_000_000  # ranks that have waited so long in a circle wait for ever


class Member(NamedTuple):
    """A rank of a group, seen at one of its collectives.

    Attributes:
        page: None when nothing is known of the rank.
        came: None when it is not known, because it has called many more since.
        word: its fingerprint, where it has come.
    """

    rank: int
    page: Page | None
    came: bool | None
    word: int = 0
    lineage: int = 0
    number: int = -1
    route: int = 0

    @property
    def record(self) -> Record | None:
        return None if self.page is None or self.number < 0 else self.page.record(self.number)


def member(board: Board, seat_key: int, rank: int, sequence: int) -> Member:
    page = board.of(rank)
    group = None if page is None else page.find_group(seat_key)
    if page is None or group is None:
        return Member(rank, page, False if page is None or not page.is_full else None)
    at = row_of(group) + (sequence & (SLOTS - 1)) * SLOT_WORDS
    word, lineage, number, route = page.words[at : at + SLOT_WORDS]
    ahead = ((word >> 48) - sequence) & 0xFFFF
    if word and ahead == 0:
        return Member(rank, page, True, word, lineage, number, route)
    return Member(rank, page, None if word and ahead < 0x8000 else False)


def members(watch: Watch, seat: Seat, sequence: int) -> list[Member]:
    return [member(watch.board, seat.key, rank, sequence) for rank in seat.group.ranks]


def have_all_come(found: Sequence[Member]) -> bool:
    return all(m.came is not False for m in found)


def agree(found: Iterable[Member]) -> bool:
    """Whether those who came call the same."""
    return not is_divided(_parties(found), _differ)


def judge(watch: Watch, seat: Seat, sequence: int, since: int) -> Verdict | None:
    """What is wrong with this collective, which this rank has called at the time `since`; None as far as can be told."""
    found = members(watch, seat, sequence)
    waited = monotonic_ns() - since
    if not agree(found):
        return verdict_text.mismatch(seat, sequence, found, odd_ones(found)) if _is_decided(found, waited) else None
    if any(m.page is not None and m.page.words[H.STATE] == State.LOST for m in found):  # it came, but what it sent may not have
        return lost(watch, seat, sequence)
    missing = [m for m in found if m.came is False and (m.page is not None or watch.sees_all)]
    if not missing:
        return None
    return (
        _gone(watch, seat, sequence, found, missing, waited)
        or _circle(watch, seat, sequence, found, waited)
        or _stall(watch, seat, sequence, found, since)
    )


def _is_decided(found: Sequence[Member], waited: int) -> bool:
    """Whether those who have not come could no longer change who is odd, will not come, or take too long."""
    largest = max(map(len, _parties(found)))
    if have_all_come(found) or 2 * largest > len(found) or waited > _TO_COME_NS:
        return True
    return waited > _STABLE_NS and not any(_may_come(m) for m in found if m.came is False)


def _may_come(m: Member) -> bool:
    """Whether a rank still runs, as far as is known, and has not waited for long in another collective."""
    if m.page is None:
        return True
    return m.page.words[H.STATE] == State.RUNNING and _blocked_for_long(m.page) is None and not is_dead(m.page)


def odd_ones(found: Sequence[Member]) -> tuple[int, ...]:
    return minority([[m.rank for m in party] for party in _parties(found)])


def _parties(found: Iterable[Member]) -> list[list[Member]]:
    """Those who have come, by what they call."""
    return connected([m for m in found if m.came], _alike)


def _alike(one: Member, other: Member) -> bool:
    return one.word == other.word and not unlike(one.lineage, other.lineage)


def _differ(one: Member, other: Member) -> bool:
    return one.word != other.word or differ(one.lineage, one.page, other.lineage, other.page)


def connected(items: Sequence[T], alike: Callable[[T, T], bool]) -> list[list[T]]:
    """The items in parties: those that are alike, or are connected by others. (What two ranks know a value by may differ, and a third
    may have something in common with both.)"""
    parties: list[list[T]] = []
    for item in items:
        near = [party for party in parties if any(alike(item, other) for other in party)]
        parties = [party for party in parties if all(party is not p for p in near)] + [[*(x for party in near for x in party), item]]
    return parties


def is_divided(parties: Sequence[Sequence[T]], differ: Callable[[T, T], bool]) -> bool:
    """Return whether any two items of different parties are known to differ."""
    return any(differ(a, b) for one, other in itertools.combinations(parties, 2) for a in one for b in other)


def minority(parties: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """All ranks but those of the largest party; none where two are equally large."""
    ordered = sorted(parties, key=len, reverse=True)
    if len(ordered) < 2 or len(ordered[0]) == len(ordered[1]):
        return ()
    return tuple(sorted(rank for party in ordered[1:] for rank in party))


def parties_by(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    found: dict[Hashable, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def _gone(watch: Watch, seat: Seat, sequence: int, found: Sequence[Member], missing: Sequence[Member], waited: int) -> Verdict | None:
    """Members that will never come."""
    if any(_is_lost(m) for m in missing):
        return lost(watch, seat, sequence)
    left = [m for m in missing if m.page is not None and m.page.words[H.STATE] in (State.ENDED, State.CLOSED)]
    undecided = len(missing) > len(left)
    if not left or (undecided and waited < _TO_END_NS):
        return None
    waiting = [m.rank for m in found if m.came]
    return verdict_text.left(seat, sequence, found, left, minority([waiting, [m.rank for m in left]]))


def lost(watch: Watch, seat: Seat, sequence: int) -> Verdict | None:
    """All ranks of the job that have died or cannot be reached, if any has."""
    gone = lost_ranks(watch.board)
    return verdict_text.lost(seat, sequence, members(watch, seat, sequence), gone) if gone else None


def lost_ranks(board: Board) -> list[Member]:
    """Those that have died or cannot be reached."""
    return [m for m in _everyone(board) if _is_lost(m)]


def ended_ranks(board: Board) -> list[Member]:
    """Those whose program is over."""
    return [m for m in _everyone(board) if m.page is not None and m.page.words[H.STATE] in (State.ENDED, State.CLOSED)]


def _everyone(board: Board) -> list[Member]:
    return [Member(rank, board.of(rank), False) for rank in range(board.size)]


def wrong_route(watch: Watch, seat: Seat, sequence: int) -> Verdict | None:
    """Whether messages of this collective have nobody at their other end, as far as its ranks have come."""
    found = members(watch, seat, sequence)
    messages = [(src, dst, _fits(found, src, dst)) for src, dst in _messages(found)]
    if all(fits for *_, fits in messages):
        return None
    return verdict_text.wrong_route(seat, sequence, found, worst_correspondent([m.rank for m in found], messages))


def worst_correspondent(ranks: Sequence[int], messages: Sequence[tuple[int, int, bool]]) -> tuple[int, ...]:
    """The rank of whose messages the largest share does not fit what the other end says, of several the one with most of these; none where
    that is several.

    Args:
        messages: place of the sender and of the receiver, whether both say the same of it.
    """
    shares = []
    for place in range(len(ranks)):
        fits = [fit for src, dst, fit in messages if place in (src, dst)]
        shares.append((fits.count(False) / max(1, len(fits)), fits.count(False)))
    return (ranks[shares.index(max(shares))],) if shares.count(max(shares)) == 1 else ()


def wrong_splits(watch: Watch, seat: Seat, sequence: int) -> Verdict | None:
    """Whether ranks of this all_to_all send what others do not expect, as far as they have come."""
    found = members(watch, seat, sequence)
    shown = {place: m.page.splits(m.number, len(found)) for place, m in enumerate(found) if m.came and m.route and m.page is not None}
    pairs = [(src, dst, shown[src][0][dst], shown[dst][1][src]) for src in shown for dst in shown]
    messages = [(src, dst, sent == expected) for src, dst, sent, expected in pairs if sent != expected or (sent and src != dst)]
    if all(fits for *_, fits in messages):
        return None
    return verdict_text.wrong_splits(seat, sequence, found, shown, worst_correspondent([m.rank for m in found], messages))


def _messages(found: Sequence[Member]) -> set[tuple[int, int]]:
    """(place of the sender, place of the receiver), as either says, where both have come."""
    said = set()
    for place, m in enumerate(found):
        if m.came and m.route >> 32:
            said.add((place, (m.route >> 32) - 1))
        if m.came and m.route & _LOW32:
            said.add(((m.route & _LOW32) - 1, place))
    return {(src, dst) for src, dst in said if found[src].came and found[dst].came}


def _fits(found: Sequence[Member], src: int, dst: int) -> bool:
    """Whether both know of the message, and how large it is."""
    sender, receiver = found[src], found[dst]
    if sender.route >> 32 != dst + 1 or receiver.route & _LOW32 != src + 1:
        return False
    sent, expected = sender.record, receiver.record
    return sent is None or expected is None or sent.sent == expected.received


def _is_lost(m: Member) -> bool:
    if m.page is None:
        return False
    state = m.page.words[H.STATE]
    return state == State.LOST or (state in (State.RUNNING, State.RAISED) and is_dead(m.page))


def _circle(watch: Watch, seat: Seat, sequence: int, found: Sequence[Member], waited: int) -> Verdict | None:
    """Whether all those who are missing wait themselves, in the end for this rank."""
    if waited < _STABLE_NS:
        return None
    me = seat.world.rank
    reached, ahead = {me}, [m.rank for m in found if m.came is False]
    while ahead:
        rank = ahead.pop()
        if rank in reached:
            continue
        reached.add(rank)
        awaited = _awaited(watch.board, rank)
        if not awaited:
            return None  # one that still runs, or nothing is known of it
        ahead += awaited
    stuck = [(rank, page.blocked) for rank in sorted(reached) if (page := watch.board.of(rank)) is not None]
    return verdict_text.deadlock(watch.board, [(rank, record) for rank, record in stuck if record is not None])


def _awaited(board: Board, rank: int) -> list[int]:
    """The ranks that this one has been waiting for, for some time."""
    page = board.of(rank)
    record = None if page is None else _blocked_for_long(page)
    if page is None or record is None:
        return []
    ranks = [int(r) for r in page.group_text(record.group).partition("\t")[2].split(",") if r.isdecimal()]
    key = page.group_key(record.group)
    return [r for r in ranks if r != rank and member(board, key, r, record.sequence).came is False]


def _blocked_for_long(page: Page) -> Record | None:
    """The collective that a rank has been waiting in for some time."""
    return page.blocked if monotonic_ns() - page.words[H.BLOCKED_SINCE] >= _STABLE_NS // 2 else None


def _stall(watch: Watch, seat: Seat, sequence: int, found: Sequence[Member], since: int) -> Verdict | None:
    timeout_ns = settings().timeout * 1e9
    if monotonic_ns() - since < timeout_ns or watch.ns_since(since) < timeout_ns:
        return None
    return verdict_text.stall(watch, seat, sequence, found, monotonic_ns() - since)
