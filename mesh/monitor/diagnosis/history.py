"""Where the ranks of a job parted, from what each of them has called.

    rank 0   all_reduce dp    all_reduce dp     barrier ...
    rank 1   all_reduce dp    barrier ...
    rank 2   all_reduce dp    barrier ...            from the last call that all have made on, the first in which they differ: rank 0 is odd
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..recording.trace_buffer import H, Page, Record

MESSAGES = ("send", "recv")
TORCHS_DEFAULT = "torch's default group"
_TORCHS = "torch's group"
_HISTORY = 1000  # so many calls are looked through

# What is compared of a call: operation and axes.
_Step = tuple[str, str]
_Call = tuple[Record, _Step, int]  # with the key of the group


def left_the_order(pages: Mapping[int, Page], stuck: Mapping[int, int]) -> tuple[int, ...]:
    """Who is odd at the first call in which the ranks' histories differ in operation or axes.

    Messages, and what is called on groups that the program has made of some ranks, are left out: who takes part in them differs anyway.
    Where there is no other difference it may still be that all but one rank send or receive a message there.

    Args:
        stuck: the number of the record in which a rank waits. A difference that lies further back is none of this deadlock's:
            ranks that do not run the same program have always differed.
    """
    calls = {rank: _calls(page, max(p.words[H.RECORDS] for p in pages.values())) for rank, page in pages.items()}
    calls = _since_all_met(calls, len(pages))
    blamed = _odd(pages, {rank: [call for call in its if _is_for_all(pages[rank], call)] for rank, its in calls.items()}, stuck)
    return _odd(pages, calls, stuck, only_messages=True) or () if blamed is None else blamed


def _calls(page: Page, most: int) -> list[_Call]:
    first = max(0, most - _HISTORY)
    found = [page.record(number) for number in range(first, page.words[H.RECORDS])]
    return [(record, _step_of(page, record), page.group_key(record.group)) for record in found if record is not None]


def _step_of(page: Page, record: Record) -> _Step:
    op = record.call.partition("\t")[0]
    return op, "" if op in MESSAGES else page.group_text(record.group).partition("\t")[0]


def _is_for_all(page: Page, call: _Call) -> bool:
    record, (op, axes), _ = call
    return op not in MESSAGES and (not axes.startswith(_TORCHS) or page.group_text(record.group).count(",") + 1 == page.words[H.SIZE])


def _since_all_met(calls: Mapping[int, list[_Call]], ranks: int) -> dict[int, list[_Call]]:
    """What came after the last call that all ranks have made in one group, in any order; everything where there is none."""
    places = {rank: {(key, record.sequence): at for at, (record, _, key) in enumerate(its)} for rank, its in calls.items()}
    shared = set.intersection(*(set(found) for found in places.values()))
    if not shared:
        return dict(calls)
    some = next(iter(places.values()))
    last = max(shared, key=lambda call: some[call])
    return {rank: its[places[rank][last] + 1 :] for rank, its in calls.items()}


def _odd(
    pages: Mapping[int, Page], calls: Mapping[int, Sequence[_Call]], stuck: Mapping[int, int], only_messages: bool = False
) -> tuple[int, ...] | None:
    """Who differs first, nobody where votes are equal; None where nobody differs."""
    from .diagnose import minority, parties_by

    for step in zip(*(calls[rank] for rank in pages), strict=False):
        here = dict(zip(pages, step, strict=True))
        parties = parties_by(here, lambda rank: here[rank][1])  # noqa: B023
        if len(parties) > 1:
            blamed = minority(parties)
            if only_messages and not (len(parties) == 2 and any(here[rank][1][0] in MESSAGES for rank in max(parties, key=len))):
                return ()
            return blamed if all(here[rank][0].number >= stuck.get(rank, 0) - 1 for rank in blamed) else ()
    return None
