"""The world of real processes: groups over torch.distributed, with NCCL, gloo or any other backend it knows."""

from __future__ import annotations

import atexit
import hashlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from . import errors, wire
from .group import Group, Observer, World
from .work import Work, and_then

# torch 2.13 renamed these two.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_TO_FINISH_S = 0.1  # before the interpreter ends


def _ops() -> dict[str, Any]:
    op = dist.ReduceOp
    return {"sum": op.SUM, "max": op.MAX, "min": op.MIN, "product": op.PRODUCT}


_REDUCE_OP = _ops() if dist.is_available() else {}


class _TorchWork(Work):
    """What torch has under way, with the buffers it reads and writes."""

    __slots__ = ("_buffers", "_works")

    def __init__(self, works: list[Any], buffers: tuple[Tensor, ...]) -> None:
        self._works, self._buffers = works, buffers

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._buffers = [], ()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class ProcessGroup(Group):
    """Group over a torch.distributed process group, which the first collective makes.

    Making a group waits for its members, so merely asking for one (to print its ranks, on one rank) must not do it.
    """

    __slots__ = ("_connected", "_reference")

    def __init__(self, world: World, ranks: tuple[int, ...], handle: dist.ProcessGroup | None = None) -> None:
        super().__init__(world, ranks)
        self._connected = False
        # Weak, as torch owns its groups: one that outlives destroy_process_group aborts the process at exit.
        self._reference = None if handle is None else weakref.ref(handle)

    @property
    def handle(self) -> dist.ProcessGroup:
        """torch's process group. Communication: the first time, its members wait for each other.

        Raises: LaunchEnvironmentError after destroy_process_group.
        """
        made = self._make_handle() if self._reference is None else self._reference()
        if made is None:
            raise errors.LaunchEnvironmentError(
                f"the process group of ranks {self.ranks} was destroyed (torch.distributed.destroy_process_group); "
                "make the mesh again after the new default group is started."
            )
        return made

    def _make_handle(self) -> dist.ProcessGroup:
        handle = self._new_handle()
        self._reference = weakref.ref(handle)
        return handle

    def _new_handle(self) -> dist.ProcessGroup:
        if not dist.is_initialized():
            raise errors.LaunchEnvironmentError(
                "torch.distributed has no default process group, so there is no process group to hand out. "
                "Call init_device_mesh(...) or torch.distributed.init_process_group(...) first."
            )
        if len(self.ranks) == dist.get_world_size():
            return _default_group()
        with _naming_groups_by_their_ranks():
            made: Any = dist.new_group(list(self.ranks), use_local_synchronization=True)
        return made

    def _all_gather(self, out: Tensor, x: Tensor, async_op: bool) -> Work | None:
        if x.dtype not in wire.NATIVE:
            out, x = wire.as_bytes(out), wire.as_bytes(x)
        work = _all_gather_flat(_flat(out), _flat(x), group=self.handle, async_op=async_op)
        return None if work is None else _TorchWork([work], (out, x))

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: str, async_op: bool) -> Work | None:
        work = _reduce_scatter_flat(_flat(out), _flat(x), _REDUCE_OP[op], group=self.handle, async_op=async_op)
        return None if work is None else _TorchWork([work], (out, x))

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work | None:
        work = dist.all_reduce(x, _REDUCE_OP[op], group=self.handle, async_op=async_op)
        return None if work is None else _TorchWork([work], (x,))

    def _all_to_all(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int] | None, in_splits: Sequence[int] | None, async_op: bool
    ) -> Work | None:
        splits = [None if given is None else list(given) for given in (out_splits, in_splits)]
        if x.dtype not in wire.NATIVE:
            width = x.element_size()
            out, x = wire.as_bytes(out), wire.as_bytes(x)
            splits = [None if given is None else [n * width for n in given] for given in splits]
        work = dist.all_to_all_single(_flat(out), _flat(x), *splits, group=self.handle, async_op=async_op)
        return None if work is None else _TorchWork([work], (out, x))

    def _broadcast(self, x: Tensor, src: int, async_op: bool) -> Work | None:
        if x.dtype not in wire.NATIVE:
            x = wire.as_bytes(x)
        work = dist.broadcast(x, self.ranks[src], group=self.handle, async_op=async_op)
        return None if work is None else _TorchWork([work], (x,))

    def _permute(self, out: Tensor, x: Tensor, dst: int | None, src: int | None, async_op: bool) -> Work | None:
        handle = self.handle
        self._connect(handle, x)
        if x.dtype not in wire.NATIVE or x.is_neg():
            out, x = wire.as_bytes(out), wire.as_bytes(x)
        if _needs_host_memory(handle, x.device):
            arrived = torch.empty_like(out, device="cpu")
            work = and_then(_send_and_receive(handle, arrived, x.cpu(), dst, src), lambda: _copy_where_any(out, arrived, src))
        else:
            work = _send_and_receive(handle, out, x, dst, src)
        return work if async_op or work is None else work.wait()

    def _connect(self, handle: dist.ProcessGroup, x: Tensor) -> None:
        """Lets all ranks meet once before they send: NCCL connects a whole group in its first call, if all make it."""
        if not self._connected and x.device.type != "cpu":
            dist.all_reduce(x.new_zeros(1, dtype=torch.int32), group=handle)
        self._connected = True

    def _barrier(self) -> None:
        dist.barrier(group=self.handle)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, data, group=self.handle)
        return gathered


