"""Build verdicts in the simulated world, where everything is known.

Which rank called what, waits for what, has finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..comm.recording.recorder import unlike
from ..comm.recording.trace_buffer import Header
from ..errors import CollectiveMismatchError, DeadlockError, at, short
from ..monitor.diagnosis.history import left_the_order
from ..monitor.diagnosis.verdict_text import OTHER_STEPS, RULE, in_step, on_values
from ..monitor.diagnosis.votes import (
    connected_components,
    minority,
    parties_by,
    worst_correspondent,
)
from ..monitor.verdict import Observation, Verdict, compose_text
from ..text import ranks_text
from .arrival import Arrival

_FIELDS = ("operation", "agree", "layout", "lineage")


class BlockedRank(NamedTuple):
    """A blocked rank: its collective, the group, the ranks that are missing, and the line."""

    rank: int
    call: Arrival
    ranks: Sequence[int]
    missing: list[int]
    place: str | None


def are_in_different_steps(calls: Sequence[Arrival]) -> bool:
    """Return whether ranks have marked different steps, as far as they have marked any."""
    return len({call.step for call in calls} - {None}) > 1


def different_collectives(
    problem: str, ranks: Sequence[int], calls: Sequence[Arrival], places: Sequence[str | None]
) -> CollectiveMismatchError:
    blamed = _outliers(ranks, calls)
    field = _field(calls)
    seen = tuple(
        Observation(*fields)
        for fields in zip(ranks, map(str, calls), (place or "" for place in places), strict=True)
    )
    if field == "step":
        seen = tuple(in_step(s, call.step) for s, call in zip(seen, calls, strict=True))
    who: dict[str, list[int]] = {}
    for observation in seen:
        who.setdefault(f"{observation.call}{at(observation.place or None)}", []).append(
            observation.rank
        )
    lines = [f"  ranks {members} call {text}" for text, members in who.items()]
    advice = OTHER_STEPS if field == "step" else RULE
    if field == "lineage":
        advice = on_values(
            {rank: call.trace_buffer for rank, call in zip(ranks, calls, strict=True)}
        )
    text = compose_text(
        f"{problem} in the group of ranks {short(ranks)}{_blame(blamed)}.", advice, lines
    )
    return CollectiveMismatchError(text, Verdict("mismatch", blamed, field, seen, text))


def _blame(blamed: Sequence[int]) -> str:
    return f"; outlier: {ranks_text(blamed)}" if blamed else ""


def _fields(call: Arrival) -> list[object]:
    return [call.op, call.agree, call.tag, call.lineage]


def _field(calls: Sequence[Arrival]) -> str:
    if are_in_different_steps(calls):
        return "step"
    first = _fields(calls[0])
    for call in calls:
        for name, one, other in zip(_FIELDS, first, _fields(call), strict=True):
            if one != other:
                return _name_of_agreed(calls[0], call) if name == "agree" else name
    return ""


def _name_of_agreed(one: Arrival, other: Arrival) -> str:
    for one_value, other_value in zip(one.agree, other.agree, strict=False):
        if one_value != other_value:
            return _name_of_value(one_value)
    return "shape"


def _name_of_value(value: object) -> str:
    if not isinstance(value, str):
        return "dtype"
    if value.startswith("src="):
        return "source"
    return "shape" if value.endswith("elements") else "reduction"


def _outliers(ranks: Sequence[int], calls: Sequence[Arrival]) -> tuple[int, ...]:
    if are_in_different_steps(calls):
        marked = [
            (rank, call) for rank, call in zip(ranks, calls, strict=True) if call.step is not None
        ]
        in_one_step = parties_by(marked, lambda place: place[1].step)
        return minority([[rank for rank, _ in party] for party in in_one_step])
    parties = connected_components(
        list(zip(ranks, calls, strict=True)), lambda one, other: _alike(one[1], other[1])
    )
    if len(parties) == 1:
        return worst_correspondent(ranks, list(_messages(calls)))
    return minority([[rank for rank, _ in party] for party in parties])


def _messages(calls: Sequence[Arrival]) -> Iterator[tuple[int, int, bool]]:
    """Yield each message that a sender or a receiver describes.

    (place of the sender, of the receiver, whether both describe it alike).
    """
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            if i != j:
                sent, expected = _amounts(sender, receiver, i, j)
                if sent or expected:
                    yield i, j, sent == expected


def _amounts(sender: Arrival, receiver: Arrival, i: int, j: int) -> tuple[int, int]:
    """Return how much goes from one rank to the other, as each states.

    Plus one where a message may be empty, so that 0 means none.
    """
    if sender.op == "all_to_all":
        return sender.buffers[3][j], receiver.buffers[2][i]
    _, x, dst, _ = sender.buffers
    out, _, _, src = receiver.buffers
    return (x.numel() + 1 if dst == j else 0), (out.numel() + 1 if src == i else 0)


def _alike(one: Arrival, other: Arrival) -> bool:
    return _fields(one)[:3] == _fields(other)[:3] and not unlike(one.lineage, other.lineage)


def no_rank_can_go_on(waits: Sequence[BlockedRank], finished: Sequence[int]) -> DeadlockError:
    """Return the error for a simulated world in which every rank is blocked or has finished."""
    blamed = _who_keeps_waiting(waits, set(finished))
    lines = [
        f"  rank {w.rank} waits in {w.call} over ranks {short(w.ranks)} for ranks "
        f"{w.missing}{at(w.place)}"
        for w in waits
    ]
    if finished:
        lines.append(f"  ranks {list(finished)} have finished")
    seen = tuple(Observation(w.rank, str(w.call), w.place or "") for w in waits)
    seen += tuple(Observation(rank, "has finished", "") for rank in finished)
    text = compose_text(f"no simulated rank can go on{_blame(blamed)}.", RULE, lines)
    return DeadlockError(text, Verdict("deadlock", blamed, "order", seen, text))


def _who_keeps_waiting(waits: Sequence[BlockedRank], finished: set[int]) -> tuple[int, ...]:
    """Return the smaller of those that finished and those that wait for them.

    If nobody waits for a rank that has finished, return the ranks that left the order of calls.
    """
    missing: set[int] = set().union(*(w.missing for w in waits))
    gone = sorted(missing & finished)
    if gone:
        return minority([gone, [w.rank for w in waits if not finished.isdisjoint(w.missing)]])
    buffers = {w.rank: w.call.trace_buffer for w in waits if w.call.trace_buffer is not None}
    return (
        left_the_order(
            buffers, {rank: buffer.words[Header.RECORDS] - 1 for rank, buffer in buffers.items()}
        )
        if buffers
        else ()
    )
