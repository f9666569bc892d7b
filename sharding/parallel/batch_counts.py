"""A check before an epoch: whether all ranks have as many batches."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

from ...mesh.context import given_or_current
from ...mesh.device_mesh import DeviceMesh
from ...mesh.text import ranks_text


def check_lengths(loader: Sized, mesh: DeviceMesh | None = None) -> int:
    """check_lengths(loader) -> how many batches every rank has; an error that names the odd rank where they differ.

    Args:
        loader: what has a `len()`: a DataLoader over a dataset with one, a list of batches.
        mesh: whose ranks are compared; by default that of `with mesh:` or `set_mesh`.

    Raises:
        ValueError: on every rank, if lengths differ: which rank has how many.
        TypeError: on every rank, if a loader has no length (a generator, a DataLoader over an IterableDataset).
        MeshError: this rank is outside the mesh.

    Communication: one small all_gather over the mesh.

    Example:
        >>> steps = sm.check_lengths(loader, mesh)
    """
    group = given_or_current(mesh).group()
    told = group.all_gather_object(_length(loader))
    if None in told:
        raise TypeError(_no_length(group.ranks, told))
    if len(set(told)) > 1:
        raise ValueError(_uneven(group.ranks, told))
    return told[0]


def _length(loader: Sized) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # which say that there is none
        return None


def _no_length(ranks: Sequence[int], told: Sequence[Any]) -> str:
    without = [rank for rank, length in zip(ranks, told, strict=True) if length is None]
    return (
        f"check_lengths: the loader has no len() on {ranks_text(without)}, so nobody can tell how many batches it gives; check a "
        "loader with a length, or let `for batch in sm.join(loader, mesh)` end the loop on all ranks at once"
    )


def _uneven(ranks: Sequence[int], told: Sequence[int]) -> str:
    """Who has how many, the few first: they are the odd ones."""
    having: dict[int, list[int]] = {}
    for rank, length in zip(ranks, told, strict=True):
        having.setdefault(length, []).append(rank)
    fewest_first = sorted(having.items(), key=lambda item: len(item[1]))
    who = ", ".join(f"{ranks_text(some)} {'has' if len(some) == 1 else 'have'} {length}" for length, some in fewest_first)
    return (
        f"check_lengths: of batches, {who}: give all ranks as many, or write `for batch in sm.join(loader, mesh)`: all ranks stop "
        f"after {min(told)}, or with mode='shadow' or mode='empty' all run {max(told)} steps, some of them without samples"
    )
