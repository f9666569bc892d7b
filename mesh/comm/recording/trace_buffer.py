"""The trace buffer of a rank: its activity, in memory that other ranks can read.

Those of its host; a file keeps it when the rank dies.

    header     who it is, its heartbeat, what it is blocked on    8-byte words, see `Header`
    stack      its Python stack, when another rank has asked
    groups     for each group: which, how many collectives it     (fingerprint, lineage, number of
               has called, and of its last 64, or 1024            the record, route)
    ring       its last 4096 collectives                          records of 8 words
    splits     how much its last all_to_alls sent and expected
    text       what records point to: calls, places, groups       append-only

Only its own rank writes to a trace buffer (except for one word, with which others ask for its
stack), so nothing is locked. A reader may see a half-written record; it compares the fingerprint,
one word that is written last.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ...text import printable

GROUPS, SLOTS, SLOT_WORDS = 256, 64, 4  # groups beyond these are recorded, but not compared
# words of a slot of a group's row after the first, which is the fingerprint
SLOT_LINEAGE, SLOT_RECORD, SLOT_ROUTE = 1, 2, 3
# the first groups have longer rows: CUDA queues about 1000 launches, so far apart may hosts be
LONG_ROWS, LONG_SLOTS = 16, 1024
RECORDS, RECORD_WORDS = 4096, 8
RECORD_END = 4  # the word of a record with the time of its end
HEADER_BYTES, STACK_BYTES, TEXT_BYTES = 1024, 31 * 1024, 1 << 20
MARK_WORDS, MARKS = 3, 31  # of marked steps, in the header
GROUP_TABLE = (HEADER_BYTES + STACK_BYTES) // 8  # in words, like the next ones
GROUP_WORDS = 3
SLOT_AREA = GROUP_TABLE + GROUPS * GROUP_WORDS
RING = SLOT_AREA + (LONG_ROWS * LONG_SLOTS + (GROUPS - LONG_ROWS) * SLOTS) * SLOT_WORDS
# splits of the last few all_to_alls that no layouts describe
SPLITS = RING + RECORDS * RECORD_WORDS
SPLIT_ENTRIES, MOST_SPLITS = 16, 64
_SPLIT_WORDS = 2 * MOST_SPLITS
LINE_BITS = 192
# Bits in Header.BLOCKED: a stream of an accelerator waits in the collective, for which the main
# thread waits; or for which it may not wait.
ON_DEVICE, MAY_GO_ON = 1 << 63, 1 << 62
IDLE = 1 << 32  # in Header.PAUSED
_TEXT = (SPLITS + SPLIT_ENTRIES * _SPLIT_WORDS) * 8  # in bytes
BUFFER_BYTES = _TEXT + TEXT_BYTES
SIZE_BITS = 24
# "shard", and the size: it differs in other versions of the layout
MAGIC = (0x7368617264 << SIZE_BITS) + BUFFER_BYTES

_NO_ROOM = 8  # offset of the first text, "?", which stands for texts without room
_LONGEST_TEXT = 4096

_pack_record = struct.Struct("8Q").pack_into


class Header:
    """Names of the header's words.

    Times are `time.monotonic_ns()` of the host; `CLOCK` added to one gives nanoseconds since 1970.
    """

    MAGIC, RANK, SIZE, PID, BORN, CLOCK = range(6)
    HEARTBEAT, STATE, DOING = 6, 7, 8  # DOING: a text
    # number of the record that the main thread is blocked in, plus 1; the bits ON_DEVICE, MAY_GO_ON
    BLOCKED, BLOCKED_SINCE = 9, 10
    RECORDS, TEXT_END, GROUPS = 11, 12, 13
    STACK_WANTED, STACK_GIVEN, STACK_BYTES = 14, 15, 16
    PAUSED = 17  # how many debuggers it is in, and how many waits of `idle`, each counted as IDLE
    STEP = 18
    PID_SPACE = 19  # process ids are valid only within it; 0 in the copy of another host's buffer
    HOST = 20  # a text
    EXIT_S = 21  # seconds after a verdict in which the process exits; 0 if nothing may end it
    # whether the watchdog thread has read the verdict, and so ends the process by itself
    AWARE = 22
    CHANNELS = 23  # number of channels for messages that the program sends by torch
    # whether some of these are numbered differently than by their sender or receiver
    UNMATCHED = 24
    SEED, DRAWN = 25, 26  # of the random number generator, see `sharding/tensor/random.py`
    THREAD_ERROR = 27  # a text: which thread raised what
    RESUMED = 28  # when the last pause ended
    LINES = 29  # three words: which lines have made sharded tensors, one bit for each
    OPTIMIZER_STEPS = 32  # of optimizers with sharded parameters
    # up to the end of the header, for each of the last marked steps: its number, the number of the
    # next record, the time
    MARKED_STEPS = 33


class RankState:
    """State of a rank's program. Others set LOST, for a rank on an unreachable host."""

    RUNNING, RAISED, ENDED, CLOSED, LOST = range(5)


