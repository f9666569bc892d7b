"""Copies of the trace buffers of ranks on other hosts.

The rest of the monitor reads them like those of this host.

buffer of rank 2 on host-b                         copy on host-a
header | table | rows | ring | text     ----->     header | table | rows | ring | text
a part is sent when it has changed                 times on this host's clock, marked as a copy
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...comm.recording.trace_buffer import (
    BUFFER_BYTES,
    GROUP_TABLE,
    GROUP_WORDS,
    GROUPS,
    MAGIC,
    RECORD_WORDS,
    RECORDS,
    RING,
    SLOT_AREA,
    SLOT_WORDS,
    SLOTS,
    SPLITS,
    STACK_BYTES,
    TEXT_BYTES,
    Header,
    RankState,
    TraceBuffer,
    row_of,
    slots_of,
)
from ..recording.files import make_file, map_file
from ..recording.job_directory import open_buffer

_STACK = GROUP_TABLE * 8 - STACK_BYTES
_TEXT = BUFFER_BYTES - TEXT_BYTES
_HEADER_WORDS = Header.MARKED_STEPS  # without these
_PART_BYTES = 4096  # of the ring, and of the text
# the last ones, of a row as of the ring; earlier ones were sent when they were the last
_SENT_RECORDS = 256
_PART_RECORDS = _PART_BYTES // (8 * RECORD_WORDS)
_ROW_PART_BYTES = SLOTS * SLOT_WORDS * 8
_REASON = TEXT_BYTES - _PART_BYTES  # place in a copy's text that is free for this host's own reason
# words that belong to this host's copy
_OWN = (Header.STACK_WANTED, Header.STACK_GIVEN, Header.PID_SPACE)


def parts(buffer: TraceBuffer) -> Iterator[tuple[int, int]]:
    """Yield (start, length) in bytes of all parts in use, references before their targets."""
    words = buffer.words
    groups = min(words[Header.GROUPS], GROUPS)
    yield 0, _HEADER_WORDS * 8
    if words[Header.STACK_BYTES]:
        yield _STACK, words[Header.STACK_BYTES]
    yield GROUP_TABLE * 8, groups * GROUP_WORDS * 8
    for number in range(groups):
        for part in _last_parts(buffer.group_called(number), SLOTS, slots_of(number)):
            yield row_of(number) * 8 + part * _ROW_PART_BYTES, _ROW_PART_BYTES
    for part in _last_parts(words[Header.RECORDS], _PART_RECORDS, RECORDS):
        yield RING * 8 + part * _PART_BYTES, _PART_BYTES
    for start in range(0, min(words[Header.TEXT_END], _REASON), _PART_BYTES):
        yield _TEXT + start, _PART_BYTES


def is_part(start: int, length: int) -> bool:
    """Return whether another host may have published a part of this length, which begins here."""
    if start == 0:
        return length == _HEADER_WORDS * 8
    if start == _STACK:
        return 0 < length <= STACK_BYTES
    if start == GROUP_TABLE * 8:
        return length <= GROUPS * GROUP_WORDS * 8
    areas = (
        (SLOT_AREA * 8, RING * 8, _ROW_PART_BYTES),
        (RING * 8, SPLITS * 8, _PART_BYTES),
        (_TEXT, _TEXT + _REASON, _PART_BYTES),
    )
    return any(
        first <= start < end and (start - first) % size == 0 and length == size
        for first, end, size in areas
    )


def checked_header(data: bytes, rank: int, size: int) -> None:
    """Raise ValueError if these bytes are not the header of this rank's trace buffer."""
    words = struct.unpack(f"{_HEADER_WORDS}Q", data)
    if (words[Header.MAGIC], words[Header.RANK], words[Header.SIZE]) != (MAGIC, rank, size):
        raise ValueError(f"it is not the header of rank {rank} of {size}")


def _last_parts(count: int, length: int, size: int) -> list[int]:
    """Return which parts, of `length` records each, of a ring hold the last of `count` records."""
    first = max(0, count - min(_SENT_RECORDS, size)) // length
    last = -(-count // length)
    return list(dict.fromkeys(part % (size // length) for part in range(first, last)))


class BufferSource:
    """A trace buffer of this host, and which of its parts have been sent."""

    def __init__(self, buffer: TraceBuffer) -> None:
        self.buffer = buffer
        self.versions: dict[int, int] = {}

    def changed_parts(self) -> dict[int, bytes]:
        """Return the parts that have changed since the last call, by where they start."""
        parts_by_start = {}
        versions = {}
        for start, length in parts(self.buffer):
            data = bytes(self.buffer.data[start : start + length])
            versions[start] = zlib.crc32(data)
            if self.versions.get(start) != versions[start]:
                parts_by_start[start] = data
        self.versions = versions
        return parts_by_start


class BufferCopy:
    """The copy of another host's trace buffer, in this host's folder."""

    def __init__(self, buffer: TraceBuffer) -> None:
        self.buffer = buffer
        self._versions: dict[int, int] = {}
        self._beat = 0

    def missing(self, versions: Mapping[int, int]) -> list[int]:
        """Return where the parts start that are not here yet."""
        return [
            start for start, version in versions.items() if self._versions.get(start) != version
        ]

    def write(self, changed_parts: Mapping[int, bytes], versions: Mapping[int, int]) -> None:
        """Write parts: those that others refer to first, the header last."""
        for start in sorted(changed_parts, reverse=True):
            if start:
                part = changed_parts[start]
                self.buffer.data[start : start + len(part)] = part
            self._versions[start] = versions[start]
        if 0 in changed_parts:
            self._write_header(struct.unpack(f"{_HEADER_WORDS}Q", changed_parts[0]))

    def _write_header(self, header: tuple[int, ...]) -> None:
        words = self.buffer.words
        now = time.monotonic_ns()
        blocked_for = max(0, header[Header.HEARTBEAT] - header[Header.BLOCKED_SINCE])
        for number, value in enumerate(header):
            if number not in (*_OWN, Header.HEARTBEAT, Header.BLOCKED_SINCE):
                words[number] = value
        if header[Header.HEARTBEAT] != self._beat:
            self._beat = header[Header.HEARTBEAT]
            words[Header.HEARTBEAT] = now
        words[Header.BLOCKED_SINCE] = now - blocked_for

    def set_reason(self, reason: str) -> None:
        """Write the rank's status in its place: why it is lost."""
        encoded = reason.encode()[: _PART_BYTES - 4]
        struct.pack_into("I", self.buffer.data, _TEXT + _REASON, len(encoded))
        self.buffer.data[_TEXT + _REASON + 4 : _TEXT + _REASON + 4 + len(encoded)] = encoded
        self.buffer.words[Header.DOING] = _REASON

    def mark_lost(self) -> None:
        """Mark the rank as one that cannot be reached; its next header clears that."""
        self.buffer.words[Header.STATE] = RankState.LOST
        self._versions.pop(0, None)


def make_copy(path: Path) -> BufferCopy:
    """Return an empty copy in a file, or the copy that is there.

    Where hosts share the folder, the buffer itself is there and is kept.

    Raises: OSError where no file can be made.
    """
    if not path.exists():
        temporary = path.with_suffix(f".{time.monotonic_ns()}")
        TraceBuffer(map_file(make_file(temporary, BUFFER_BYTES), BUFFER_BYTES)).begin(0, 0)
        temporary.replace(path)
    buffer = open_buffer(path)
    return BufferCopy(
        TraceBuffer(bytearray(BUFFER_BYTES))
        if buffer is None or buffer.words[Header.PID_SPACE]
        else buffer
    )
