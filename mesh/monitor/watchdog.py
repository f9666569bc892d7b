"""The watchdog: a thread per process that publishes what the process is doing.

A heartbeat, the main thread's stack on request, and in which collective it is blocked on an
accelerator. It diagnoses collectives that the main thread cannot check, and after a verdict sees to
the end of the process.
"""

from __future__ import annotations

import contextlib
import dis
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FrameType

from ..comm.call_site import frame_of_thread, is_inner, main_thread_stack
from ..comm.recording.recorder import Recorder
from ..comm.recording.trace_buffer import IDLE, MAY_GO_ON, ON_DEVICE, Header
from ..settings import monotonic_ns, settings
from . import termination
from .diagnosis import diagnose, verdict_text
from .diagnosis.members import lost_ranks, read_members
from .job import Job
from .recording.job_directory import Alarm

TICK_S = 0.05
_ALIVE_S = 1.0  # how often to look which ranks are alive
# time after a verdict that a program has to call a collective, before its main thread is
# interrupted
_POLITE_S = 0.5
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
    """The watchdog thread of one process of a job.

    Args:
        depart: called when the program has left the job, and continues.
    """

    def __init__(self, job: Job, depart: Callable[[], None]) -> None:
        self._job, self._depart = job, depart
        self._over = threading.Event()
        self._left_at = 0
        self._before: dict[Recorder, int] = {}  # what recorders had called at the last tick
        self._looked_at = 0
        # what recorders with a lost rank had called, as a stream waited for it
        self._on_stream: dict[Recorder, int] = {}
        self._warned: set[tuple[int, int]] = set()
        # types of errors of ticks, and the lines that raised them
        self._reported: set[tuple[type[Exception], str, int | None]] = set()
        self._device_waits = DeviceWaits(job)
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
            except Exception as error:
                # `stop` does not wait for longer than a second, and then what is read may be closed
                if self._over.is_set():
                    return
                self._report(error)

    def _report(self, error: Exception) -> None:
        """Print an error of a tick, once for each line that raises it.

        The next tick is tried: without this thread nothing finds stalls, or ends this process
        after a verdict.
        """
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        place = (type(error), innermost.filename, innermost.lineno)
        if place in self._reported:
            return
        self._reported.add(place)
        lines = "".join(traceback.format_exception(error))
        # of an stderr that is closed, or that nobody reads, which may be the error itself
        with contextlib.suppress(OSError, ValueError):
            self._warn(f"an error in the watchdog thread, which continues:\n{lines}")

    def _tick(self) -> None:
        job = self._job
        words = job.buffer.words
        words[Header.HEARTBEAT] = monotonic_ns()
        if words[Header.STACK_WANTED] != words[Header.STACK_GIVEN]:
            job.buffer.write_stack(main_thread_stack())
        if job.relay is not None:
            job.relay.look()
        if job.alarm[0] == Alarm.UNMONITORED:
            return
        if job.alarm[0]:
            self._see_to_the_end()
        elif settings().mode != "off":
            self._device_waits.look()
            for recorder in job.recorders:
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
        verdict = diagnose.device_cycle(self._job)
        if verdict is not None:
            self._job.fail(verdict)

    def _find_lost(self) -> None:
        """Diagnose ranks that were lost after they had called what others wait for.

        Their hosts had run ahead of the device.

        Such a collective counts as settled. It may still complete, so it must be under way at two
        looks in a row. The device is asked only once a rank is lost: a query by this thread may
        disturb the capture of a CUDA graph.
        """
        job = self._job
        # it may wait for as long as nobody else does
        if job.buffer.words[Header.PAUSED] >= IDLE:
            gone = lost_ranks(job.directory)
            if gone:
                job.fail(verdict_text.died(gone))
                return
        on_device = [
            recorder for recorder in job.recorders if recorder.on_device and not recorder.is_channel
        ]
        gone = {m.rank for m in lost_ranks(job.directory)} if on_device else set()
        with_gone = [recorder for recorder in on_device if gone.intersection(recorder.group.ranks)]
        waiting = {recorder: recorder.called for recorder in with_gone if recorder.is_on_stream()}
        for recorder, called in waiting.items():
            verdict = (
                diagnose.lost(job, recorder, called - 1)
                if self._on_stream.get(recorder) == called
                else None
            )
            if verdict is not None:
                job.fail(verdict)
                return
        self._on_stream = waiting

    def _see_to_the_end(self) -> None:
        """End this process's part in a failed job.

        Interrupt a main thread that is busy elsewhere, end a process that does not exit.
        """
        job = self._job
        verdict = job.standing()
        waited = (monotonic_ns() - job.failed_at) / 1e9
        if verdict is None:
            return
        job.buffer.words[Header.AWARE] = 1
        if self._has_left():
            self._depart()
            return
        termination.set_deadline(job, termination.may_end(job))
        if waited < _POLITE_S:
            return
        if (
            not job.notified
            and termination.alarm_signal is not None
            and threading.main_thread().is_alive()
        ):
            signal.pthread_kill(threading.main_thread().ident or 0, termination.alarm_signal)
        # what this sets free first runs the handler of the signal
        job.communicators.abort(job.is_of_this_job, wait=False)
        if waited > (
            settings().exit_s if job.notified else min(job.deaf_s, settings().exit_s)
        ) and termination.may_end(job):
            why = f"{waited:.0f} s after its job failed (SHARDMESH_EXIT_S), here:\n"
            end = f"rank {job.directory.rank} is ended {why}{main_thread_stack()}{verdict.text}"
            termination.end(job, end)

    def _has_left(self) -> bool:
        """Return whether the program has destroyed the job's groups and continues.

        One that is about to exit destroys them, too.
        """
        if self._job.is_of_this_job() or not threading.main_thread().is_alive():
            self._left_at = 0
        elif not self._left_at:
            self._left_at = monotonic_ns()
        return bool(self._left_at) and monotonic_ns() - self._left_at > _TO_LEAVE_S * 1e9

    def _look(self, recorder: Recorder, called: int) -> None:
        """Diagnose a collective that not all ranks have called.

        Main threads that wait for a GPU cannot do so themselves.
        """
        job = self._job
        sequence = called - 1
        if job.is_settled(recorder) or not recorder.is_open(sequence):
            return
        members = read_members(job.directory, recorder, sequence)
        record = next((m.record for m in members if m.rank == recorder.group.global_rank), None)
        if record is None or (not job.sees_all and any(m.buffer is None for m in members)):
            return
        waited = monotonic_ns() - record.start
        warn_ns = settings().warn * 1e9
        if (
            waited > warn_ns
            and (recorder.key, sequence) not in self._warned
            and job.ns_since(record.start) > warn_ns
        ):
            self._warned.add((recorder.key, sequence))
            first = diagnose.first_missed(
                recorder, sequence, [m for m in members if m.came is False]
            )
            self._warn(
                verdict_text.stall(
                    job, recorder, first, read_members(job.directory, recorder, first), waited
                ).text
            )
        job.check_visible(recorder, record.start)
        is_waiting = not recorder.shows_waits or job.buffer.blocked is not None
        verdict = diagnose.diagnose(job, recorder, sequence, record.start, is_waiting)
        if verdict is not None:
            job.fail(verdict)

    def _warn(self, text: str) -> None:
        print(f"shardmesh: rank {self._job.directory.rank}: {text}", file=sys.stderr, flush=True)


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

    def __init__(self, job: Job) -> None:
        self._job = job
        self._records = self._since = self._there_since = self._shown = 0
        self._place: _Place | None = None
        self._number: int | None = None

    def look(self) -> None:
        """Look where the main thread is, and publish what it waits for.

        If it has been there since the last look.
        """
        job = self._job
        now = monotonic_ns()
        records = job.buffer.words[Header.RECORDS]
        place = None
        waits = False
        if records == self._records and any(
            recorder.stream_mark is not None for recorder in job.recorders
        ):
            place, waits = place_of(frame_of_thread(threading.main_thread().ident))
        if place is None or place != self._place:
            self._there_since = now
        is_stuck = now - self._there_since >= (1 if waits else _STUCK_NS)
        number = job.stream_events.first_pending() if is_stuck else None
        if number is None or number != self._number:
            self._since = now
        self._records, self._place, self._number = records, place, number
        self._publish(0 if number is None else number + 1 | ON_DEVICE | (0 if waits else MAY_GO_ON))

    def _publish(self, blocked: int) -> None:
        words = self._job.buffer.words
        published = words[Header.BLOCKED]
        # the main thread waits on the host, and publishes that itself
        if published not in (0, self._shown):
            self._shown = 0
        elif published != blocked:
            words[Header.BLOCKED_SINCE] = self._since
            words[Header.BLOCKED] = self._shown = blocked


def place_of(frame: FrameType | None) -> tuple[_Place | None, bool]:
    """Return an identifier of where a thread is, and whether it waits for a device there.

    As far as the names of its calls say.

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
    """Return whether the instruction there waits for a device.

    It calls a function that does, or asks for the truth of a value (`if x:`).
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
