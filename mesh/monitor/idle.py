"""Wait for work for as long as it takes, while the other ranks wait in a collective.

    rank 0   with idle(): request = inbox.get() .......... broadcast      no stall, however long
    rank 1   broadcast ................................... broadcast

The other ranks see that it is idle, and do not count the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..comm.call_site import user_line
from ..comm.current_world import current_world
from ..comm.recording.trace_buffer import IDLE
from .monitor import monitor_of


@contextmanager
def idle() -> Iterator[None]:
    """with idle(): what this rank waits for inside, a request or a file, may take any time.

    Put it around the wait alone. While a rank is inside, no rank is reported as late, and the time
    inside does not count afterwards; a rank that dies or raises is still named on all ranks. It may
    be nested, and used in several threads.

    Let the other ranks wait on the host, in a broadcast of a CPU tensor on a group of the mesh,
    which has no time limit. NCCL ends a collective on the device after `watchdog(timeout=)` and a
    minute, and the program's own groups have the timeout that `init_process_group` was given.

    Raises: WatchError when the job has failed before, and inside, where a signal interrupts the
        wait, when it fails meanwhile.

    Communication: none. About 5 us.

    >>> import queue
    >>> import shardmesh as sm
    >>> inbox = queue.Queue()
    >>> inbox.put([1, 2, 3])
    >>> with sm.monitor.idle():
    ...     request = inbox.get()
    """
    monitor = monitor_of(current_world())
    if monitor is None:
        yield
        return
    monitor.check()
    path, line = user_line()
    with monitor.paused(f"idle, at {path}:{line}", IDLE):
        yield
