"""A thread per process that publishes a heartbeat, and the main thread's stack on request."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from ..comm.call_site import frame_of_thread, is_inner
from ..comm.recording.trace_buffer import IDLE, Header
from ..settings import monotonic_ns, settings
from . import termination
from .device_waits import DeviceWaits
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
