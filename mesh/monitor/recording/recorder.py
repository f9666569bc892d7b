"""A rank's seat in a group: where each of its collectives is written down and compared, in about two microseconds.

    enter   what is called, on what, from where -> a record in the page, a fingerprint in the group's row
            a look at the rows of others in the group: first shown, then looked, so of two that differ one sees it before it moves anything
    leave   when it is over

In a group of up to 8 each looks at all others; in a larger one at two neighbours: all ranks are alike if each is like its neighbours.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

from ...comm.call_site import user_frame
from ..diagnosis.verdict_text import call_text
from ..settings import monotonic_ns
from .trace_buffer import (
    MOST_SPLITS,
    RECORD_WORDS,
    RECORDS,
    RING,
    SLOT_AREA,
    SLOT_WORDS,
    SLOTS,
    H,
    Page,
    _pack_record,
    stable_hash,
)

if TYPE_CHECKING:
    from ...comm.group import Group
    from ..monitor import Watch
    from .job_directory import Board

NO_GROUP = 0xFFFF  # in the records of groups for which there was no room
_SMALL = 8  # ranks of a group in which each looks at all others
_frame = sys._getframe
_LAST, _LAST_RECORD = SLOTS - 1, RECORDS - 1
_COUNT = H.RECORDS
_RING_BYTES, _RECORD_BYTES = RING * 8, RECORD_WORDS * 8
_LOW48 = (1 << 48) - 1
_HASH = (1 << 21) - 1


class CommTag:
    """What a collective belongs to, as its caller knows: `f32[1024, 4096] @ P('dp') -> P()`. Compared between ranks."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"CommTag({self.text!r})"


class _Call:
    """A collective that was called before, and from where.

    Attributes:
        text, fingerprint: what it is.
        depth: how far above `enter` the outermost frame of ours was, 0 if there was none; `code` is what ran there.
        user, instruction, line: what called that, where, and the text of the line.
    """

    __slots__ = ("code", "depth", "fingerprint", "instruction", "line", "text", "user")

    def __init__(self, text: int, fingerprint: int) -> None:
        self.text, self.fingerprint = text, fingerprint
        self.depth = self.instruction = self.line = 0
        self.code: CodeType | None = None
        self.user: CodeType | None = None


