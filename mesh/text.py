"""Tables, lists and ranks as text of bounded length; numbers and texts that others have written."""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Collection, Sequence
from typing import TypeVar

Item = TypeVar("Item")

_SHOWN = 200  # characters of a value that others have written
# Control characters but newline and tab, marks that turn the direction of text, and halves of
# surrogate pairs.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_DIGITS = re.compile(r"[0-9]{1,18}")
_repr = reprlib.Repr()  # of large objects a part, in little time
_repr.maxstring = _repr.maxother = _repr.maxlong = _SHOWN
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = 16

# in names of environment variables
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|AUTH|JWT|CREDENTIAL", re.IGNORECASE)


class Lines(str):
    """A text of several lines, which is shown as lines where it is the value of an expression."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def is_secret(name: str) -> bool:
    """Return whether a variable of this name may hold a secret, which is neither shown nor sent."""
    return bool(_SECRET.search(name))


def whole_number(text: str) -> int | None:
    """whole_number("42") -> 42; None for anything but 1 to 18 ASCII digits.

    `int` and `isdecimal` take digits of every script.
    """
    return int(text) if _DIGITS.fullmatch(text) else None


def printable(text: str) -> str:
    """Return text of others with its control characters escaped, so as not to steer a terminal."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shortened(value: object, most: int = _SHOWN) -> str:
    """Return a value that others have written, or an error, as one line for an error.

    Of at most about `most` characters.
    """
    if isinstance(value, BaseException):
        said = getattr(value, "strerror", None) or str(value) or type(value).__name__
        text = " ".join(said[: 4 * most].split())
    elif isinstance(value, str):
        text = value
    else:
        text = repr(value[: most + 1]) if isinstance(value, bytes) else _repr.repr(value)
    text = printable(text[: most + 1]).replace("\n", "\\n").replace("\t", "\\t")
    return text if len(text) <= most else f"{text[:most]}..."


def table_lines(rows: Sequence[Sequence[str]], right: Collection[int] | None = None) -> list[str]:
    """Return the rows as lines in which each column is as wide as its widest cell.

    Args:
        rows: the cells of each row; the first row may be headings.
        right: the columns to align to the right; by default those in which every cell below the
            first row begins with a digit.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if right is None:
        right = [
            i for i, column in enumerate(columns) if all(cell[:1].isdigit() for cell in column[1:])
        ]
    pads = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    return [
        "  ".join(
            pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks for a sentence: `rank 2`, or `ranks 0, 1, 3`; of a long list both ends."""
    names = [str(r) for r in ranks]
    if len(names) > 16:
        names = [*names[:8], "...", *names[-4:]]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(names)}"


def elided(items: Sequence[Item], max_items: int) -> list[Item | None]:
    """Return all items, or the first and last with None between if more than `max_items`."""
    if len(items) <= max_items:
        return list(items)
    head = (max_items + 1) // 2
    return [*items[:head], None, *items[len(items) - max_items + head :]]


def rank_ranges(ranks: Sequence[int], max_ranges: int = 8) -> str:
    """Return ranks with runs of three or more as `0-3,8,9`; of many a few, and their number."""
    ranges: list[str] = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        ranges += [f"{members[0]}-{members[-1]}"] if len(members) > 2 else map(str, members)
    if len(ranges) <= max_ranges:
        return ",".join(ranges)
    return f"{','.join(ranges[:3])},...,{ranges[-1]} ({len(ranks):,} ranks)"