class Record(NamedTuple):
    """One recorded collective of a rank; times in ns, `end` 0 while it is under way."""

    number: int
    group: int
    sequence: int
    call: str
    place: str
    start: int
    end: int
    lineage: int
    sent: int
    received: int


class TraceBuffer:
    """A rank's trace buffer in `BUFFER_BYTES` of memory: a mapped file, or a bytearray."""

    __slots__ = ("_memory", "_texts", "data", "numbers", "words")

    def __init__(self, memory: Any) -> None:
        self._memory = memory  # kept alive
        self.data = memoryview(memory).cast("B")
        self.words: Any = self.data.cast("Q")
        self._texts: dict[str, int] = {}
        self.numbers = itertools.count()  # of this rank's records; several threads may take one

    @classmethod
    def private(cls, rank: int, size: int) -> TraceBuffer:
        """Return a trace buffer that no other process reads."""
        buffer = cls(mmap.mmap(-1, BUFFER_BYTES))  # untouched memory costs nothing
        buffer.begin(rank, size)
        return buffer

    def begin(self, rank: int, size: int) -> None:
        words = self.words
        words[Header.RANK] = rank
        words[Header.SIZE] = size
        words[Header.TEXT_END] = 8  # offset 0 means no text
        self._texts["?"] = self._append(b"?")
        words[Header.MAGIC] = MAGIC

    # -- writing, by its own rank ------------------------------------------------------------------

    def text(self, value: str) -> int:
        """Return where the text is, appended if new; the place of "?" when there is no room."""
        offset = self._texts.get(value)
        if offset is None:
            offset = self._append(value.encode(errors="replace")[:_LONGEST_TEXT])
            if offset != _NO_ROOM:
                self._texts[value] = offset
        return offset

    def set_doing(self, state: str) -> None:
        """Publish what the rank is in the middle of, for verdicts and the ledger; "" if nothing."""
        self.words[Header.DOING] = self.text(state) if state else 0

    def note_line(self, line: int) -> None:
        """Record that a line, given by its hash, has created a sharded tensor."""
        word, bit = divmod(line % LINE_BITS, 64)
        self.words[Header.LINES + word] |= 1 << bit

    def lines(self) -> int:
        """Return the lines that have made sharded tensors, as bits."""
        words = self.words
        return words[Header.LINES] | words[Header.LINES + 1] << 64 | words[Header.LINES + 2] << 128

    def _append(self, encoded: bytes) -> int:
        start = self.words[Header.TEXT_END]
        end = start + 4 + len(encoded)
        if end > TEXT_BYTES:
            return _NO_ROOM
        at = _TEXT + start
        struct.pack_into("I", self.data, at, len(encoded))
        self.data[at + 4 : at + 4 + len(encoded)] = encoded
        self.words[Header.TEXT_END] = end
        return start

    def add_group(self, key: int, description: str) -> int | None:
        """Add a group and return its number; None when the table is full."""
        number = self.words[Header.GROUPS]
        if number >= GROUPS:
            return None
        at = GROUP_TABLE + GROUP_WORDS * number
        self.words[at], self.words[at + 1], self.words[at + 2] = key, self.text(description), 0
        self.words[Header.GROUPS] = number + 1
        return number

    def write_record(self, number: int, fields: Sequence[int]) -> None:
        _pack_record(self.data, (RING + (number % RECORDS) * RECORD_WORDS) * 8, *fields)
        self.words[Header.RECORDS] = number + 1

    def write_splits(self, number: int, sent: Sequence[int], expected: Sequence[int]) -> None:
        """Write how many elements an all_to_all sends to and receives from each rank.

        The ranks are those of the group; the collective is the one with this number.
        """
        at = SPLITS + number % SPLIT_ENTRIES * _SPLIT_WORDS
        for i, n in enumerate((*sent, *expected)):
            self.words[at + i] = n

    def splits(self, number: int, size: int) -> tuple[list[int], list[int]]:
        """Return (sent, expected) as given to `write_splits`."""
        at = SPLITS + number % SPLIT_ENTRIES * _SPLIT_WORDS
        return self.words[at : at + size].tolist(), self.words[at + size : at + 2 * size].tolist()

    def write_stack(self, text: str) -> None:
        encoded = text.encode(errors="replace")[: STACK_BYTES - 8]
        self.data[HEADER_BYTES : HEADER_BYTES + len(encoded)] = encoded
        self.words[Header.STACK_BYTES] = len(encoded)
        self.words[Header.STACK_GIVEN] = self.words[Header.STACK_WANTED]

    # -- reading, by any rank ----------------------------------------------------------------------

    def read_text(self, start: int) -> str:
        if not 0 < start < TEXT_BYTES - 4:
            return ""
        (length,) = struct.unpack_from("I", self.data, _TEXT + start)
        length = min(length, _LONGEST_TEXT)
        return printable(
            bytes(self.data[_TEXT + start + 4 : _TEXT + start + 4 + length]).decode(
                errors="replace"
            )
        )

    def read_stack(self) -> str:
        length = min(self.words[Header.STACK_BYTES], STACK_BYTES)
        return printable(
            bytes(self.data[HEADER_BYTES : HEADER_BYTES + length]).decode(errors="replace")
        )

    def ask_for_stack(self, seconds: float) -> str:
        """Ask the rank's watchdog thread where the main thread is.

        "" when it does not answer within so many seconds.
        """
        self.words[Header.STACK_WANTED] += 1
        deadline = time.monotonic() + seconds
        while self.words[Header.STACK_GIVEN] != self.words[Header.STACK_WANTED]:
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.01)
        return self.read_stack()

    @property
    def is_full(self) -> bool:
        """Whether there may be groups without an entry in the table."""
        return self.words[Header.GROUPS] >= GROUPS

    def find_group(self, key: int) -> int | None:
        """Return the number that this rank gave a group; None if it has called nothing on it."""
        for number in range(min(self.words[Header.GROUPS], GROUPS)):
            if self.words[GROUP_TABLE + GROUP_WORDS * number] == key:
                return number
        return None

    def group_key(self, number: int) -> int:
        return self.words[GROUP_TABLE + GROUP_WORDS * number]

    def group_text(self, number: int) -> str:
        return self.read_text(self.words[GROUP_TABLE + GROUP_WORDS * number + 1])

    def group_called(self, number: int) -> int:
        """Return how many collectives the rank has called on a group."""
        return self.words[called_at(number)]

    def record(self, number: int) -> Record | None:
        """Return the collective with this number; None when it is overwritten, or not there yet."""
        count = self.words[Header.RECORDS]
        if not max(0, count - RECORDS) <= number < count:
            return None
        at = RING + (number % RECORDS) * RECORD_WORDS
        where, call, place, start, end, lineage, sent, received = self.words[at : at + RECORD_WORDS]
        return Record(
            number,
            where >> 48,
            where & ((1 << 48) - 1),
            self.read_text(call),
            self.read_text(place),
            start,
            end,
            lineage,
            sent,
            received,
        )

    def records(self) -> Iterator[Record]:
        """Yield the collectives that are still there, the oldest first."""
        count = self.words[Header.RECORDS]
        for number in range(max(0, count - RECORDS), count):
            record = self.record(number)
            if record is not None:
                yield record

    @property
    def last(self) -> Record | None:
        return self.record(self.words[Header.RECORDS] - 1)

    @property
    def blocked(self) -> Record | None:
        """The collective that the rank's main thread is blocked in."""
        return None if self.words[Header.BLOCKED] & MAY_GO_ON else self.stuck

    @property
    def stuck(self) -> Record | None:
        """The collective that the rank's main thread is blocked in.

        If it is in none, one that its device waits in.
        """
        stuck = self.words[Header.BLOCKED] & ~(ON_DEVICE | MAY_GO_ON)
        return self.record(stuck - 1) if stuck else None


def row_of(number: int) -> int:
    """Return where the row of a group begins in a trace buffer, in words."""
    before = (
        number * LONG_SLOTS
        if number < LONG_ROWS
        else LONG_ROWS * LONG_SLOTS + (number - LONG_ROWS) * SLOTS
    )
    return SLOT_AREA + before * SLOT_WORDS


def slots_of(number: int) -> int:
    """Return how many collectives the row of a group holds, a power of two."""
    return LONG_SLOTS if number < LONG_ROWS else SLOTS


def called_at(number: int) -> int:
    """Return where a trace buffer has how many collectives were called on a group, in words."""
    return GROUP_TABLE + GROUP_WORDS * number + 2


def stable_hash(text: str) -> int:
    """Return a hash of 64 bits that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
