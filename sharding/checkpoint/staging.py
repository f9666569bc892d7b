"""Copies of tensors in host memory; for an asynchronous save, of a whole tree.

    stream   ... step 7 | copies | step 8 ...   copies of step 7, whatever the program does next
    host     async_save -> step 8 is launched   does not wait
    thread   waits for an event, writes

The copies go to pinned memory, which is kept for the next save: they run at the full rate of the
link. They are in the order of the stream, since later work may overwrite the tree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.transfer.host_copies import is_asynchronous, record_event
from ...mesh.comm.world import World
from ..tensor.sharded_tensor import ShardedTensor

_ALIGNED, _SMALL = 64, 1 << 20  # bytes


class _StagingMemory:
    """Pinned memory of one world, which its saves use one after the other."""

    def __init__(self, _: World) -> None:
        self.buffer: Tensor | None = None


def copy_leaves(
    leaves: Mapping[str, Any], world: World
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return copies of leaves, tensors on the host, and a function that waits for their values.

    The memory of the last copies for this world is used again.
    """
    parts = {
        name: leaf._local if isinstance(leaf, ShardedTensor) else leaf
        for name, leaf in leaves.items()
        if isinstance(leaf, Tensor)
    }
    parts = {name: _plain(x) for name, x in parts.items()}
    late = [name for name, x in parts.items() if is_asynchronous(x.device.type)]
    late_copies, ready = start_copies([parts[name] for name in late], world)
    copies = dict(zip(late, late_copies, strict=True))
    copied_leaves = {}
    for name, leaf in leaves.items():
        if not isinstance(leaf, Tensor):
            copied_leaves[name] = copy.deepcopy(leaf)
            continue
        part = copies[name] if name in copies else on_host(parts[name], copy=True)
        copied_leaves[name] = (
            ShardedTensor._make_guarded(part, leaf._layout, leaf._lineage)
            if isinstance(leaf, ShardedTensor)
            else part
        )
    return copied_leaves, ready


def small_on_host(leaves: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Return the leaves, small plain tensors moved to the host with a single wait."""
    small = {
        name: _plain(x)
        for name, x in leaves.items()
        if type(x) in (Tensor, nn.Parameter)
        and x.layout is torch.strided
        and is_asynchronous(x.device.type)
        and x.nbytes <= _SMALL
    }
    copies, ready = start_copies(list(small.values()), world)
    ready()
    return {**leaves, **dict(zip(small, copies, strict=True))}


def start_copies(
    tensors: Sequence[Tensor], world: World
) -> tuple[list[Tensor], Callable[[], None]]:
    """Start copying tensors of devices to memory that this world reuses.

    Return the copies and a function that waits for their values.
    """
    starts = [0]
    for x in tensors:
        starts.append(starts[-1] + -(-x.nbytes // _ALIGNED) * _ALIGNED)
    memory = world.state(_StagingMemory)
    if starts[-1] and (memory.buffer is None or memory.buffer.numel() < starts[-1]):
        memory.buffer = None  # free it first
        memory.buffer = torch.empty(starts[-1], dtype=torch.uint8, device="cpu", pin_memory=True)
    copies = []
    for start, x in zip(starts, tensors, strict=False):
        out = (
            torch.empty_like(x, device="cpu")
            if memory.buffer is None
            else memory.buffer[start : start + x.nbytes].view(x.dtype).view(x.shape)
        )
        copies.append(out.copy_(x, non_blocking=True))
    events = [record_event(device) for device in {x.device for x in tensors}]

    def ready() -> None:
        for event in events:
            event.synchronize()

    return copies, ready


def _plain(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg()


def on_host(x: Tensor, copy: bool = False) -> Tensor:
    """Return a contiguous host tensor with its own storage: `torch.save` writes whole storages."""
    x = x.resolve_conj().resolve_neg().to("cpu", copy=copy).contiguous()
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()
