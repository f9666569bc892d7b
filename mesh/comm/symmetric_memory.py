"""Symmetric memory: buffers that all ranks of a group can read, made once for each group that wants one.

The memory is torch's (`torch.distributed._symmetric_memory`, which is private: it is used here and nowhere else); what is done
with it is in `kernels/symmetric.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...kernels.symmetric import MAX_PROGRAMS, MAX_RANKS, PAD_BYTES, Peers
from .. import errors
from .group import Group

BUFFER_BYTES = 64 << 20  # of each rank, for each group that uses it
STAGING_BYTES = BUFFER_BYTES // 4 * 3  # of these, what peers may pull from; the rest is for all-reduces
# About ten minutes of looks at a microsecond each, as long as NCCL waits by default.
SPINS = 600_000_000

Provider = Callable[[Group, torch.device], Peers | None]


def peers_of(group: Group, device: torch.device) -> Peers | None:
    """`peers_of(group, device) -> the group's shared memory`; None, on every rank, where there is none.

    Communication: the first time for a group that may have one, its ranks meet to exchange addresses.
    """
    if device.type not in group.shared:
        group.shared[device.type] = _agreed(group, device) if device.type in PROVIDERS and 1 < group.size <= MAX_RANKS else None
    return group.shared[device.type]


def needed_peers(group: Group, device: torch.device) -> Peers:
    """`peers_of` where a plan relies on it.

    Raises: CollectiveError where there is none.
    """
    found = peers_of(group, device)
    if found is None:
        raise errors.CollectiveError(
            f"the plan uses memory that the ranks {group.ranks} share, but they share none on {device.type!r}: the mesh's topology "
            "has symmetric=Link(...); calibrate(mesh) sets it where there is such memory, replace(mesh.topology, symmetric=None) "
            "does without."
        )
    return found


def _agreed(group: Group, device: torch.device) -> Peers | None:
    """The memory, if every rank has got it."""
    try:
        found = PROVIDERS[device.type](group, device)
    except (ImportError, RuntimeError):  # no peer-to-peer access, say: then there is none
        found = None
    missing = torch.tensor([int(found is None)], dtype=torch.int32, device=device)
    group.all_reduce(missing, "max")
    return None if int(missing) else found


def _of_torch(group: Group, device: torch.device) -> Peers | None:
    """Over torch's symmetric memory; the signal pad is the end of the buffer."""
    import torch.distributed._symmetric_memory as symmetric

    handle: Any = getattr(group, "handle", None)  # a simulated group has none
    if handle is None:
        return None
    memory = symmetric.empty(BUFFER_BYTES + PAD_BYTES, dtype=torch.uint8, device=device).zero_()
    shared = symmetric.rendezvous(memory, handle)
    addresses = torch.tensor(list(shared.buffer_ptrs), dtype=torch.int64).to(device)
    torch.get_device_module(device.type).synchronize(device)  # the pad is zero before anybody writes to it
    group.barrier()
    return Peers(
        group.rank, group.size, memory[:BUFFER_BYTES], addresses, addresses + BUFFER_BYTES,
        epochs=torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device),
        error=torch.zeros(group.size, dtype=torch.int32, pin_memory=True),
        spins=SPINS,
    )  # fmt: skip


# By device type; the same on all ranks.
PROVIDERS: dict[str, Provider] = {"cuda": _of_torch}
