"""Tables and lists of ranks as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table_lines(rows: Sequence[Sequence[str]], right: Collection[int] | None = None) -> list[str]:
    """Return the rows as lines in which each column is as wide as its widest cell.

    Args:
        rows: the cells of each row; the first row may be headings.
        right: the columns to align to the right; by default those in which every cell below the first row begins with a digit.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if right is None:
        right = [i for i, column in enumerate(columns) if all(cell[:1].isdigit() for cell in column[1:])]
    pads = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    return ["  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)).rstrip() for row in rows]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks for a sentence: `rank 2`, or `ranks 0, 1, 3`; the middle of a long list is left out."""
    names = [str(r) for r in ranks]
    if len(names) > 16:
        names = [*names[:8], "...", *names[-4:]]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(names)}"
