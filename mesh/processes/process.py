"""ProcessWorld and ProcessGroup: collectives over torch.distributed, with any of its backends."""

from __future__ import annotations

import atexit
import math
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from .. import errors
from ..comm import dtype_encoding
from ..comm.current_world import register_process_world
from ..comm.group import Group, Observer
from ..comm.group_backend import DEFAULT, FAKE, GroupBackend
from ..comm.work import DONE, Work, and_then
from ..comm.world import World
from ..monitor import timeouts
from ..monitor.agreement import Agreement
from ..monitor.hosts.relay import start_relay
from ..monitor.monitor import Monitor, monitor_of
from ..monitor.process_hooks import start_monitor
from ..monitor.startup.job_name import find_name
from ..monitor.torch_calls import hooks
from ..settings import settings
from ..topology import torchrun_node_size
from .torch_groups import calls
from .torch_groups.new_group import add_host, has_host, is_default_backend, new_group, without_host
from .torch_groups.works import (
    MonitoredMessage,
    MonitoredMessages,
    MonitoredWork,
    PolledWork,
    TorchWork,
    mark_stream,
)

_settings = settings()
_CPU, _EMPTY = torch.device("cpu"), torch.empty(0, device="cpu")
_EXIT_DELAY_S = 0.1


class ProcessGroup(Group):
    """Group over a torch.distributed process group, which is made by the first collective.

    Making a process group waits for all of its ranks, so asking for a `Group` on one rank (to print
    its ranks, say) must not do it.
    """

    __slots__ = (
        "_backend",
        "_broadcasts_messages",
        "_channel",
        "_connected",
        "_label",
        "_lacks_host",
        "_torch_group",
    )

    def __init__(
        self,
        world: World,
        ranks: tuple[int, ...],
        torch_group: dist.ProcessGroup | None = None,
        backend: GroupBackend = DEFAULT,
        label: str = "",
    ) -> None:
        super().__init__(world, ranks)
        self._backend = backend
        self._label = label
        self._connected = self._lacks_host = False
        self._broadcasts_messages: bool | None = None  # before the first message
        # Weak, because a group that outlives destroy_process_group aborts the process at exit.
        self._torch_group = None if torch_group is None else weakref.ref(torch_group)
        is_default = (
            torch_group is not None
            and torch_group is dist.group.WORLD
            and dist.get_world_size() > 1
        )
        self._channel = None if is_default else self._torch_group

    def identity(self) -> str:
        return super().identity() + self._label

    @property
    def handle(self) -> dist.ProcessGroup:
        """torch's process group for the program's own calls of torch.distributed.

        Over all ranks this is the default group.

        Communication: the first access waits for all ranks of the group, unless it is the default
        group.

        Raises: LaunchEnvironmentError after destroy_process_group.
        """
        is_default = self._backend == DEFAULT
        if (
            self._torch_group is None
            and is_default
            and dist.is_initialized()
            and self.size == dist.get_world_size()
        ):
            self._torch_group = weakref.ref(_default_group())
        if self._torch_group is not None:
            return self._alive(self._torch_group)
        return self._channel_for(_CPU) if is_default else self.channel

    @property
    def channel(self) -> dist.ProcessGroup:
        """The process group that the collectives of shardmesh use.

        It is never torch's default group. A collective that a program calls there on one rank only,
        or in another order, would be matched with one of shardmesh's, and every later collective
        would receive the data of the one before.

        Communication: the first access waits for all ranks of the group.

        Raises: LaunchEnvironmentError after destroy_process_group.
        """
        handle = None if self._channel is None else self._channel()
        if handle is None:
            reference = self._channel or self._torch_group
            if reference is not None:
                self._alive(reference)  # raises if it is not
            handle = self._new_handle()
            self._channel = weakref.ref(handle)
        return handle

    def _channel_for(self, device: torch.device) -> dist.ProcessGroup:
        """Return `channel`, with a backend for the CPU if that is the device.

        Communication: as `channel`; also the first access for the CPU waits for all ranks of the
        group.
        """
        handle = self.channel
        if self._lacks_host and device.type == "cpu":
            recorder = self.recorder
            if recorder is not None and recorder.monitor is not None and recorder.called:
                recorder.monitor.waiting.rendezvous(recorder, recorder.called - 1)
            timeout = timeouts.group_timeout("gloo") if self.world.monitor is not None else None
            try:
                add_host(handle, timeout or default_pg_timeout)
            except RuntimeError as error:
                self._explain(error)
                raise
            self._lacks_host = False
            if timeout is not None:
                timeouts.manage(handle, is_own=True)
        return handle

    def _alive(self, reference: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
        handle = reference()
        if handle is None:
            raise errors.LaunchEnvironmentError(
                f"the process group of ranks {self.ranks} was destroyed "
                "(torch.distributed.destroy_process_group); make the mesh again after starting the "
                "new default group."
            )
        return handle

    def _new_handle(self) -> dist.ProcessGroup:
        if not dist.is_initialized():
            raise errors.LaunchEnvironmentError(
                "torch.distributed has no default process group, so this group has no process "
                "group either. Call init_device_mesh(...) or "
                "torch.distributed.init_process_group(...) first."
            )
        is_whole = self.size == dist.get_world_size()
        # MPI cannot make another group
        if (
            is_whole
            and self._backend == DEFAULT
            and (self.size == 1 or dist.get_backend() == "mpi")
        ):
            return _default_group()
        name, options, _ = self._backend
        is_monitored = self.world.monitor is not None and name != FAKE
        timeout = (
            timeouts.group_timeout(name or dist.get_backend_config()) if is_monitored else None
        )
        if timeout is timeouts.ON_HOST and isinstance(self.world, ProcessWorld):
            timeout = timeouts.connect_timeout(self.world.connect_s)
        backends = without_host(dist.get_backend_config()) if name is None else name
        try:
            handle = new_group(
                self.ranks,
                self.world.job if isinstance(self.world, ProcessWorld) else "",
                timeout,
                backends,
                options,
            )
        except RuntimeError as error:
            self._explain(error)
            raise
        if timeout is not None:
            timeouts.manage(handle, is_own=True)
        self._lacks_host = backends is not None and not has_host(backends)
        return handle

    def _explain(self, error: RuntimeError) -> None:
        """Raise the monitor's diagnosis of an error while ranks connect, if there is one."""
        recorder = self.recorder
        monitor = None if recorder is None else monitor_of(recorder)
        if recorder is not None and monitor is not None:
            monitor.waiting.explain(recorder, recorder.called - 1, error)

    def _start(
        self,
        call: Callable[..., Any],
        buffers: tuple[Tensor, ...],
        async_op: bool,
        *args: Any,
        kind: type[MonitoredWork] = MonitoredWork,
    ) -> Work | None:
        """Run a collective of torch.

        A monitored one (on the CPU) is always started asynchronously, then waited for by the
        monitor.

        On an accelerator only the stream waits, so a call without `async_op` runs on the current
        stream.

        Args:
            kind: how the host waits for a monitored one.
        """
        handle = self._channel_for(buffers[0].device)
        recorder = self.recorder
        call = self._as_ours(call)
        monitor = self._monitor_of(buffers[0])
        if recorder is None or monitor is None:
            work = call(*args, group=handle, async_op=async_op)
            if work is not None:
                return TorchWork([work], buffers, recorder)
            mark_stream(recorder, buffers[0].device)
            return None
        try:
            work = call(*args, group=handle, async_op=True)
        except RuntimeError as error:
            monitor.waiting.explain(recorder, recorder.called - 1, error)
            raise
        if work is None:
            return DONE if async_op else None
        monitored_work = kind([work], buffers, recorder, monitor)
        return monitored_work if async_op else monitored_work.wait()

    def _all_gather(self, out: Tensor, x: Tensor, async_op: bool) -> Work | None:
        if x.dtype not in dtype_encoding.NATIVE:
            out, x = dtype_encoding.as_bytes(out), dtype_encoding.as_bytes(x)
        return self._start(calls.all_gather, (out, x), async_op, _flat(out), _flat(x))

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: str, async_op: bool) -> Work | None:
        if (
            op == "sum"
            and x.device.type == "cpu"
            and _is_gloo(self._channel_for(x.device), x.device)
        ):
            return self._reduce_scatter_by_all_to_all(out, x, async_op)
        return self._start(calls.reduce_scatter, (out, x), async_op, _flat(out), _flat(x), op)

    def _reduce_scatter_by_all_to_all(self, out: Tensor, x: Tensor, async_op: bool) -> Work | None:
        """Exchange the parts of each sum and add them in the order of ranks.

        gloo's reduce_scatter is slower than its all_reduce.
        """
        arrived = x.detach().new_empty(self.size, out.numel())
        work = and_then(
            self._all_to_all(arrived, x, None, None, True),
            lambda: dtype_encoding.add_up(arrived, out),
        )
        return work if async_op or work is None else work.wait()

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work | None:
        return self._start(calls.all_reduce, (x,), async_op, x, op)

    def _all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        out_splits: Sequence[int] | None,
        in_splits: Sequence[int] | None,
        async_op: bool,
    ) -> Work | None:
        splits = out_splits, in_splits
        if x.dtype not in dtype_encoding.NATIVE:
            width = x.element_size()
            out, x = dtype_encoding.as_bytes(out), dtype_encoding.as_bytes(x)
            splits = tuple(
                None if sizes is None else [n * width for n in sizes] for sizes in splits
            )
        return self._start(calls.all_to_all, (out, x), async_op, _flat(out), _flat(x), *splits)

    def _broadcast(self, x: Tensor, src: int, async_op: bool) -> Work | None:
        if x.dtype not in dtype_encoding.NATIVE:
            x = dtype_encoding.as_bytes(x)
        return self._start(calls.broadcast, (x,), async_op, x, src)

    def _permute(
        self, out: Tensor, x: Tensor, dst: int | None, src: int | None, async_op: bool
    ) -> Work | None:
        handle = self._channel_for(x.device)
        self._connect(handle, x)
        if x.dtype not in dtype_encoding.NATIVE or x.is_neg():
            out, x = dtype_encoding.as_bytes(out), dtype_encoding.as_bytes(x)
        if _needs_host_memory(handle, x.device):
            arrived = torch.empty_like(out, device="cpu")
            work = self._start_messages(handle, arrived, x.cpu(), dst, src)
            if src is not None:
                work = and_then(work, lambda: out.copy_(arrived))
        else:
            work = self._start_messages(handle, out, x, dst, src)
        return work if async_op or work is None else work.wait()

    def _send(self, x: Tensor, dst: int) -> Work | None:
        if self._is_message_broadcast(x):
            return self._broadcast_message(x, self.rank)
        return self._permute(x.new_empty(0), x, dst, None, True)

    def _receive(self, out: Tensor, src: int) -> Work | None:
        if self._is_message_broadcast(out):
            return self._broadcast_message(out, src)
        return self._permute(out, out.new_empty(0), None, src, True)

    def _is_message_broadcast(self, x: Tensor) -> bool:
        """Return whether messages of this group of two ranks are broadcasts.

        gloo's own messages are waited for without a time limit. A rank that checks the others
        meanwhile would have to ask again and again whether the sender has called. A broadcast moves
        the same bytes, and has a timed wait.
        """
        if x.device.type != "cpu":
            return False
        if self._broadcasts_messages is None:
            self._broadcasts_messages = _is_gloo(self._channel_for(x.device), x.device)
        return self._broadcasts_messages

    def _broadcast_message(self, x: Tensor, src: int) -> Work | None:
        if not x.numel():
            return DONE
        if x.dtype not in dtype_encoding.NATIVE or x.is_neg():
            x = dtype_encoding.as_bytes(x)
        return self._start(calls.broadcast_message, (x,), True, x, src, kind=MonitoredMessage)

    def _connect(self, handle: dist.ProcessGroup, x: Tensor) -> None:
        """Run one collective of all ranks before the first message.

        NCCL connects a whole group in its first call if all ranks make it.
        """
        if not self._connected and x.device.type != "cpu":
            self._as_ours(calls.all_reduce)(
                x.new_zeros(1, dtype=torch.int32), "sum", group=handle, async_op=False
            )
            self._connected = True

    def _start_messages(
        self, handle: dist.ProcessGroup, out: Tensor, x: Tensor, dst: int | None, src: int | None
    ) -> Work:
        ops = []
        if dst is not None and x.numel():
            ops.append(dist.P2POp(dist.isend, x, group=handle, group_peer=dst))
        if src is not None and out.numel():
            ops.append(dist.P2POp(dist.irecv, out, group=handle, group_peer=src))
        works = self._as_ours(dist.batch_isend_irecv)(ops) if ops else []
        recorder = self.recorder
        monitor = self._monitor_of(x)
        if recorder is None or monitor is None:
            return TorchWork(works, (out, x), recorder)
        return MonitoredMessages(works, (out, x), recorder, monitor, (dst, src))

    def _as_ours(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls this one of torch, marked as shardmesh's own.

        It is marked if the program made the process group.
        """
        return call if self._torch_group is None else partial(hooks.as_ours, call)

    def _monitor_of(self, x: Tensor) -> Monitor | None:
        """Return the monitor if it checks other ranks during a collective on this tensor."""
        if self.recorder is None or x.device.type != "cpu" or _settings.mode == "off":
            return None
        return monitor_of(self.recorder)

    def _barrier(self) -> None:
        """Wait for all ranks on the host, in the CPU backend if there is one.

        `dist.barrier` uses the bound device instead.
        """
        device = self._host_device()
        self._start(
            calls.barrier,
            (_EMPTY,),
            False,
            device,
            kind=MonitoredWork if device.type == "cpu" else PolledWork,
        )

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gather the sizes, then the data, padded to the longest."""
        device = self._host_device()
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        sizes = torch.empty(self.size, dtype=torch.int64, device=device)
        self._all_gather(sizes, torch.tensor([len(data)], device=device), False)
        longest = int(sizes.max())
        padded = torch.nn.functional.pad(payload, (0, longest - len(data)))
        everyone = torch.empty(self.size, longest, dtype=torch.uint8, device=device)
        self._all_gather(everyone, padded, False)
        return [
            bytes(row[:size].numpy())
            for row, size in zip(everyone.cpu(), sizes.tolist(), strict=True)
        ]

    def _host_device(self) -> torch.device:
        """Return the device for data of the host.

        The CPU if the group has a backend for it, else the bound or current device.
        """
        handle = self._channel_for(_CPU)
        types = {device.type for device in handle._device_types}
        if "cpu" in types:
            return torch.device("cpu")
        if handle.bound_device_id is not None:
            return handle.bound_device_id
        kind = sorted(types)[0]
        return torch.device(kind, torch.get_device_module(kind).current_device())


def _needs_host_memory(handle: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the backend sends and receives host memory only.

    gloo supports other devices in collectives only.
    """
    return device.type != "cpu" and _is_gloo(handle, device)


def _is_gloo(handle: dist.ProcessGroup, device: torch.device) -> bool:
    return handle._get_backend(device).name() == "gloo"


def _flat(x: Tensor) -> Tensor:
    """Return x with one dim: backends split buffers along the first."""
    return x if x.dim() == 1 else x.view(-1)


class ProcessWorld(World):
    """The processes of the default process group; without one, this process alone.

    Attributes:
        job: a name of the default group, the same on all ranks and different for each that is
            started; "" if it has no store.
        connect_s: seconds for the ranks of a new group of gloo to connect, once all are known to be
            there; as long as it takes by default.
        node_size: how many consecutive ranks share a node, by the environment when the world began;
            None for one node, or uneven ones.
    """

    monitor: Monitor | None

    def __init__(self, default: dist.ProcessGroup | None, observers: list[Observer]) -> None:
        rank, size = (dist.get_rank(), dist.get_world_size()) if default is not None else (0, 1)
        super().__init__(rank, size, observers)
        self._default = None if default is None else weakref.ref(default)
        # torch's meshes, and the DeviceMesh of each
        self.from_torch: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.job = ""
        self.connect_s = math.inf
        self.node_size = torchrun_node_size(size)
        if default is not None and size > 1:
            self._start_monitor()

    def _start_monitor(self) -> None:
        store: Any = default_store()
        name = None if store is None else find_name(store, self.rank)
        if name is None:
            return
        self.job, stale = name
        self.monitor = start_monitor(
            self, self.job, Agreement(store, self.job, stale, self.rank, self.size)
        )
        if self.monitor is not None:
            self.monitor.relay = start_relay(self.monitor, store)

    def is_over(self, default: dist.ProcessGroup | None) -> bool:
        """Return whether the default group has changed."""
        if self._default is None:
            return default is not None
        return default is None or self._default() is not default

    def _make_group(self, ranks: tuple[int, ...]) -> Group:
        return ProcessGroup(self, ranks)

    def _backend_group(self, ranks: tuple[int, ...], backend: GroupBackend) -> Group:
        """Return the group of these ascending ranks.

        A backend that is the default group's makes no other group, unless a communicator does.
        """
        if (
            not backend.communicator
            and backend.options is None
            and (backend.name is None or is_default_backend(backend.name))
        ):
            return super()._backend_group(ranks, DEFAULT)
        key = ranks, backend
        group = self._groups.get(key)
        if group is None:
            if backend.communicator:
                label = f" {backend.communicator}"
            else:
                others = [key for key in self._groups if key[:1] == (ranks,)]
                number = sum(not other.communicator for _, other in others)
                label = f" {backend.name} {number}"
            group = self._groups[key] = ProcessGroup(self, ranks, None, backend, label)
        return group

    def group_from(self, handle: dist.ProcessGroup) -> Group:
        """Return the group over an existing process group, which it uses."""
        ranks = tuple(sorted(dist.get_process_group_ranks(handle)))
        if ranks not in self._groups:
            self._groups[ranks] = ProcessGroup(self, ranks, handle)
        return self._groups[ranks]


# One list for all worlds of the process, so that a budget opened before the default group was
# started still counts.
_observers: list[Observer] = []
_world: ProcessWorld | None = None


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise errors.LaunchEnvironmentError(
            "torch.distributed has no default group: call init_device_mesh first."
        )
    return group


def process_world() -> ProcessWorld:
    """Return the world of the default process group, new if the group is. Starts nothing."""
    global _world
    default = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if _world is None or _world.is_over(default):
        if default is not None:
            atexit.unregister(_wait_for_gloo_threads)
            atexit.register(_wait_for_gloo_threads)
        if _world is not None and _world.monitor is not None:
            _world.monitor.depart()
        _world = ProcessWorld(default, _observers)
    return _world


def default_store() -> Any:
    """Return the store of the default group; None if it has none, as under MPI."""
    try:
        return distributed_c10d._get_default_store()
    except (RuntimeError, AttributeError):
        return None


def _wait_for_gloo_threads() -> None:
    """Give gloo's threads time to release the last tensors, for which they need the GIL.

    A thread that waits for the GIL when the interpreter exits aborts the process (in 2 of 10 runs
    of a short torchrun job without this delay, in none with it).
    """
    time.sleep(_EXIT_DELAY_S)


register_process_world(process_world)
