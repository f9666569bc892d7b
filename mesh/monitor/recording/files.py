"""The monitor's files: which folder they are in, and memory for them that is allocated before it is mapped.

A sparse file on a file system that fills up later can be mapped, and the first write to it kills the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_LARGEST_SHARE = 4  # a job uses at most a quarter of the free shared memory: data loaders and NCCL need it too
_GONE = ".gone"  # suffix of a folder that is being deleted
_start_folder = os.getcwd()  # a program may change its folder before it makes its first mesh


def parent_folder(needed: int = 0) -> Path:
    """Return the folder in which jobs have their folders: shared memory if it is writable and has room, else the temporary folder.

    Args:
        needed: bytes.
    """
    chosen = os.environ.get("SHARDMESH_WATCH_DIR")
    if chosen:
        return Path(_start_folder, chosen)
    return _SHARED_MEMORY if _has_room(_SHARED_MEMORY, needed) else Path(tempfile.gettempdir())


def parent_folders() -> list[Path]:
    """Return every folder in which jobs of this host may have their folders."""
    if os.environ.get("SHARDMESH_WATCH_DIR"):
        return [parent_folder()]
    return list(dict.fromkeys([_SHARED_MEMORY, Path(tempfile.gettempdir())]))


def _has_room(folder: Path, needed: int) -> bool:
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK) and found.f_bavail * found.f_frsize >= _LARGEST_SHARE * needed


def folder_prefix() -> str:
    return f"shardmesh-{os.getuid() if hasattr(os, 'getuid') else 0}-"


def job_folders(parent: Path) -> Iterator[tuple[float, Path]]:
    """Yield (time of the last change, folder) of the user's jobs, without folders that another process deletes meanwhile."""
    prefix = folder_prefix()
    try:
        entries = list(os.scandir(parent))
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(prefix):
            with contextlib.suppress(OSError):
                yield entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)


def is_being_deleted(folder: Path) -> bool:
    return folder.name.endswith(_GONE)


def claim(folder: Path) -> Path | None:
    """Rename a folder to delete it; return None if another process was first."""
    gone = folder.with_name(folder.name + _GONE)
    try:
        folder.rename(gone)
    except OSError:
        return None
    return gone


def make_file(path: Path, size: int) -> Path:
    """Make a file of at least this size, with its memory or disk blocks allocated.

    Raises: OSError where there is no room, or the folder cannot be written to.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # never shorter than it was: another rank may have it mapped
    try:
        there = os.fstat(file).st_size
        if there >= size:
            return path
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:  # on macOS
            os.pwrite(file, bytes(size - there), there)
    finally:
        os.close(file)
    return path


def map_file(path: Path, size: int) -> mmap.mmap:
    """Map a file. Raises: OSError, or ValueError where the file is shorter."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)
