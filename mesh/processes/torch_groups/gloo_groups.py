"""Groups of gloo that all ranks have left, some of them in the middle of a collective, are freed.

    shut down     the group's connections are closed: its collectives fail, its threads are idle
    freed         later, when nothing runs in it: its threads end, its file descriptors are closed

torch 2.13 has no call for this: `ProcessGroupGloo.abort` leaves a collective waiting, and
destroying the group waits for it. A group has a thread that waits for its sockets in an epoll of
its own, and Linux says which these are (`/proc/self/fdinfo`). Which epoll is a group's shows when
it is made.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...monitor.timeouts import torch_groups

_EPOLL = "anon_inode:[eventpoll]"
_REGISTERED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)
_FILES, _INFO = Path("/proc/self/fd"), Path("/proc/self/fdinfo")

# torch's process group -> the file descriptors of its epolls
_epolls: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def noting_sockets() -> Iterator[None]:
    """Note which epolls belong to the groups that are made inside the block."""
    before, groups = _open_epolls(), torch_groups()
    yield
    new = _open_epolls() - before
    for handle in torch_groups():
        if new and all(handle is not known for known in groups):
            _epolls[handle] = new


def shut_down(handle: Any) -> bool:
    """Close the connections of a group in which no rank waits any more for a result.

    Returns:
        Whether they are closed: not those of other backends, nor where there is no `/proc`.
    """
    try:
        names = {handle._get_backend(device).name() for device in handle._device_types}
    except RuntimeError:  # of a backend that was aborted
        return False
    if names != {"gloo"}:
        return False
    epolls = _epolls.pop(handle, frozenset())
    for epoll in epolls:
        if not _is_epoll(epoll):
            return False
        for number in _REGISTERED.findall((_INFO / str(epoll)).read_text()):
            _close_connection(int(number))
    return bool(epolls)


def _open_epolls() -> frozenset[int]:
    if not _INFO.exists():
        return frozenset()
    return frozenset(int(name) for name in os.listdir(_FILES) if _is_epoll(int(name)))


def _is_epoll(number: int) -> bool:
    return _target(number) == _EPOLL


def _target(number: int) -> str:
    """Return what a file descriptor stands for; empty if it is closed meanwhile."""
    try:
        return os.readlink(_FILES / str(number))
    except OSError:
        return ""


def _close_connection(number: int) -> None:
    """Close the connection of a socket in both directions; it stays gloo's.

    No-op for other files, and for a socket that listens.
    """
    if not _target(number).startswith("socket:"):
        return
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)
