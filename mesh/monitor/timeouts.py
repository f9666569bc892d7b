"""Limits of the waits in torch's process groups: timeouts, and after a verdict an abort.

    the host waits     gloo, MPI     practically none: the monitor checks these waits, and knows
                                     when a rank is paused
    a device waits     NCCL          the stall time and a minute: longer than the monitor takes to
                                     find a rank that is missing

torch has one timeout for each backend of a group; a mixed group has two. Those of a device follow
`watchdog(timeout=)`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from .. import settings as settings_module
from ..settings import settings

ON_HOST = timedelta(days=3650)
_GRACE_S = 60.0
_LONGEST_ABORT_S = 5.0  # an abort that takes longer goes on by itself
# torch's process group -> whether it is one of shardmesh, on which the monitor checks all waits of
# the host
_managed: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_never_destroyed: set[int] = set()  # ids of the groups that are never destroyed


def group_timeout(backends: str) -> timedelta | None:
    """Return the timeout of a new group with these backends; None for torch's own.

    Backends are text such as "nccl" or "cpu:gloo,cuda:nccl".
    """
    if settings().mode == "off":
        return None
    names = [part.rpartition(":")[2] for part in backends.split(",")]
    return _on_device() if any(map(waits_on_device, names)) else ON_HOST


def connect_timeout(seconds: float) -> timedelta:
    """Return a timeout for connecting the ranks of a group, until `manage` sets that of its waits.

    No more than the time after which a rank counts as stalled, if it is limited at all.
    """
    if seconds == math.inf:
        return ON_HOST
    return timedelta(seconds=min(seconds, settings().timeout))


def manage(handle: Any, is_own: bool) -> None:
    """Keep the timeouts of a group that was started with `group_timeout` in step with the settings.

    Args:
        is_own: whether only shardmesh calls its collectives.
    """
    _managed[handle] = is_own
    _apply(handle, is_own)


def backends_text(handle: Any) -> str:
    """Return a group's backends with their timeouts, and its bound device.

    "cuda: nccl, 360 s; device bound: cuda:1".
    """
    texts = []
    for kind in sorted(device.type for device in handle._device_types):
        backend = handle._get_backend(torch.device(kind))
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        text = f"{kind}: {backend.name()}"
        if timeout is not None and timeout >= ON_HOST:
            text += ", waits without limit"
        elif timeout is not None:
            text += f", {timeout.total_seconds():g} s"
        texts.append(text)
    return f"{'; '.join(texts)}; device bound: {getattr(handle, 'bound_device_id', None) or 'none'}"


def release() -> None:
    """Set all managed timeouts to torch's defaults: the job goes on without the monitor."""
    for handle in list(_managed):
        with contextlib.suppress(RuntimeError, ValueError, AttributeError):
            distributed_c10d._set_pg_timeout(default_pg_timeout, handle)
    _managed.clear()


def _update() -> None:
    for handle, is_own in list(_managed.items()):
        _apply(handle, is_own)


def _apply(handle: Any, is_own: bool) -> None:
    backends = {device.type: handle._get_backend(device) for device in handle._device_types}
    on_device = {kind: waits_on_device(backend.name()) for kind, backend in backends.items()}
    # The program's own calls on a mixed group are not waited for by the monitor.
    on_host = ON_HOST if is_own or not any(on_device.values()) else _on_device()
    for kind, backend in backends.items():
        with contextlib.suppress(RuntimeError, AttributeError):  # a backend without timeouts
            backend._set_default_timeout(_on_device() if on_device[kind] else on_host)


def _on_device() -> timedelta:
    return timedelta(seconds=min(settings().timeout + _GRACE_S, ON_HOST.total_seconds()))


def waits_on_device(backend: str) -> bool:
    """Return whether a device, not the host, waits for collectives of this backend."""
    return "cpu" not in dist.Backend.backend_capability.get(backend, ())


settings_module.on_timeout.append(_update)


# -- after a verdict -------------------------------------------------------------------------------


def torch_groups() -> list[dist.ProcessGroup]:
    """Return all process groups that torch has in this process."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    known = getattr(distributed_c10d, "_world", None)
    return [] if known is None else list(known.pg_map)


def keep_groups() -> None:
    """Keep all of torch's process groups from being destroyed.

    Destroying a gloo group waits for its threads, and those may wait for ranks that never answer.
    """
    for handle in torch_groups():
        if id(handle) not in _never_destroyed:
            _never_destroyed.add(id(handle))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))


class Communicators:
    """Abort the communicators of accelerators when the job has failed.

    Nothing else ends a kernel that waits for other ranks.

        the verdict is raised     first abort: destroy_process_group would wait for the kernels,
                                  under a lock that an abort needs as well
        half a second later       abort: the main thread is stuck in a synchronization, which that
                                  ends; then it raises the verdict
    """

    def __init__(self) -> None:
        self._aborts: list[threading.Thread] | None = None  # before the first look
        self._lock = threading.RLock()

    def abort(self, is_of_this_job: Callable[[], bool], wait: bool) -> None:
        """Abort them, once. Those for which the host waits, such as gloo's, are left alone.

        Each has a thread, since one abort may wait for a kernel that another ends
        (https://github.com/pytorch/pytorch/issues/119797). Later calls ask torch nothing: before
        Python 3.14 the interpreter aborts the process when it ends while a thread is in a call of
        torch that gives up the interpreter, as looking up a backend does.

        Args:
            is_of_this_job: returns whether torch's groups are those of the job.
            wait: whether to return when that is done, or has taken long.
        """
        with self._lock:
            handles = torch_groups() if self._aborts is None else []
            # asked afterwards: if so, the groups are those of this job
            if handles and is_of_this_job():
                backends: dict[int, Any] = {}
                for handle in handles:
                    backends |= {id(backend): backend for backend in _backends(handle)}
                self._aborts = [
                    threading.Thread(target=_abort, args=(b,), name="shardmesh-abort", daemon=True)
                    for b in backends.values()
                ]
                for thread in self._aborts:
                    thread.start()
        deadline = time.monotonic() + (_LONGEST_ABORT_S if wait else 0)
        for thread in self._aborts or ():
            thread.join(max(0.0, deadline - time.monotonic()))


def _backends(handle: Any) -> list[Any]:
    backends = []
    for device in handle._device_types:
        with contextlib.suppress(RuntimeError):  # the group has been destroyed
            backends.append(handle._get_backend(device))
    return [backend for backend in backends if waits_on_device(backend.name())]


def _abort(backend: Any) -> None:
    # it was aborted before, or takes longer than torch's timeout
    with contextlib.suppress(RuntimeError):
        backend.abort()
