"""Caches of bounded size: `keep` adds to any, and a `LayoutCache` lives on layouts."""

from __future__ import annotations

from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

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


class CacheOwner(Protocol):
    """What caches live on: a `Layout`.

    Attributes:
        caches: the values of each cache.
    """

    caches: dict[LayoutCache[Any, Any], dict[Any, Any]]


class LayoutCache(Generic[Key, Value]):
    """What one part of the library computes from layouts, kept on the first of them.

    So it lives as long as this layout, and does not keep a mesh alive. Make one for each kind of
    value, at the top of a module.

    Args:
        limit: number of values on one layout, see `keep`.

    Example:
        >>> mesh = AbstractMesh((2,), ("dp",))
        >>> lengths: LayoutCache[str, int] = LayoutCache(limit=16)
        >>> layout = Layout.of(mesh, P("dp"), (8,))
        >>> lengths.get(layout, "mine") or lengths.keep(layout, "mine", layout.shape[0] // 2)
        4
        >>> lengths.get(layout, "mine")
        4
    """

    __slots__ = ("_limit",)

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit

    def get(self, layout: CacheOwner, key: Key) -> Value | None:
        """Return the value of a key on this layout, None if there is none."""
        values = layout.caches.get(self)
        return None if values is None else values.get(key)

    def keep(self, layout: CacheOwner, key: Key, value: Value) -> Value:
        """Put a value on this layout and return it."""
        values = layout.caches.get(self)
        if values is None:
            values = layout.caches.setdefault(self, {})
        return keep(values, key, value, self._limit)
