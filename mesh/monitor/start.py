"""Start the monitor of a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..comm.recording.trace_buffer import BUFFER_BYTES
from . import forked_child, termination
from .agreement import Agreement, warn
from .monitor import Monitor
from .recording.cleanup import sweep
from .recording.job_directory import ALARM_BYTES, JobDirectory, ranks_here

if TYPE_CHECKING:
    from ..comm.group import World


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
    termination.install()
    forked_child.install()
    monitor = Monitor(world, directory, agreement)
    termination.monitors.add(monitor)
    monitor.watchdog.start()
    return monitor
