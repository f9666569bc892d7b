"""Monitor for hangs: record collectives, poll the others while waiting, broadcast the verdict.

A process has one monitor for each default process group. It ends with the group or with the first
verdict: after that every collective of every rank raises the verdict.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback

from ..comm.comm_context import NO_CONTEXT, CommContext, NoContext
from ..comm.recording.recorder import RecordedGroup, Recorder
from ..comm.recording.trace_buffer import Header, RankState, TraceBuffer
from ..comm.world import World
from ..errors import WatchError
from ..settings import settings
from . import termination
from .agreement import Agreement
from .diagnosis import verdict_text
from .diagnosis.diagnose import out_of_time
from .diagnosis.members import ended_ranks, lost_ranks
from .job import Job
from .recording.job_directory import JobDirectory
from .timeouts import keep_groups
from .verdict import Verdict
from .waiting import TO_EXPLAIN_S, Waiting
from .watchdog import Watchdog

_NAP_S = 1e-2
_SETTLE_S = 0.3
_LONGEST_EXIT_S = 1e6


class Monitor(Job):
    """The job, and what monitors it in this process.

    Attributes:
        waiting: how this process waits for others.
        watchdog: the thread that diagnoses what the main thread cannot.
        torch_context: what the program's own calls are part of, as a `CommContext` of those of the
            library.
    """

    def __init__(
        self, world: World, directory: JobDirectory, agreement: Agreement | None = None
    ) -> None:
        super().__init__(world, directory, agreement)
        self.waiting = Waiting(self)
        self.watchdog = Watchdog(self, self.depart)
        self.torch_context: CommContext | NoContext = NO_CONTEXT
        self.buffer.words[Header.EXIT_S] = (
            0 if termination.is_hosted() else math.ceil(min(settings().exit_s, _LONGEST_EXIT_S))
        )

    def add_recorder(self, group: RecordedGroup) -> Recorder:
        """Return a new recorder of a group, whose collectives are compared from now on."""
        recorder = Recorder(group, self.buffer, self)
        self.recorders.append(recorder)
        return recorder

    # -- verdicts ----------------------------------------------------------------------------------

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
        keep_groups()
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
        self.communicators.abort(self.is_of_this_job, wait=True)

    def verdict_on_lost(self) -> Verdict | None:
        """Make the loss of ranks that have died the verdict on the job.

        Return the one that stands; None if none has.
        """
        gone = lost_ranks(self.directory)
        return self.fail(verdict_text.died(gone)) if gone else None

    def _find_lost(self) -> bool:
        """Look for the rank behind a broken connection; return whether there is a verdict."""
        deadline = time.monotonic() + TO_EXPLAIN_S
        while self.standing() is None and time.monotonic() < deadline:
            self.look_elsewhere()
            self.verdict_on_lost()
            time.sleep(_NAP_S)
        ended = ended_ranks(self.directory)
        if self.standing() is None and ended:
            self.fail(verdict_text.ended(ended, self.directory.size))
        return self.standing() is not None

    # -- the end -----------------------------------------------------------------------------------

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

    def close(self, state: int = RankState.CLOSED) -> None:
        """End this rank's part in the job."""
        if os.getpid() != self.pid:
            return
        self._stop_calls()
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

    def depart(self) -> None:
        """Stop monitoring: the program continues without this job, or in another one.

        Its process is no longer ended.
        """
        self.close()
        self.abandoned = False
        self.watchdog.stop()
        termination.set_deadline(self, False)

    def suspend(self) -> None:
        """Stop comparing ranks and ending this process: the program goes on after the verdict.

        Other ranks still see this one, until `close`, and other hosts are told of the verdict.
        """
        self.notified = self.is_suspended = True
        self.buffer.words[Header.AWARE] = 1
        if self.relay is not None:
            self.relay.speak_on()
        self.watchdog.stop()
        termination.set_deadline(self, False)
        self._retire()
        if self._agreement is not None:
            self._agreement.stop()
        self.abandoned = False

    def detach(self) -> None:
        """Stop writing to memory that the ranks share: this process is a forked child."""
        self.buffer = TraceBuffer.private(self.directory.rank, self.directory.size)
        for recorder in self.recorders:
            recorder.detach(self.buffer)


def monitor_of(owner: World | Recorder) -> Monitor | None:
    """Return the monitor of a world or recorder.

    None in simulated and null worlds, for a process alone, and once the ranks go on without it.
    """
    monitor = owner.monitor
    return monitor if isinstance(monitor, Monitor) else None
