"""A process group that behaves like NCCL's, on the CPU: collectives return at once and complete
later, and a timed wait that expires aborts the communicator. `tests/mesh/simulated/nccl_world.py`
has worlds of shardmesh that behave so, with data.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class NcclLikeGroup:
    """Stands for one of torch's process groups over two ranks.

    Args:
        seconds: how long its works take.

    Attributes:
        devices: where each barrier ran.
        works: of all calls, in order.
        is_aborted: whether the communicator is broken, and all works with it.
    """

    def __init__(
        self,
        device_types: Sequence[str] = ("cuda",),
        bound: torch.device | None = None,
        seconds: float = 0.3,
    ) -> None:
        self._device_types = [torch.device(name) for name in device_types]
        self.bound_device_id, self.seconds = bound, seconds
        self.devices: list[torch.device] = []
        self.works: list[NcclLikeWork] = []
        self.is_aborted = False
        self.lock = threading.Lock()

    def _get_backend(self, device: torch.device) -> NcclLikeBackend:
        return NcclLikeBackend(self, "gloo" if device.type == "cpu" else "nccl")

    def shutdown(self) -> None:
        """Wait for the kernels under a lock, as `destroy_process_group` does."""
        with self.lock:
            while not (self.is_aborted or all(work.is_completed() for work in self.works)):
                time.sleep(0.001)

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def barrier(self, opts: Any) -> NcclLikeWork:
        self.devices.append(opts.device)
        self.works.append(NcclLikeWork(self))
        return self.works[-1]


class NcclLikeBackend:
    """The part of a group for one device."""

    def __init__(self, group: NcclLikeGroup, name: str) -> None:
        self._group, self._name = group, name

    def name(self) -> str:
        return self._name

    def abort(self) -> None:
        assert self._name == "nccl"
        with self._group.lock:
            self._group.is_aborted = True


class NcclLikeWork:
    """A collective under way."""

    def __init__(self, group: NcclLikeGroup) -> None:
        self.group, self.end = group, time.monotonic() + group.seconds

    def is_completed(self) -> bool:
        return self.group.is_aborted or time.monotonic() >= self.end

    def wait(self, timeout: timedelta | None = None) -> bool:
        deadline = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
        while not self.is_completed():
            self.group.is_aborted = time.monotonic() > deadline
            time.sleep(0.001)
        if self.group.is_aborted:
            raise RuntimeError("NCCL communicator was aborted")
        return True