def _send_and_receive(handle: dist.ProcessGroup, out: Tensor, x: Tensor, dst: int | None, src: int | None) -> Work:
    ops = []
    if dst is not None and x.numel():
        ops.append(dist.P2POp(dist.isend, x, group=handle, group_peer=dst))
    if src is not None and out.numel():
        ops.append(dist.P2POp(dist.irecv, out, group=handle, group_peer=src))
    return _TorchWork(dist.batch_isend_irecv(ops) if ops else [], (out, x))


def _needs_host_memory(handle: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend sends from and receives into host memory alone: gloo, which takes other devices in collectives only."""
    return device.type != "cpu" and handle._get_backend(device).name() == "gloo"


def _copy_where_any(out: Tensor, arrived: Tensor, src: int | None) -> None:
    if src is not None:
        out.copy_(arrived)


_times_made: Counter[tuple[int, ...]] = Counter()
_naming = threading.Lock()


@contextmanager
def _naming_groups_by_their_ranks() -> Iterator[None]:
    """Lets the members of a new group agree on its name.

    Torch names a group made with `use_local_synchronization` by its ranks and the number of groups that this rank has
    made so far (2.13: distributed_c10d._hash_ranks_to_str). Members that differ in that number, as on meshes over parts
    of the world, wait for each other under different names, for ever. How often these very ranks have made a group is
    the same on all of them.
    """
    if not hasattr(distributed_c10d, "_hash_ranks_to_str"):
        yield
        return
    with _naming:
        torchs_own = distributed_c10d._hash_ranks_to_str
        distributed_c10d._hash_ranks_to_str = _group_name
        try:
            yield
        finally:
            distributed_c10d._hash_ranks_to_str = torchs_own


def _group_name(ranks: Sequence[int]) -> str:
    key = tuple(ranks)
    _times_made[key] += 1
    digest = hashlib.sha1(repr(key).encode(), usedforsecurity=False).hexdigest()
    return f"shardmesh_{digest}_{_times_made[key]}"


def _flat(x: Tensor) -> Tensor:
    """Backends split buffers along their first dim."""
    return x if x.dim() == 1 else x.view(-1)


class ProcessWorld(World):
    """The processes of the default process group; without one, this process alone."""

    def __init__(self, default: dist.ProcessGroup | None, observers: list[Observer]) -> None:
        rank, size = (dist.get_rank(), dist.get_world_size()) if default is not None else (0, 1)
        super().__init__(rank, size, observers)
        self._default = None if default is None else weakref.ref(default)

    def is_over(self, default: dist.ProcessGroup | None) -> bool:
        """Whether the default group is another one now."""
        if self._default is None:
            return default is not None
        return default is None or self._default() is not default

    def _make_group(self, ranks: tuple[int, ...]) -> Group:
        return ProcessGroup(self, ranks)

    def adopt(self, handle: dist.ProcessGroup) -> Group:
        """The group over the ranks of an existing process group, using it instead of making another."""
        ranks = tuple(sorted(dist.get_process_group_ranks(handle)))
        if ranks not in self._groups:
            self._groups[ranks] = ProcessGroup(self, ranks, handle)
        return self._groups[ranks]


# One list for the life of the process: a budget that was opened before the default group was made still counts.
_observers: list[Observer] = []
_world: ProcessWorld | None = None


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise errors.LaunchEnvironmentError("torch.distributed has no default group: call init_device_mesh first.")
    return group


def process_world() -> ProcessWorld:
    """The world of the default process group, a new one whenever that group is a new one. Starts nothing."""
    global _world
    default = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if _world is None or _world.is_over(default):
        if default is not None:
            atexit.unregister(_let_threads_finish)
            atexit.register(_let_threads_finish)
        _world = ProcessWorld(default, _observers)
    return _world


def _let_threads_finish() -> None:
    """gloo's threads let go of the last tensors after a collective is done, for which they need the interpreter's lock: one that
    still waits for it when the interpreter ends aborts the process (seen in 2 of 10 runs of a short torchrun job, with this in none)."""
    time.sleep(_TO_FINISH_S)
