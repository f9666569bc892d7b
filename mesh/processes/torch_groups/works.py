"""Works of torch.distributed, and how the host waits for them while the monitor checks others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm.recording.recorder import Recorder
from ...comm.work import Work
from ...monitor.monitor import Monitor
from ...monitor.waiting import is_done_now

_WITHOUT_STREAMS = ("cpu", "meta")


def mark_stream(recorder: Recorder | None, device: torch.device, number: int | None = None) -> None:
    """Record an event where the current stream waits for a collective.

    From it the watchdog knows whether the collective has completed.

    Args:
        number: of its record; None for the last one of the recorder.
    """
    if recorder is None or recorder.monitor is None or device.type in _WITHOUT_STREAMS:
        return
    number = recorder.record_of(recorder.called - 1) if number is None else number
    recorder.stream_mark = recorder.monitor.stream_events.mark(number, device)


class TorchWork(Work):
    """Started works of torch, and the buffers that they read and write.

    Args:
        recorder: of collectives on an accelerator, for which `wait` lets the current stream wait.
    """

    __slots__ = ("_buffers", "_number", "_recorder", "_works")

    def __init__(
        self, works: list[Any], buffers: tuple[Tensor, ...], recorder: Recorder | None = None
    ) -> None:
        self._works, self._recorder = works, recorder
        self._number = None if recorder is None else recorder.record_of(recorder.called - 1)
        self._buffers: tuple[Tensor, ...] = buffers

    def wait(self) -> None:
        for work in self._works:
            self._wait(work)
        if self._works:
            mark_stream(self._recorder, self._buffers[0].device, self._number)
        self._works, self._buffers = [], ()

    def _wait(self, work: Any) -> None:
        work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class MonitoredWork(TorchWork):
    """A collective on the CPU; while it waits, the monitor checks the other ranks."""

    __slots__ = ("_own_recorder", "_sequence", "_waiting")

    def __init__(
        self, works: list[Any], buffers: tuple[Tensor, ...], recorder: Recorder, monitor: Monitor
    ) -> None:
        super().__init__(works, buffers)
        self._own_recorder = recorder
        self._sequence = recorder.called - 1
        self._waiting = monitor.waiting

    def _wait(self, work: Any) -> None:
        self._waiting.wait_for_work(self._own_recorder, self._sequence, work)


class MonitoredMessage(MonitoredWork):
    """A message between two ranks on the CPU that has a timed wait."""

    __slots__ = ()

    def _wait(self, work: Any) -> None:
        self._waiting.wait_for_message(self._own_recorder, self._sequence, work)

    def is_completed(self) -> bool:
        """Return whether it has arrived; under a profiler, which could lock both, False."""
        return all(map(is_done_now, self._works))


class PolledWork(MonitoredWork):
    """A collective on an accelerator that the host waits for, as for a barrier.

    NCCL aborts its communicator if a timed wait expires.
    """

    __slots__ = ()

    def _wait(self, work: Any) -> None:
        self._waiting.poll(self._own_recorder, self._sequence, work)


class MonitoredMessages(MonitoredWork):
    """Point-to-point messages on the CPU.

    gloo's wait for a message blocks the thread, so first wait, monitored, for the other ranks.
    """

    __slots__ = ("_places",)

    def __init__(
        self,
        works: list[Any],
        buffers: tuple[Tensor, ...],
        recorder: Recorder,
        monitor: Monitor,
        places: Sequence[int | None],
    ) -> None:
        super().__init__(works, buffers, recorder, monitor)
        self._places = places

    def wait(self) -> None:
        if self._works:
            self._waiting.wait_for_peers(self._own_recorder, self._sequence, self._places)
        super().wait()

    def _wait(self, work: Any) -> None:
        self._waiting.wait_to_the_end(self._own_recorder, self._sequence, work)
