"""Agreement of the ranks of a group.

What each of them knows, values that must be the same, and errors that all ranks raise.

    gather_facts     rank 0 knows a    rank 1 knows b       ->  {0: a, 1: b} on both
    facts_of         rank 0 knows a    rank 1 waits         ->  a on both
    same_on_all      rank 0 has a      rank 1 has a         ->  a on both; if they differ, an error
    run_on_all       rank 0 returns a  rank 1 raises        ->  the same error on both

All of the library's small messages between ranks go through here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..errors import WatchError
from .group import Group
from .recording.recorder import CommTag

T = TypeVar("T")
_SHOWN = 3  # different errors in one text
_RANKS_SHOWN = 8  # ranks that have the same error


def gather_facts(group: Group, facts: T, *, tag: CommTag | None = None) -> dict[int, T]:
    """gather_facts(group, facts) -> {rank: its facts}, on every rank, in the order of the group.

    Communication: one all_gather of small objects.
    """
    return dict(zip(group.ranks, group.all_gather_object(facts, tag=tag), strict=True))


def facts_of(group: Group, rank: int, facts: Any = None) -> Any:
    """facts_of(group, rank, facts) -> the facts of one rank, on every rank.

    What others pass is not sent.

    Communication: one all_gather of small objects.
    """
    return gather_facts(group, facts if group.world.rank == rank else None)[rank]


def same_on_all(group: Group, value: T, error: Callable[[dict[int, T]], Exception]) -> T:
    """same_on_all(group, value, error) -> value, if every rank has the same.

    Args:
        error: returns the error for values that differ, by rank.

    Raises: that error, on every rank.

    Communication: one all_gather of small objects.
    """
    values = gather_facts(group, value)
    first = values[group.ranks[0]]
    if any(other != first for other in values.values()):
        raise error(values)
    return first


def run_on_all(
    group: Group,
    work: Callable[[], T],
    error: Callable[[str], Exception],
    text: Callable[[Exception], str] = str,
) -> dict[int, T]:
    """run_on_all(group, work, error) -> {rank: what `work()` returned there}, on every rank.

    Args:
        error: returns the error to raise, from a text that is the same on every rank.
        text: returns what the others are told of this rank's error.

    Raises:
        Exception: `error(...)`, on every rank, if `work` raised on some.
        WatchError, KeyboardInterrupt, SystemExit: unchanged, on the ranks where it is raised.

    Communication: one all_gather of small objects.
    """
    result, failure, before = None, None, sys.exc_info()[1]
    try:
        result = work()
    except WatchError:
        raise
    except Exception as raised:
        interrupt = interrupt_of(raised, before)
        if interrupt is not None and not isinstance(interrupt, Exception):
            raise interrupt from None
        failure = interrupt or raised
    told = gather_facts(group, (result, None if failure is None else text(failure)))
    raise_failures({rank: said for rank, (_, said) in told.items()}, error, failure)
    return {rank: value for rank, (value, _) in told.items()}  # type: ignore[misc]


def raise_failures(
    texts: Mapping[int, str | None],
    error: Callable[[str], Exception],
    failure: Exception | None = None,
) -> None:
    """Raise an error if some ranks have failed.

    Args:
        texts: by rank, of all ranks of a group: what it says of its failure, None for none.
        error: returns the error to raise, from a text that is the same on every rank.
        failure: of this rank; the cause of the error.
    """
    by_text: dict[str, list[int]] = {}
    for rank, text in texts.items():
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    if not by_text:
        return
    listed = [
        f"on rank {', '.join(map(str, ranks[:_RANKS_SHOWN]))}: {text}"
        for text, ranks in list(by_text.items())[:_SHOWN]
    ]
    if len(by_text) > _SHOWN:
        listed.append(f"and {len(by_text) - _SHOWN} more")
    same_everywhere = len(by_text) == 1 and None not in texts.values()
    raise error(next(iter(by_text)) if same_everywhere else "; ".join(listed)) from failure


def interrupt_of(error: BaseException, before: BaseException | None) -> BaseException | None:
    """Return the first interrupt that `error` replaced.

    One that is not an `Exception`, or says that there is no memory.

    Args:
        before: the error that was being handled when the work began; it is not of this work.
    """
    seen: set[int] = set()
    at = error.__cause__ or error.__context__
    while at is not None and at is not before and id(at) not in seen:
        if not isinstance(at, Exception) or isinstance(at, MemoryError):
            return at
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    return None
