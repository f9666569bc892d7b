"""Caches that end somewhere."""

from __future__ import annotations

from itertools import islice
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

LIMIT = 4096


def keep(cache: dict[Key, Value], key: Key, value: Value, limit: int | None = None) -> Value:
    """Put a value into a cache, and give it back; a full cache forgets the older half first.

    A cache that is emptied whole would have everything that is in use worked out again at once; counting uses would cost
    time at each of them.
    """
    limit = LIMIT if limit is None else limit
    if len(cache) >= limit:
        for old in list(islice(cache, limit // 2)):
            del cache[old]
    cache[key] = value
    return value
