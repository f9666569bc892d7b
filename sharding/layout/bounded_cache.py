"""`keep`: add to a cache of bounded size."""

from __future__ import annotations

from itertools import islice
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

LIMIT = 1024  # entries of a kilobyte or so
# entries of ten kilobytes or more, such as compiled redistributions and calls of mapped functions
HEAVY_LIMIT = 256


def keep(cache: dict[Key, Value], key: Key, value: Value, limit: int | None = None) -> Value:
    """Put a value into a cache and return it; of a full cache, the older half is dropped first.

    Half, since an empty cache would make everything in use be computed again at once, and a
    least-recently-used order would cost time at each look-up.
    """
    limit = LIMIT if limit is None else limit
    if len(cache) >= limit:
        for old in list(islice(cache, (limit + 1) // 2)):
            cache.pop(old, None)  # another thread may have dropped it
    cache[key] = value
    return value
