"""Allocate symmetric memory: one buffer per group that all of its ranks can read.

The memory is torch's (`torch.distributed._symmetric_memory`, which is private; only this file uses
it). The kernels that read it are in `kernels/symmetric/`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...kernels.symmetric import MAX_PROGRAMS, MAX_RANKS, PAD_BYTES, Peers
from .. import errors
from .group import Group
from .recording.recorder import CommTag
from .work import DONE, Work

BUFFER_BYTES = 64 << 20  # on each rank, for each group that uses it
# the part that peers may pull from; the rest is for all-reduces
STAGING_BYTES = BUFFER_BYTES // 4 * 3
# About ten minutes of polls of a microsecond each, as long as NCCL waits by default.
SPINS = 600_000_000

_WITH_STREAMS = frozenset({"cuda"})

_log = logging.getLogger(__name__)

Provider = Callable[[Group, torch.device, CommTag | None], Peers | None]


def peers_of(group: Group, device: torch.device, tag: CommTag | None = None) -> Peers | None:
    """Return the memory that the group's ranks share on this type of device.

    None on every rank if there is none.

    Args:
        tag: its purpose.

    Communication: the first call for a group that may have one exchanges addresses among its ranks.
    """
    if device.type not in group.shared:
        group.shared[device.type] = (
            _allocate_on_all(group, device, tag)
            if device.type in PROVIDERS and 1 < group.size <= MAX_RANKS
            else None
        )
    return group.shared[device.type]


def needed_peers(group: Group, device: torch.device, tag: CommTag | None = None) -> Peers:
    """Return `peers_of(group, device, tag)` for a plan that needs it.

    Raises: CollectiveError if there is none.
    """
    peers = peers_of(group, device, tag)
    if peers is None:
        raise errors.CollectiveError(
            f"the plan uses symmetric memory of the ranks {group.ranks}, but they share none on "
            f"{device.type!r}: the mesh's topology has symmetric=Link(...). Call calibrate(mesh), "
            "which sets it only where there is such memory, or set mesh.topology = "
            "replace(mesh.topology, symmetric=None)."
        )
    return peers


def _allocate_on_all(group: Group, device: torch.device, tag: CommTag | None) -> Peers | None:
    """Return the memory if every rank could allocate it, else None."""
    try:
        peers = PROVIDERS[device.type](group, device, tag)
    except (ImportError, RuntimeError) as error:
        # such as no peer-to-peer access between the devices
        peers = None
        _log.warning(
            "rank %d: no symmetric memory among ranks %s on %s: %s",
            group.world.rank,
            group.ranks,
            device,
            error,
        )
    missing = torch.tensor([int(peers is None)], dtype=torch.int32, device=device)
    group.all_reduce(missing, "max", tag=tag)
    return None if int(missing) else peers


def _of_torch(group: Group, device: torch.device, tag: CommTag | None) -> Peers | None:
    """Allocate torch's symmetric memory; the signal pad is at the end of the buffer."""
    import torch.distributed._symmetric_memory as symmetric

    handle: Any = getattr(group, "handle", None)  # a simulated group has none
    if handle is None:
        return None
    memory = symmetric.empty(BUFFER_BYTES + PAD_BYTES, dtype=torch.uint8, device=device).zero_()
    shared = symmetric.rendezvous(memory, handle)
    addresses = torch.tensor(list(shared.buffer_ptrs), dtype=torch.int64, device=device)
    # the pad must be zero before any rank writes to it
    torch.get_device_module(device.type).synchronize(device)
    group.barrier(tag=tag)
    return Peers(
        group.rank,
        group.size,
        memory[:BUFFER_BYTES],
        addresses,
        addresses + BUFFER_BYTES,
        epochs=torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device),
        # Whatever torch's default device is.
        error=torch.zeros(group.size, dtype=torch.int32, device="cpu", pin_memory=True),
        spins=SPINS,
    )


class SideStream:
    """The stream of those operations on a group's shared memory whose results are waited for later.

        current stream   ... write x ---.          compute           wait() .--- read the result ...
                                        v                                   |
        side stream          wait for the event, stage, barrier, read, barrier, event

    All operations on the memory must run in one order, those on the current stream too: the next on
    the side stream waits for the current stream, and the next on the current stream for the last
    event of the side stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._module, self._device = torch.get_device_module(device.type), device
        # few programs, which the other ranks wait for
        self._stream = self._module.Stream(device, priority=-1)
        self._last: tuple[Any, bool] | None = None

    def start(self, run: Callable[[], object], tensors: Iterable[Tensor]) -> Work:
        """Run on the side stream, after the current one; `tensors` are what it reads and writes."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        for x in tensors:
            x.record_stream(self._stream)
        with self._module.stream(self._stream):
            run()
        event = self._stream.record_event()
        self._last = event, self._module.is_current_stream_capturing()
        return _StreamWork(self._module, self._device, event)

    def run(self, run: Callable[[], object]) -> None:
        """Run on the current stream, after what was started on the side stream."""
        if self._last is not None:
            event, captured = self._last
            # a graph waits for nothing outside, nor the reverse
            if captured == self._module.is_current_stream_capturing():
                self._module.current_stream(self._device).wait_event(event)
        run()


class _StreamWork(Work):
    """Work on another stream, up to an event."""

    __slots__ = ("_device", "_event", "_module")

    def __init__(self, module: Any, device: torch.device, event: Any) -> None:
        self._module, self._device, self._event = module, device, event

    def wait(self) -> None:
        self._module.current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        return self._event.query()


def run_shared(
    group: Group,
    device: torch.device,
    run: Callable[[Peers], object],
    tensors: Iterable[Tensor],
    async_op: bool,
    tag: CommTag | None,
) -> Work:
    """Run an operation on the group's shared memory.

    On the current stream, or with `async_op` on one of its own.

    Args:
        tensors: what it reads and writes.
    """
    peers = needed_peers(group, device, tag)
    if device.type not in _WITH_STREAMS:
        run(peers)
        return DONE
    side = group.shared.get(f"stream of {device.type}")
    if side is None:
        side = group.shared[f"stream of {device.type}"] = SideStream(device)
    if async_op:
        return side.start(lambda: run(peers), tensors)
    side.run(lambda: run(peers))
    return DONE


# How to allocate, by device type; must be the same on all ranks.
PROVIDERS: dict[str, Provider] = {"cuda": _of_torch}
