"""Find the first call in which the histories of a job's ranks differ.

rank 0   all_reduce dp    all_reduce dp     barrier ...    rank 0 is the outlier, by the first call
rank 1   all_reduce dp    barrier ...                      that differs after the last that all made
rank 2   all_reduce dp    barrier ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...comm.recording.trace_buffer import Header, Record, TraceBuffer
from .votes import minority, parties_by

MESSAGES = ("send", "recv")
TORCHS_DEFAULT = "torch's default group"
_TORCHS = "torch's group"
_HISTORY = 1000  # calls of each rank that are compared

# What is compared of a call: operation and axes.
_Step = tuple[str, str]
_CachedCall = tuple[Record, _Step, int]  # with the key of the group


def left_the_order(buffers: Mapping[int, TraceBuffer], stuck: Mapping[int, int]) -> tuple[int, ...]:
    """Return the outliers at the first call in which the histories differ in operation or axes.

    Messages, and calls on groups that the program made of some ranks, are left out: which ranks
    take part in them differs anyway. If nothing else differs, the outliers may be those that alone
    do not send or receive a message there.

    Args:
        buffers: trace buffer of each rank.
        stuck: number of the record in which a rank waits. A difference further back did not cause
            this deadlock: ranks that do not run the same program have always differed. Later calls,
            of hosts that run ahead of a device, do not count.
    """
    most = max(p.words[Header.RECORDS] for p in buffers.values())
    calls = {
        rank: _calls(buffer, max(0, most - _HISTORY), stuck.get(rank, most))
        for rank, buffer in buffers.items()
    }
    calls = _since_all_met(calls, len(buffers))
    blamed = _outliers(
        buffers,
        {
            rank: [call for call in its if _is_for_all(buffers[rank], call)]
            for rank, its in calls.items()
        },
        stuck,
    )
    return _outliers(buffers, calls, stuck, only_messages=True) or () if blamed is None else blamed


def _calls(buffer: TraceBuffer, first: int, last: int) -> list[_CachedCall]:
    records = [
        buffer.record(number)
        for number in range(min(first, last), min(last + 1, buffer.words[Header.RECORDS]))
    ]
    return [
        (record, _step_of(buffer, record), buffer.group_key(record.group))
        for record in records
        if record is not None
    ]


def _step_of(buffer: TraceBuffer, record: Record) -> _Step:
    op = record.call.partition("\t")[0]
    return op, "" if op in MESSAGES else buffer.group_text(record.group).partition("\t")[0]


def _is_for_all(buffer: TraceBuffer, call: _CachedCall) -> bool:
    record, (op, axes), _ = call
    if op in MESSAGES:
        return False
    return (
        not axes.startswith(_TORCHS)
        or buffer.group_text(record.group).count(",") + 1 == buffer.words[Header.SIZE]
    )


def _since_all_met(
    calls: Mapping[int, list[_CachedCall]], ranks: int
) -> dict[int, list[_CachedCall]]:
    """Return the calls after the last one that all ranks made in one group.

    In any order; all calls where there is none.
    """
    places = {
        rank: {(key, record.sequence): at for at, (record, _, key) in enumerate(its)}
        for rank, its in calls.items()
    }
    shared = set.intersection(*(set(place_of_call) for place_of_call in places.values()))
    if not shared:
        return dict(calls)
    some = next(iter(places.values()))
    last = max(shared, key=lambda call: some[call])
    return {rank: its[places[rank][last] + 1 :] for rank, its in calls.items()}


def _outliers(
    buffers: Mapping[int, TraceBuffer],
    calls: Mapping[int, Sequence[_CachedCall]],
    stuck: Mapping[int, int],
    only_messages: bool = False,
) -> tuple[int, ...] | None:
    """Return the ranks that differ first, none if votes are equal; None if no rank differs."""
    for step in zip(*(calls[rank] for rank in buffers), strict=False):
        calls_of_step = dict(zip(buffers, step, strict=True))
        parties = parties_by(calls_of_step, lambda rank: calls_of_step[rank][1])  # noqa: B023
        if len(parties) > 1:
            blamed = minority(parties)
            if only_messages and not (
                len(parties) == 2
                and any(calls_of_step[rank][1][0] in MESSAGES for rank in max(parties, key=len))
            ):
                return ()
            return (
                blamed
                if all(calls_of_step[rank][0].number >= stuck.get(rank, 0) - 1 for rank in blamed)
                else ()
            )
    return None
