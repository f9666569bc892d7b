"""Comparing copies between ranks, and finding where they differ.

Each rank hashes every leaf. What it sends is one hash of all leaves that it shares with the same ranks, for each such set of ranks,
and one of how its tree is built. Only where these differ more is gathered: the hashes of all leaves, and those of parts of the
first leaf that differs, until the element is found.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....mesh.comm.group import Group
from ....mesh.comm.null import NullGroup
from ....mesh.text import ranks_text
from ...layout.layout import dtype_name
from .bit_hash import bit_hash, flat_of
from .copies import Copy

_PARTS = 256  # into which a leaf is cut to find the element that differs
_LONGEST = 200  # characters of a value
_MOST_NAMED = 4  # of leaves and of sets of ranks that differ

Camps = list[list[int]]  # the ranks of a set that hold the same value, the largest camp first


class ReplicaError(RuntimeError):
    """Ranks that should hold the same values do not; every rank raises it, with the same text.

    Attributes:
        path: the first leaf that differs, by name.
        ranks: the ranks whose copy of it differs from the value that most of its holders have; none where no value is ahead.
        index: of the first element that differs, in the whole tensor; None where shapes differ or it is no tensor.
    """

    def __init__(self, message: str, path: str = "", ranks: Iterable[int] = (), index: Sequence[int] | None = None) -> None:
        super().__init__(message)
        self.path, self.ranks, self.index = path, tuple(ranks), None if index is None else tuple(index)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.path, self.ranks, self.index)


def compare(what: str, copies: Sequence[Copy], group: Group) -> None:
    """Compare copies between the ranks of a group; `what` begins the error's text: "assert_replicated: ".

    Raises: ReplicaError, on every rank.
    Communication: one all_gather of about 60 bytes, and 20 for each set of ranks that share something; after a difference more.
    """
    if isinstance(group, NullGroup):
        return
    prints = _fingerprints(copies)
    tree = _digest([(copy.path, copy.kind) for copy in copies])
    everyone = group.all_gather_object((tree, _by_holders(copies, prints)))
    if any(other != tree for other, _ in everyone):
        raise _other_trees(what, copies, group)
    if not _agree([shared for _, shared in everyone]):
        raise _difference(what, copies, prints, group)


# -- hashes ------------------------------------------------------------------------------------------------------------


def _digest(x: Any) -> bytes:
    return hashlib.blake2b(repr(x).encode(), digest_size=8).digest()


def _fingerprints(copies: Sequence[Copy]) -> list[bytes]:
    """A hash of each leaf as this rank holds it."""
    hashes = {i: bit_hash(c.value) for i, c in enumerate(copies) if isinstance(c.value, Tensor) and not c.value.is_meta}
    numbers = _on_host(hashes)
    return [_digest((_described(copy), numbers.get(i))) for i, copy in enumerate(copies)]


def _on_host(hashes: dict[int, Tensor]) -> dict[int, int]:
    """The values of 0-d tensors, in one transfer for each device."""
    places: dict[torch.device, list[int]] = defaultdict(list)
    for i, x in hashes.items():
        places[x.device].append(i)
    fetched = {device: torch.stack([hashes[i] for i in found]).tolist() for device, found in places.items()}
    return {i: value for device, found in places.items() for i, value in zip(found, fetched[device], strict=True)}


def _described(copy: Copy) -> str:
    """Dtype and shape of this rank's part, or what is no tensor."""
    if isinstance(copy.value, Tensor):
        return f"{dtype_name(copy.value.dtype)}{list(copy.value.shape)}"
    return repr(copy.value) if copy.can_be_compared else copy.kind


def _by_holders(copies: Sequence[Copy], prints: Sequence[bytes]) -> dict[bytes, tuple[int, bytes]]:
    """For each set of ranks with which this one shares leaves: how many ranks it has, and a hash of all these leaves."""
    shared: dict[tuple[int, ...], list[bytes]] = defaultdict(list)
    for copy, print_ in zip(copies, prints, strict=True):
        if copy.holders:
            shared[copy.holders].append(print_)
    return {_digest(holders): (len(holders), _digest(found)) for holders, found in shared.items()}


