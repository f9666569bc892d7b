"""Record and compare each collective of a rank on one group, in about two microseconds.

    enter   what is called, on what, from where -> a record in the trace buffer, a fingerprint in
            the group's row; then read the rows of other ranks: publish before reading, so that on a
            mismatch at least one rank detects it before moving data
    leave   the record gets its end time

In a group of up to 8 ranks each reads the rows of all others, in a larger one those of two
neighbours: all ranks agree if each agrees with its neighbours.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, Protocol, Self

from ...settings import monotonic_ns
from ..call_site import user_frame
from ..comm_context import CommContext, NoContext
from .call_text import call_text
from .stream_events import Mark, StreamEvents
from .trace_buffer import (
    MOST_SPLITS,
    RECORD_END,
    RECORD_WORDS,
    RECORDS,
    RING,
    SLOT_LINEAGE,
    SLOT_RECORD,
    SLOT_ROUTE,
    SLOT_WORDS,
    Header,
    TraceBuffer,
    _pack_record,
    called_at,
    row_of,
    slots_of,
    stable_hash,
)

NO_GROUP = 0xFFFF  # group number in the records of groups without a row
_SMALL = 8  # up to so many ranks, each reads the rows of all others
_frame = sys._getframe
_LAST_RECORD = RECORDS - 1
_COUNT = Header.RECORDS
_RING_BYTES, _RECORD_BYTES = RING * 8, RECORD_WORDS * 8
_LOW32, _LOW47 = (1 << 32) - 1, (1 << 47) - 1
# A word of a row: 16 bits of the sequence number | STEP_MARKED | 47 of the call's hash, with those
# of the marked step mixed into the upper 15, so that the lower 32 tell calls apart whatever the
# step.
STEP_MARKED = 1 << 47
_STEPS = 1 << 15
_HASH = (1 << 16) - 1


class CommTag:
    """A collective's purpose, compared between ranks: `f32[1024, 4096] @ P('dp') -> P()`.

    Passed to the call of a `Group`. Callers keep one for all calls of a kind, by which the recorder
    looks up its data on them.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    @staticmethod
    @lru_cache(1024)
    def of(text: str) -> CommTag:
        """Return the one tag of this text, for callers that do not keep it."""
        return CommTag(text)

    def __repr__(self) -> str:
        return f"CommTag({self.text!r})"


class _CachedCall:
    """A collective that was called before, and the line that called it last.

    Attributes:
        text, fingerprint: of the call.
        depth: how far above `enter` the library's outermost frame was, 0 if there was none; `code`
            is what ran there.
        user, instruction, line: what called that, where, and the text of the line.
    """

    __slots__ = ("code", "depth", "fingerprint", "instruction", "line", "text", "user")

    def __init__(self, text: int, fingerprint: int) -> None:
        self.text, self.fingerprint = text, fingerprint
        self.depth = self.instruction = self.line = 0
        self.code: CodeType | None = None
        self.user: CodeType | None = None


class RecordedGroup:
    """The ranks of a group, and the place of this one among them.

    Attributes:
        ranks: global ranks, ascending.
        rank: index of this rank in `ranks`.
        size: number of ranks.
        comm_context: what the collectives that a thread calls on the group are part of.
    """

    __slots__ = ("comm_context", "rank", "ranks", "size")

    def __init__(
        self, ranks: tuple[int, ...], global_rank: int, comm_context: CommContext | NoContext
    ) -> None:
        self.ranks = ranks
        self.rank = ranks.index(global_rank)
        self.size = len(ranks)
        self.comm_context = comm_context

    @property
    def global_rank(self) -> int:
        """This rank in the world."""
        return self.ranks[self.rank]

    def identity(self) -> str:
        """Return a text that tells the group from others, the same on all of its ranks."""
        return str(self.ranks)

    def description(self) -> str:
        """Return what the group is called in messages."""
        return f"ranks {','.join(map(str, self.ranks))}"


class TraceBuffers(Protocol):
    """The trace buffers of a job's ranks: `JobDirectory`."""

    def buffer_of(self, rank: int) -> TraceBuffer | None:
        """Return the trace buffer of a rank; None as long as there is none."""


class CallWaits(Protocol):
    """How a rank waits for others that call the same or something else: `Waiting`.

    Raises: WatchError when the job fails meanwhile.
    """

    def wait_for_votes(self, recorder: Recorder) -> None:
        """Wait until votes decide which of the ranks that differ are the outliers."""

    def rendezvous(self, recorder: Recorder, sequence: int) -> None:
        """Wait until all ranks call the same."""

    def compare_splits(self, recorder: Recorder, sequence: int) -> None:
        """Compare how much each rank sends with what its receiver expects."""


