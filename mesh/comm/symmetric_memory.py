"""Allocate symmetric memory: one buffer per group that all of its ranks can read.

The memory is torch's (`torch.distributed._symmetric_memory`, which is private; only this file uses it). The kernels that read it
are in `kernels/symmetric/`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ...kernels.symmetric import MAX_PROGRAMS, MAX_RANKS, PAD_BYTES, Peers
from .. import errors
from ..monitor.recording.recorder import CommTag
from .group import Group

BUFFER_BYTES = 64 << 20  # on each rank, for each group that uses it
STAGING_BYTES = BUFFER_BYTES // 4 * 3  # the part that peers may pull from; the rest is for all-reduces
# About ten minutes of polls of a microsecond each, as long as NCCL waits by default.
SPINS = 600_000_000

_log = logging.getLogger(__name__)

Provider = Callable[[Group, torch.device, CommTag | None], Peers | None]


def peers_of(group: Group, device: torch.device, tag: CommTag | None = None) -> Peers | None:
    """Return the memory that the group's ranks share on this type of device, or None on every rank if there is none.

    Args:
        tag: its purpose.

    Communication: the first call for a group that may have one exchanges addresses among its ranks.
    """
    if device.type not in group.shared:
        group.shared[device.type] = _agreed(group, device, tag) if device.type in PROVIDERS and 1 < group.size <= MAX_RANKS else None
    return group.shared[device.type]


def needed_peers(group: Group, device: torch.device, tag: CommTag | None = None) -> Peers:
    """Return `peers_of(group, device, tag)` for a plan that needs it.

    Raises: CollectiveError if there is none.
    """
    found = peers_of(group, device, tag)
    if found is None:
        raise errors.CollectiveError(
            f"the plan uses symmetric memory of the ranks {group.ranks}, but they share none on {device.type!r}: the mesh's topology "
            "has symmetric=Link(...). Call calibrate(mesh), which sets it only where there is such memory, or set "
            "mesh.topology = replace(mesh.topology, symmetric=None)."
        )
    return found


def _agreed(group: Group, device: torch.device, tag: CommTag | None) -> Peers | None:
    """Return the memory if every rank could allocate it, else None."""
    try:
        found = PROVIDERS[device.type](group, device, tag)
    except (ImportError, RuntimeError) as error:  # such as no peer-to-peer access between the devices
        found = None
        _log.warning("rank %d: no symmetric memory among ranks %s on %s: %s", group.world.rank, group.ranks, device, error)
    missing = torch.tensor([int(found is None)], dtype=torch.int32, device=device)
    group.all_reduce(missing, "max", tag=tag)
    return None if int(missing) else found


def _of_torch(group: Group, device: torch.device, tag: CommTag | None) -> Peers | None:
    """Allocate torch's symmetric memory; the signal pad is at the end of the buffer."""
    import torch.distributed._symmetric_memory as symmetric

    handle: Any = getattr(group, "handle", None)  # a simulated group has none
    if handle is None:
        return None
    memory = symmetric.empty(BUFFER_BYTES + PAD_BYTES, dtype=torch.uint8, device=device).zero_()
    shared = symmetric.rendezvous(memory, handle)
    addresses = torch.tensor(list(shared.buffer_ptrs), dtype=torch.int64, device=device)
    torch.get_device_module(device.type).synchronize(device)  # the pad must be zero before any rank writes to it
    group.barrier(tag=tag)
    return Peers(
        group.rank, group.size, memory[:BUFFER_BYTES], addresses, addresses + BUFFER_BYTES,
        epochs=torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device),
        error=torch.zeros(group.size, dtype=torch.int32, device="cpu", pin_memory=True),  # whatever torch's default device is
        spins=SPINS,
    )  # fmt: skip


# How to allocate, by device type; must be the same on all ranks.
PROVIDERS: dict[str, Provider] = {"cuda": _of_torch}
