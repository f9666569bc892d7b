"""Timeouts of torch's process groups while the monitor is on.

    the host waits     gloo, MPI     practically none: the monitor checks these waits, and knows
                                     when a rank is paused
    a device waits     NCCL          the stall time and a minute: longer than the monitor takes to
                                     find a rank that is missing

torch has one timeout for each backend of a group; a mixed group has two. Those of a device follow
`watchdog(timeout=)`.
"""

from __future__ import annotations

import contextlib
import weakref
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
# torch's process group -> whether it is one of shardmesh, on which the monitor checks all waits of
# the host
_managed: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def group_timeout(backends: str) -> timedelta | None:
    """Return the timeout of a new group with these backends, such as "nccl" or
    "cpu:gloo,cuda:nccl"; None for torch's own.
    """
    if settings().mode == "off":
        return None
    names = [part.rpartition(":")[2] for part in backends.split(",")]
    return _on_device() if any(map(waits_on_device, names)) else ON_HOST


def manage(handle: Any, is_own: bool) -> None:
    """Keep the timeouts of a group that was started with `group_timeout` in step with the settings.

    Args:
        is_own: whether only shardmesh calls its collectives.
    """
    _managed[handle] = is_own
    _apply(handle, is_own)


def described(handle: Any) -> str:
    """Return a group's backends, timeouts and device: "cuda: nccl, 360 s; device bound: cuda:1"."""
    texts = []
    for kind in sorted(device.type for device in handle._device_types):
        backend = handle._get_backend(torch.device(kind))
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        after = (
            ""
            if timeout is None
            else ", waits without limit"
            if timeout >= ON_HOST
            else f", {timeout.total_seconds():g} s"
        )
        texts.append(f"{kind}: {backend.name()}{after}")
    return f"{'; '.join(texts)}; device bound: {getattr(handle, 'bound_device_id', None) or 'none'}"


def release() -> None:
    """Set all managed timeouts to torch's defaults, for a job that goes on without the monitor."""
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
    """Return whether a device, not the host, waits for collectives of a backend of this name."""
    return "cpu" not in dist.Backend.backend_capability.get(backend, ())


settings_module.on_timeout.append(_update)
