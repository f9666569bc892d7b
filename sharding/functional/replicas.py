"""Comparing replicas bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...mesh.device_mesh import DeviceMesh
from ..layout import Layout
from ..tensor import ShardedTensor


class ReplicaError(RuntimeError):
    """Ranks that should hold the same values do not."""


def check_replicas(named: Sequence[tuple[str, Any, Layout | None]], own: DeviceMesh) -> None:
    """Compare each tensor between the ranks that should hold the same of it.

    Args:
        named: how to name a value, this rank's part, and its layout; None for what is no tensor.
        own: the mesh of the manual axes.

    Raises: ReplicaError, on every rank, naming the first tensor, rank and index that differ.

    Communication: one all_gather of digests; where they differ, one of the values.
    """
    named = [(path, _plain(x), layout) for path, x, layout in named if layout is not None and isinstance(x, Tensor)]
    group = own.group(own.axis_names)
    everyone = group.all_gather_object([digest(x) for _, x, _ in named])
    for i, (path, x, layout) in enumerate(named):
        sets = _replica_sets(layout, own, group.ranks)
        bits = {r: each[i] for r, each in zip(group.ranks, everyone, strict=True)}
        odd = [(ranks[0], r) for ranks in sets for r in ranks if bits[r] != bits[ranks[0]]]
        if odd:
            raise ReplicaError(_difference(path, layout, *odd[0], group.ranks, group.all_gather_object(_values(x))))


_SAMPLE = 1 << 20  # elements of a tensor that are compared when a signature is first seen


def sampled_digest(x: Tensor) -> bytes | None:
    """`digest` of as many elements as cost little, evenly spread."""
    flat = _plain(x).detach().reshape(-1)
    return digest(flat[:: max(1, flat.numel() // _SAMPLE)])


def digest(x: Tensor) -> bytes | None:
    """What tells the bits of one tensor from those of another; None on the meta device, where there are none."""
    x = _plain(x)
    if x.is_meta:
        return None
    return hashlib.blake2b(repr((x.shape, x.dtype)).encode() + _bytes(x).numpy().tobytes(), digest_size=16).digest()


def _plain(x: Any) -> Tensor:
    return x._local if isinstance(x, ShardedTensor) else x


def _bytes(x: Tensor) -> Tensor:
    """The bits of a tensor, one row for each element."""
    flat = x.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _values(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().cpu().contiguous()


def _at(everyone: Sequence[Any], ranks: Sequence[int], rank: int) -> Any:
    return everyone[ranks.index(rank)]


def _replica_sets(layout: Layout, own: DeviceMesh, ranks: Sequence[int]) -> list[list[int]]:
    """The ranks of each part, lowest first."""
    named = [own.axis_index(axis) for axis in layout.spec.axes if axis in own.axis_names]
    sets: dict[Any, list[int]] = {}
    for rank in ranks:
        place: Any = own.coordinate_of(rank)
        sets.setdefault(tuple(place[i] for i in named), []).append(rank)
    return list(sets.values())


def _difference(path: str, layout: Layout, first: int, other: int, ranks: Sequence[int], everyone: Sequence[Tensor]) -> str:
    one, two = _at(everyone, ranks, first), _at(everyone, ranks, other)
    what = f"{path}, {layout}, is not the same on ranks {first} and {other}, which should hold the same of it"
    if one.shape != two.shape or one.dtype != two.dtype:
        return f"{what}: {list(one.shape)} of {one.dtype} and {list(two.shape)} of {two.dtype}"
    flat = int((_bytes(one) != _bytes(two)).any(1).nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), one.shape)] if one.ndim else []
    return f"{what}: at index {index} they hold {one.flatten()[flat].item()!r} and {two.flatten()[flat].item()!r}"
