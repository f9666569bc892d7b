"""Atomic files: written, synced, renamed; with a checksum of every piece."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .crc import crc32_combine

_BUFFER = 1 << 20
_COMBINED = 1 << 16  # from this number of bytes on, combining checksums is faster than computing one


class Sink:
    """A new file, written sequentially; `sync` returns when it is on disk.

    Errors of `write` are raised by `sync`, since `torch.save`, which calls `write`, would replace them by another error.

    Attributes:
        position: bytes written so far.
        crc: CRC-32 of the bytes since the last call of `piece`.
    """

    def __init__(self, path: Path) -> None:
        self._raw = _Descriptor(path)
        self._file = io.BufferedWriter(self._raw, _BUFFER)
        self.position = self.crc = 0
        self._error: OSError | None = None
        self._elements: int | None = None  # bytes of the tensor that is being saved, whose CRC-32 `torch.save` computes
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
            except OSError as error:
                self._error = error
        return written

    def save(self, x: Tensor) -> None:
        """Write a host tensor with `torch.save`.

        `torch.save` computes the CRC-32 of the elements, which takes most of the time, and writes it after them; `crc` reuses it instead
        of reading the elements again.
        """
        self._elements = x.nbytes if x.nbytes >= _COMBINED and torch.serialization.get_crc32_options() else None
        torch.save(x, self)  # type: ignore[arg-type]
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
            self.crc = zlib.crc32(data, self.crc) if crc is None else crc32_combine(self.crc, crc, memoryview(data).nbytes)

    def flush(self) -> None:
        """Do nothing; `torch.save` calls it. See `sync`."""

    def sync(self) -> None:
        """Flush and sync the file to disk.

        Raises:
            OSError: a write failed.
        """
        if self._error is not None:
            raise self._error
        self._file.flush()
        os.fsync(self._raw.fileno())


def _crc_after(data: Any, length: int) -> int | None:
    """Return the CRC-32 in a zip data descriptor after that many bytes; None if the data is not one."""
    signature, crc, size = struct.unpack_from("<4sII", data) if memoryview(data).nbytes >= 12 else (b"", 0, 0)
    return crc if signature == b"PK\x07\x08" and size == length & 0xFFFFFFFF else None


class _Descriptor(io.RawIOBase):
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

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
    unfinished = path.with_name(path.name + ".unfinished")
    with Sink(unfinished) as sink:
        sink.write(data)
        sink.sync()
    os.rename(unfinished, path)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_into(path: Path, offset: int, views: Iterable[memoryview]) -> int:
    """Fill the views, one after the other, with a file's bytes from `offset`; return their number, less at the end of the file."""
    done = 0
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        for view in views:
            while view and (got := file.readinto(view)):
                view, done = view[got:], done + got
    return done
