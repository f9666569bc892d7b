"""Monitor for hangs: record collectives, poll the others while waiting, broadcast the verdict.

A process has one monitor for each default process group. It ends with the group or with the first
verdict: after that every collective of every rank raises the verdict.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..comm.recording.recorder import Recorder
from ..comm.recording.stream_events import StreamEvents
from ..comm.recording.trace_buffer import BUFFER_BYTES, Header, RankState, TraceBuffer
from ..errors import WatchError
from ..settings import monotonic_ns, settings
from . import termination, timeouts
from .agreement import Agreement, warn
from .diagnosis import verdict_text
from .diagnosis.members import agree, ended_ranks, have_all_come, lost_ranks, read_members
from .hosts.relay import is_needed
from .recording.cleanup import sweep
from .recording.job_directory import ALARM_BYTES, Alarm, JobDirectory, is_near, ranks_here
from .timeouts import Communicators
from .torch_calls import hooks
from .torch_calls.recorder import UNMARKED, out_of_time
from .verdict import Verdict
from .waiting import TO_EXPLAIN_S, Waiting
from .watchdog import Watchdog

if TYPE_CHECKING:
    from ..comm.group import Group
    from ..comm.world import World
    from .hosts.relay import Relay

_NAP_S = 1e-2
_SETTLE_S = 0.3
_LONGEST_EXIT_S = 1e6
# after waiting so long, a rank asks whether the missing ranks are visible at all
_DOUBT_NS = 50_000_000
_STACK_S = 0.3  # how long to wait for the stack of a rank on this host
_FAR_STACK_S = 1.0  # of a rank on another host
_detaches_children = False


class Monitor:
    """One process's view of the job: its own trace buffer, those of others, and the verdict.

    Attributes:
        directory: the trace buffers of all ranks.
        buffer: this rank's trace buffer.
        alarm: one word; not 0 when there is a verdict, or when the job is not monitored.
        recorders: of the groups on which this rank has called something.
        torch_context: what the program's own calls are part of, as a `CommContext` of those of the
            library.
        stream_events: where streams of accelerators wait for its collectives.
        abandoned: whether a collective may have been left under way, which torch's threads would
            wait for at exit.
        notified: whether this rank's program has raised or printed the verdict.
        failed_at: when this rank learned of the verdict; 0 before.
        relay: the connection to other hosts; None if there is none.
        waiting: how this process waits for others.
        is_on: whether the ranks are compared; False once the job goes on without the monitor.
    """

    def __init__(
        self, world: World, directory: JobDirectory, agreement: Agreement | None = None
    ) -> None:
        self.world = weakref.proxy(world)
        self.directory, self.buffer, self.alarm = directory, directory.buffer, directory.alarm
        self.recorders: list[Recorder] = []
        self.torch_context: Any = UNMARKED
        self.stream_events = StreamEvents()
        self.communicators = Communicators(self)
        self.waiting = Waiting(self)
        self.abandoned = self.notified = False
        self.failed_at = 0
        self._agreement = agreement
        self._pausing = threading.RLock()  # a handler of a signal may pause, too
        self.is_on = True
        self.pid = os.getpid()
        self.relay: Relay | None = None
        self._verdict: Verdict | None = None
        self.watchdog = Watchdog(self)
        self.buffer.words[Header.EXIT_S] = (
            0 if termination.is_hosted() else math.ceil(min(settings().exit_s, _LONGEST_EXIT_S))
        )

    @property
    def sees_all(self) -> bool:
        """Whether every rank of the job becomes visible here: by one host, or a relay."""
        return self.relay is not None or not is_needed(os.environ, self.directory.size)

    @property
    def is_strict(self) -> bool:
        return settings().mode in ("strict", "full")

    def add_recorder(self, group: Group) -> Recorder:
        recorder = Recorder(group, self.buffer, self)
        self.recorders.append(recorder)
        return recorder

    # -- verdicts ----------------------------------------------------------------------------------

    def standing(self) -> Verdict | None:
        """Return the verdict on the job, if there is one."""
        if self._verdict is None and self.alarm[0]:
            self._verdict = self.directory.verdict()
            if self._verdict is not None:
                self.failed_at = self.failed_at or monotonic_ns()
        return self._verdict

    def check(self) -> None:
        """Raise the verdict on the job, a WatchError, if there is one."""
        verdict = self.standing()
        if verdict is not None:
            raise self._error(verdict)

    def _error(self, verdict: Verdict) -> WatchError:
        self.notified = self.abandoned = True
        termination.keep_groups()
        self.communicators.abort(wait=True)
        return verdict.error()

    def depart(self) -> None:
        """Stop monitoring: the program continues without this job, or in another one, and its
        process is no longer ended.
        """
        self.close()
        self.abandoned = False
        self.watchdog.stop()
        termination.set_deadline(self, False)

    def detach(self) -> None:
        """Stop writing to memory that the ranks share: this process is a forked child."""
        self.buffer = TraceBuffer.private(self.directory.rank, self.directory.size)
        for recorder in self.recorders:
            recorder.detach(self.buffer)

    def is_of_this_job(self) -> bool:
        """Return whether the default group is still the one that the monitor is for."""
        default = dist.group.WORLD if dist.is_initialized() else None
        return default is not None and not self.world.is_over(default)

    # -- a job that cannot be monitored ------------------------------------------------------------

    def checked(self) -> Monitor | None:
        """Return this monitor, or None if the ranks go on without one. Raises: WatchError for the
        verdict on the job.
        """
        if self.alarm[0] == Alarm.UNWATCHED:
            self._retire()
            return None
        self.check()
        return self

    def give_up(self, reason: str) -> None:
        """Let all ranks go on without the monitor, unless there is a verdict: those of this host at
        once, others through the store.
        """
        if self.directory.give_up():
            warn(reason) if self._agreement is None else self._agreement.decline(reason)

    def _retire(self) -> None:
        """Stop comparing; only record this rank's collectives, under torch's own timeouts."""
        if not self.is_on:
            return
        self.is_on = False
        hooks.stop(self)
        with contextlib.suppress(ReferenceError):
            self.world.retire_monitor()
        for recorder in self.recorders:
            recorder.monitor, recorder.others = None, []
        timeouts.release()
        self.buffer.words[Header.BLOCKED] = 0

    def near_buffers(self) -> list[TraceBuffer]:
        """Return the known trace buffers of the ranks of this host."""
        buffers = (self.directory.buffer_of(rank) for rank in range(self.directory.size))
        return [buffer for buffer in buffers if buffer is not None and is_near(buffer)]

    def fail(self, verdict: Verdict) -> Verdict:
        """Make this the verdict on the job, unless there is one already; return the one that
        stands, which all ranks raise.
        """
        self._verdict = self.directory.post(verdict)
        self.failed_at = self.failed_at or monotonic_ns()
        return self._verdict

    def failed(self, verdict: Verdict) -> WatchError:
        """Call `fail` and return the error to raise."""
        return self._error(self.fail(verdict))

    def raised(self, error: BaseException) -> None:
        """Notify the other ranks that this rank's program raised."""
        self.notified = True
        if (
            os.getpid() != self.pid
            or isinstance(error, WatchError)
            or self.buffer.words[Header.STATE] != RankState.RUNNING
        ):
            return
        self.abandoned = True
        termination.keep_groups()
        interruption = termination.interruption(error)
        stalled = out_of_time(self, error)
        if interruption is not None:
            self.fail(verdict_text.interrupted(self.world.rank, interruption, self.buffer))
        elif stalled is not None:
            self.fail(stalled)
        elif not (termination.is_broken_connection(error) and self._find_lost()):
            text = "".join(traceback.format_exception(error))
            self.fail(
                verdict_text.raised(
                    self.world.rank, type(error).__name__, str(error), text, self.buffer
                )
            )
        self.buffer.words[Header.STATE] = RankState.RAISED
        self.communicators.abort(wait=True)

    def verdict_on_lost(self) -> Verdict | None:
        """Make the loss of ranks that have died the verdict on the job, and return the one that
        stands; None if none has.
        """
        gone = lost_ranks(self.directory)
        return self.fail(verdict_text.died(gone)) if gone else None

    def _find_lost(self) -> bool:
        """Look for the rank behind a broken connection; return whether there is a verdict."""
        deadline = time.monotonic() + TO_EXPLAIN_S
        while self.standing() is None and time.monotonic() < deadline:
            self.verdict_on_lost()
            time.sleep(_NAP_S)
        ended = ended_ranks(self.directory)
        if self.standing() is None and ended:
            self.fail(verdict_text.ended(ended, self.directory.size))
        return self.standing() is not None

    # -- what others see ---------------------------------------------------------------------------

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
        """Return the stack of a rank's main thread, which its watchdog thread writes down; no lines
        when it does not.
        """
        buffer = self.directory.buffer_of(rank)
        if buffer is None:
            return []
        if rank == self.directory.rank:
            return self.watchdog.stack().splitlines()
        stack = buffer.ask_for_stack(_STACK_S if is_near(buffer) else _FAR_STACK_S)
        return [f"  | {line}" for line in stack.splitlines()]

    def check_visible(self, recorder: Recorder, since: int) -> None:
        """Ask, after a time of waiting, whether the ranks not yet seen are visible at all."""
        if self._agreement is not None and monotonic_ns() - since > _DOUBT_NS:
            self._agreement.check_visible(self, recorder.group.ranks)

    def settle(self) -> None:
        """Wait briefly at exit until the other ranks have seen this rank's last collectives.

        A rank that got what it needed may be the first to exit, before the others notice that they
        differ.
        """
        deadline = time.monotonic() + _SETTLE_S
        while (
            self.is_on
            and not self.notified
            and self.buffer.words[Header.STATE] == RankState.RUNNING
            and os.getpid() == self.pid
        ):
            verdict = self.standing()
            if verdict is not None:
                print(
                    f"shardmesh: rank {self.directory.rank}: {verdict.text}",
                    file=sys.stderr,
                    flush=True,
                )
                self.abandoned = self.notified = True
            if time.monotonic() > deadline or all(
                self.is_settled(recorder) for recorder in self.recorders if not recorder.is_channel
            ):
                return
            time.sleep(0.01)

    def is_settled(self, recorder: Recorder) -> bool:
        """Return whether all ranks have called what this one called last, and agree."""
        if recorder.settled < recorder.called:
            called = recorder.called
            members = read_members(self, recorder, called - 1)
            if have_all_come(members) and agree(members):
                recorder.settled = called
        return recorder.settled >= recorder.called

    # -- the end -----------------------------------------------------------------------------------

    def close(self, state: int = RankState.CLOSED) -> None:
        """End this rank's part in the job."""
        if os.getpid() != self.pid:
            return
        hooks.stop(self)
        if self.buffer.words[Header.STATE] == RankState.RUNNING:
            if not self.abandoned:
                self.watchdog.stop()
            self.directory.leave(state)
        elif self._verdict is not None and self._verdict.is_interruption:
            self.directory.leave(state)
        if self._agreement is not None:
            self._agreement.stop()
        if self.relay is not None:
            self.relay.close()
            self.relay = None