def _agree(everyone: Sequence[dict[bytes, tuple[int, bytes]]]) -> bool:
    """Whether all ranks of each set have spoken of it, and have the same hash."""
    found: dict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
    for shared in everyone:
        for holders, entry in shared.items():
            found[holders].append(entry)
    return all(len(entries) == entries[0][0] and len(set(entries)) == 1 for entries in found.values())


# -- what differs ------------------------------------------------------------------------------------------------------


def _camps(values: Iterable[tuple[int, Any]]) -> Camps:
    """Ranks by the value that they have: `(rank, value)`, ranks ascending."""
    found: dict[Any, list[int]] = defaultdict(list)
    for rank, value in values:
        found[value].append(rank)
    return sorted(found.values(), key=lambda ranks: (-len(ranks), ranks))


def _is_tie(camps: Camps) -> bool:
    return len(camps) > 1 and len(camps[0]) == len(camps[1])


def _odd(camps: Camps) -> list[int]:
    return [] if _is_tie(camps) else sorted(rank for camp in camps[1:] for rank in camp)


def _who(camps: Camps) -> str:
    if _is_tie(camps) and len(camps[0]) == 1 < len(camps) - 1:
        return f"no two of {ranks_text([camp[0] for camp in camps])} agree"
    if _is_tie(camps):
        return f"{_some(list(map(ranks_text, camps)), ' against ')}, a tie"
    odd = _odd(camps)
    return f"{ranks_text(odd)} differ{'s' if len(odd) == 1 else ''} from {ranks_text(camps[0])}"


def _some(texts: Sequence[str], separator: str) -> str:
    """The first few, and how many more there are."""
    more = len(texts) - _MOST_NAMED
    return separator.join(texts[:_MOST_NAMED]) + (f"{separator}and {more} more" if more > 0 else "")


def _others(count: int) -> str:
    return "1 other leaf differs" if count == 1 else f"{count} other leaves differ"


def _named(copy: Copy) -> str:
    return f"{copy.path or 'the tree'}, {copy.kind},"


def _other_trees(what: str, copies: Sequence[Copy], group: Group) -> ReplicaError:
    """Ranks have leaves of other names or kinds."""
    everyone = [_kinds(leaves) for leaves in group.all_gather_object([(copy.path, copy.kind) for copy in copies])]
    differing = {path: [kinds.get(path, "not there") for kinds in everyone] for path in sorted(set().union(*everyone))}
    path, kinds = next((path, kinds) for path, kinds in differing.items() if len(set(kinds)) > 1)
    camps = _camps(zip(group.ranks, kinds, strict=True))
    on = "; ".join(f"{kinds[group.ranks.index(camp[0])]} on {ranks_text(camp)}" for camp in camps)
    more = sum(len(set(kinds)) > 1 for kinds in differing.values()) - 1
    rest = f" {_others(more)} so, too." if more else ""
    return ReplicaError(f"{what}the ranks have different trees: {path or 'the tree'} is {on}.{rest}", path, _odd(camps))


