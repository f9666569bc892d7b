"""The watchdog: a thread that shows that the process lives, and where its main thread is when others ask."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from ..comm.call_site import frame_of_thread, is_inner
from . import termination
from .diagnosis import diagnose, verdict_text
from .recording.job_directory import Alarm
from .recording.trace_buffer import H
from .settings import monotonic_ns, settings

if TYPE_CHECKING:
    from .monitor import Watch
    from .recording.recorder import Seat

TICK_S = 0.05
_POLITE_S, _DEAF_S = 0.5, 5.0  # how long after a verdict a program has to come to a collective, and to react to a signal
_TO_LEAVE_S = 1.5  # how long a program without its groups has to live on, to be no program that ends


class Watchdog:
    """One thread for one `Watch`."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._over = threading.Event()
        self._left_at = 0
        self._before: dict[Seat, int] = {}  # what seats had called at the last tick
        self._warned: set[tuple[int, int]] = set()
        self._thread = threading.Thread(target=self._run, name="shardmesh-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread no longer looks at anything."""
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
        watch = self._watch
        words = watch.page.words
        words[H.HEARTBEAT] = monotonic_ns()
        if words[H.STACK_WANTED] != words[H.STACK_GIVEN]:
            watch.page.write_stack(self.stack())
        if watch.relay is not None:
            watch.relay.look()
        if watch.alarm[0] == Alarm.UNWATCHED:
            return
        if watch.alarm[0]:
            self._see_to_the_end()
        elif settings().mode != "off":
            for seat in watch.seats:
                called = seat.called
                if seat.settled < called and self._before.get(seat) == called:  # a program that moves on needs no looking after
                    self._look(seat, called)
                self._before[seat] = called

    def _see_to_the_end(self) -> None:
        """The job has failed: a program that is busy elsewhere is called, and one that does not end is ended."""
        watch = self._watch
        verdict = watch.standing()
        waited = (monotonic_ns() - watch.failed_at) / 1e9
        if verdict is None:
            return
        watch.page.words[H.AWARE] = 1
        if self._has_left():
            watch.depart()
            return
        termination.set_deadline(watch, termination.may_end(watch))
        if waited < _POLITE_S:
            return
        if not watch.told and termination.alarm_signal is not None and threading.main_thread().is_alive():
            signal.pthread_kill(threading.main_thread().ident or 0, termination.alarm_signal)
        if waited > (settings().exit_s if watch.told else min(_DEAF_S, settings().exit_s)) and termination.may_end(watch):
            why = f"{waited:.0f} s after its job failed (SHARDMESH_EXIT_S), here:\n{self.stack()}"
            termination.end(watch, f"rank {watch.board.rank} is ended {why}{verdict.text}")

    def _has_left(self) -> bool:
        """Whether the program has destroyed the job's groups, and goes on: one that is about to end does so, too."""
        if self._watch.is_of_this_job() or not threading.main_thread().is_alive():
            self._left_at = 0
        elif not self._left_at:
            self._left_at = monotonic_ns()
        return bool(self._left_at) and monotonic_ns() - self._left_at > _TO_LEAVE_S * 1e9

    def _look(self, seat: Seat, called: int) -> None:
        """Looks at a collective for which not all ranks have come yet; main threads that wait for a GPU cannot."""
        watch, sequence = self._watch, called - 1
        if watch.is_settled(seat) or not seat.is_open(sequence):
            return
        found = diagnose.members(watch, seat, sequence)
        record = next((m.record for m in found if m.rank == seat.world.rank), None)
        if record is None or (not watch.sees_all and any(m.page is None for m in found)):
            return
        waited, warn_ns = monotonic_ns() - record.start, settings().warn * 1e9
        if waited > warn_ns and (seat.key, sequence) not in self._warned and watch.ns_since(record.start) > warn_ns:
            self._warned.add((seat.key, sequence))
            self._warn(verdict_text.stall(watch, seat, sequence, found, waited).text)
        watch.doubt(seat, record.start)
        verdict = diagnose.judge(watch, seat, sequence, record.start)
        if verdict is not None:
            watch.fail(verdict)

    def _warn(self, text: str) -> None:
        print(f"shardmesh: rank {self._watch.board.rank}: {text}", file=sys.stderr, flush=True)

    def stack(self) -> str:
        """The main thread's stack; what is not the user's is left off but for the innermost frame."""
        frame = frame_of_thread(threading.main_thread().ident)
        if frame is None:
            return ""
        summary = traceback.extract_stack(frame)
        frames = [f for f, _ in traceback.walk_stack(frame)][::-1]
        kept = [s for s, f in zip(summary, frames, strict=True) if not is_inner(f.f_code) or f is frame]
        return "".join(traceback.format_list(kept))
