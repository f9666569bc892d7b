"""The world of real processes: groups over torch.distributed, with NCCL, gloo or any other backend it knows."""

from __future__ import annotations

import atexit
import hashlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from .. import errors
from ..monitor.agreement import Agreement
from ..monitor.hosts.relay import start_relay
from ..monitor.monitor import Monitor
from ..monitor.recording.job_name import find_name
from ..monitor.recording.recorder import Recorder
from ..monitor.settings import settings
from ..monitor.start import start_monitor
from ..monitor.torch_calls import hooks
from . import dtype_encoding
from .group import Group, Observer, World
from .work import DONE, Work, and_then

if TYPE_CHECKING:
    from ..device_mesh import DeviceMesh

# torch 2.13 renamed these two.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_FOR_EVER = timedelta(days=7)
_NOTHING = torch.empty(0)
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
            self._wait(work)
        self._works, self._buffers = [], ()

    def _wait(self, work: Any) -> None:
        work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class _WatchedWork(_TorchWork):
    """A collective on the CPU, waited for with an eye on the other ranks."""

    __slots__ = ("_seat", "_sequence", "_watch")

    def __init__(self, works: list[Any], buffers: tuple[Tensor, ...], recorder: Recorder, watch: Monitor) -> None:
        super().__init__(works, buffers)
        self._seat, self._sequence, self._watch = recorder, recorder.called - 1, watch

    def _wait(self, work: Any) -> None:
        self._watch.wait(self._seat, self._sequence, work)


class _WatchedMessages(_WatchedWork):
    """Messages between ranks on the CPU: gloo can only wait for them without looking up, so first the others must have come."""

    __slots__ = ("_places",)

    def __init__(
        self, works: list[Any], buffers: tuple[Tensor, ...], recorder: Recorder, watch: Monitor, places: Sequence[int | None]
    ) -> None:
        super().__init__(works, buffers, recorder, watch)
        self._places = places

    def wait(self) -> None:
        if self._works:
            self._watch.wait_for_peers(self._seat, self._sequence, self._places)
        super().wait()

    def _wait(self, work: Any) -> None:
        self._watch.wait_to_the_end(self._seat, self._sequence, work)


