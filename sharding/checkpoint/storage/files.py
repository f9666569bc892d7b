"""Atomic files: written under a random name, synced, renamed; with a checksum of every piece.

    model.safetensors.5f3a91c2e07b4d18.unfinished    created with O_EXCL and O_NOFOLLOW, locked
                                                     while it is written
    model.safetensors                                the same file, renamed

A file that is read may be a link, but must be a regular file: a FIFO or a device is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import stat
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....mesh.comm.agreement import interrupt_of
from .crc import crc32_combine

_BUFFER = 1 << 20
_TOKEN_BYTES = 8  # of the random part of a temporary name
# a temporary file of this age that nobody has locked was left by a process that was killed
_LEFT_S = 60.0
_LONGEST_NAME = 255  # bytes, of a file's name
# from this number of bytes on, combining checksums is faster than computing one
_COMBINED = 1 << 16


class Sink:
    """A new file, written sequentially; `sync` returns when it is on disk.

    The file must not exist, also not as a link. Errors of `write` are raised by `sync`, since
    `torch.save`, which calls `write`, would replace them by another error.

    Attributes:
        position: bytes written so far.
        crc: CRC-32 of the bytes since the last call of `piece`.
    """

    def __init__(self, path: Path) -> None:
        self._raw = _Descriptor(path)
        self._file = io.BufferedWriter(self._raw, _BUFFER)
        self.position = self.crc = 0
        self._error: OSError | MemoryError | None = None
        # Bytes of the tensor that is being saved, whose CRC-32 `torch.save` computes.
        self._elements: int | None = None
        self._waiting: Any = None  # these bytes, until the CRC-32 after them is written

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def piece(self) -> int:
        """Begin a new piece and return its offset."""
        self.crc = 0
        return self.position

    def write(self, data: Any) -> int:
        """Write as a file does; `torch.save` calls it."""
        written = memoryview(data).nbytes
        self._checksum(data, written)
        self.position += written
        if self._error is None:
            try:
                self._file.write(data)
            except (OSError, MemoryError) as error:
                self._error = error
        return written

    def save(self, x: Tensor) -> None:
        """Write a host tensor with `torch.save`.

        `torch.save` computes the CRC-32 of the elements, which takes most of the time, and writes
        it after them; `crc` reuses it instead of reading the elements again.
        """
        self._elements = (
            x.nbytes if x.nbytes >= _COMBINED and torch.serialization.get_crc32_options() else None
        )
        torch_save(x, self)
        self._add_waiting(None)
        self._elements = None

    def _checksum(self, data: Any, nbytes: int) -> None:
        if self._waiting is not None:
            self._add_waiting(_crc_after(data, memoryview(self._waiting).nbytes))
        if nbytes == self._elements:
            self._waiting = data  # memory of the tensor that is being saved
        else:
            self.crc = zlib.crc32(data, self.crc)

    def _add_waiting(self, crc: int | None) -> None:
        """Add the last written elements to the checksum, by their own CRC-32 if that is known."""
        data, self._waiting = self._waiting, None
        if data is not None:
            self.crc = (
                zlib.crc32(data, self.crc)
                if crc is None
                else crc32_combine(self.crc, crc, memoryview(data).nbytes)
            )

    def flush(self) -> None:
        """Do nothing; `torch.save` calls it. See `sync`."""

    def sync(self) -> None:
        """Flush and sync the file to disk.

        Raises:
            OSError, MemoryError: a write failed.
        """
        if self._error is not None:
            raise self._error
        self._file.flush()
        os.fsync(self._raw.fileno())


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def _crc_after(data: Any, length: int) -> int | None:
    """Return the CRC-32 in a zip data descriptor after so many bytes; None if it is not one."""
    signature, crc, size = (
        struct.unpack_from("<4sII", data) if memoryview(data).nbytes >= 12 else (b"", 0, 0)
    )
    return crc if signature == b"PK\x07\x08" and size == length & 0xFFFFFFFF else None


class _Descriptor(io.RawIOBase):
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, _NEW, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:  # type: ignore[override]
        return os.write(self._fd, data)

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: under a temporary name, synced, then renamed."""
    unfinished = temporary_path(path)
    with Sink(unfinished) as sink, removed_on_error([unfinished]):
        sink.write(data)
        sink.sync()
        os.rename(unfinished, path)


def temporary_path(path: Path) -> Path:
    """Return a path with a random name in the same folder, to be renamed to `path`."""
    suffix = f".{os.urandom(_TOKEN_BYTES).hex()}.unfinished"
    fits = len(os.fsencode(path.name + suffix)) <= _LONGEST_NAME
    return path.with_name((path.name if fits else "") + suffix)


@contextlib.contextmanager
def removed_on_error(paths: Iterable[Path]) -> Iterator[None]:
    """Remove these files if the block raises. They must be this process's own."""
    try:
        yield
    except BaseException:
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise


def remove_left_over(path: Path) -> None:
    """Remove old temporary files of `path` that no process has locked: killed ones left them."""
    pattern = re.compile(re.escape(path.name) + rf"\.[0-9a-f]{{{2 * _TOKEN_BYTES}}}\.unfinished")
    for name in filter(pattern.fullmatch, os.listdir(path.parent)):
        with contextlib.suppress(OSError):
            _remove_unless_locked(path.with_name(name))


def _remove_unless_locked(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(fd)
        os.utime(fd)  # now, by the clock of the file system
        if stat.S_ISREG(status.st_mode) and os.fstat(fd).st_mtime > status.st_mtime + _LEFT_S:
            os.unlink(path)
        else:
            os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Hold the lock of a folder where its file system has locks.

    So sets of files are renamed one after the other.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def torch_save(value: Any, file: Any) -> None:
    """Write a value with `torch.save`; Ctrl-C stays a KeyboardInterrupt.

    `torch.save` completes its container after an exception, and then raises that this failed.
    """
    with own_interrupt():
        torch.save(value, file)


def serialize(value: Any) -> bytes:
    """Return a value that is not a tensor, as torch.distributed.checkpoint stores it."""
    file = io.BytesIO()
    torch_save(value, file)
    return file.getvalue()


@contextlib.contextmanager
def own_interrupt() -> Iterator[None]:
    """Raise the KeyboardInterrupt, SystemExit or MemoryError behind the block's error."""
    before = sys.exc_info()[1]
    try:
        yield
    except Exception as error:
        interrupt = interrupt_of(error, before)
        if interrupt is not None:
            raise interrupt from None
        raise


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_regular(path: Path) -> io.FileIO:
    """Open a file for reading without waiting for a writer.

    Raises:
        OSError: it is missing, or not a regular file: a folder, a FIFO, a device.
    """
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_regular(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: as `open_regular`; or it has more than `limit` bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"{size} bytes, more than {limit}", str(path))
        return file.readall() or b""


def read_into(path: Path, offset: int, views: Iterable[memoryview]) -> int:
    """Fill the views, one after the other, with a file's bytes from `offset`.

    Return their number, less at the end of the file.

    Raises:
        OSError: the file is missing, or not a regular file.
    """
    done = 0
    with open_regular(path) as file:
        file.seek(offset)
        for view in views:
            while view and (got := file.readinto(view)):
                view, done = view[got:], done + got
    return done
