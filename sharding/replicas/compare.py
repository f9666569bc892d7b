"""`compare`: compare replicas between ranks, and find the first element that differs.

Each rank hashes every leaf. It sends a hash of the structure of its tree, and for each set of ranks
with which it shares leaves a hash of all these leaves. Only if these differ, more is gathered: the
hashes of all leaves, and then those of parts of the first leaf that differs, until the element is
found.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...mesh.comm.agreement import gather_facts
from ...mesh.comm.dispatch_modes import outside_of_program_modes
from ...mesh.comm.group import Group
from ...mesh.comm.null import NullGroup
from ...mesh.text import ranks_text
from ..layout.layout import dtype_name
from .bit_hash import bit_hash, flat_of
from .leaves import ReplicaLeaf

_PARTS = 256  # parts into which a leaf is cut to find the element that differs
_LONGEST = 200  # characters of a value
_MOST_NAMED = 4  # of leaves and of sets of ranks that differ

EqualRanks = list[list[int]]  # ranks that hold the same value, the longest list first


class ReplicaError(RuntimeError):
    """Ranks that should hold the same values do not; raised on every rank, with the same text.

    Attributes:
        path: the name of the first leaf that differs.
        ranks: the ranks whose value differs from that of the majority; empty if there is no
            majority.
        index: of the first element that differs, in the global tensor; None if shapes differ or the
            leaf is not a tensor.
    """

    def __init__(
        self,
        message: str,
        path: str = "",
        ranks: Iterable[int] = (),
        index: Sequence[int] | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.ranks = tuple(ranks)
        self.index = None if index is None else tuple(index)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.path, self.ranks, self.index)


def compare(prefix: str, leaves: Sequence[ReplicaLeaf], group: Group) -> None:
    """Compare leaves between the ranks of a group that should hold the same.

    Args:
        prefix: the beginning of the error's text, such as "assert_replicated: ".

    Raises: ReplicaError, on every rank.

    Communication: one all_gather of about 60 bytes, and 20 for each set of ranks that share leaves;
    more if values differ.
    """
    if isinstance(group, NullGroup):
        return
    with outside_of_program_modes():
        _compare(prefix, leaves, group)


def _compare(prefix: str, leaves: Sequence[ReplicaLeaf], group: Group) -> None:
    hashes = _fingerprints(leaves)
    tree = _digest([(leaf.path, leaf.kind) for leaf in leaves])
    everyone = gather_facts(group, (tree, _by_holders(leaves, hashes)))
    if any(other != tree for other, _ in everyone.values()):
        raise _other_trees(prefix, leaves, group)
    if not _agree([shared for _, shared in everyone.values()]):
        raise _difference(prefix, leaves, hashes, group)


# -- hashes ----------------------------------------------------------------------------------------


def _digest(x: Any) -> bytes:
    return hashlib.blake2b(repr(x).encode(), digest_size=8).digest()


def _fingerprints(leaves: Sequence[ReplicaLeaf]) -> list[bytes]:
    """Return a hash of each leaf on this rank."""
    hashes = {
        i: bit_hash(c.value)
        for i, c in enumerate(leaves)
        if isinstance(c.value, Tensor) and not c.value.is_meta
    }
    numbers = _to_numbers(hashes)
    return [_digest((_describe_part(leaf), numbers.get(i))) for i, leaf in enumerate(leaves)]


def _to_numbers(hashes: dict[int, Tensor]) -> dict[int, int]:
    """Return the values of 0-d tensors, in one transfer for each device."""
    on_device: dict[torch.device, list[int]] = defaultdict(list)
    for i, x in hashes.items():
        on_device[x.device].append(i)
    values = {
        device: torch.stack([hashes[i] for i in indices]).tolist()
        for device, indices in on_device.items()
    }
    return {
        i: value
        for device, indices in on_device.items()
        for i, value in zip(indices, values[device], strict=True)
    }


def _describe_part(leaf: ReplicaLeaf) -> str:
    """Return dtype and shape of this rank's part, or the text of a leaf that is not a tensor."""
    if isinstance(leaf.value, Tensor):
        return f"{dtype_name(leaf.value.dtype)}{list(leaf.value.shape)}"
    return repr(leaf.value) if leaf.can_be_compared else leaf.kind


def _by_holders(
    leaves: Sequence[ReplicaLeaf], hashes: Sequence[bytes]
) -> dict[bytes, tuple[int, bytes]]:
    """Return, for each set of ranks that shares leaves with this one, its size and their hash."""
    shared: dict[tuple[int, ...], list[bytes]] = defaultdict(list)
    for leaf, hash_ in zip(leaves, hashes, strict=True):
        if leaf.holders:
            shared[leaf.holders].append(hash_)
    return {
        _digest(holders): (len(holders), _digest(shared_hashes))
        for holders, shared_hashes in shared.items()
    }


