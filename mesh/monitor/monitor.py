"""The watch of one process: it sits down in each group, looks around while it waits, and tells the others what went wrong.

A process has one watch for each default process group. It ends with the group, or with the first verdict: from then on every
collective of every rank raises it.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from ..errors import WatchError
from . import termination
from .agreement import Agreement, say
from .diagnosis import diagnose, verdict_text
from .hosts.relay import is_needed
from .recording.cleanup import sweep
from .recording.job_directory import ALARM_BYTES, Alarm, Board, is_near, ranks_here
from .recording.recorder import SLOT_WORDS, SLOTS, Seat
from .recording.trace_buffer import PAGE_BYTES, H, Page, State
from .settings import monotonic_ns, settings
from .torch_calls import hooks
from .torch_calls.recorder import out_of_time
from .verdict import Verdict
from .watchdog import Watchdog

if TYPE_CHECKING:
    from ..comm.group import Group
    from ..comm.world import World
    from .hosts.relay import Relay

_SLICE, _LONG_SLICE = timedelta(milliseconds=10), timedelta(milliseconds=25)
_LONG_NS = 20_000_000  # from then on it looks at all the others' pages, before only whether there is a verdict
_SPINS = 20  # looks at a peer's row, before sleeping in between
_NAP_S, _LONGEST_NAP_S = 1e-4, 1e-2
_TO_EXPLAIN_S = 1.0  # how long a broken connection may lack an explanation
_SETTLE_S = 0.3
_LONGEST_EXIT_S = 1e6
_TO_SHOW_S = 0.3
_CPU, _WATCHED = torch.device("cpu"), timedelta(days=1)  # groups with so long a timeout relied on the watch
_DOUBT_NS = 50_000_000  # of waiting, after which a rank asks whether those who have not come can be seen at all
_STACK_S, _FAR_STACK_S = 0.3, 1.0  # until a rank of this host, or another one, has said where it is


class Watch:
    """What this process shows to the job's other ranks, and what it learns from them.

    Attributes:
        board: the pages of all ranks.
        alarm: one word, not 0 when there is a verdict.
        seats: of the groups in which this rank has called something.
        abandoned: whether a collective may have been left under way, which torch's threads would wait for at exit.
        told: whether this rank's program has met the verdict.
        failed_at: when this rank learned of the verdict; 0 before.
    """

    def __init__(self, world: World, board: Board, agreement: Agreement | None = None) -> None:
        self.world = weakref.proxy(world)
        self.board, self.page, self.alarm = board, board.page, board.alarm
        self.seats: list[Seat] = []
        self.abandoned = self.told = False
        self.failed_at = 0
        self._agreement = agreement
        self._is_on = True
        self.pid = os.getpid()
        self.relay: Relay | None = None
        self._verdict: Verdict | None = None
        self.watchdog = Watchdog(self)
        self.page.words[H.EXIT_S] = 0 if termination.is_hosted() else math.ceil(min(settings().exit_s, _LONGEST_EXIT_S))

    @property
    def sees_all(self) -> bool:
        """Whether every rank of the job shows itself here sooner or later: there is one host, or a relay to the others."""
        return self.relay is not None or not is_needed(os.environ, self.board.size)

    @property
    def is_strict(self) -> bool:
        return settings().mode in ("strict", "full")

    def sit(self, group: Group) -> Seat:
        seat = Seat(group, self.page, self)
        self.seats.append(seat)
        return seat

    # -- verdicts ------------------------------------------------------------------------------------------------------

    def standing(self) -> Verdict | None:
        """The verdict on the job, if there is one."""
        if self._verdict is None and self.alarm[0]:
            self._verdict = self.board.verdict()
            if self._verdict is not None:
                self.failed_at = self.failed_at or monotonic_ns()
        return self._verdict

    def check(self) -> None:
        """Raises: WatchError when there is a verdict on the job."""
        found = self.standing()
        if found is not None:
            raise self._error(found)

    def _error(self, verdict: Verdict) -> WatchError:
        self.told = self.abandoned = True
        termination.keep_groups()
        return verdict.error()

    def depart(self) -> None:
        """The program goes on without this job, or in another one: it is not ended any more."""
        self.close()
        self.abandoned = False
        self.watchdog.stop()
        termination.set_deadline(self, False)

    def is_of_this_job(self) -> bool:
        """Whether the default group is still the one that the watch is for."""
        default = dist.group.WORLD if dist.is_initialized() else None
        return default is not None and not self.world.is_over(default)

    # -- a job that cannot be watched ----------------------------------------------------------------------------------

    def checked(self) -> Watch | None:
        """This watch, or None where the ranks go on without one. Raises: WatchError when there is a verdict on the job."""
        if self.alarm[0] == Alarm.UNWATCHED:
            self._retire()
            return None
        self.check()
        return self

    def give_up(self, reason: str) -> None:
        """All ranks go on without a watch, unless there is a verdict already: those of this host at once, others by the store."""
        if self.board.give_up():
            say(reason) if self._agreement is None else self._agreement.decline(reason)

    def _retire(self) -> None:
        """From now on collectives of this rank are only noted down, and torch's timeouts hold."""
        if not self._is_on:
            return
        self._is_on = False
        hooks.stop(self)
        with contextlib.suppress(ReferenceError):
            self.world.retire_watch()
        for seat in self.seats:
            seat.watch, seat.others = None, []
        for handle in termination.torch_groups():
            with contextlib.suppress(RuntimeError, ValueError, AttributeError):
                if handle._get_backend(_CPU).options._timeout >= _WATCHED:
                    distributed_c10d._set_pg_timeout(default_pg_timeout, handle)
        self.page.words[H.BLOCKED] = 0

    def near_pages(self) -> list[Page]:
        """The pages of the ranks of this host that are known."""
        pages = (self.board.of(rank) for rank in range(self.board.size))
        return [page for page in pages if page is not None and is_near(page)]

    def fail(self, verdict: Verdict) -> Verdict:
        """Makes it the verdict on the job, unless there is one; the one that stands, which all ranks raise."""
        self._verdict = self.board.post(verdict)
        self.failed_at = self.failed_at or monotonic_ns()
        return self._verdict

    def failed(self, verdict: Verdict) -> WatchError:
        """`fail`, and the error to raise."""
        return self._error(self.fail(verdict))

    def raised(self, error: BaseException) -> None:
        """Tells the other ranks that this one raised."""
        self.told = True
        if os.getpid() != self.pid or isinstance(error, WatchError) or self.page.words[H.STATE] != State.RUNNING:
            return
        self.abandoned = True
        termination.keep_groups()
        stalled = out_of_time(self, error)
        if stalled is not None:
            self.fail(stalled)
        elif not (termination.is_broken_connection(error) and self._find_lost()):
            text = "".join(traceback.format_exception(error))
            self.fail(verdict_text.raised(self.world.rank, type(error).__name__, str(error), text, self.page))
        self.page.words[H.STATE] = State.RAISED

    def _find_lost(self) -> bool:
        """Whether there is a verdict, or one on a rank that has gone, within the time that a broken connection has to be explained."""
        deadline = time.monotonic() + _TO_EXPLAIN_S
        while self.standing() is None and time.monotonic() < deadline:
            gone = diagnose.lost_ranks(self.board)
            if gone:
                self.fail(verdict_text.died(gone))
            time.sleep(_LONGEST_NAP_S)
        ended = diagnose.ended_ranks(self.board)
        if self.standing() is None and ended:
            self.fail(verdict_text.ended(ended, self.board.size))
        return self.standing() is not None

    # -- looking around ------------------------------------------------------------------------------------------------

    def look(self, seat: Seat) -> None:
        """A neighbour differs: waits for the others to tell who is odd. Raises: WatchError, if they do differ."""
        since, sequence = monotonic_ns(), seat.called - 1
        while not diagnose.agree(diagnose.members(self, seat, sequence)) and self._judge(seat, sequence, since):
            time.sleep(_NAP_S)

    def _judge(self, seat: Seat, sequence: int, since: int) -> bool:
        """Raises: WatchError for what is wrong. False where nobody judges any more."""
        if self.checked() is None:
            return False
        found = diagnose.judge(self, seat, sequence, since)
        if found is not None:
            raise self.failed(found)
        self.doubt(seat, since)
        return self.alarm[0] != Alarm.UNWATCHED

    def doubt(self, seat: Seat, since: int) -> None:
        """After some time: can those who have not been seen be seen at all?"""
        if self._agreement is not None and monotonic_ns() - since > _DOUBT_NS:
            self._agreement.doubt(self, seat.group.ranks)

    def assemble(self, seat: Seat, sequence: int) -> None:
        """Waits until all ranks call the same: before the first collective of a group, for which torch connects them, or if strict."""

        def done(found: list[diagnose.Member]) -> bool:
            late = [m for m in found if m.came is False and (m.page is not None or self.sees_all)]
            return not late and diagnose.agree(found)

        self._meet(seat, sequence, done)
        if sequence == 0 and self._is_on:
            seat.meet_neighbours(self.board)

    def _meet(self, seat: Seat, sequence: int, done: Callable[[list[diagnose.Member]], bool]) -> None:
        self.wait_until(seat, sequence, lambda: done(diagnose.members(self, seat, sequence)))

    def wait_until(self, seat: Seat, sequence: int, is_done: Callable[[], bool], limit_ns: float = math.inf) -> bool:
        """Waits, for so long, with an eye on the others; whether it is done. Raises: WatchError for what it sees."""
        since = monotonic_ns()
        for _ in range(_SPINS):
            if is_done():
                return True
        nap = _NAP_S
        with self._blocked(seat, sequence, since):
            while not is_done():
                if monotonic_ns() - since > limit_ns or not self._judge(seat, sequence, since):
                    return False
                time.sleep(nap)
                nap = min(1.5 * nap, _LONGEST_NAP_S)  # those who wait must leave the processors to those they wait for
        return True

    def meet(self, seat: Seat, sequence: int, places: Sequence[int | None]) -> None:
        """Returns when these members have come to this collective.

        A message between two ranks cannot be waited for in slices: so nobody waits for one who has not come.
        """
        ranks = [seat.group.ranks[place] for place in places if place is not None]

        def done(_: Any) -> bool:
            peers = [diagnose.member(self.board, seat.key, r, sequence) for r in ranks]
            return all(m.came is not False or (m.page is not None and not is_near(m.page)) for m in peers)

        self._meet(seat, sequence, done)
        wrong = diagnose.wrong_route(self, seat, sequence) if self._is_on else None
        if wrong is not None:
            raise self.failed(wrong)

    def compare_splits(self, seat: Seat, sequence: int) -> None:
        """Raises: WatchError where a rank sends another number of elements than its receiver expects, as far as ranks have come."""
        if diagnose.wrong_splits(self, seat, sequence) is not None:
            deadline = time.monotonic() + _TO_SHOW_S
            while time.monotonic() < deadline and not all(m.route for m in diagnose.members(self, seat, sequence)):
                time.sleep(_NAP_S)  # who is odd shows when all have said how much they send
            wrong = diagnose.wrong_splits(self, seat, sequence)
            if wrong is not None:
                raise self.failed(wrong)

    def wait(self, seat: Seat, sequence: int, work: Any) -> None:
        """Waits for torch's work, looking up after 10 ms, 20 ms and 30 ms, then every 25 ms. Raises: WatchError for what it sees.

        To look at everybody's pages takes 0.2 ms: a rank that differs from others looks itself before it waits, and the watchdog's thread
        looks, too, so what is left to those who wait for long is mostly a rank that is gone.
        """
        if not self._is_done_soon(seat, sequence, work, _SLICE):
            self._wait_long(seat, sequence, work)

    def _is_done_soon(self, seat: Seat, sequence: int, work: Any, slice_: timedelta) -> bool:
        """Waits for a slice of time. (One that runs out takes torch 0.2 ms, to build an error.)"""
        try:
            work.wait(slice_)
        except RuntimeError:
            if not work.is_completed():
                return False
            self.wait_to_the_end(seat, sequence, work)  # it came just after the slice, or it failed
        return True

    def _wait_long(self, seat: Seat, sequence: int, work: Any) -> None:
        since, slice_ = monotonic_ns(), _SLICE
        with self._blocked(seat, sequence, since):
            while not self._is_done_soon(seat, sequence, work, slice_):
                is_long = monotonic_ns() - since >= _LONG_NS
                if not (self._judge(seat, sequence, since) if is_long else self.checked() is not None):
                    work.wait(default_pg_timeout)
                    return
                slice_ = _LONG_SLICE if is_long else slice_

    def wait_to_the_end(self, seat: Seat, sequence: int, work: Any) -> None:
        """Waits for torch's work without looking up."""
        try:
            work.wait()
        except RuntimeError as error:
            self.explain(seat, sequence, error)

    def explain(self, seat: Seat, sequence: int, error: RuntimeError) -> None:
        """A collective broke: somebody else is the reason. Raises: that, or the error itself."""
        since = monotonic_ns()
        patience = _TO_EXPLAIN_S + (self.relay.lost_after_s if self.relay is not None and self.relay.has_others else 0)
        while monotonic_ns() - since < patience * 1e9:
            try:
                if not self._judge(seat, sequence, since):
                    break
                gone = diagnose.lost(self, seat, sequence)  # also one that had come to this collective
                if gone is not None:
                    raise self.failed(gone)
            except WatchError as found:
                raise found from error
            time.sleep(0.01)
        raise error

    @contextmanager
    def _blocked(self, seat: Seat, sequence: int, since: int) -> Iterator[None]:
        """Shows others what the main thread waits in. Of an asynchronous collective it need not be the newest record."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        words = self.page.words
        number = words[seat.row + (sequence & (SLOTS - 1)) * SLOT_WORDS + 2] if seat.row is not None else words[H.RECORDS] - 1
        words[H.BLOCKED_SINCE], words[H.BLOCKED] = since, number + 1
        try:
            yield
        finally:
            words[H.BLOCKED] = 0

    # -- what others see -----------------------------------------------------------------------------------------------

    def set_state(self, text: str) -> None:
        """What this rank does, shown to those who wait for it."""
        self.page.words[H.DOING] = self.page.text(text) if text else 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While any rank is inside, no rank takes waiting for a stall; nor does the time inside count afterwards."""
        words = self.page.words
        words[H.PAUSED] += 1
        try:
            yield
        finally:
            words[H.RESUMED] = monotonic_ns()
            words[H.PAUSED] -= 1

    def ns_since(self, start: int) -> int:
        """Return the time since `start` in ns, or since the last pause of a rank ended; 0 while a rank is paused."""
        clock = self.page.words[H.CLOCK]
        for page in filter(None, map(self.board.of, range(self.board.size))):
            if page.words[H.PAUSED]:
                return 0
            if page.words[H.RESUMED]:
                start = max(start, page.words[H.RESUMED] + page.words[H.CLOCK] - clock)
        return monotonic_ns() - start

    def stack_of(self, rank: int) -> list[str]:
        """Where a rank is now: its own watchdog thread writes it down. No lines when it does not."""
        page = self.board.of(rank)
        if page is None:
            return []
        if rank == self.board.rank:
            return self.watchdog.stack().splitlines()
        words = page.words
        words[H.STACK_WANTED] += 1
        deadline = time.monotonic() + (_STACK_S if words[H.PID_SPACE] else _FAR_STACK_S)
        while words[H.STACK_GIVEN] != words[H.STACK_WANTED]:
            if time.monotonic() > deadline:
                return []
            time.sleep(0.01)
        return [f"  | {line}" for line in page.read_stack().splitlines()]

    def settle(self) -> None:
        """At the end of the program: a rank that received what it wanted may be the first to go, before the others see that they differ."""
        deadline = time.monotonic() + _SETTLE_S
        while self._is_on and not self.told and self.page.words[H.STATE] == State.RUNNING and os.getpid() == self.pid:
            verdict = self.standing()
            if verdict is not None:
                print(f"shardmesh: rank {self.board.rank}: {verdict.text}", file=sys.stderr, flush=True)
                self.abandoned = self.told = True
            if time.monotonic() > deadline or all(self.is_settled(seat) for seat in self.seats if not seat.is_channel):
                return
            time.sleep(0.01)

    def is_settled(self, seat: Seat) -> bool:
        """Whether all ranks have come to what this one called last, and agree."""
        if seat.settled < seat.called:
            called = seat.called
            found = diagnose.members(self, seat, called - 1)
            if diagnose.have_all_come(found) and diagnose.agree(found):
                seat.settled = called
        return seat.settled >= seat.called

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, state: int = State.CLOSED) -> None:
        """This rank takes no further part in the job."""
        if os.getpid() != self.pid:
            return
        hooks.stop(self)
        if self.page.words[H.STATE] == State.RUNNING:
            if not self.abandoned:
                self.watchdog.stop()
            self.board.leave(state)
        if self._agreement is not None:
            self._agreement.stop()
        if self.relay is not None:
            self.relay.close()
            self.relay = None


def start_watch(world: World, job: str, agreement: Agreement | None = None) -> Watch | None:
    """A watch for the ranks of this world; None where this rank's files cannot be made, which all ranks learn."""
    try:
        parent = None if agreement is None else agreement.folder(ranks_here(world.size) * PAGE_BYTES + ALARM_BYTES)
        board = Board(job, world.rank, world.size, parent)
        if agreement is not None:
            agreement.join(board)
    except OSError as error:
        reason = f"its files cannot be made: {error}"
        say(reason) if agreement is None else agreement.decline(reason)
        return None
    sweep(board.folder.parent)
    termination.install()
    watch = Watch(world, board, agreement)
    termination.watches.add(watch)
    watch.watchdog.start()
    return watch


def watch_of(world: World) -> Watch | None:
    """The watch over the ranks of a world; None in simulated and null worlds, and for a process alone."""
    return world.watch
