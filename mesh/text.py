"""Format tables and lists of ranks as text of bounded length."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the rows as lines with aligned columns.

    Args:
        right: indices of the columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    return ["  ".join(pad(c, w) for pad, c, w in zip(pads, row, widths, strict=True)).rstrip() for row in rows]


def ends(items: Sequence[Item], most: int) -> list[Item | None]:
    """Return all items, or, if there are more than `most`, the first and the last ones around a None."""
    if len(items) <= most:
        return list(items)
    head = (most + 1) // 2
    return [*items[:head], None, *items[len(items) - most + head :]]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks for a sentence: `rank 2`, or `ranks 0, 1, 3`; the middle of a long list is left out."""
    names = [str(r) for r in ranks]
    if len(names) > 16:
        names = [*names[:8], "...", *names[-4:]]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(names)}"


def rank_runs(ranks: Sequence[int], most: int = 8) -> str:
    """Return ranks with runs of three or more shortened: `0-3,8,9`; of more than `most` runs the first three, the last and the count."""
    runs: list[str] = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        found = [rank for _, rank in run]
        runs += [f"{found[0]}-{found[-1]}"] if len(found) > 2 else map(str, found)
    if len(runs) <= most:
        return ",".join(runs)
    return f"{','.join(runs[:3])},...,{runs[-1]} ({len(ranks):,} ranks)"
