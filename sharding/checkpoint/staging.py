"""Copies of a tree in host memory, for an asynchronous save.

    stream   ... step 7 | copies | step 8 ...   copies of step 7, whatever the program does next
    host     async_save -> step 8 is launched   does not wait
    thread   waits for an event, writes

The copies go to pinned memory, which is kept for the next save: they run at the full rate of the
link. They are in the order of the stream, since later work may overwrite the tree.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.transfer.host_copies import is_asynchronous, record_event
from ...mesh.comm.world import World
from ..tensor.sharded_tensor import ShardedTensor
from .saving import on_host

_ALIGNED, _SMALL = 64, 1 << 20  # bytes
_kept: weakref.WeakKeyDictionary[World, Tensor] = weakref.WeakKeyDictionary()


def copy_leaves(
    leaves: Mapping[str, Any], world: World
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return copies of leaves on the host, and a function that waits until they have values.

    The memory of the last copies for this world is used again.
    """
    parts = {
        name: leaf._local if isinstance(leaf, ShardedTensor) else leaf
        for name, leaf in leaves.items()
        if isinstance(leaf, Tensor)
    }
    parts = {name: _plain(x) for name, x in parts.items()}
    late = [name for name, x in parts.items() if is_asynchronous(x.device.type)]
    found, ready = start_copies([parts[name] for name in late], world)
    copies = dict(zip(late, found, strict=True))
    made = {}
    for name, leaf in leaves.items():
        if not isinstance(leaf, Tensor):
            made[name] = copy.deepcopy(leaf)
            continue
        part = copies[name] if name in copies else on_host(parts[name], copy=True)
        made[name] = (
            ShardedTensor._make_guarded(part, leaf._layout, leaf._lineage)
            if isinstance(leaf, ShardedTensor)
            else part
        )
    return made, ready


def small_on_host(leaves: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Return the leaves, small device tensors on the host, which waits once for all of them."""
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
    """Start copying tensors of devices to memory kept for this world; return the copies and a
    function that waits for their values.
    """
    starts = [0]
    for x in tensors:
        starts.append(starts[-1] + -(-x.nbytes // _ALIGNED) * _ALIGNED)
    kept = _kept.get(world)
    if starts[-1] and (kept is None or kept.numel() < starts[-1]):
        _kept.pop(world, None)
        kept = None  # free it first
        kept = _kept[world] = torch.empty(
            starts[-1], dtype=torch.uint8, device="cpu", pin_memory=True
        )
    found = []
    for start, x in zip(starts, tensors, strict=False):
        out = (
            torch.empty_like(x, device="cpu")
            if kept is None
            else kept[start : start + x.nbytes].view(x.dtype).view(x.shape)
        )
        found.append(out.copy_(x, non_blocking=True))
    events = [record_event(device) for device in {x.device for x in tensors}]

    def ready() -> None:
        for event in events:
            event.synchronize()

    return found, ready


def _plain(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg()
