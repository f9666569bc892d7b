"""Abort the communicators of accelerators when the job has failed: nothing else ends a kernel that
waits for other ranks.

the verdict is raised     first abort: destroy_process_group would wait for the kernels, under a
                          lock that an abort needs as well
half a second later       abort: the main thread is stuck in a synchronization, which that ends;
                          then it raises the verdict
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from .termination import torch_groups
from .timeouts import waits_on_device

if TYPE_CHECKING:
    from .monitor import Monitor

_LONGEST_S = 5.0  # an abort that takes longer goes on by itself


class Communicators:
    """Those of this process's groups, for one `Monitor`."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._aborts: list[threading.Thread] = []
        self._lock = threading.RLock()

    def abort(self, wait: bool) -> None:
        """Abort them, once. Those for which the host waits, such as gloo's, are left alone.

        Each has a thread, since one abort may wait for a kernel that another ends (https://github.com/pytorch/pytorch/issues/119797).

        Args:
            wait: whether to return when that is done, or has taken long.
        """
        with self._lock:
            handles = [] if self._aborts else torch_groups()
            # Asked afterwards: if so, the groups are those of this job.
            if handles and self._monitor.is_of_this_job():
                backends = {
                    id(found): found for handle in handles for found in _backends(handle)
                }.values()
                self._aborts = [
                    threading.Thread(target=_abort, args=(b,), name="shardmesh-abort", daemon=True)
                    for b in backends
                ]
                for thread in self._aborts:
                    thread.start()
        deadline = time.monotonic() + (_LONGEST_S if wait else 0)
        for thread in self._aborts:
            thread.join(max(0.0, deadline - time.monotonic()))


def _backends(handle: Any) -> list[Any]:
    found = []
    for device in handle._device_types:
        with contextlib.suppress(RuntimeError):  # the group has been destroyed
            found.append(handle._get_backend(device))
    return [backend for backend in found if waits_on_device(backend.name())]


def _abort(backend: Any) -> None:
    # It was aborted before, or takes longer than torch's timeout.
    with contextlib.suppress(RuntimeError):
        backend.abort()
