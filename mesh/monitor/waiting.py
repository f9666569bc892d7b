"""How a rank waits for other ranks and for torch's works, checking meanwhile whether the job fails.

                  the alarm: whether another      the trace buffers of all ranks, from
                  rank has given a verdict        which this rank may give a verdict
a collective      after 20 ms                     after 30 ms, then every 25 ms
a message         -                               after 40 ms, then every 50 ms

A look at the trace buffers begins with one at the alarm. A message is one of a `Channel`, as
between stages of a pipeline. These are the times for torch's works on the CPU (`_wait_long`);
`wait_until`, which polls, has its own.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed.constants import default_pg_timeout

from ..comm.recording.recorder import Recorder
from ..comm.recording.trace_buffer import Header, TraceBuffer
from ..errors import WatchError
from ..settings import monotonic_ns
from .diagnosis import diagnose
from .diagnosis.members import agree, member, read_members
from .job import Job
from .recording.job_directory import Alarm, is_near

_SLICE, _LONG_SLICE = timedelta(milliseconds=10), timedelta(milliseconds=25)
# ranks of a pipeline wait for messages much of the time
_MESSAGE_SLICE, _LONG_MESSAGE_SLICE = timedelta(milliseconds=20), timedelta(milliseconds=50)
_LONG_NS = 20_000_000  # from then on a waiting rank reads all trace buffers; before, only the alarm
_SPINS = 20  # checks without sleeping in between
_NAP_S, _LONGEST_NAP_S = 1e-4, 1e-2
_LONGEST_NAP_FOR_MESSAGE_S = 5e-4  # in `permute`, such as each hop of ring attention
_DIAGNOSE_EVERY_NS = 10_000_000  # the longest time between two diagnoses of one wait
_DIAGNOSE_MESSAGE_EVERY_NS = 50_000_000
TO_EXPLAIN_S = 1.0  # how long to look for the reason of a broken connection
_SHORT = timedelta(milliseconds=1)
_IS_PENDING = "Operation timed out!"  # c10d::Work::wait, when the time is over
_Work: Any = getattr(dist, "Work", None)
_wait: Any = getattr(_Work, "wait", None)  # before `torch_calls` wraps it


class Waiting:
    """The waits of one process of a job."""

    def __init__(self, job: Job) -> None:
        self._job = job

    # -- for other ranks ---------------------------------------------------------------------------

    def rendezvous(self, recorder: Recorder, sequence: int) -> None:
        """Wait until all ranks call the same.

        Before a group's first collective, for which torch connects them, and in "strict" mode.
        """

        def have_all_come() -> bool:
            members = read_members(self._job.directory, recorder, sequence)
            late = [
                m
                for m in members
                if m.came is False and (m.buffer is not None or self._job.sees_all)
            ]
            return not late and agree(members)

        self.wait_until(recorder, sequence, have_all_come)
        if sequence == 0 and self._job.is_on:
            recorder.find_neighbours(self._job.directory)

    def wait_for_votes(self, recorder: Recorder) -> None:
        """Wait until votes decide which of the ranks that differ are the outliers.

        Raise that as a WatchError.
        """
        since = monotonic_ns()
        sequence = recorder.called - 1
        while not agree(read_members(self._job.directory, recorder, sequence)) and self._diagnose(
            recorder, sequence, since
        ):
            time.sleep(_NAP_S)

    def wait_for_peers(
        self, recorder: Recorder, sequence: int, places: Sequence[int | None]
    ) -> None:
        """Return when these members have called this collective.

        A message between two ranks cannot be waited for in slices, so it is not waited for before
        both ranks have called.
        """
        ranks = [recorder.group.ranks[place] for place in places if place is not None]

        late_peer: tuple[TraceBuffer, int] | None = None  # its buffer, and the group's number in it

        def have_called() -> bool:
            nonlocal late_peer
            if late_peer is not None:
                buffer, group = late_peer
                if buffer.group_called(group) <= sequence:
                    return False  # what most checks of a long wait come to
            for rank in ranks:
                peer = member(self._job.directory, recorder.key, rank, sequence)
                buffer = peer.buffer
                if peer.came is not False or (buffer is not None and not is_near(buffer)):
                    continue
                group = None if buffer is None else buffer.find_group(recorder.key)
                if buffer is not None and group is not None:
                    late_peer = buffer, group
                return False
            return True

        self.wait_until(
            recorder,
            sequence,
            have_called,
            longest_nap_s=_LONGEST_NAP_FOR_MESSAGE_S,
            undiagnosed_ns=_LONG_NS,
            diagnose_every_ns=_DIAGNOSE_MESSAGE_EVERY_NS,
        )
        wrong = diagnose.wrong_route(self._job, recorder, sequence) if self._job.is_on else None
        if wrong is not None:
            raise self._job.failed(wrong)

    def compare_splits(self, recorder: Recorder, sequence: int) -> None:
        """Raise a WatchError where a rank sends another number of elements than is expected.

        By its receiver, as far as ranks have called.
        """
        since = monotonic_ns()
        while (wrong := diagnose.wrong_splits(self._job, recorder, sequence)) is not None:
            # the outlier is known once all have shown how much they send
            waited = monotonic_ns() - since
            if not diagnose.may_show_splits(
                self._job, recorder, sequence, waited
            ) or not self._diagnose(recorder, sequence, since):
                # the last one may have shown it after the verdict was made
                wrong = diagnose.wrong_splits(self._job, recorder, sequence) or wrong
                raise self._job.failed(wrong)
            time.sleep(_NAP_S)

    def wait_until(
        self,
        recorder: Recorder,
        sequence: int,
        is_done: Callable[[], bool],
        limit_ns: float = math.inf,
        longest_nap_s: float = _LONGEST_NAP_S,
        undiagnosed_ns: int = 0,
        diagnose_every_ns: int = _DIAGNOSE_EVERY_NS,
    ) -> bool:
        """Wait until `is_done()` or the time limit; return `is_done()`. Raises: WatchError.

        Args:
            longest_nap_s: by so much the return may be late. Naps begin at 0.1 ms and grow.
            undiagnosed_ns: how long to wait before the trace buffers of all ranks are read.
            diagnose_every_ns: the longest time between two diagnoses.
        """
        since = monotonic_ns()
        for _ in range(_SPINS):
            if is_done():
                return True
        nap = _NAP_S
        next_diagnosis = since + undiagnosed_ns
        with self._publish_blocked(recorder, sequence, since):
            while not is_done():
                now = monotonic_ns()
                if now - since > limit_ns:
                    return False
                if now >= next_diagnosis:
                    if not self._diagnose(recorder, sequence, since, is_done):
                        return False
                    next_diagnosis = now + min(now - since, diagnose_every_ns)
                time.sleep(nap)
                # leave the processors to the ranks that are waited for
                nap = min(1.5 * nap, longest_nap_s)
        return True

    # -- for torch's works -------------------------------------------------------------------------

    def wait_for_work(self, recorder: Recorder, sequence: int, work: Any) -> None:
        """Wait for torch's work on the CPU, checking the other ranks.

        Reading all trace buffers takes 0.2 ms. A rank that differs from others detects that before
        it waits, and the watchdog thread checks as well, so a long wait usually means that a rank
        is gone. Raises: the diagnosed WatchError.
        """
        if not self._is_done_soon(recorder, sequence, work, _SLICE):
            self._wait_long(recorder, sequence, work, _SLICE, _LONG_SLICE)

    def wait_for_message(self, recorder: Recorder, sequence: int, work: Any) -> None:
        """Wait for a message on the CPU, checking the other ranks.

        Raises: the diagnosed WatchError.
        """
        if not self._is_done_soon(recorder, sequence, work, _MESSAGE_SLICE):
            self._wait_long(recorder, sequence, work, _MESSAGE_SLICE, _LONG_MESSAGE_SLICE)

    def _is_done_soon(
        self, recorder: Recorder, sequence: int, work: Any, slice_: timedelta
    ) -> bool:
        """Wait for a slice of time, and return whether the work is done.

        When the slice runs out, torch takes 0.2 ms to build its error.
        """
        try:
            work.wait(slice_)
        except RuntimeError as error:
            if is_pending(error, work):
                return False
            # it ended just after the slice, or it failed
            self.wait_to_the_end(recorder, sequence, work)
        return True

    def _wait_long(
        self,
        recorder: Recorder,
        sequence: int,
        work: Any,
        slice_: timedelta,
        long_slice: timedelta,
    ) -> None:
        """Wait in slices of time; in long ones once trace buffers are read after each."""
        since = monotonic_ns()
        with self._publish_blocked(recorder, sequence, since):
            while not self._is_done_soon(recorder, sequence, work, slice_):
                is_long = monotonic_ns() - since >= _LONG_NS
                if not (
                    self._diagnose(recorder, sequence, since)
                    if is_long
                    else self._job.checked() is not None
                ):
                    work.wait(default_pg_timeout)
                    return
                slice_ = long_slice if is_long else slice_

    def poll(self, recorder: Recorder, sequence: int, work: Any) -> None:
        """Wait for torch's work on an accelerator, checking the other ranks.

        It gets no timeout, which would abort NCCL's communicator.
        """
        self.wait_until(recorder, sequence, work.is_completed)
        self.wait_to_the_end(recorder, sequence, work)

    def wait_to_the_end(self, recorder: Recorder, sequence: int, work: Any) -> None:
        """Wait for torch's work without checking the other ranks."""
        try:
            work.wait()
        except RuntimeError as error:
            self.explain(recorder, sequence, error)

    def explain(self, recorder: Recorder, sequence: int, error: RuntimeError) -> None:
        """Raise the reason for a collective that broke.

        WatchError where another rank is the reason, else the error itself.
        """
        since = monotonic_ns()
        relay = self._job.relay
        limit_s = TO_EXPLAIN_S
        if relay is not None and relay.has_others:
            limit_s += relay.lost_after_s
        while monotonic_ns() - since < limit_s * 1e9:
            try:
                self._job.look_elsewhere()
                if not self._diagnose(recorder, sequence, since):
                    break
                # also a rank that had called this collective
                gone = diagnose.lost(self._job, recorder, sequence)
                if gone is not None:
                    raise self._job.failed(gone)
            except WatchError as diagnosed:
                raise diagnosed from error
            time.sleep(0.01)
        raise error

    # -- while it waits ----------------------------------------------------------------------------

    def _diagnose(
        self,
        recorder: Recorder,
        sequence: int,
        since: int,
        is_done: Callable[[], bool] | None = None,
    ) -> bool:
        """Raise the verdict on a collective, a WatchError, if there is one.

        Return False once the job is not monitored any more.

        Args:
            is_done: whether what is waited for has come: a rank that calls and ends right after the
                last look is not one that ended without it.
        """
        if self._job.checked() is None:
            return False
        verdict = diagnose.diagnose(self._job, recorder, sequence, since)
        if verdict is not None and not (is_done is not None and is_done()):
            raise self._job.failed(verdict)
        self._job.check_visible(recorder, since)
        return self._job.alarm[0] != Alarm.UNMONITORED

    @contextmanager
    def _publish_blocked(self, recorder: Recorder, sequence: int, since: int) -> Iterator[None]:
        """Publish what the main thread is blocked in.

        Of an asynchronous collective that need not be the newest record.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        words = self._job.buffer.words
        words[Header.BLOCKED_SINCE], words[Header.BLOCKED] = since, recorder.record_of(sequence) + 1
        try:
            yield
        finally:
            words[Header.BLOCKED] = 0


# -- whether a work of gloo is done ----------------------------------------------------------------

# gloo's thread    Work.finish: has the work's lock, runs the profiler's callback, which waits for
#                  the interpreter's lock
# this thread      Work.isCompleted: has the interpreter's lock, waits for the work's:
#                  neither goes on
#
# The callback needs the interpreter where the collective was started under
# `torch.autograd.graph.saved_tensors_hooks`, as in a backward of FSDP, while a profiler was on
# (torch 2.13). A wait releases the interpreter's lock, so a short one asks in place of
# `is_completed()`.


def is_pending(error: RuntimeError, work: Any) -> bool:
    """Return whether a timed wait raised this error because the time was over.

    Otherwise the work has failed, or has just ended.
    """
    return _IS_PENDING in str(error) or not work.is_completed()


def is_done(work: Any) -> bool:
    """Return whether a collective of gloo has ended or failed; waits up to 1 ms."""
    if type(work) is not _Work:  # a stand-in
        return work.is_completed()
    try:
        _wait(work, _SHORT)
    except RuntimeError as error:
        return not is_pending(error, work)
    return True


def is_done_now(work: Any) -> bool:
    """Return whether a work has ended, in little time; under a profiler always False."""
    return not profiler._is_profiler_enabled and work.is_completed()
