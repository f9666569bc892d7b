"""Record the collectives that the program itself calls on one of torch's process groups.

Nothing waits here before torch has started the call, not even a group's first one: programs may
start something asynchronous in one group before calls of another group, and rank 0 may have
scattered long before the others ask for their parts.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...comm.comm_context import CommContext, NoContext
from ...comm.recording.recorder import RecordedGroup, Recorder, TraceBuffers
from ...comm.recording.trace_buffer import SLOTS
from ..diagnosis.diagnose import note_missing
from ..diagnosis.history import TORCHS_DEFAULT
from ..diagnosis.members import agree, have_all_come, read_members
from ..monitor import Monitor
from ..waiting import is_done

_CPU = torch.device("cpu")
_SOON = timedelta(seconds=1)  # for torch to report by itself that its time has run out
_LAST = SLOTS - 1
_NONE: tuple[int, Callable[[], Any] | None, Any, int] = (-1, None, None, 0)


def mark_step(monitor: Monitor, origin: tuple[None, int] | None) -> None:
    """Let the collectives that this thread calls on torch's groups belong to a step from now on."""
    context = monitor.torch_context
    if not isinstance(context, CommContext):
        context = monitor.torch_context = CommContext()
        for recorder in monitor.recorders:
            if isinstance(recorder, TorchRecorder) and not recorder.is_channel:
                recorder._comm_context = context
    context.origin = origin


class TorchGroup(RecordedGroup):
    """What is recorded of one of torch's groups.

    Args:
        identity: tells it from others.
        description: what it is called in messages.
    """

    __slots__ = ("_description", "_identity")

    def __init__(
        self,
        identity: str,
        description: str,
        ranks: tuple[int, ...],
        monitor: Monitor,
        comm_context: CommContext | NoContext,
    ) -> None:
        super().__init__(ranks, monitor.directory.rank, comm_context)
        self._identity, self._description = identity, description

    @staticmethod
    def of(handle: Any, ranks: tuple[int, ...], monitor: Monitor) -> TorchGroup:
        """Return the group of a handle of torch's."""
        name = name_of(handle)
        description = TORCHS_DEFAULT if handle is dist.group.WORLD else f"torch's group {name}"
        return TorchGroup(
            f"torch {name} {ranks}", description, ranks, monitor, monitor.torch_context
        )

    def identity(self) -> str:
        return self._identity

    def description(self) -> str:
        return self._description


class TorchRecorder(Recorder):
    """What one rank records of one of torch's groups.

    Attributes:
        size: of the group.
        on_cpu: whether its calls can be waited for in slices: those of gloo, which the host waits
            for.
        timeout_ns: torch's own timeout of the group.
        under_way: (sequence number; torch's work, by a reference, or None while it is waited for;
            recorder; number of the record) of the last calls.
    """

    __slots__ = ("on_cpu", "size", "timeout_ns", "under_way")
    needs_rendezvous = shows_waits = False  # C++ waits without it
    monitor: Monitor | None

    def __init__(self, handle: Any, group: TorchGroup, monitor: Monitor) -> None:
        super().__init__(group, monitor.buffer, monitor)
        self.size = group.size
        self.on_cpu = all(
            handle._get_backend(device).name() == "gloo" for device in handle._device_types
        )
        self.timeout_ns = _timeout_ns(handle)
        self.under_way = [_NONE] * SLOTS

    # -- a call ------------------------------------------------------------------------------------

    def begin(self, sequence: int) -> None:
        """Mark a call as under way until `end`, even if its work is done."""
        self.under_way[sequence & _LAST] = sequence, None, self, 0

    def end(self, sequence: int, number: int) -> None:
        self.under_way[sequence & _LAST] = _NONE
        self.leave(number)

    def is_open(self, sequence: int) -> bool:
        """Return whether this rank's part in the call is under way.

        One that has broadcast need not wait for those who receive.
        """
        latest, work, _, number = self.under_way[sequence & _LAST]
        if latest != sequence:
            return False
        if work is None:
            return True
        pending = work()
        if pending is not None and not (
            is_done(pending) if self.on_cpu and not self.is_channel else pending.is_completed()
        ):
            return True
        self.end(sequence, number)
        return False

    @property
    def on_device(self) -> bool:
        return not self.on_cpu

    def is_on_stream(self) -> bool:
        return not self.on_cpu and self.called > 0 and self.is_open(self.called - 1)

    def wait(
        self, sequence: int, work: Any, timeout: timedelta | None, plainly: Callable[..., Any]
    ) -> Any:
        """Wait for torch's work, checking the other ranks now and then.

        Args:
            plainly: torch's own way to wait.

        Raises: WatchError if the monitor explains it; otherwise torch's error.
        """
        monitor = self.monitor
        if monitor is None or not self.on_cpu:
            return plainly(work) if timeout is None else plainly(work, timeout)
        if timeout is not None:
            monitor.waiting.wait_until(
                self, sequence, lambda: is_done(work), timeout.total_seconds() * 1e9
            )
            return plainly(work, _SOON)
        monitor.waiting.wait_for_work(self, sequence, work)
        return True

    def wait_for_all(self, sequence: int, timeout: timedelta) -> bool:
        """Wait until all ranks have called; return whether they did in time. Raises: WatchError."""
        monitor = self.monitor
        return monitor is None or monitor.waiting.wait_until(
            self,
            sequence,
            lambda: have_all_come(read_members(monitor.directory, self, sequence)),
            timeout.total_seconds() * 1e9,
        )

    def explain(self, sequence: int, error: RuntimeError) -> None:
        """Raise a WatchError where another rank is the reason for an error of torch's."""
        if self.monitor is not None and self.on_cpu:
            self.mark(error, sequence)
            self.monitor.waiting.explain(self, sequence, error)

    def mark(self, error: BaseException, sequence: int) -> None:
        """Record on an error of torch's, such as a timeout, that other ranks had not arrived."""
        if self.monitor is not None:
            note_missing(self.monitor.directory, self, sequence, error)

    # -- the row -----------------------------------------------------------------------------------

    def find_neighbours(self, directory: TraceBuffers) -> None:
        """Find the neighbours' rows, and compare.

        Nothing was known of ranks that arrived earlier when this one called.
        """
        super().find_neighbours(directory)
        monitor = self.monitor
        if monitor is not None and not agree(
            read_members(monitor.directory, self, self.called - 1)
        ):
            monitor.waiting.wait_for_votes(self)


def name_of(handle: Any) -> str:
    """Return the name that torch has given to a group, the same on all of its ranks."""
    return distributed_c10d._world.pg_names.get(handle, "")


def _timeout_ns(handle: Any) -> int:
    try:
        return int(handle._get_backend(_CPU).options._timeout.total_seconds() * 1e9)
    except (RuntimeError, AttributeError):
        return int(dist.distributed_c10d.default_pg_timeout.total_seconds() * 1e9)
