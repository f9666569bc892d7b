"""`Job`: what one process knows of its job, and the verdict on it.

It is the part of the `Monitor` that its other parts work on: those that wait, diagnose, watch from
a thread of their own, carry records between hosts.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol, Self

import torch.distributed as dist

from ..comm.call_site import main_thread_stack
from ..comm.recording.recorder import Recorder
from ..comm.recording.stream_events import StreamEvents
from ..comm.recording.trace_buffer import Header, TraceBuffer
from ..comm.world import World
from ..errors import WatchError
from ..settings import monotonic_ns, settings
from . import timeouts
from .agreement import Agreement, warn
from .diagnosis.members import agree, have_all_come, read_members
from .recording.job_directory import Alarm, JobDirectory, is_near, may_span_hosts
from .timeouts import Communicators, keep_groups
from .verdict import Verdict

# after waiting so long, a rank asks whether the missing ranks are visible at all
_DOUBT_NS = 50_000_000
_DEAF_S = 5.0
_STACK_S = 1.0  # how long to wait for the stack of another rank, whose host may be busy


class HostLink(Protocol):
    """The connection to the job's other hosts: `Relay`.

    Attributes:
        lost_after_s: seconds after which a silent host counts as lost.
    """

    lost_after_s: float

    @property
    def has_others(self) -> bool:
        """Whether there are other hosts, as far as this rank knows."""
        ...

    def look(self) -> None:
        """Mark hosts that are silent, and compare this rank's collectives with those of others."""

    def lose(self, ranks: Collection[int], reason: str) -> None:
        """Mark ranks of other hosts as lost."""

    def speak_on(self) -> None:
        """Publish for this host from here on though its ranks have stopped watching each other."""

    def close(self) -> None:
        """Publish the last state of this host if no other rank can, and stop."""

    def leave(self) -> None:
        """Stop at once: nobody waits for what this host would say last."""


