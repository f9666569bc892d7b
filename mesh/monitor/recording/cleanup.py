"""Delete what ended jobs of this user have left, while other processes do the same.

    a job ends well              its last rank deletes the folder               `JobDirectory.leave`
    Ctrl-C, SIGTERM, SIGHUP      the same; under `launch` its parent does it    `remove_jobs_of`
    a job fails, or is killed    its folder shows why: the newest is kept until `sweep`, in the next
    python -m shardmesh doctor --fix                                            `remove_left`

Containers may share a folder, and process ids of one mean nothing in another. So a process counts
as gone only if it can be looked up from here: by its id, its start time and the namespace of its
id.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from ...comm.recording.trace_buffer import Header, RankState, TraceBuffer
from .files import claim, is_being_deleted, job_folders, parent_folders, remove_folder, trace_files
from .job_directory import is_dead, is_local, is_near, open_header

_KEPT = 1  # folders of dead jobs that are kept, to find out what happened
_NEW_S = 60.0  # how long a rank of a job may take to make its files, after another one has
_LONGEST_S = 0.5  # per start; the next start continues


def sweep(parent: Path) -> None:
    """Delete the folders of jobs that are over, except for the newest.

    Never raises, and takes at most about half a second.
    """
    kept_folders = 0
    folders = sorted(job_folders(parent), reverse=True)
    began = time.monotonic()
    for changed, folder in folders:
        if time.monotonic() - began > _LONGEST_S:
            return
        if not is_left(folder, changed):
            continue
        if kept_folders < _KEPT and not is_being_deleted(folder):
            kept_folders += 1
        else:
            _remove(folder)


def remove_left(parents: Iterable[Path]) -> Iterator[Path]:
    """Delete the folders of all jobs in these folders that are over; yield those that are gone."""
    for parent in parents:
        for changed, folder in sorted(job_folders(parent)):
            if is_left(folder, changed) and _remove(folder):
                yield folder


def remove_jobs_of(pids: Collection[int], environment: Mapping[str, str] = os.environ) -> None:
    """Delete the folders of jobs whose ranks on this host were all among these processes.

    The processes have ended.

    Args:
        pids: the processes.
        environment: theirs.
    """
    for parent in parent_folders(environment):
        for _, folder in job_folders(parent):
            headers = _headers(folder)
            if (
                headers
                and all(header.words[Header.PID] in pids for header in headers)
                and _are_gone(headers)
            ):
                _remove(folder)


def is_left(folder: Path, changed: float) -> bool:
    """Return whether a job has left this folder: it is over, and no rank may still be starting.

    Args:
        changed: time of the folder's last change, in seconds since 1970.
    """
    headers = _headers(folder)
    if not _are_gone(headers):
        return False
    is_whole = bool(headers) and len(headers) >= max(
        header.words[Header.SIZE] for header in headers
    )
    return (is_whole and not is_being_deleted(folder)) or time.time() - changed > _NEW_S


def _are_gone(headers: Iterable[TraceBuffer]) -> bool:
    """Return whether the processes of a job are gone, as far as can be seen.

    Those of another container cannot.
    """
    own = [header for header in headers if is_near(header)]  # not the copies of other hosts'
    return all(is_local(header) and (is_dead(header) or _has_left(header)) for header in own)


def _has_left(header: TraceBuffer) -> bool:
    """Return whether the rank has ended its part; one that has raised may still be ending."""
    return header.words[Header.STATE] in (RankState.ENDED, RankState.CLOSED)


def _headers(folder: Path) -> list[TraceBuffer]:
    """Return the headers of the trace buffers in a job's folder, as far as they are readable."""
    return [header for path in trace_files(folder) if (header := open_header(path)) is not None]


def _remove(folder: Path) -> bool:
    """Delete a job's folder; return whether it is gone."""
    with contextlib.suppress(OSError):  # another process deletes it
        claimed = folder if is_being_deleted(folder) else claim(folder)
        if claimed is not None:
            remove_folder(claimed)
            return not claimed.exists()
    return False