class Seat:
    """One rank's seat in one group.

    Attributes:
        called: how many collectives it has called on the group.
        caller: the thread that is in one of them; 0 if none is.
        key: what the group is called on every rank's page.
        number: of the group in the own page.
        row: where the group's row begins in the own page, in words; None where there is no room for it.
        settled: how many of its collectives all ranks have come to.
        others: (words of the page, where its row begins) of the neighbours that are known so far.
        assembles: whether ranks wait for each other before the first collective, for which torch connects them.
        is_channel: whether it is for messages between two ranks.
    """

    __slots__ = (
        "_calls", "_comm_context", "_data", "_numbers", "_tag", "called", "caller", "group", "key", "number", "others", "page", "row",
        "settled", "watch", "words", "world",
    )  # fmt: skip
    assembles, is_channel = True, False

    def __init__(self, group: Group, page: Page, watch: Watch | None) -> None:
        self.group, self.page, self.watch, self.world = group, page, watch, group.world
        self.words: Any = page.words
        self._data, self._numbers, self._comm_context = page.data, page.numbers, group.world.comm_context
        self.key = stable_hash(f"{group.ranks} {group.world.epoch}")
        self._calls: dict[Any, _Call] = {}
        self.number = self._tag = 0
        self.row: int | None = None
        self.called = self.settled = self.caller = 0
        self.others: list[tuple[Any, int]] = []

    def enter(self, op: str, how: str, dtype: Any, size: int, sent: int, received: int, route: int = 0) -> int:
        """Notes down a collective before it moves anything; the number of its record.

        Args:
            how: the reduction, or "src=0" of a broadcast.
            size: elements that must agree between ranks; -1 where they need not.
            route: of a message, from and to whom, see `route_of`.

        Raises: WatchError when the job has failed, or a neighbour called something else.
        """
        watch, context, words = self.watch, self._comm_context, self.words
        if watch is not None and watch.alarm[0]:
            watch = watch.checked()
        note = context.tag
        call = self._calls.get((op, how, dtype, size, note))
        if call is None:
            call = self._new_call(op, how, dtype, size, note)
        sequence = self.called
        self.called = sequence + 1
        # Most calls come from where the last one did. (`sys._getframe` is fast, walking up the frames is not.)
        line = 0
        if call.depth:
            try:
                frame = _frame(call.depth)
                user: Any = frame.f_back
                if user.f_lasti == call.instruction and user.f_code is call.user and frame.f_code is call.code:
                    line = call.line
            except (ValueError, AttributeError):  # this one comes from less deep
                pass
        number = next(self._numbers)
        lineage = context.lineage
        _pack_record(
            self._data, _RING_BYTES + (number & _LAST_RECORD) * _RECORD_BYTES,
            self._tag | sequence, call.text, line or self._find_line(call), monotonic_ns(), 0, lineage, sent, received,
        )  # fmt: skip
        words[_COUNT] = number + 1
        row = self.row
        if row is None:
            return number
        slot = (sequence & _LAST) * SLOT_WORDS
        mine = (sequence & 0xFFFF) << 48 | call.fingerprint
        words[row + slot] = 0  # so that nobody takes the new lineage for that of the old fingerprint
        words[row + slot + 3] = route
        words[row + slot + 2] = number
        words[row + slot + 1] = lineage
        words[row + slot] = mine
        if watch is not None:
            for theirs, start in self.others:
                found = theirs[start + slot]
                if found == mine:
                    if theirs[start + slot + 1] != lineage:
                        watch.look(self)
                elif found and found >> 48 == sequence & 0xFFFF:
                    watch.look(self)
            if (sequence == 0 or watch.is_strict) and self.assembles:
                watch.assemble(self, sequence)
            elif sequence & (sequence - 1) == 0:
                self.meet_neighbours(watch.board)
        return number

    def show_splits(self, number: int, sent: Sequence[int], expected: Sequence[int]) -> None:
        """Of an all_to_all that no layouts describe, compares how much goes where. Raises: WatchError where ranks differ."""
        if self.watch is None or self.row is None or self._comm_context.tag is not None or len(sent) > MOST_SPLITS:
            return
        self.page.write_splits(number, sent, expected)
        self.words[self.row + (self.called - 1 & _LAST) * SLOT_WORDS + 3] = 1  # from now on others may look at them
        self.watch.compare_splits(self, self.called - 1)

    def described(self, number: int) -> str:
        """The collective of this record and its line, for messages."""
        record = self.page.record(number)
        return "a collective" if record is None else f"{call_text(record.call)} at {record.place}"

    def is_open(self, sequence: int) -> bool:
        """Whether to look after a call that not all ranks have come to."""
        return True

    def leave(self, number: int) -> None:
        """The collective of this record is over."""
        words = self.words
        if words[_COUNT] - number < RECORDS:  # else its place belongs to another
            words[RING + (number & _LAST_RECORD) * RECORD_WORDS + 4] = monotonic_ns()

    def meet_neighbours(self, board: Board) -> None:
        """Finds the rows of the others, as far as they have called something: of all in a small group, else of the next on both sides."""
        me, size = self.group.rank, self.group.size
        near = range(1, size) if size <= _SMALL else (1, size - 1)
        found = [(page, page.find_group(self.key)) for step in near if (page := board.of(self.group.ranks[(me + step) % size])) is not None]
        self.others = [(page.words, row_of(number)) for page, number in found if number is not None]

    def _new_call(self, op: str, how: str, dtype: Any, size: int, note: CommTag | None) -> _Call:
        if self.row is None and not self._calls:
            self._sit_down()
        fields = [op, how, str(dtype).removeprefix("torch."), "" if size < 0 else str(size), "" if note is None else note.text]
        text = "\t".join(fields)
        call = self._calls[op, how, dtype, size, note] = _Call(self.page.text(text), stable_hash(text) & _LOW48 | 1)
        if len(self._calls) > 10_000:  # calls of ever new sizes
            self._calls.clear()
        return call

    def _sit_down(self) -> None:
        """Tells where in the page the row is, at the first collective: by then the axes of the group are known."""
        number = self._find_row()
        if number is not None:
            self.number, self._tag, self.row = number, number << 48, row_of(number)
        else:
            self._tag = NO_GROUP << 48

    def _find_row(self) -> int | None:
        return self.page.add_group(self.key, f"{self._name()}\t{','.join(map(str, self.group.ranks))}")

    def _name(self) -> str:
        """What the group is called in messages."""
        from ...comm.report import axes_of

        return axes_of(self.world, self.group.ranks)

    def _find_line(self, call: _Call) -> int:
        """The text of the line in the user's program from which this comes; `call` remembers it."""
        frame, depth = user_frame(2)
        call.depth, call.code = depth - 1, _frame(depth).f_code  # seen from `enter`, which is one lower
        call.user, call.instruction = frame.f_code, frame.f_lasti
        call.line = self.page.text(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return call.line


def route_of(dst: int | None, src: int | None) -> int:
    """The places in the group that a message goes to and comes from, as one word."""
    return (0 if dst is None else dst + 1) << 32 | (0 if src is None else src + 1)


def row_of(number: int) -> int:
    """Where the row of a page's group begins, in words."""
    return SLOT_AREA + number * SLOTS * SLOT_WORDS


def unlike(one: int, other: int) -> bool:
    """Whether two lineages speak of different values: all three hashes differ; see `sharding/ops/lineage.py`. 0 says nothing."""
    different = one ^ other
    return bool(one and other and different & _HASH and different >> 21 & _HASH and different >> 42)