class Job:
    """One process's view of the job: its own trace buffer, those of others, and the verdict.

    Attributes:
        directory: the trace buffers of all ranks.
        buffer: this rank's trace buffer.
        alarm: one word; not 0 when there is a verdict, or when the job is not monitored.
        recorders: of the groups on which this rank has called something.
        stream_events: where streams of accelerators wait for its collectives.
        communicators: of accelerators, to be aborted when the job has failed.
        abandoned: whether a collective may have been left under way, which torch's threads would
            wait for at exit.
        notified: whether this rank's program has raised or printed the verdict.
        failed_at: when this rank learned of the verdict; 0 before.
        relay: the connection to other hosts; None if there is none.
        ended_elsewhere: returns ranks of other hosts that have ended, where something else than the
            relay can tell; called when a connection has broken or a host is silent.
        is_suspended: whether the program goes on after the verdict, in another job.
        is_on: whether the ranks are compared; False once the job goes on without the monitor.
        pid: of the process that the job began in; a forked child has another.
        at_stop: called once when comparing ends: what restores torch's methods.
        deaf_s: seconds after a verdict until a process that has not reacted is ended, if
            SHARDMESH_EXIT_S is not less.
    """

    def __init__(
        self, world: World, directory: JobDirectory, agreement: Agreement | None = None
    ) -> None:
        self.world = weakref.proxy(world)
        self.directory, self.buffer, self.alarm = directory, directory.buffer, directory.alarm
        self.recorders: list[Recorder] = []
        self.stream_events = StreamEvents()
        self.communicators = Communicators()
        self.abandoned = self.notified = False
        self.failed_at = 0
        self.is_on = True
        self.ended_elsewhere: Callable[[], Collection[int]] = tuple
        self.is_suspended = False
        self.pid = os.getpid()
        self.relay: HostLink | None = None
        self.at_stop: list[Callable[[], None]] = []
        self.deaf_s = _DEAF_S
        self._agreement = agreement
        self._pausing = threading.RLock()  # a handler of a signal may pause, too
        self._verdict: Verdict | None = None

    @property
    def sees_all(self) -> bool:
        """Whether every rank of the job becomes visible here: by one host, or a relay."""
        return self.relay is not None or not may_span_hosts(os.environ, self.directory.size)

    @property
    def is_strict(self) -> bool:
        return settings().mode in ("strict", "full")

    def is_of_this_job(self) -> bool:
        """Return whether the default group is still the one that the monitor is for."""
        default = dist.group.WORLD if dist.is_initialized() else None
        return default is not None and not self.world.is_over(default)

    # -- verdicts ----------------------------------------------------------------------------------

    def standing(self) -> Verdict | None:
        """Return the verdict on the job, if there is one."""
        if self._verdict is None and self.alarm[0]:
            verdict = self.directory.verdict()
            if verdict is not None:
                self._set_verdict(verdict)
        return self._verdict

    def _set_verdict(self, verdict: Verdict) -> None:
        # in this order: a thread that sees the verdict asks since when
        self.failed_at = self.failed_at or monotonic_ns()
        self._verdict = verdict

    def check(self) -> None:
        """Raise the verdict on the job, a WatchError, if there is one."""
        verdict = self.standing()
        if verdict is not None:
            raise self._error(verdict)

    def fail(self, verdict: Verdict) -> Verdict:
        """Make this the verdict on the job, unless there is one already.

        Return the one that stands, which all ranks raise.
        """
        standing = self.directory.post(verdict)
        self._set_verdict(standing)
        return standing

    def failed(self, verdict: Verdict) -> WatchError:
        """Call `fail` and return the error to raise."""
        return self._error(self.fail(verdict))

    def _error(self, verdict: Verdict) -> WatchError:
        self.notified = True
        self.abandon()
        return verdict.error()

    def abandon(self) -> None:
        """Leave this rank's collectives under way: the job has failed."""
        self.abandoned = True
        keep_groups()
        self.communicators.abort(self.is_of_this_job, wait=True)

    def look_elsewhere(self) -> None:
        """Mark ranks of other hosts as lost that have ended, where `ended_elsewhere` tells."""
        ended = () if self.relay is None or self.is_suspended else self.ended_elsewhere()
        if ended and self.relay is not None:
            self.relay.lose(ended, "its host says that its process has ended")

    # -- a job that cannot be monitored ------------------------------------------------------------

    def checked(self) -> Self | None:
        """Return this object, or None if the ranks go on without one.

        Raises: WatchError for the verdict on the job.
        """
        if self.alarm[0] == Alarm.UNMONITORED:
            self._retire()
            return None
        self.check()
        return self

    def give_up(self, reason: str) -> None:
        """Let all ranks go on without the monitor, unless there is a verdict.

        Those of this host at once, others through the store.
        """
        if self._agreement is not None:
            self._agreement.give_up(self.directory, reason)
        elif self.directory.give_up():
            warn(reason)

    def _retire(self) -> None:
        """Stop comparing; only record this rank's collectives, under torch's own timeouts."""
        if not self.is_on:
            return
        self.is_on = False
        self._stop_calls()
        with contextlib.suppress(ReferenceError):
            self.world.retire_monitor()
        for recorder in self.recorders:
            recorder.monitor, recorder.others = None, []
        timeouts.release()
        self.buffer.words[Header.BLOCKED] = 0

    def _stop_calls(self) -> None:
        while self.at_stop:
            self.at_stop.pop()()

    # -- what others see ---------------------------------------------------------------------------

    def near_buffers(self) -> list[TraceBuffer]:
        """Return the known trace buffers of the ranks of this host."""
        buffers = (self.directory.buffer_of(rank) for rank in range(self.directory.size))
        return [buffer for buffer in buffers if buffer is not None and is_near(buffer)]

    @contextmanager
    def paused(self, state: str = "", kind: int = 1) -> Iterator[None]:
        """Suspend stall detection on all ranks while one is inside; that time never counts.

        Args:
            state: what this rank is doing meanwhile, for those that wait for it; "" to leave it as
                it is.
            kind: 1 for a debugger, in which a failed job does not end the process; `IDLE` for a
                wait.
        """
        words = self.buffer.words
        text = self.buffer.text(state) if state else words[Header.DOING]
        with self._pausing:
            before, words[Header.DOING] = words[Header.DOING], text
            words[Header.PAUSED] += kind
        try:
            yield
        finally:
            with self._pausing:
                words[Header.RESUMED] = monotonic_ns()
                words[Header.PAUSED] -= kind
                words[Header.DOING] = before

    def ns_since(self, start: int) -> int:
        """Return the ns since `start`, or since the last pause of a rank; 0 while one is paused."""
        clock = self.buffer.words[Header.CLOCK]
        for buffer in filter(None, map(self.directory.buffer_of, range(self.directory.size))):
            if buffer.words[Header.PAUSED]:
                return 0
            if buffer.words[Header.RESUMED]:
                start = max(
                    start, buffer.words[Header.RESUMED] + buffer.words[Header.CLOCK] - clock
                )
        return monotonic_ns() - start

    def stack_of(self, rank: int) -> list[str]:
        """Return the stack of a rank's main thread, which its watchdog thread writes down.

        No lines when it does not.
        """
        buffer = self.directory.buffer_of(rank)
        if buffer is None:
            return []
        if rank == self.directory.rank:
            return main_thread_stack().splitlines()
        stack = buffer.ask_for_stack(_STACK_S)
        return [f"  | {line}" for line in stack.splitlines()]

    def check_visible(self, recorder: Recorder, since: int) -> None:
        """Ask, after a time of waiting, whether the ranks not yet seen are visible at all."""
        if self._agreement is not None and monotonic_ns() - since > _DOUBT_NS:
            self._agreement.check_visible(
                self.directory, recorder.group.ranks, self.relay is not None
            )

    def is_settled(self, recorder: Recorder) -> bool:
        """Return whether all ranks have called what this one called last, and agree."""
        if recorder.settled < recorder.called:
            called = recorder.called
            members = read_members(self.directory, recorder, called - 1)
            if have_all_come(members) and agree(members):
                recorder.settled = called
        return recorder.settled >= recorder.called
