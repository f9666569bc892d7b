"""Publish in which collective a rank is blocked while its main thread waits for an accelerator.

The host of an accelerator does not wait in a collective. It runs ahead, and stops where it needs a
result:

    rank 0   G.all_reduce #5   x.item() ...   BLOCKED: G#5, the first that its stream has not
                                              completed
    rank 1   H.all_reduce #7   x.item() ...   BLOCKED: H#7; each waits for what the other has not
                                              called: a deadlock

A main thread that stays at another place for seconds may be in a launch for which the queue has no
room, in the backward pass, or wait for something else. Then only the device counts as blocked.

The device is asked only while the main thread stays at one place, and so captures no CUDA graph: an
event that another thread queries may disturb a capture.
"""

from __future__ import annotations

import dis
import threading
from functools import lru_cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from ..comm.call_site import frame_of_thread, is_inner
from ..comm.recording.trace_buffer import MAY_GO_ON, ON_DEVICE, Header
from ..settings import monotonic_ns

if TYPE_CHECKING:
    from .monitor import Monitor

_STUCK_NS = 5_000_000_000
_Place = tuple[int, int]
# Functions and methods that return when the device has computed their result, besides those called
# `...synchronize`
_WAITING = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "to",
    "copy_",
    "nonzero",
    "equal",
    "float",
    "int",
    "bool",
    "is_nonzero",
}


class DeviceWaits:
    """What one process publishes, see above."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._records = self._since = self._there_since = self._shown = 0
        self._place: _Place | None = None
        self._number: int | None = None

    def look(self) -> None:
        """Look where the main thread is, and publish what it waits for if it has been there since
        the last look.
        """
        monitor = self._monitor
        now = monotonic_ns()
        records = monitor.buffer.words[Header.RECORDS]
        place = None
        waits = False
        if records == self._records and any(
            recorder.stream_mark is not None for recorder in monitor.recorders
        ):
            place, waits = place_of(frame_of_thread(threading.main_thread().ident))
        if place is None or place != self._place:
            self._there_since = now
        is_stuck = now - self._there_since >= (1 if waits else _STUCK_NS)
        number = monitor.stream_events.first_pending() if is_stuck else None
        if number is None or number != self._number:
            self._since = now
        self._records, self._place, self._number = records, place, number
        self._publish(0 if number is None else number + 1 | ON_DEVICE | (0 if waits else MAY_GO_ON))

    def _publish(self, blocked: int) -> None:
        words = self._monitor.buffer.words
        published = words[Header.BLOCKED]
        # the main thread waits on the host, and publishes that itself
        if published not in (0, self._shown):
            self._shown = 0
        elif published != blocked:
            words[Header.BLOCKED_SINCE] = self._since
            words[Header.BLOCKED] = self._shown = blocked


def place_of(frame: FrameType | None) -> tuple[_Place | None, bool]:
    """Return an identifier of where a thread is, and whether that is a call that waits for a
    device, as far as its names say.

    Args:
        frame: its innermost. Those of shardmesh and torch count as part of the call of the user's
            program.
    """
    place = None if frame is None else (id(frame), frame.f_lasti)
    while frame is not None:
        if _waits(frame.f_code, frame.f_lasti):
            return place, True
        frame = frame.f_back if is_inner(frame.f_code) else None
    return place, False


@lru_cache(1024)
def _waits(code: CodeType, at: int) -> bool:
    """Return whether the instruction there is a call of a function that waits for a device, or the
    truth of a value (`if x:`).
    """
    if at < 0:  # the frame has not begun
        return False
    # `at` may be in the cache behind the last one
    before = [instruction for instruction in dis.get_instructions(code) if instruction.offset <= at]
    current = before[-1]
    if "CALL" not in current.opname:
        return (
            "IF_TRUE" in current.opname
            or "IF_FALSE" in current.opname
            or current.opname in ("TO_BOOL", "UNARY_NOT")
        )
    start = current.positions and (current.positions.lineno, current.positions.col_offset)
    names = [
        instruction
        for instruction in before
        if instruction.opname.startswith(
            ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_SUPER")
        )
    ]
    called = [
        instruction
        for instruction in names
        if instruction.positions
        and (instruction.positions.lineno, instruction.positions.col_offset) == start
    ]
    name = str(called[-1].argval) if called else ""
    return name in _WAITING or name.endswith("synchronize")