def _agree(everyone: Sequence[dict[bytes, tuple[int, bytes]]]) -> bool:
    """Return whether all ranks of each set have an entry for it, with the same hash."""
    by_holders: dict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
    for shared in everyone:
        for holders, entry in shared.items():
            by_holders[holders].append(entry)
    return all(
        len(entries) == entries[0][0] and len(set(entries)) == 1 for entries in by_holders.values()
    )


# -- what differs ----------------------------------------------------------------------------------


def _equal_ranks(values: Iterable[tuple[int, Any]]) -> EqualRanks:
    """Group ranks by their value, given as `(rank, value)` with ascending ranks."""
    by_value: dict[Any, list[int]] = defaultdict(list)
    for rank, value in values:
        by_value[value].append(rank)
    return sorted(by_value.values(), key=lambda ranks: (-len(ranks), ranks))


def _is_tie(groups: EqualRanks) -> bool:
    return len(groups) > 1 and len(groups[0]) == len(groups[1])


def _outliers(groups: EqualRanks) -> list[int]:
    return [] if _is_tie(groups) else sorted(rank for ranks in groups[1:] for rank in ranks)


def _who(groups: EqualRanks) -> str:
    if _is_tie(groups) and len(groups[0]) == 1 < len(groups) - 1:
        return f"no two of {ranks_text([ranks[0] for ranks in groups])} agree"
    if _is_tie(groups):
        return f"{_some(list(map(ranks_text, groups)), ' against ')}, a tie"
    outliers = _outliers(groups)
    return (
        f"{ranks_text(outliers)} differ{'s' if len(outliers) == 1 else ''} from "
        f"{ranks_text(groups[0])}"
    )


def _some(texts: Sequence[str], separator: str) -> str:
    """Return the first few texts, and how many more there are."""
    more = len(texts) - _MOST_NAMED
    return separator.join(texts[:_MOST_NAMED]) + (f"{separator}and {more} more" if more > 0 else "")


def _others(count: int) -> str:
    """Return a text for the number of other leaves that differ."""
    return "1 other leaf differs" if count == 1 else f"{count} other leaves differ"


def _leaf_text(leaf: ReplicaLeaf) -> str:
    return f"{leaf.path or 'the tree'}, {leaf.kind},"


def _other_trees(prefix: str, leaves: Sequence[ReplicaLeaf], group: Group) -> ReplicaError:
    """Return the error for ranks whose leaves have different names or kinds."""
    named = gather_facts(group, [(leaf.path, leaf.kind) for leaf in leaves])
    everyone = {rank: _kinds(leaves) for rank, leaves in named.items()}
    differing: dict[str, dict[int, str]] = {}
    for path in sorted(set().union(*everyone.values())):
        kinds = {rank: kinds.get(path, "not there") for rank, kinds in everyone.items()}
        if len(set(kinds.values())) > 1:
            differing[path] = kinds
    path, kinds = next(iter(differing.items()))
    groups = _equal_ranks(kinds.items())
    on = "; ".join(f"{kinds[ranks[0]]} on {ranks_text(ranks)}" for ranks in groups)
    more = len(differing) - 1
    rest = f" {_others(more)} so, too." if more else ""
    return ReplicaError(
        f"{prefix}the ranks have different trees: {path or 'the tree'} is {on}.{rest}",
        path,
        _outliers(groups),
    )


