"""Start a process's monitor, and end it in children that the process forks."""

from __future__ import annotations

import os

from ..comm.recording.trace_buffer import BUFFER_BYTES
from ..comm.world import World
from . import exit_hooks
from .agreement import Agreement, warn
from .monitor import Monitor
from .recording.cleanup import sweep
from .recording.job_directory import ALARM_BYTES, JobDirectory, ranks_here
from .timeouts import keep_groups
from .torch_calls import hooks

_detaches_children = False


def start_monitor(world: World, job: str, agreement: Agreement | None = None) -> Monitor | None:
    """Start this process's monitor; None if its files cannot be made, which all ranks are told."""
    try:
        parent = (
            None
            if agreement is None
            else agreement.folder(ranks_here(world.size) * BUFFER_BYTES + ALARM_BYTES)
        )
        directory = JobDirectory(job, world.rank, world.size, parent)
        if agreement is not None:
            agreement.join(directory)
    except OSError as error:
        reason = f"its files cannot be made: {error}"
        warn(reason) if agreement is None else agreement.decline(reason)
        return None
    sweep(directory.folder.parent)
    exit_hooks.install()
    _detach_forked_children()
    monitor = Monitor(world, directory, agreement)
    exit_hooks.monitors.add(monitor)
    monitor.watchdog.start()
    return monitor


def _detach_forked_children() -> None:
    """Detach every child that this process forks from now on.

    A child has the rank's memory and sockets, but none of the threads that communicate: a
    collective that it called would hang, or take what other ranks have sent to the rank. So the
    child records into memory of its own, and collectives on the rank's groups raise. It may start a
    default group of its own.
    """
    global _detaches_children
    if not _detaches_children and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_be_no_rank)
        _detaches_children = True


def _be_no_rank() -> None:
    for monitor in list(exit_hooks.monitors):
        monitor.detach()
    hooks.refuse_calls()
    exit_hooks.monitors.clear()
    keep_groups()  # the child has none of the threads that torch would wait for at exit
