"""Delete what old jobs have left, while other processes do the same."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from ...comm.recording.trace_buffer import Header, RankState
from .files import claim, is_being_deleted, job_folders, remove_folder, trace_files
from .job_directory import is_dead, is_local, open_buffer

_KEPT = 10  # folders of dead jobs that are kept, to find out what happened
_NEW_S = 60.0
_LONGEST_S = 0.5  # per start; the next start continues


def sweep(parent: Path) -> None:
    """Delete the folders of jobs that are over, except for the newest ones. Never raises, and takes at most about half a second."""
    began, now = time.monotonic(), time.time()
    found = sorted(job_folders(parent), reverse=True)
    jobs = [one for one in found if not is_being_deleted(one[1])]
    left = [one for one in found if is_being_deleted(one[1])]  # by a process that was killed meanwhile
    for changed, folder in [*jobs[_KEPT:], *left]:
        if time.monotonic() - began > _LONGEST_S:
            return
        with contextlib.suppress(OSError):  # another process deletes it
            if now - changed > _NEW_S and is_over(folder):
                gone = folder if is_being_deleted(folder) else claim(folder)
                if gone is not None:
                    remove_folder(gone)


def is_over(folder: Path) -> bool:
    """Return whether all processes of the job in this folder are gone, as far as can be seen: not those of another container."""
    buffers = [buffer for path in trace_files(folder) if (buffer := open_buffer(path)) is not None]
    ours = [buffer for buffer in buffers if buffer.words[Header.PID_SPACE]]  # not the copies of other hosts' buffers
    return all(is_local(buffer) and (is_dead(buffer) or buffer.words[Header.STATE] != RankState.RUNNING) for buffer in ours)
