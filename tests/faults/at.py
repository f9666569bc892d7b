"""The environment of a program of the table: one rank of shardmesh, or of torch.distributed alone.

The programs are spelled as both understand: `at.d` is `shardmesh.compat` or what torch calls the same, and `at.group()` has our
collectives on flat buffers, which `TorchGroup` gives torch's names.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardmesh as sm
from shardmesh.mesh.monitor.settings import watchdog
from tests.faults.fault import STALL_S

TORCH_TIMEOUT_S = 5.0  # of torch's groups; the default is 30 minutes
TORCH = SimpleNamespace(**{**vars(dtensor), "DeviceMesh": DeviceMesh, "init_device_mesh": init_device_mesh})


class Notes:
    """What happens on one rank, line by line in a file: written at once, so that it is there after a SIGKILL, too."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, event: str, **more: Any) -> None:
        """Notes an event with the time: seconds of a clock that all processes of the machine share."""
        line = json.dumps({"event": event, "when": time.monotonic(), **more}) + "\n"
        os.write(self._file, line.encode())


class At:
    """The place where a program runs, as one rank sees it.

    Attributes:
        rank, size: of the world.
        stalls: whether a rank that does not come within `STALL_S` is an error once it is asked who goes wrong. Not before: on a busy
            machine ranks start far apart.
        d: `shardmesh.compat`, or a namespace with torch's things of the same names.
        mesh: the mesh of the table's entry.
        notes: what happens here.
    """

    def __init__(self, rank: int, size: int, odd: bool, notes: Notes) -> None:
        self.rank, self.size, self._odd, self.notes = rank, size, odd, notes
        self._noted = False
        self.stalls = False
        self.d: Any = sm.compat
        self.mesh: Any = None

    def start(self, mesh: Mapping[str, int]) -> None:
        """Makes the mesh, if there is to be one, and starts the default group on the way."""
        if mesh:
            self.mesh = self.d.init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))

    def stalls_soon(self) -> None:
        """From now on a rank that does not come within `STALL_S` is an error."""
        watchdog(warn=STALL_S / 2, timeout=STALL_S)

    def odd(self) -> bool:
        """Whether this rank is to go wrong here. If so, that is the time of the fault, when it is asked for the first time."""
        if self.stalls:
            self.stalls_soon()
        if self._odd and not self._noted:
            self._noted = True
            self.notes.add("fault")
        return self._odd

    def put(self, tensor: Tensor, *placements: Any) -> Any:
        """`tensor`, the same on every rank, laid out on the mesh without communication."""
        return self.d.distribute_tensor(tensor, self.mesh, list(placements), src_data_rank=None)

    def group(self, axis: str | None = None) -> Any:
        """The group along an axis, or of all ranks of the mesh."""
        return self.mesh.group(axis or self.mesh.axis_names)


class AtTorch(At):
    """The same without shardmesh: DTensor, and torch.distributed's collectives with a timeout of a few seconds."""

    def __init__(self, rank: int, size: int, odd: bool, notes: Notes) -> None:
        super().__init__(rank, size, odd, notes)
        self.d = TORCH

    def start(self, mesh: Mapping[str, int]) -> None:
        """As above. Torch leaves the groups of a mesh at their timeout of 30 minutes: here all get a short one."""
        dist.set_debug_level_from_env()
        dist.distributed_c10d.default_pg_timeout = timedelta(seconds=TORCH_TIMEOUT_S)
        dist.init_process_group("gloo", timeout=timedelta(seconds=TORCH_TIMEOUT_S))
        super().start(mesh)

    def stalls_soon(self) -> None:
        """Torch has one timeout for everything."""

    def group(self, axis: str | None = None) -> TorchGroup:
        return TorchGroup(dist.group.WORLD if axis is None else self.mesh.get_group(axis))


class TorchGroup:
    """torch.distributed's collectives over one group, with the names and arguments of `shardmesh.mesh.comm.group.Group`."""

    def __init__(self, group: Any) -> None:
        self.handle, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, out: Tensor, x: Tensor, async_op: bool = False) -> Any:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(out, x, group=self.handle, async_op=async_op)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str = "sum", async_op: bool = False) -> Any:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(out, x, _reduction(op), group=self.handle, async_op=async_op)

    def all_reduce(self, x: Tensor, op: str = "sum", async_op: bool = False) -> Any:
        return dist.all_reduce(x, _reduction(op), group=self.handle, async_op=async_op)

    def all_to_all(self, out: Tensor, x: Tensor, out_splits: Any = None, in_splits: Any = None) -> Any:
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


def quiet() -> None:
    """One thread each: four ranks share a few cores."""
    torch.set_num_threads(1)
