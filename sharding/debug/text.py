"""Lists as text of bounded length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def elided(items: Sequence[Item], max_items: int) -> list[Item | None]:
    """Return all items, or the first and the last ones with a None between them if there are more than `max_items`."""
    if len(items) <= max_items:
        return list(items)
    head = (max_items + 1) // 2
    return [*items[:head], None, *items[len(items) - max_items + head :]]


def rank_ranges(ranks: Sequence[int], max_ranges: int = 8) -> str:
    """Return ranks with runs of three or more shortened, `0-3,8,9`; of many runs a few, and the number of ranks."""
    ranges: list[str] = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        found = [rank for _, rank in run]
        ranges += [f"{found[0]}-{found[-1]}"] if len(found) > 2 else map(str, found)
    if len(ranges) <= max_ranges:
        return ",".join(ranges)
    return f"{','.join(ranges[:3])},...,{ranges[-1]} ({len(ranks):,} ranks)"