class ProcessGroup(Group):
    """Group over a torch.distributed process group, which the first collective makes.

    Making a group waits for its members, so merely asking for one (to print its ranks, on one rank) must not do it.
    """

    __slots__ = ("_channel", "_connected", "_given")

    def __init__(self, world: World, ranks: tuple[int, ...], given: dist.ProcessGroup | None = None) -> None:
        super().__init__(world, ranks)
        self._connected = False
        # Weak, as torch owns its groups: one that outlives destroy_process_group aborts the process at exit.
        self._given = None if given is None else weakref.ref(given)
        self._channel = None if _is_default(given) else self._given

    @property
    def handle(self) -> dist.ProcessGroup:
        """torch's process group, for a program's own calls of torch.distributed: over all ranks its default group.

        Communication: the first time that of other ranks is asked for, its members wait for each other.

        Raises: LaunchEnvironmentError after destroy_process_group.
        """
        if self._given is None and dist.is_initialized() and self.size == dist.get_world_size():
            self._given = weakref.ref(_default_group())
        return self._alive(self._given) if self._given is not None else self.channel

    @property
    def channel(self) -> dist.ProcessGroup:
        """The process group that the library's collectives go through.

        It is never torch's default group: a collective that a program calls there on one rank alone, or in another order, would meet
        those of the library, and all data after it would arrive one collective too late.

        Communication: the first time, its members wait for each other.

        Raises: LaunchEnvironmentError after destroy_process_group.
        """
        if self._channel is None:
            if self._given is not None:
                self._alive(self._given)
            made = self._new_handle()
            self._channel = weakref.ref(made)
            return made
        return self._alive(self._channel)

    def _alive(self, reference: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
        made = reference()
        if made is None:
            raise errors.LaunchEnvironmentError(
                f"the process group of ranks {self.ranks} was destroyed (torch.distributed.destroy_process_group); "
                "make the mesh again after the new default group is started."
            )
        return made

    def _new_handle(self) -> dist.ProcessGroup:
        if not dist.is_initialized():
            raise errors.LaunchEnvironmentError(
                "torch.distributed has no default process group, so there is no process group to hand out. "
                "Call init_device_mesh(...) or torch.distributed.init_process_group(...) first."
            )
        if self.size == dist.get_world_size() and (self.size == 1 or dist.get_backend() == "mpi"):  # which makes no groups of its own
            return _default_group()
        try:
            with _naming_groups_by_their_ranks(self._scope()):
                made: Any = dist.new_group(list(self.ranks), use_local_synchronization=True, timeout=_timeout())
        except RuntimeError as error:
            if self.recorder is not None and self.recorder.monitor is not None:
                self.recorder.monitor.explain(self.recorder, self.recorder.called - 1, error)
            raise
        return made

    def _scope(self) -> str:
        return self.world.job if isinstance(self.world, ProcessWorld) else ""

    def _started(self, call: Callable[..., Any], buffers: tuple[Tensor, ...], async_op: bool, *args: Any) -> Work | None:
        """Runs a collective of torch's on the first buffers it takes. On the CPU it is always started, and then waited for.

        On an accelerator to wait is for the stream to wait, and a call that is not `async_op` may use the current one.
        """
        handle, recorder = self.channel, self.recorder
        call = self._as_ours(call)
        watch = self._watch_of(buffers[0])
        if recorder is None or watch is None:
            work = call(*args, group=handle, async_op=async_op)
            return None if work is None else _TorchWork([work], buffers)
        try:
            work = call(*args, group=handle, async_op=True)
        except RuntimeError as error:
            watch.explain(recorder, recorder.called - 1, error)
            raise
        if work is None:
            return DONE if async_op else None
        watched = _WatchedWork([work], buffers, recorder, watch)
        return watched if async_op else watched.wait()

    def _all_gather(self, out: Tensor, x: Tensor, async_op: bool) -> Work | None:
        if x.dtype not in dtype_encoding.NATIVE:
            out, x = dtype_encoding.as_bytes(out), dtype_encoding.as_bytes(x)
        return self._started(_all_gather_flat, (out, x), async_op, _flat(out), _flat(x))

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: str, async_op: bool) -> Work | None:
        if op == "sum" and x.device.type == "cpu" and _is_gloo(self.channel, x.device):
            return self._summed_here(out, x, async_op)
        return self._started(_reduce_scatter_flat, (out, x), async_op, _flat(out), _flat(x), _REDUCE_OP[op])

    def _summed_here(self, out: Tensor, x: Tensor, async_op: bool) -> Work | None:
        """Each rank gets the parts of its sum and adds them in the order of ranks: gloo's own takes longer than its all_reduce."""
        arrived = x.detach().new_empty(self.size, out.numel())
        work = and_then(self._all_to_all(arrived, x, None, None, True), lambda: dtype_encoding.add_up(arrived, out))
        return work if async_op or work is None else work.wait()

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work | None:
        return self._started(dist.all_reduce, (x,), async_op, x, _REDUCE_OP[op])

    def _all_to_all(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int] | None, in_splits: Sequence[int] | None, async_op: bool
    ) -> Work | None:
        splits = [None if given is None else list(given) for given in (out_splits, in_splits)]
        if x.dtype not in dtype_encoding.NATIVE:
            width = x.element_size()
            out, x = dtype_encoding.as_bytes(out), dtype_encoding.as_bytes(x)
            splits = [None if given is None else [n * width for n in given] for given in splits]
        return self._started(dist.all_to_all_single, (out, x), async_op, _flat(out), _flat(x), *splits)

    def _broadcast(self, x: Tensor, src: int, async_op: bool) -> Work | None:
        if x.dtype not in dtype_encoding.NATIVE:
            x = dtype_encoding.as_bytes(x)
        return self._started(dist.broadcast, (x,), async_op, x, self.ranks[src])

    def _permute(self, out: Tensor, x: Tensor, dst: int | None, src: int | None, async_op: bool) -> Work | None:
        handle = self.channel
        self._connect(handle, x)
        if x.dtype not in dtype_encoding.NATIVE or x.is_neg():
            out, x = dtype_encoding.as_bytes(out), dtype_encoding.as_bytes(x)
        if _needs_host_memory(handle, x.device):
            arrived = torch.empty_like(out, device="cpu")
            work = and_then(self._messages(handle, arrived, x.cpu(), dst, src), lambda: _copy_where_any(out, arrived, src))
        else:
            work = self._messages(handle, out, x, dst, src)
        return work if async_op or work is None else work.wait()

    def _connect(self, handle: dist.ProcessGroup, x: Tensor) -> None:
        """Lets all ranks meet once before they send: NCCL connects a whole group in its first call, if all make it."""
        if not self._connected and x.device.type != "cpu":
            self._as_ours(dist.all_reduce)(x.new_zeros(1, dtype=torch.int32), group=handle)
        self._connected = True

    def _messages(self, handle: dist.ProcessGroup, out: Tensor, x: Tensor, dst: int | None, src: int | None) -> Work:
        ops = []
        if dst is not None and x.numel():
            ops.append(dist.P2POp(dist.isend, x, group=handle, group_peer=dst))
        if src is not None and out.numel():
            ops.append(dist.P2POp(dist.irecv, out, group=handle, group_peer=src))
        works = self._as_ours(dist.batch_isend_irecv)(ops) if ops else []
        recorder, watch = self.recorder, self._watch_of(x)
        if recorder is None or watch is None:
            return _TorchWork(works, (out, x))
        return _WatchedMessages(works, (out, x), recorder, watch, (dst, src))

    def _as_ours(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """This function of torch's; on a group that the program has made, too, nobody takes what it calls for a call of the program's."""
        return call if self._given is None else partial(hooks.as_ours, call)

    def _watch_of(self, x: Tensor) -> Monitor | None:
        """The watch, where a collective on this tensor is to be waited for with an eye on the others."""
        return self.recorder.monitor if self.recorder is not None and x.device.type == "cpu" and settings().mode != "off" else None

    def _barrier(self) -> None:
        self._started(dist.barrier, (_NOTHING,), False)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Sizes first, then everything, each as long as the longest."""
        device = self._host_device()
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        sizes = torch.empty(self.size, dtype=torch.int64, device=device)
        self._all_gather(sizes, torch.tensor([len(data)], device=device), False)
        longest = int(sizes.max())
        padded = torch.nn.functional.pad(mine, (0, longest - len(data)))
        everyone = torch.empty(self.size, longest, dtype=torch.uint8, device=device)
        self._all_gather(everyone, padded, False)
        return [bytes(row[:size].numpy()) for row, size in zip(everyone.cpu(), sizes.tolist(), strict=True)]

    def _host_device(self) -> torch.device:
        """Where the group takes data that comes from the host: the CPU, if it has a backend for it."""
        types = {device.type for device in self.channel._device_types}
        if "cpu" in types:
            return torch.device("cpu")
        kind = sorted(types)[0]
        return torch.device(kind, torch.get_device_module(kind).current_device())


def _timeout() -> timedelta | None:
    """For a new group: none of torch's where the watch looks after all its ranks do, which is on the CPU."""
    return _FOR_EVER if is_watched(dist.get_backend_config()) and process_world().monitor is not None else None


def is_watched(backends: str) -> bool:
    """Whether ranks that wait in collectives of these backends see what the watch sees; on an accelerator the stream waits."""
    return settings().mode != "off" and all(part.startswith("cpu") or ":" not in part for part in backends.split(","))


def _needs_host_memory(handle: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend sends from and receives into host memory alone: gloo, which takes other devices in collectives only."""
    return device.type != "cpu" and _is_gloo(handle, device)


def _is_gloo(handle: dist.ProcessGroup, device: torch.device) -> bool:
    return handle._get_backend(device).name() == "gloo"


def _copy_where_any(out: Tensor, arrived: Tensor, src: int | None) -> None:
    if src is not None:
        out.copy_(arrived)


_times_made: Counter[tuple[str, tuple[int, ...]]] = Counter()  # by job, so that an error in one is none in the next
_naming = threading.Lock()


@contextmanager
def _naming_groups_by_their_ranks(job: str) -> Iterator[None]:
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
        distributed_c10d._hash_ranks_to_str = partial(_group_name, job)
        try:
            yield
        finally:
            distributed_c10d._hash_ranks_to_str = torchs_own


def _group_name(job: str, ranks: Sequence[int]) -> str:
    key = job, tuple(ranks)
    _times_made[key] += 1
    digest = hashlib.sha1(repr(key).encode(), usedforsecurity=False).hexdigest()
    return f"shardmesh_{digest}_{_times_made[key]}"


def _is_default(handle: dist.ProcessGroup | None) -> bool:
    return handle is not None and handle is dist.group.WORLD and dist.get_world_size() > 1


def _flat(x: Tensor) -> Tensor:
    """Backends split buffers along their first dim."""
    return x if x.dim() == 1 else x.view(-1)


class ProcessWorld(World):
    """The processes of the default process group; without one, this process alone.

    Attributes:
        job: a name for the life of the default group, the same on all ranks; "" where its store keeps nothing.
    """

    def __init__(self, default: dist.ProcessGroup | None, observers: list[Observer]) -> None:
        rank, size = (dist.get_rank(), dist.get_world_size()) if default is not None else (0, 1)
        super().__init__(rank, size, observers)
        self._default = None if default is None else weakref.ref(default)
        self.from_torch: weakref.WeakKeyDictionary[Any, DeviceMesh] = weakref.WeakKeyDictionary()  # torch's meshes, converted
        self.job = ""
        if default is not None and size > 1:
            self._start_watch()

    def _start_watch(self) -> None:
        store: Any = _default_store()
        name = None if store is None else find_name(store, self.rank)
        if name is None:
            return
        self.job, stale = name
        self.monitor = start_monitor(self, self.job, Agreement(store, self.job, stale, self.rank, self.size))
        if self.monitor is not None:
            self.monitor.relay = start_relay(self.monitor, store)

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
        if _world is not None and _world.monitor is not None:
            _world.monitor.depart()
        _world = ProcessWorld(default, _observers)
    return _world


def _default_store() -> Any:
    """None where there is none: under MPI."""
    try:
        return distributed_c10d._get_default_store()
    except (RuntimeError, AttributeError):
        return None


def _let_threads_finish() -> None:
    """gloo's threads let go of the last tensors after a collective is done, for which they need the interpreter's lock: one that
    still waits for it when the interpreter ends aborts the process (seen in 2 of 10 runs of a short torchrun job, with this in none)."""
    time.sleep(_TO_FINISH_S)