def _kinds(leaves: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return name -> kind, or kinds if several leaves have the same name."""
    by_path: dict[str, list[str]] = defaultdict(list)
    for path, kind in leaves:
        by_path[path].append(kind)
    return {path: " and ".join(kinds) for path, kinds in by_path.items()}


def _difference(
    prefix: str, leaves: Sequence[ReplicaLeaf], hashes: Sequence[bytes], group: Group
) -> ReplicaError:
    """Return the error for ranks that have the same tree with different values."""
    held = [
        (leaf.holders and _digest(leaf.holders), x) for leaf, x in zip(leaves, hashes, strict=True)
    ]
    everyone = gather_facts(group, held)
    sets = [
        _sets_that_differ({rank: row[i] for rank, row in everyone.items()})
        for i in range(len(leaves))
    ]
    differing = [i for i, groups in enumerate(sets) if groups]
    if not differing:
        return _other_holders(prefix, leaves, group)
    first, *others = differing
    leaf = leaves[first]
    outliers = sorted(rank for groups in sets[first] for rank in _outliers(groups))
    where, index = _first_difference(leaf, (sets[first][0][0][0], sets[first][0][1][0]), group)
    also = (
        f" {_others(len(others))}, too: {_some([leaves[i].path for i in others], ', ')}."
        if others
        else ""
    )
    text = (
        f"{_leaf_text(leaf)} is not the same on ranks that should hold the same of it: "
        f"{_some(list(map(_who, sets[first])), '; ')}"
    )
    return ReplicaError(f"{prefix}{text}. {where}.{also}", leaf.path, outliers, index)


def _sets_that_differ(row: dict[int, tuple[Any, bytes]]) -> list[EqualRanks]:
    """Return the sets of ranks that should hold the same of one leaf and do not.

    That of the lowest rank comes first.
    """
    by_holders: dict[Any, list[tuple[int, bytes]]] = defaultdict(list)
    for rank, (holders, hash_) in row.items():
        if holders:
            by_holders[holders].append((rank, hash_))
    return [groups for groups in map(_equal_ranks, by_holders.values()) if len(groups) > 1]


def _other_holders(prefix: str, leaves: Sequence[ReplicaLeaf], group: Group) -> ReplicaError:
    """Return the error for ranks whose trees are the same but whose meshes differ.

    They disagree on which ranks hold the same.
    """
    everyone = gather_facts(group, [leaf.holders for leaf in leaves])
    for i, leaf in enumerate(leaves):
        holders = {rank: row[i] for rank, row in everyone.items()}
        pair = next(
            (
                (rank, other)
                for rank in group.ranks
                for other in holders[rank]
                if holders[other] != holders[rank]
            ),
            None,
        )
        if pair is not None:
            said = " and ".join(f"by rank {rank} on {ranks_text(holders[rank])}" for rank in pair)
            return ReplicaError(
                f"{prefix}{_leaf_text(leaf)} is replicated {said}: make its mesh of the same ranks "
                "on all ranks",
                leaf.path,
            )
    raise RuntimeError(
        f"{prefix}the hash of several leaves differs, but the hashes of the single leaves are equal"
    )


# -- which element ---------------------------------------------------------------------------------


def _first_difference(
    leaf: ReplicaLeaf, pair: tuple[int, int], group: Group
) -> tuple[str, list[int] | None]:
    """Return where the values of two ranks differ, in words, and the index in the global tensor."""
    one, other = _of_pair(_describe_part(leaf), pair, group)
    if one != other or not isinstance(leaf.value, Tensor):
        return f"Rank {pair[0]} holds {one[:_LONGEST]} and rank {pair[1]} {other[:_LONGEST]}", None
    flat = flat_of(leaf.value)
    low, high = _narrow_interval(flat, pair, group)
    values = _elements(flat[low:high]) if group.world.rank in pair else []
    ones, others = _of_pair((values, list(leaf.value.shape), leaf.start), pair, group)
    at = next(i for i, (a, b) in enumerate(zip(ones[0], others[0], strict=True)) if a != b)
    _, shape, start = ones
    index = []
    if shape:
        index = [int(i) for i in torch.unravel_index(torch.tensor(low + at), tuple(shape))]
    if start:  # of the part in the global tensor
        index = [i + begin for i, begin in zip(index, start, strict=True)]
    (one, one_bits), (other, other_bits) = ones[0][at], others[0][at]
    shown = (
        f"{one} and {other}" if one != other else f"{one} of bits 0x{one_bits} and 0x{other_bits}"
    )
    return (
        f"Between ranks {pair[0]} and {pair[1]} the first difference is at index {index}: {shown}",
        index,
    )


def _of_pair(own: Any, pair: tuple[int, int], group: Group) -> tuple[Any, Any]:
    """Return the objects of two of the ranks, on all ranks."""
    everyone = gather_facts(group, own if group.world.rank in pair else None)
    return everyone[pair[0]], everyone[pair[1]]


def _narrow_interval(flat: Tensor, pair: tuple[int, int], group: Group) -> tuple[int, int]:
    """Return an interval of at most `_PARTS` elements that has the first one that differs."""
    low, high = 0, _of_pair(flat.numel(), pair, group)[0]
    while high - low > _PARTS:
        step = -(-(high - low) // _PARTS)
        own_parts = (
            [flat[i : min(i + step, high)] for i in range(low, high, step)]
            if group.world.rank in pair
            else []
        )
        one, other = _of_pair([int(bit_hash(part)) for part in own_parts], pair, group)
        part = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        low, high = low + part * step, min(high, low + (part + 1) * step)
    return low, high


def _elements(flat: Tensor) -> list[tuple[str, str]]:
    """Return the value and the bits of each element."""
    width = flat.element_size()
    rows = flat.view(torch.uint8).view(-1, width).tolist()
    return [
        (repr(value), bytes(reversed(row)).hex())
        for value, row in zip(flat.tolist(), rows, strict=True)
    ]