class Neighbour:
    """Where a recorder finds what another rank has called on its group.

    Attributes:
        words: the rank's trace buffer.
        row: where the group's row begins in it, in words.
        last_slot: the number of slots of the row, a power of two, less one.
        called_at: which word has how many collectives were called.
    """

    __slots__ = ("called_at", "last_slot", "row", "words")

    def __init__(self, buffer: TraceBuffer, number: int) -> None:
        self.words: Any = buffer.words
        self.row = row_of(number)
        self.last_slot = slots_of(number) - 1
        self.called_at = called_at(number)


class CallMonitor(Protocol):
    """What groups and recorders need of the monitor of their job: `Monitor`.

    Attributes:
        alarm: one word; not 0 when there is a verdict, or when the job is not monitored.
        buffer: this rank's trace buffer.
        stream_events: where streams of accelerators wait for its collectives.
    """

    alarm: Any
    buffer: TraceBuffer
    stream_events: StreamEvents

    @property
    def directory(self) -> TraceBuffers: ...

    @property
    def waiting(self) -> CallWaits: ...

    @property
    def is_strict(self) -> bool:
        """Whether ranks wait for each other in every collective."""
        ...

    def checked(self) -> Self | None:
        """Return this monitor, or None if the ranks go on without one. Raises: WatchError."""

    def add_recorder(self, group: RecordedGroup) -> Recorder:
        """Return a new recorder of a group, of whose collectives the monitor knows from now on."""
        ...


