"""Abort the communicators of accelerators when a job has failed: nothing else ends a kernel that waits for other ranks.

Until then the stream, a host that waits for it, and `destroy_process_group` are stuck.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import Any

from .timeouts import waits_on_device


def abort(handles: Iterable[Any]) -> None:
    """Abort the communicators of these groups of torch, except for those that the host waits for, such as gloo's. Returns at once.

    Each has a thread, since aborting one may wait for a kernel of another (https://github.com/pytorch/pytorch/issues/119797).
    """
    for backend in {id(found): found for handle in handles for found in _backends(handle)}.values():
        threading.Thread(target=_abort, args=(backend,), name="shardmesh-abort", daemon=True).start()


def _backends(handle: Any) -> list[Any]:
    found = []
    for device in handle._device_types:
        with contextlib.suppress(RuntimeError):  # the group has been destroyed
            found.append(handle._get_backend(device))
    return [backend for backend in found if waits_on_device(backend.name())]


def _abort(backend: Any) -> None:
    with contextlib.suppress(RuntimeError, AttributeError):  # it was aborted before; a backend that cannot be aborted
        backend.abort()