def monitor_of(world: World) -> Monitor | None:
    """Return the monitor of a world; None in simulated and null worlds, and for a process alone."""
    return world.monitor


# -- start -----------------------------------------------------------------------------------------


def start_monitor(world: World, job: str, agreement: Agreement | None = None) -> Monitor | None:
    """Start this process's monitor; None if its files cannot be made, which all ranks are told."""
    try:
        parent = (
            None
            if agreement is None
            else agreement.folder(ranks_here(world.size) * BUFFER_BYTES + ALARM_BYTES)
        )
        directory = JobDirectory(job, world.rank, world.size, parent)
        if agreement is not None:
            agreement.join(directory)
    except OSError as error:
        reason = f"its files cannot be made: {error}"
        warn(reason) if agreement is None else agreement.decline(reason)
        return None
    sweep(directory.folder.parent)
    termination.install()
    _detach_forked_children()
    monitor = Monitor(world, directory, agreement)
    termination.monitors.add(monitor)
    monitor.watchdog.start()
    return monitor


def _detach_forked_children() -> None:
    """Detach every child that this process forks from now on.

    A child has the rank's memory and sockets, but none of the threads that communicate: a
    collective that it called would hang, or take what other ranks have sent to the rank. So the
    child records into memory of its own, and collectives on the rank's groups raise. It may start a
    default group of its own.
    """
    global _detaches_children
    if not _detaches_children and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_be_no_rank)
        _detaches_children = True


def _be_no_rank() -> None:
    for monitor in list(termination.monitors):
        monitor.detach()
    hooks.refuse_calls()
    termination.monitors.clear()
    termination.keep_groups()  # the child has none of the threads that torch would wait for at exit
