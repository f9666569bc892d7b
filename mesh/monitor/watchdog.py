"""A thread per process that publishes a heartbeat, the main thread's stack on request, and in which
collective it is blocked on an accelerator. It diagnoses collectives that the main thread cannot
check, and after a verdict sees to the end of the process.
"""

from __future__ import annotations

import dis
import signal
import sys
import threading
import traceback
from functools import lru_cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from ..comm.call_site import frame_of_thread, is_inner
from ..comm.recording.trace_buffer import IDLE, MAY_GO_ON, ON_DEVICE, Header
from ..settings import monotonic_ns, settings
from . import termination
from .diagnosis import diagnose, verdict_text
from .diagnosis.members import lost_ranks, read_members
from .recording.job_directory import Alarm

if TYPE_CHECKING:
    from ..comm.recording.recorder import Recorder
    from .monitor import Monitor

TICK_S = 0.05
_ALIVE_S = 1.0  # how often to look which ranks are alive
# time after a verdict that a program has to call a collective, before its main thread is
# interrupted
_POLITE_S = 0.5
_DEAF_S = 5.0  # time after a verdict until a program that did not react is ended
# how long a program must go on after its groups were destroyed to count as living on
_TO_LEAVE_S = 1.5
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


class Watchdog:
    """The watchdog thread of one `Monitor`."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._over = threading.Event()
        self._left_at = 0
        self._before: dict[Recorder, int] = {}  # what recorders had called at the last tick
        self._looked_at = 0
        # what recorders with a lost rank had called, as a stream waited for it
        self._on_stream: dict[Recorder, int] = {}
        self._warned: set[tuple[int, int]] = set()
        self._device_waits = DeviceWaits(monitor)
        self._thread = threading.Thread(target=self._run, name="shardmesh-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait until it no longer reads anything."""
        self._over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._over.wait(TICK_S):
            try:
                self._tick()
            except ReferenceError:  # the world has gone
                return

    def _tick(self) -> None:
        monitor = self._monitor
        words = monitor.buffer.words
        words[Header.HEARTBEAT] = monotonic_ns()
        if words[Header.STACK_WANTED] != words[Header.STACK_GIVEN]:
            monitor.buffer.write_stack(self.stack())
        if monitor.relay is not None:
            monitor.relay.look()
        if monitor.alarm[0] == Alarm.UNWATCHED:
            return
        if monitor.alarm[0]:
            self._see_to_the_end()
        elif settings().mode != "off":
            self._device_waits.look()
            for recorder in monitor.recorders:
                called = recorder.called
                # else the program is making progress
                if recorder.settled < called and self._before.get(recorder) == called:
                    self._look(recorder, called)
                self._before[recorder] = called
            self._find_cycle()
            now = monotonic_ns()
            if now - self._looked_at >= _ALIVE_S * 1e9:
                self._looked_at = now
                self._find_lost()

    def _find_cycle(self) -> None:
        """Diagnose devices that wait for each other in collectives that all hosts have called."""
        verdict = diagnose.device_cycle(self._monitor)
        if verdict is not None:
            self._monitor.fail(verdict)

    def _find_lost(self) -> None:
        """Diagnose ranks that were lost after they had called what others wait for: their hosts had
        run ahead of the device.

        Such a collective counts as settled. It may still complete, so it must be under way at two
        looks in a row. The device is asked only once a rank is lost: a query by this thread may
        disturb the capture of a CUDA graph.
        """
        monitor = self._monitor
        # it may wait for as long as nobody else does
        if monitor.buffer.words[Header.PAUSED] >= IDLE:
            gone = lost_ranks(monitor.directory)
            if gone:
                monitor.fail(verdict_text.died(gone))
                return
        on_device = [
            recorder
            for recorder in monitor.recorders
            if recorder.on_device and not recorder.is_channel
        ]
        gone = {m.rank for m in lost_ranks(monitor.directory)} if on_device else set()
        with_gone = [recorder for recorder in on_device if gone.intersection(recorder.group.ranks)]
        waiting = {recorder: recorder.called for recorder in with_gone if recorder.is_on_stream()}
        for recorder, called in waiting.items():
            verdict = (
                diagnose.lost(monitor, recorder, called - 1)
                if self._on_stream.get(recorder) == called
                else None
            )
            if verdict is not None:
                monitor.fail(verdict)
                return
        self._on_stream = waiting

    def _see_to_the_end(self) -> None:
        """End this process's part in a failed job: interrupt a main thread that is busy elsewhere,
        end a process that does not exit.
        """
        monitor = self._monitor
        verdict = monitor.standing()
        waited = (monotonic_ns() - monitor.failed_at) / 1e9
        if verdict is None:
            return
        monitor.buffer.words[Header.AWARE] = 1
        if self._has_left():
            monitor.depart()
            return
        termination.set_deadline(monitor, termination.may_end(monitor))
        if waited < _POLITE_S:
            return
        if (
            not monitor.notified
            and termination.alarm_signal is not None
            and threading.main_thread().is_alive()
        ):
            signal.pthread_kill(threading.main_thread().ident or 0, termination.alarm_signal)
        # what this sets free first runs the handler of the signal
        monitor.communicators.abort(wait=False)
        if waited > (
            settings().exit_s if monitor.notified else min(_DEAF_S, settings().exit_s)
        ) and termination.may_end(monitor):
            why = f"{waited:.0f} s after its job failed (SHARDMESH_EXIT_S), here:\n{self.stack()}"
            termination.end(monitor, f"rank {monitor.directory.rank} is ended {why}{verdict.text}")

    def _has_left(self) -> bool:
        """Return whether the program has destroyed the job's groups and continues. One that is
        about to exit destroys them, too.
        """
        if self._monitor.is_of_this_job() or not threading.main_thread().is_alive():
            self._left_at = 0
        elif not self._left_at:
            self._left_at = monotonic_ns()
        return bool(self._left_at) and monotonic_ns() - self._left_at > _TO_LEAVE_S * 1e9

    def _look(self, recorder: Recorder, called: int) -> None:
        """Diagnose a collective that not all ranks have called; main threads that wait for a GPU
        cannot do so themselves.
        """
        monitor = self._monitor
        sequence = called - 1
        if monitor.is_settled(recorder) or not recorder.is_open(sequence):
            return
        members = read_members(monitor, recorder, sequence)
        record = next((m.record for m in members if m.rank == recorder.world.rank), None)
        if record is None or (not monitor.sees_all and any(m.buffer is None for m in members)):
            return
        waited = monotonic_ns() - record.start
        warn_ns = settings().warn * 1e9
        if (
            waited > warn_ns
            and (recorder.key, sequence) not in self._warned
            and monitor.ns_since(record.start) > warn_ns
        ):
            self._warned.add((recorder.key, sequence))
            first = diagnose.first_missed(
                recorder, sequence, [m for m in members if m.came is False]
            )
            self._warn(
                verdict_text.stall(
                    monitor, recorder, first, read_members(monitor, recorder, first), waited
                ).text
            )
        monitor.check_visible(recorder, record.start)
        is_waiting = not recorder.shows_waits or monitor.buffer.blocked is not None
        verdict = diagnose.diagnose(monitor, recorder, sequence, record.start, is_waiting)
        if verdict is not None:
            monitor.fail(verdict)

    def _warn(self, text: str) -> None:
        print(
            f"shardmesh: rank {self._monitor.directory.rank}: {text}", file=sys.stderr, flush=True
        )

    def stack(self) -> str:
        """Return the main thread's stack; of the library only the innermost frame."""
        frame = frame_of_thread(threading.main_thread().ident)
        if frame is None:
            return ""
        summary = traceback.extract_stack(frame)
        frames = [f for f, _ in traceback.walk_stack(frame)][::-1]
        shown = [
            s for s, f in zip(summary, frames, strict=True) if not is_inner(f.f_code) or f is frame
        ]
        return "".join(traceback.format_list(shown))


# -- waits for an accelerator ----------------------------------------------------------------------


class DeviceWaits:
    """Publish in which collective a rank is blocked while its main thread waits for an accelerator.

    The host of an accelerator does not wait in a collective. It runs ahead, and stops where it
    needs a result:

        rank 0   G.all_reduce #5   x.item() ...   BLOCKED: G#5, the first that its stream
                                                  has not completed
        rank 1   H.all_reduce #7   x.item() ...   BLOCKED: H#7; each waits for what the
                                                  other has not called: a deadlock

    A main thread that stays at another place for seconds may be in a launch for which the queue has
    no room, in the backward pass, or wait for something else. Then only the device counts as
    blocked.

    The device is asked only while the main thread stays at one place, and so captures no CUDA
    graph: an event that another thread queries may disturb a capture.
    """

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