class Recorder:
    """What one rank records of one group.

    Attributes:
        called: how many collectives this rank has called on the group.
        tag: what the last one of them is for, as its caller said.
        caller: the thread that is inside one of them; 0 if none is.
        key: a hash that identifies the group in every rank's trace buffer.
        number: of the group in this rank's trace buffer.
        row: where the group's row begins in this rank's trace buffer, in words; None if there is no
            room for it.
        settled: how many of its collectives all ranks have called.
        others: the neighbours that are known so far; empty without a monitor.
        needs_rendezvous: whether ranks wait for each other before the first collective, for which
            torch connects them.
        is_channel: whether it is for messages between two ranks.
        shows_waits: whether a main thread that waits in one of its collectives always publishes
            that.
        stream_mark: where a stream waits for the last collective on an accelerator; None before the
            first one.
    """

    __slots__ = (
        "_called_at",
        "_calls",
        "_comm_context",
        "_data",
        "_last_slot",
        "_number_bits",
        "_numbers",
        "buffer",
        "called",
        "caller",
        "group",
        "key",
        "monitor",
        "number",
        "others",
        "row",
        "settled",
        "stream_mark",
        "tag",
        "words",
    )
    needs_rendezvous = True
    is_channel = False
    shows_waits = True

    def __init__(
        self, group: RecordedGroup, buffer: TraceBuffer, monitor: CallMonitor | None
    ) -> None:
        self.group = group
        self.buffer = buffer
        self.monitor = monitor
        self.key = stable_hash(group.identity())
        self.tag: CommTag | None = None
        self.called = self.settled = self.caller = 0
        self.others: list[Neighbour] = []
        self.stream_mark: Mark | None = None
        # What `enter` needs of others, at hand:
        self.words: Any = buffer.words
        self._data = buffer.data
        self._numbers = buffer.numbers
        self._comm_context = group.comm_context
        self._calls: dict[Any, _CachedCall] = {}
        # The group's place in the trace buffer, claimed at the first call:
        self.number = self._number_bits = 0  # the second as the upper bits of a record's first word
        self.row: int | None = None
        self._last_slot = self._called_at = 0  # as those of a `Neighbour`

    def enter(
        self,
        op: str,
        how: str,
        dtype: Any,
        size: int,
        sent: int,
        received: int,
        tag: CommTag | None = None,
        route: int = 0,
        is_message: bool = False,
    ) -> int:
        """Record a collective before it moves any data; return the number of its record.

        Args:
            how: the reduction, or "src=0" of a broadcast.
            size: elements that must agree between ranks; -1 if they need not.
            tag: the purpose of the call, None if unknown; must agree between ranks.
            route: of a message, from and to whom, see `route_of`.
            is_message: whether it is one message between two ranks, which may be sent long before
                its receiver calls. It waits for nobody, also in "strict" mode: the second rank to
                call compares before it sends or reads anything.

        Raises: WatchError when the job has failed, or a neighbour called something else.
        """
        monitor = self.monitor
        words = self.words
        if monitor is not None and monitor.alarm[0]:
            monitor = monitor.checked()
        self.tag = tag
        call = self._calls.get((op, how, dtype, size, tag))
        if call is None:
            call = self._new_call(op, how, dtype, size, tag)
        sequence = self.called
        self.called = sequence + 1
        context = self._comm_context
        fingerprint = call.fingerprint
        # The line: that of a step that another line has begun; else most calls come from the same
        # line as the last one. (`sys._getframe` is fast, walking up the frames is not.)
        line = 0
        origin = context.origin
        if origin is not None:
            place, step = origin
            fingerprint ^= step
            if place is not None:
                line = self.buffer.text(place)
        if call.depth and not line:
            try:
                frame = _frame(call.depth)
                user: Any = frame.f_back
                if (
                    user.f_lasti == call.instruction
                    and user.f_code is call.user
                    and frame.f_code is call.code
                ):
                    line = call.line
            except (ValueError, AttributeError):  # the stack is shallower this time
                pass
        number = next(self._numbers)
        lineage = context.lineage
        if not lineage and context.loss is not None:
            lineage = context.loss.lineage_on(self.group.ranks)
        _pack_record(
            self._data,
            _RING_BYTES + (number & _LAST_RECORD) * _RECORD_BYTES,
            self._number_bits | sequence,
            call.text,
            line or self._find_line(call),
            monotonic_ns(),
            0,
            lineage,
            sent,
            received,
        )
        words[_COUNT] = number + 1
        row = self.row
        if row is None:
            return number
        # Publish, then compare.
        slot = row + (sequence & self._last_slot) * SLOT_WORDS
        own_word = (sequence & 0xFFFF) << 48 | fingerprint
        words[slot] = 0  # so that no rank pairs the new lineage with the old fingerprint
        words[slot + SLOT_ROUTE] = route
        words[slot + SLOT_RECORD] = number
        words[slot + SLOT_LINEAGE] = lineage
        words[slot] = own_word
        words[self._called_at] = sequence + 1
        if monitor is not None:
            for other in self.others:
                other_words = other.words
                slot = other.row + (sequence & other.last_slot) * SLOT_WORDS
                other_word = other_words[slot]
                if other_word != own_word:
                    if not other_word or other_word >> 48 != sequence & 0xFFFF:
                        continue
                    if not same_call(other_word, own_word):
                        monitor.waiting.wait_for_votes(self)
                        continue
                other_lineage = other_words[slot + SLOT_LINEAGE]
                if other_lineage != lineage and unlike(other_lineage, lineage):
                    monitor.waiting.wait_for_votes(self)
            waits = sequence == 0 or (monitor.is_strict and not is_message)
            if waits and self.needs_rendezvous:
                monitor.waiting.rendezvous(self, sequence)
            elif sequence & (sequence - 1) == 0:
                self.find_neighbours(monitor.directory)
        return number

    def detach(self, buffer: TraceBuffer) -> None:
        """Record to another trace buffer from now on, and compare nothing."""
        self.buffer = buffer
        self.words = buffer.words
        self.monitor = None
        self.others = []

    def show_splits(self, number: int, sent: Sequence[int], expected: Sequence[int]) -> None:
        """Publish and compare the splits of an all_to_all without a tag. Raises: WatchError."""
        if self.monitor is None or self.row is None or len(sent) > MOST_SPLITS:
            return
        self.buffer.write_splits(number, sent, expected)
        # from now on other ranks may read them
        self.words[self.row + (self.called - 1 & self._last_slot) * SLOT_WORDS + SLOT_ROUTE] = 1
        self.monitor.waiting.compare_splits(self, self.called - 1)

    def record_of(self, sequence: int) -> int:
        """Return the number of the record of one of the last collectives.

        That of the newest record of any group where there is no row.
        """
        if self.row is None:
            return self.words[_COUNT] - 1
        return self.words[self.row + (sequence & self._last_slot) * SLOT_WORDS + SLOT_RECORD]

    def keeps(self, sequence: int) -> bool:
        """Return whether the row still has one of the collectives called."""
        return self.row is not None and self.called - sequence <= self._last_slot + 1

    def call_and_line(self, number: int) -> str:
        """Return the collective of this record and its line, for messages."""
        record = self.buffer.record(number)
        return "a collective" if record is None else f"{call_text(record.call)} at {record.place}"

    def is_open(self, sequence: int) -> bool:
        """Return whether a call that not all ranks have made is to be diagnosed."""
        return True

    @property
    def on_device(self) -> bool:
        """Whether collectives run on streams of an accelerator, behind the host."""
        return self.stream_mark is not None

    def is_on_stream(self) -> bool:
        """Return whether a stream of an accelerator still waits for the last collective."""
        return self.stream_mark is not None and self.stream_mark.is_pending()

    def leave(self, number: int) -> None:
        """Record that the collective of this record has ended."""
        words = self.words
        if words[_COUNT] - number < RECORDS:  # else its slot belongs to a newer record
            words[RING + (number & _LAST_RECORD) * RECORD_WORDS + RECORD_END] = monotonic_ns()

    def find_neighbours(self, directory: TraceBuffers) -> None:
        """Find the rows of the ranks to compare with, as far as they have called something.

        All in a small group, else both neighbours.
        """
        rank, size = self.group.rank, self.group.size
        distances = range(1, size) if size <= _SMALL else (1, size - 1)
        others: list[Neighbour] = []
        for distance in distances:
            buffer = directory.buffer_of(self.group.ranks[(rank + distance) % size])
            number = None if buffer is None else buffer.find_group(self.key)
            if buffer is not None and number is not None:
                others.append(Neighbour(buffer, number))
        self.others = others  # at once: the watchdog reads it meanwhile

    def _new_call(
        self, op: str, how: str, dtype: Any, size: int, tag: CommTag | None
    ) -> _CachedCall:
        if self.row is None and not self._calls:
            self._claim_row()
        fields = [
            op,
            how,
            str(dtype).removeprefix("torch."),
            "" if size < 0 else str(size),
            "" if tag is None else tag.text,
        ]
        text = "\t".join(fields)
        call = self._calls[op, how, dtype, size, tag] = _CachedCall(
            self.buffer.text(text), _fingerprint(text)
        )
        if len(self._calls) > 1_024:  # a program whose sizes always change
            self._calls.clear()
        return call

    def _claim_row(self) -> None:
        """Claim a row at the first collective: by then the group's axes are known."""
        number = self._find_row()
        if number is not None:
            self.number, self._number_bits, self.row = number, number << 48, row_of(number)
            self._last_slot, self._called_at = slots_of(number) - 1, called_at(number)
        else:
            self._number_bits = NO_GROUP << 48

    def _find_row(self) -> int | None:
        return self.buffer.add_group(
            self.key, f"{self.group.description()}\t{','.join(map(str, self.group.ranks))}"
        )

    def _find_line(self, call: _CachedCall) -> int:
        """Find the line of the user's program that calls, and remember it in `call`.

        Return the text's place in the trace buffer.
        """
        frame, depth = user_frame(2)
        call.depth = depth - 1  # seen from `enter`, which is one lower
        call.code = _frame(depth).f_code
        call.user, call.instruction = frame.f_code, frame.f_lasti
        call.line = self.buffer.text(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return call.line


def route_of(dst: int | None, src: int | None) -> int:
    """Return the group ranks of a message's receiver and sender, as one word."""
    return (0 if dst is None else dst + 1) << 32 | (0 if src is None else src + 1)


def _fingerprint(text: str) -> int:
    return stable_hash(text) & _LOW47 | 1


def step_bits(step: int) -> int:
    """Return the bits of a marked step, to be mixed into the fingerprints of its calls."""
    return STEP_MARKED | step % _STEPS << 32


def step_of(word: int, text: str, near: int) -> int | None:
    """Return the step in which a call was made; None if its thread had marked none.

    Args:
        word: of the group's row.
        text: of the call, as the record has it.
        near: a step that the rank has marked, less than 16,384 before or after it.
    """
    bits = word & (STEP_MARKED | _LOW47)
    if not bits & STEP_MARKED:
        return None
    bits ^= STEP_MARKED | _fingerprint(text)
    if bits & _LOW32:  # there was no room for the text
        return None
    return max(0, near + ((bits >> 32) - near + _STEPS // 2) % _STEPS - _STEPS // 2)


def same_call(one: int, other: int) -> bool:
    """Return whether two words of a row are of the same call in the same step.

    A rank that has marked no step may be in any.
    """
    different = one ^ other
    return not different or bool(different & STEP_MARKED and not different & _LOW32)


def unlike(one: int, other: int) -> bool:
    """Return whether two recorded lineages seem to belong to different values; 0 is unknown.

    16 bits line | 16 order | 16 since | 16 layout      see `sharding/lineage.py`
    """
    different = one ^ other
    return bool(
        one and other and different >> 48 and different >> 32 & _HASH and different >> 16 & _HASH
    )


def differ(
    one: int, buffer: TraceBuffer | None, other: int, other_buffer: TraceBuffer | None
) -> bool:
    """Return whether two recorded lineages belong to different values.

    That depends on the lines on which both ranks have made tensors.

    If two ranks have made tensors on different lines, and one on more lines than the other, a value
    computed from two such tensors may differ in line by the one and in number by the other. Then
    the operators or layouts must differ as well.
    """
    if not unlike(one, other):
        return False
    if (one ^ other) & _HASH or buffer is None or other_buffer is None:
        return True
    own_lines, other_lines = buffer.lines(), other_buffer.lines()
    own_alone = (own_lines & ~other_lines).bit_count()
    other_alone = (other_lines & ~own_lines).bit_count()
    return not own_alone or not other_alone or own_alone == other_alone
