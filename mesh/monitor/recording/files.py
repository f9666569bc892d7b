"""The monitor's files: their folder, and memory for them that is allocated before it is mapped.

Folders such as /dev/shm are shared with other users, so only files and folders that this user alone
can write are used, and only those are deleted whose names are the monitor's.

A sparse file on a file system that fills up later can be mapped, and the first write to it kills
the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
# a job uses at most a quarter of the free shared memory: data loaders and NCCL need it too
_LARGEST_SHARE = 4
_GONE = ".gone"  # suffix of a folder that is being deleted
_NO_FOLLOW = (
    getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
)
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = re.compile(r"[0-9A-Za-z_-]+(\.gone)?")  # of a job, after the prefix
_TRACE = re.compile(r"rank[0-9]+\.trace")
# all that are ever in a job's folder
_FILES = re.compile(r"rank[0-9]+\.(trace|[0-9]+)|alarm|verdict\.(json|[0-9]+)")
_start_folder = os.getcwd()  # a program may change its folder before it makes its first mesh


def parent_folder(needed: int = 0) -> Path:
    """Return the folder in which jobs have their folders.

    Shared memory if it is writable and has room, else the temporary folder.

    Args:
        needed: bytes.
    """
    chosen = os.environ.get("SHARDMESH_WATCH_DIR")
    if chosen:
        return Path(_start_folder, chosen)
    return _SHARED_MEMORY if _has_room(_SHARED_MEMORY, needed) else Path(tempfile.gettempdir())


def parent_folders(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return every folder in which jobs of this host may have their folders.

    Args:
        environment: that of the jobs.
    """
    chosen = environment.get("SHARDMESH_WATCH_DIR")
    if chosen:
        return [Path(_start_folder, chosen)]
    return list(dict.fromkeys([_SHARED_MEMORY, Path(tempfile.gettempdir())]))


def _has_room(folder: Path, needed: int) -> bool:
    try:
        file_system = os.statvfs(folder)
    except OSError:
        return False
    return (
        os.access(folder, os.W_OK)
        and file_system.f_bavail * file_system.f_frsize >= _LARGEST_SHARE * needed
    )


def folder_prefix() -> str:
    return f"shardmesh-{os.getuid() if hasattr(os, 'getuid') else 0}-"


def open_own(path: Path | str, flags: int = os.O_RDONLY, folder: int | None = None) -> int:
    """Open a file that only this user can have written, and return its descriptor.

    A link is not followed, a FIFO not waited for.

    Args:
        flags: as those of `os.open`.
        folder: the descriptor of the folder that a relative path is in.

    Raises: OSError, PermissionError where the file is not a plain file, or others could have
    written it.
    """
    file = os.open(path, flags | _NO_FOLLOW, 0o600, dir_fd=folder)
    stat_result = os.fstat(file)
    if not stat.S_ISREG(stat_result.st_mode) or not is_own(stat_result):
        os.close(file)
        raise PermissionError(
            errno.EPERM, "it is not a plain file that only this user can write", str(path)
        )
    return file


def is_own(stat_result: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user, and nobody else can write to it."""
    return not hasattr(os, "geteuid") or (
        stat_result.st_uid == os.geteuid() and not stat_result.st_mode & _WRITABLE_BY_OTHERS
    )


def make_own_folder(path: Path) -> None:
    """Make a folder that nobody else can enter, unless this user has one there.

    Raises: OSError, PermissionError where a folder, a link or a file of somebody else has that
        name, or where everybody may rename what is in its parent.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    above = os.stat(path.parent)
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        raise PermissionError(
            errno.EPERM,
            "everybody may rename files in it (chmod +t, or set SHARDMESH_WATCH_DIR)",
            str(path.parent),
        )
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not is_own_folder(path):
        raise PermissionError(
            errno.EPERM, "it is not a folder that only this user can write to", str(path)
        )


def is_own_folder(path: Path) -> bool:
    """Return whether this is a folder, and no link to one, that only this user can write to."""
    try:
        stat_result = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(stat_result.st_mode) and is_own(stat_result)


def remove_folder(path: Path) -> None:
    """Remove a job's folder: the monitor's files, then the folder if empty. Raises: OSError."""
    if not is_own_folder(path):
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NO_FOLLOW)
    try:
        if is_own(os.fstat(folder)):
            for name in os.listdir(folder):
                if _FILES.fullmatch(name):
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)
    os.rmdir(path)


def trace_files(folder: Path) -> list[Path]:
    """Return the trace buffers in a job's folder, by name only."""
    try:
        return sorted(folder / name for name in os.listdir(folder) if _TRACE.fullmatch(name))
    except OSError:
        return []


def job_folders(parent: Path) -> Iterator[tuple[float, Path]]:
    """Yield (time of the last change, folder) of the user's jobs.

    Without those of others and those that another process deletes.
    """
    prefix = folder_prefix()
    try:
        entries = list(os.scandir(parent))
    except OSError:
        return
    for entry in entries:
        if _FOLDER.fullmatch(entry.name.removeprefix(prefix)) and entry.name.startswith(prefix):
            with contextlib.suppress(OSError):
                stat_result = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(stat_result.st_mode) and is_own(stat_result):
                    yield stat_result.st_mtime, Path(entry.path)


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
    # never shorter than it was: another rank may have it mapped
    file = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        current_size = os.fstat(file).st_size
        if current_size >= size:
            return path
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:  # on macOS
            os.pwrite(file, bytes(size - current_size), current_size)
    finally:
        os.close(file)
    return path


def map_file(path: Path, size: int) -> mmap.mmap:
    """Map a file of this user, which nobody can cut. Raises: OSError, ValueError if it is short."""
    file = open_own(path, os.O_RDWR)
    try:
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def read_file(path: Path, most: int) -> bytes:
    """Read a small file of this user. Raises: OSError, ValueError if longer than `most` bytes."""
    file = open_own(path)
    try:
        if os.fstat(file).st_size > most:
            raise ValueError(f"it is longer than {most} bytes")
        return os.read(file, most)
    finally:
        os.close(file)
