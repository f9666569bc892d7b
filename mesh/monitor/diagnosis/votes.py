"""Majority votes: which ranks are the outliers where ranks differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def connected_components(items: Sequence[T], alike: Callable[[T, T], bool]) -> list[list[T]]:
    """Return the connected components of `items` under the relation `alike`.

    The relation need not be transitive: two ranks may know a value by different hashes, and a third
    may share one with each.
    """
    parties: list[list[T]] = []
    for item in items:
        near = [party for party in parties if any(alike(item, other) for other in party)]
        parties = [party for party in parties if all(party is not p for p in near)] + [
            [*(x for party in near for x in party), item]
        ]
    return parties


def is_divided(parties: Sequence[Sequence[T]], differ: Callable[[T, T], bool]) -> bool:
    """Return whether any two items of different parties are known to differ."""
    return any(
        any(itertools.starmap(differ, itertools.product(one, other)))
        for one, other in itertools.combinations(parties, 2)
    )


def parties_by(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Return the items grouped by their key, in the order in which keys first appear."""
    parties: dict[Hashable, list[T]] = {}
    for item in items:
        parties.setdefault(key(item), []).append(item)
    return list(parties.values())


def minority(parties: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return all ranks outside the largest party, in order; none if two parties tie."""
    ordered = sorted(parties, key=len, reverse=True)
    if len(ordered) < 2 or len(ordered[0]) == len(ordered[1]):
        return ()
    return tuple(sorted(rank for party in ordered[1:] for rank in party))


def worst_correspondent(
    ranks: Sequence[int], messages: Sequence[tuple[int, int, bool]]
) -> tuple[int, ...]:
    """Return the rank with the largest share of mismatched messages.

    Of several, the one with most of them; none if ranks tie.

    Args:
        ranks: by place in the group.
        messages: (place of the sender, place of the receiver, whether both describe the message
            alike).
    """
    shares = []
    for place in range(len(ranks)):
        fits = [fit for src, dst, fit in messages if place in (src, dst)]
        shares.append((fits.count(False) / max(1, len(fits)), fits.count(False)))
    return (ranks[shares.index(max(shares))],) if shares.count(max(shares)) == 1 else ()