def _kinds(leaves: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Name -> kind, or kinds where several leaves have one name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, kind in leaves:
        found[path].append(kind)
    return {path: " and ".join(kinds) for path, kinds in found.items()}


def _difference(what: str, copies: Sequence[Copy], prints: Sequence[bytes], group: Group) -> ReplicaError:
    """Ranks have the same tree with other values in it."""
    everyone = group.all_gather_object([(copy.holders and _digest(copy.holders), x) for copy, x in zip(copies, prints, strict=True)])
    sets = [_sets_that_differ([row[i] for row in everyone], group.ranks) for i in range(len(copies))]
    differing = [i for i, camps in enumerate(sets) if camps]
    if not differing:
        return _other_holders(what, copies, group)
    first, *others = differing
    copy, odd = copies[first], sorted(rank for camps in sets[first] for rank in _odd(camps))
    where, index = _first_difference(copy, (sets[first][0][0][0], sets[first][0][1][0]), group)
    also = f" {_others(len(others))}, too: {_some([copies[i].path for i in others], ', ')}." if others else ""
    text = f"{_named(copy)} is not the same on ranks that should hold the same of it: {_some(list(map(_who, sets[first])), '; ')}"
    return ReplicaError(f"{what}{text}. {where}.{also}", copy.path, odd, index)


def _sets_that_differ(row: Sequence[tuple[Any, bytes]], ranks: Sequence[int]) -> list[Camps]:
    """The sets of ranks that should hold the same of one leaf and do not; that of the lowest rank first."""
    found: dict[Any, list[tuple[int, bytes]]] = defaultdict(list)
    for rank, (holders, print_) in zip(ranks, row, strict=True):
        if holders:
            found[holders].append((rank, print_))
    return [camps for camps in map(_camps, found.values()) if len(camps) > 1]


def _other_holders(what: str, copies: Sequence[Copy], group: Group) -> ReplicaError:
    """Ranks have the same tree, and do not agree on which of them hold the same of it."""
    everyone = group.all_gather_object([copy.holders for copy in copies])
    for i, copy in enumerate(copies):
        holders = {rank: row[i] for rank, row in zip(group.ranks, everyone, strict=True)}
        found = next(((rank, other) for rank in group.ranks for other in holders[rank] if holders[other] != holders[rank]), None)
        if found is not None:
            said = " and ".join(f"by rank {rank} on {ranks_text(holders[rank])}" for rank in found)
            return ReplicaError(f"{what}{_named(copy)} lies {said}: make its mesh of the same ranks on all ranks", copy.path)
    raise RuntimeError(f"{what}hashes of several leaves differ, and those of each leaf do not")


# -- where -------------------------------------------------------------------------------------------------------------


def _first_difference(copy: Copy, pair: tuple[int, int], group: Group) -> tuple[str, list[int] | None]:
    """Where the copies of two ranks differ, in words, and the index in the whole tensor."""
    one, other = _of_pair(_described(copy), pair, group)
    if one != other or not isinstance(copy.value, Tensor):
        return f"Rank {pair[0]} holds {one[:_LONGEST]} and rank {pair[1]} {other[:_LONGEST]}", None
    flat = flat_of(copy.value)
    low, high = _narrowed(flat, pair, group)
    values = _elements(flat[low:high]) if group.world.rank in pair else []
    ones, others = _of_pair((values, list(copy.value.shape), copy.start), pair, group)
    at = next(i for i, (a, b) in enumerate(zip(ones[0], others[0], strict=True)) if a != b)
    index = _global_index(low + at, *ones[1:])
    (one, one_bits), (other, other_bits) = ones[0][at], others[0][at]
    shown = f"{one} and {other}" if one != other else f"{one} of bits 0x{one_bits} and 0x{other_bits}"
    return f"Between ranks {pair[0]} and {pair[1]} the first difference is at index {index}: {shown}", index


def _of_pair(mine: Any, pair: tuple[int, int], group: Group) -> tuple[Any, Any]:
    """What two of the ranks have, on all of them."""
    everyone = group.all_gather_object(mine if group.world.rank in pair else None)
    return everyone[group.ranks.index(pair[0])], everyone[group.ranks.index(pair[1])]


def _narrowed(flat: Tensor, pair: tuple[int, int], group: Group) -> tuple[int, int]:
    """At most `_PARTS` elements, among which is the first one that differs."""
    low, high = 0, _of_pair(flat.numel(), pair, group)[0]
    while high - low > _PARTS:
        step = -(-(high - low) // _PARTS)
        mine = [flat[i : min(i + step, high)] for i in range(low, high, step)] if group.world.rank in pair else []
        one, other = _of_pair([int(bit_hash(part)) for part in mine], pair, group)
        part = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        low, high = low + part * step, min(high, low + (part + 1) * step)
    return low, high


def _elements(flat: Tensor) -> list[tuple[str, str]]:
    """The value and the bits of each element."""
    width = flat.element_size()
    rows = flat.view(torch.uint8).view(-1, width).tolist()
    return [(repr(value), bytes(reversed(row)).hex()) for value, row in zip(flat.tolist(), rows, strict=True)]


def _global_index(flat: int, shape: Sequence[int], start: Sequence[int]) -> list[int]:
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), tuple(shape))] if shape else []
    return [i + begin for i, begin in zip(index, start, strict=True)] if start else index
