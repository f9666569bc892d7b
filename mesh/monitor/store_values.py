"""Check values of the job's store, to which everybody who reaches its port can write.

    value of the store  --- parsed(key, value, parse) --->  a value of the right type, or one
                                                            StoreValueError that names the key

torch's store has neither passwords nor owners of keys, so no value decides more than it has to: a
job's name is 16 digits, its folder is one that this host would choose, and a copy of another host's
records keeps within its parts. See docs/trust.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .. import errors
from ..abstract_mesh import MOST_RANKS
from ..text import shortened, whole_number

T = TypeVar("T")

MOST_BYTES = 1 << 20  # of a value; a head of a host of 8 ranks has about 10 kB
_JOB = re.compile(r"[0-9a-f]{16}")
_LONGEST_TEXT = 20_000


class StoreValueError(errors.LaunchEnvironmentError):
    """A value of the job's store is not one that a rank of this job has written."""


def parsed(key: str, value: bytes, parse: Callable[[str], T], most: int = MOST_BYTES) -> T:
    """Return parse(value as text).

    Args:
        key: where the value was, for the error.
        parse: raises ValueError, TypeError or LookupError for what it cannot take.
        most: bytes.

    Raises: StoreValueError.
    """
    try:
        if len(value) > most:
            raise ValueError(f"it has {len(value)} bytes")
        return parse(value.decode())
    except StoreValueError:
        raise
    except (ValueError, TypeError, LookupError) as error:
        raise bad_value(key, value, str(error)) from None


def bad_value(key: str, value: object, why: str) -> StoreValueError:
    """Return the error for a value that no rank of this job has written."""
    return StoreValueError(
        f"the job's store has {shortened(value, 80)} under {key!r}, which no rank of this job has "
        f"written ({shortened(why, 100)}). Something else writes to MASTER_PORT: give the job a "
        "port of its own that only its hosts reach (docs/trust.md)."
    )


# -- parsers, which raise ValueError ---------------------------------------------------------------


def job_name(text: str) -> str:
    if not _JOB.fullmatch(text):
        raise ValueError("a job's name is 16 hexadecimal digits")
    return text


def message(text: str) -> str:
    """Return a text that is only shown, cut where it is longer than any of ours."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def number(text: str) -> int:
    value = whole_number(text.strip())
    if value is None:
        raise ValueError("it is not a whole number")
    return value


def signed_number(text: str) -> int:
    return -number(text[1:]) if text.startswith("-") else number(text)


def rank_list(text: str) -> set[int]:
    """Return the ranks of a list such as "2 0 3 "."""
    ranks = {number(part) for part in text.split()}
    if max(ranks, default=0) >= MOST_RANKS:
        raise ValueError("there is no such rank")
    return ranks


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object. Raises: ValueError."""
    return checked(json_value(text), dict)


def json_value(text: str) -> Any:
    """Return any value in JSON. Raises: ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def checked(value: Any, kind: type[T]) -> T:
    """Return the value. Raises: ValueError if it is of another type (a bool is no int)."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{shortened(value, 40)} is not of type {kind.__name__}")
    return value


def checked_list(value: Any, kind: type[T]) -> list[T]:
    return [checked(one, kind) for one in checked(value, list)]


def whole(value: Any, most: int = (1 << 64) - 1) -> int:
    """Return an int from 0 to `most`. Raises: ValueError."""
    if not 0 <= checked(value, int) <= most:
        raise ValueError(f"{shortened(str(value), 40)} is not a number from 0 to {most}")
    return value


def checked_ranks(value: Any) -> tuple[int, ...]:
    return tuple(whole(rank, MOST_RANKS - 1) for rank in checked(value, list))


def has_fields(value: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the object. Raises: ValueError if it has other fields than these."""
    if set(value) != set(names):
        raise ValueError(f"it has the fields {shortened(sorted(map(str, value)), 60)}")
    return value
