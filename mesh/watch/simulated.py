"""Verdicts in the simulated world, where everything is known: who called what, who waits for whom, who has finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..errors import CollectiveMismatchError, DeadlockError, at, short
from .history import left_the_order
from .judge import connected, minority
from .page import H
from .seat import unlike
from .verdict import Seen, Verdict, ranks_text

if TYPE_CHECKING:
    from ..meeting import Call

_FIELDS = ("operation", "agree", "layout", "lineage")


class Wait(NamedTuple):
    """A rank that waits: its collective, the group, who of it has not come, and its line in the program."""

    rank: int
    call: Call
    ranks: Sequence[int]
    missing: list[int]
    place: str | None


def different_collectives(
    problem: str, ranks: Sequence[int], calls: Sequence[Call], places: Sequence[str | None]
) -> CollectiveMismatchError:
    blamed = _odd(ranks, calls)
    who: dict[str, list[int]] = {}
    for rank, call, place in zip(ranks, calls, places, strict=True):
        who.setdefault(f"{call}{at(place)}", []).append(rank)
    lines = [f"{problem} in the group of ranks {short(ranks)}:", *(f"  ranks {members} call {text}" for text, members in who.items())]
    seen = tuple(Seen(*found) for found in zip(ranks, map(str, calls), (place or "" for place in places), strict=True))
    text = "\n".join(lines + _blame(blamed))
    return CollectiveMismatchError(text, Verdict("mismatch", blamed, _field(calls), seen, text))


def _blame(blamed: Sequence[int]) -> list[str]:
    return [f"The odd one: {ranks_text(blamed)}."] if blamed else []


def _fields(call: Call) -> list[object]:
    return [call.op, call.agree, call.note, call.lineage]


def _field(calls: Sequence[Call]) -> str:
    first = _fields(calls[0])
    for call in calls:
        for name, one, other in zip(_FIELDS, first, _fields(call), strict=True):
            if one != other:
                return _name_of_agreed(calls[0], call) if name == "agree" else name
    return ""


def _name_of_agreed(one: Call, other: Call) -> str:
    for mine, theirs in zip(one.agree, other.agree, strict=False):
        if mine != theirs:
            return _name_of_value(mine)
    return "shape"


def _name_of_value(value: object) -> str:
    if not isinstance(value, str):
        return "dtype"
    if value.startswith("src="):
        return "source"
    return "shape" if value.endswith("elements") else "reduction"


def _odd(ranks: Sequence[int], calls: Sequence[Call]) -> tuple[int, ...]:
    parties = connected(list(zip(ranks, calls, strict=True)), lambda one, other: _alike(one[1], other[1]))
    if len(parties) == 1:
        return _worst_correspondent(ranks, list(_messages(calls)))
    return minority([[rank for rank, _ in party] for party in parties])


def _worst_correspondent(ranks: Sequence[int], messages: Sequence[tuple[int, int, bool]]) -> tuple[int, ...]:
    """The rank of whose messages the largest share does not fit what the other end says."""
    shares = []
    for place in range(len(ranks)):
        fits = [fit for src, dst, fit in messages if place in (src, dst)]
        shares.append(fits.count(False) / max(1, len(fits)))
    return (ranks[shares.index(max(shares))],) if shares.count(max(shares)) == 1 else ()


def _messages(calls: Sequence[Call]) -> Iterator[tuple[int, int, bool]]:
    """(place of the sender, of the receiver, whether both say the same of it), for each message that one of them speaks of."""
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            if i != j:
                sent, expected = _amounts(sender, receiver, i, j)
                if sent or expected:
                    yield i, j, sent == expected


def _amounts(sender: Call, receiver: Call, i: int, j: int) -> tuple[int, int]:
    """How much goes from the one to the other, as each says; one more than the elements where nothing may go, too."""
    if sender.op == "all_to_all":
        return sender.buffers[3][j], receiver.buffers[2][i]
    _, x, dst, _ = sender.buffers
    out, _, _, src = receiver.buffers
    return (x.numel() + 1 if dst == j else 0), (out.numel() + 1 if src == i else 0)


def _alike(one: Call, other: Call) -> bool:
    return _fields(one)[:3] == _fields(other)[:3] and not unlike(one.lineage, other.lineage)


def no_rank_can_go_on(waits: Sequence[Wait], finished: Sequence[int]) -> DeadlockError:
    """Every rank waits, or has finished."""
    blamed = _who_keeps_waiting(waits, set(finished))
    lines = ["no simulated rank can go on:"]
    for rank, call, ranks, missing, place in waits:
        lines.append(f"  rank {rank} waits in {call} over ranks {short(ranks)} for ranks {missing}{at(place)}")
    if finished:
        lines.append(f"  ranks {list(finished)} have finished")
    lines += ["Every rank of a group must call the same collectives in the same order.", *_blame(blamed)]
    seen = tuple(Seen(w.rank, str(w.call), w.place or "") for w in waits) + tuple(Seen(r, "has finished", "") for r in finished)
    text = "\n".join(lines)
    return DeadlockError(text, Verdict("deadlock", blamed, "order", seen, text))


def _who_keeps_waiting(waits: Sequence[Wait], finished: set[int]) -> tuple[int, ...]:
    """Those that have finished, if they are fewer than those that wait for them, or the other way round; else who waits elsewhere."""
    gone = sorted({r for w in waits for r in w.missing if r in finished})
    if gone:
        return minority([gone, [w.rank for w in waits if not finished.isdisjoint(w.missing)]])
    pages = {w.rank: w.call.page for w in waits if w.call.page is not None}
    return left_the_order(pages, {rank: page.words[H.RECORDS] - 1 for rank, page in pages.items()}) if pages else ()
