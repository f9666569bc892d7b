"""Collectives of torch's process groups, called as their methods.

`torch.distributed.all_reduce` and its like first look for function modes, coalescing and ranks
outside of the group, which takes longer than starting the collective (2.7 us, 1.2 us as a method).
Tensors have a dtype that backends know, and one dim where they are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

_REDUCE_OP: dict[str, Any] = {}
if dist.is_available():
    _REDUCE_OP = {
        "sum": dist.ReduceOp.SUM,
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
        "product": dist.ReduceOp.PRODUCT,
    }
# torch 2.13 renamed three methods
_NEW_NAMES = hasattr(getattr(dist, "ProcessGroup", None), "all_gather_single")


def all_gather(out: Tensor, x: Tensor, *, group: Any, async_op: bool) -> Any:
    """Start an all_gather, and return torch's work.

    None without `async_op`, when it has completed (on CUDA: on the current stream).
    """
    call = group.all_gather_single if _NEW_NAMES else group._allgather_base
    return _wait_unless_async(call(out, x, _options("AllgatherOptions", async_op)), async_op)


def reduce_scatter(out: Tensor, x: Tensor, op: str, *, group: Any, async_op: bool) -> Any:
    """Start a reduce_scatter, as `all_gather`."""
    call = group.reduce_scatter_single if _NEW_NAMES else group._reduce_scatter_base
    return _wait_unless_async(
        call(out, x, _options("ReduceScatterOptions", async_op, op)), async_op
    )


def all_reduce(x: Tensor, op: str, *, group: Any, async_op: bool) -> Any:
    """Start an all_reduce, as `all_gather`."""
    return _wait_unless_async(
        group.allreduce([x], _options("AllreduceOptions", async_op, op)), async_op
    )


def all_to_all(
    out: Tensor,
    x: Tensor,
    out_splits: Sequence[int] | None,
    in_splits: Sequence[int] | None,
    *,
    group: Any,
    async_op: bool,
) -> Any:
    """Start an all_to_all, as `all_gather`."""
    call = group.all_to_all_single if _NEW_NAMES else group.alltoall_base
    return _wait_unless_async(
        call(
            out,
            x,
            list(out_splits or ()),
            list(in_splits or ()),
            _options("AllToAllOptions", async_op),
        ),
        async_op,
    )


def broadcast(x: Tensor, src: int, *, group: Any, async_op: bool) -> Any:
    """Start a broadcast from the rank with this index in the group, as `all_gather`."""
    return _wait_unless_async(
        group.broadcast([x], _options("BroadcastOptions", async_op, src=src)), async_op
    )


def broadcast_message(x: Tensor, src: int, *, group: Any, async_op: bool) -> Any:
    """Start a broadcast in a group of two ranks, as `broadcast`, of which neither waits for both.

    Groups that torch has made with TORCH_DISTRIBUTED_DEBUG=DETAIL compare ranks when a call begins,
    and wait for all of them.
    """
    backend = group._get_backend(x.device)
    group = getattr(backend, "wrapped_pg", group)
    return broadcast(x, src, group=group, async_op=async_op)


def barrier(device: torch.device, *, group: Any, async_op: bool) -> Any:
    """Start the backend's barrier for this device, which `dist.barrier` does not let one choose."""
    options = distributed_c10d.BarrierOptions()
    options.asyncOp, options.device = async_op, device
    if device.index is not None:
        options.device_ids = [device.index]
    return _wait_unless_async(group.barrier(opts=options), async_op)


@lru_cache
def _options(kind: str, async_op: bool, op: str | None = None, src: int | None = None) -> Any:
    options = getattr(distributed_c10d, kind)()
    options.asyncOp = async_op
    if op is not None:
        options.reduceOp = _REDUCE_OP[op]
    if src is not None:
        options.rootRank, options.rootTensor = src, 0
    return options


def _wait_unless_async(work: Any, async_op: bool) -> Any:
    if async_op or work is None:
        return work
    work.wait()
    return None
