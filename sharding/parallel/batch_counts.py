"""`check_lengths`: check before an epoch that all ranks have the same number of batches."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from ...mesh.comm.agreement import gather_facts
from ...mesh.context import given_or_current
from ...mesh.device_mesh import DeviceMesh
from ...mesh.text import ranks_text


def check_lengths(loader: Sized, mesh: DeviceMesh | None = None) -> int:
    """check_lengths(loader) -> the number of batches that every rank has.

    If numbers differ, an error that names the ranks.

    Args:
        loader: an object with a `len()`: a DataLoader over a sized dataset, a list of batches.
        mesh: the mesh whose ranks are compared; by default that of `with mesh:` or `set_mesh`.

    Raises:
        ValueError: on every rank, if lengths differ: lists the ranks and their lengths.
        TypeError: on every rank, if a loader has no length (a generator, a DataLoader over an
            IterableDataset).
        MeshError: this rank is outside the mesh.

    Communication: one small all_gather over the mesh.

    Example:
        >>> steps = sm.parallel.check_lengths(loader, mesh)
    """
    lengths: dict[int, Any] = gather_facts(given_or_current(mesh).group(), _length(loader))
    without = [rank for rank, length in lengths.items() if length is None]
    if without:
        raise TypeError(
            f"check_lengths: the loader has no len() on {ranks_text(without)}, so its number of "
            "batches is unknown; pass a loader with a length, or write `for batch in "
            "sm.parallel.uneven_inputs(loader, mesh)`, which ends the loop on all ranks at once"
        )
    if len(set(lengths.values())) > 1:
        raise ValueError(_uneven_text(lengths))
    return next(iter(lengths.values()))


def _length(loader: Sized) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # there is none
        return None


def _uneven_text(lengths: dict[int, int]) -> str:
    """Return the error text; ranks in the minority are first."""
    having: dict[int, list[int]] = {}
    for rank, length in lengths.items():
        having.setdefault(length, []).append(rank)
    fewest_first = sorted(having.items(), key=lambda item: len(item[1]))
    who = ", ".join(
        f"{ranks_text(some)} {'has' if len(some) == 1 else 'have'} {length}"
        for length, some in fewest_first
    )
    fewest, most = min(lengths.values()), max(lengths.values())
    return (
        f"check_lengths: numbers of batches differ: {who}; make them equal, or write `for batch in "
        f"sm.parallel.uneven_inputs(loader, mesh)`: all stop after {fewest}, or with "
        f"mode='shadow' or mode='empty' run {most} steps, some of them without samples"
    )
