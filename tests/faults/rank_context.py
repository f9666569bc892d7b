"""The context in which a program of the table runs: one rank with shardmesh, or with
torch.distributed alone.

Programs use names that both have: `ctx.d` is `shardmesh.compat` or a namespace of torch, and
`ctx.group()` has our collectives on flat buffers, which `TorchGroup` provides with torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import torch.distributed.tensor as dtensor
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardmesh as sm
from shardmesh.mesh.settings import watchdog
from tests.faults.fault import STALL_S, WARN_S

TORCH_TIMEOUT_S = 5.0  # of torch's groups; the default is 30 minutes
TORCH = SimpleNamespace(
    **{**vars(dtensor), "DeviceMesh": DeviceMesh, "init_device_mesh": init_device_mesh}
)


class EventLog:
    """A file of events on one rank, unbuffered, so that it survives SIGKILL."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, event: str, **more: Any) -> None:
        """Record an event with the time of the monotonic clock, which all processes of the machine
        share.
        """
        line = json.dumps({"event": event, "when": time.monotonic(), **more}) + "\n"
        os.write(self._file, line.encode())


class RankContext:
    """The context of a program on one rank.

    Attributes:
        rank: rank in the world.
        size: size of the world.
        short_timeout: whether `is_outlier` sets the timeout of collectives to `STALL_S`. Not
            earlier: on a busy machine ranks start far apart.
        d: `shardmesh.compat`, or a namespace of torch with the same names.
        mesh: the mesh of the fault.
        events: log of this rank's events.
    """

    def __init__(self, rank: int, size: int, outlier: bool, events: EventLog) -> None:
        self.rank, self.size, self._outlier, self.events = rank, size, outlier, events
        self._fault_recorded = False
        self.short_timeout = False
        self.d: Any = sm.compat
        self.mesh: Any = None

    def start(self, mesh: Mapping[str, int]) -> None:
        """Create the mesh, if there is one, and with it the default group."""
        if mesh:
            self.mesh = self.d.init_device_mesh(
                "cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh)
            )

    def set_short_timeout(self) -> None:
        """Set the timeout of collectives to `STALL_S`."""
        watchdog(warn=STALL_S / 2, timeout=STALL_S)

    def set_short_warning(self) -> None:
        """Set the time until ranks that wait print a warning to `WARN_S`, for programs in which
        some are late on purpose.
        """
        watchdog(warn=WARN_S)

    def is_outlier(self) -> bool:
        """Return whether this rank must diverge here. The first call on an outlier records the time
        of the fault.
        """
        if self.short_timeout:
            self.set_short_timeout()
        if self._outlier and not self._fault_recorded:
            self._fault_recorded = True
            self.events.add("fault")
        return self._outlier

    def put(self, tensor: Tensor, *placements: Any) -> Any:
        """Distribute `tensor`, which is the same on every rank, without communication."""
        return self.d.distribute_tensor(tensor, self.mesh, list(placements), src_data_rank=None)

    def group(self, axis: str | None = None) -> Any:
        """Return the group along an axis, or of all ranks of the mesh."""
        return self.mesh.group(axis or self.mesh.axis_names)


class TorchRankContext(RankContext):
    """The context without shardmesh: DTensor, and torch.distributed's collectives with a timeout of
    a few seconds.
    """

    def __init__(self, rank: int, size: int, outlier: bool, events: EventLog) -> None:
        super().__init__(rank, size, outlier, events)
        self.d = TORCH

    def start(self, mesh: Mapping[str, int]) -> None:
        """Create the mesh. Torch gives a mesh's groups a timeout of 30 minutes: set a short default
        for all.
        """
        dist.set_debug_level_from_env()
        dist.distributed_c10d.default_pg_timeout = timedelta(seconds=TORCH_TIMEOUT_S)
        dist.init_process_group("gloo", timeout=timedelta(seconds=TORCH_TIMEOUT_S))
        super().start(mesh)

    def set_short_timeout(self) -> None:
        """Do nothing: torch has one timeout for everything."""

    def set_short_warning(self) -> None:
        """Do nothing: torch does not warn."""

    def group(self, axis: str | None = None) -> TorchGroup:
        return TorchGroup(dist.group.WORLD if axis is None else self.mesh.get_group(axis))


class TorchGroup:
    """torch.distributed's collectives over one group, with the names and arguments of
    `shardmesh.mesh.comm.group.Group`.
    """

    def __init__(self, group: Any) -> None:
        self.handle, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, out: Tensor, x: Tensor, async_op: bool = False) -> Any:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(out, x, group=self.handle, async_op=async_op)

    def reduce_scatter(
        self, out: Tensor, x: Tensor, op: str = "sum", async_op: bool = False
    ) -> Any:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(out, x, _reduction(op), group=self.handle, async_op=async_op)

    def all_reduce(self, x: Tensor, op: str = "sum", async_op: bool = False) -> Any:
        return dist.all_reduce(x, _reduction(op), group=self.handle, async_op=async_op)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_splits: Any = None, in_splits: Any = None
    ) -> Any:
        return dist.all_to_all_single(out, x, out_splits, in_splits, group=self.handle)

    def broadcast(self, x: Tensor, src: int) -> Any:
        return dist.broadcast(x, group=self.handle, group_src=src)

    def permute(self, out: Tensor, x: Tensor, *, dst: int, src: int) -> None:
        sends = dist.P2POp(dist.isend, x, group=self.handle, group_peer=dst)
        receives = dist.P2POp(dist.irecv, out, group=self.handle, group_peer=src)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    def barrier(self) -> None:
        dist.barrier(group=self.handle)

    def all_gather_object(self, obj: Any) -> list[Any]:
        gathered = [None] * self.size
        dist.all_gather_object(gathered, obj, group=self.handle)
        return gathered


def _reduction(op: str) -> Any:
    return getattr(dist.ReduceOp, op.upper())
