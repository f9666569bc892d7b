"""Files that are there after a crash or not at all: written, synced, renamed; with a checksum of every piece."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_BUFFER = 1 << 20


class Sink:
    """A new file, written from front to back, and then `sync`, which returns when it is on the disk.

    What goes wrong in `write` is raised by `sync`: `torch.save`, which calls it, would make another error of it.

    Attributes:
        position: bytes written so far.
        crc: CRC-32 of what was written since `piece` was called.
    """

    def __init__(self, path: Path) -> None:
        self._raw = _Descriptor(path)
        self._file = io.BufferedWriter(self._raw, _BUFFER)
        self.position = self.crc = 0
        self._error: OSError | None = None

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def piece(self) -> int:
        """A new piece begins; where."""
        self.crc = 0
        return self.position

    def write(self, data: Any) -> int:
        """As of a file; `torch.save` calls it."""
        self.crc = zlib.crc32(data, self.crc)
        written = memoryview(data).nbytes
        self.position += written
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
        return written

    def flush(self) -> None:
        """Of a file: `torch.save` calls it. What matters is `sync`."""

    def sync(self) -> None:
        """Everything is on the disk.

        Raises:
            OSError: it is not.
        """
        if self._error is not None:
            raise self._error
        self._file.flush()
        os.fsync(self._raw.fileno())


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
    """A file with this content is on the disk under this name, or it is not there: written beside, synced, renamed."""
    beside = path.with_name(path.name + ".unfinished")
    with Sink(beside) as sink:
        sink.write(data)
        sink.sync()
    os.rename(beside, path)


def sync_folder(path: Path) -> None:
    """The names in a folder are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_into(path: Path, offset: int, views: Iterable[memoryview]) -> int:
    """Fill the views, one after the other, with a file's bytes from `offset`; return how many there were, fewer where it ends."""
    done = 0
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        for view in views:
            while view and (got := file.readinto(view)):
                view, done = view[got:], done + got
    return done
