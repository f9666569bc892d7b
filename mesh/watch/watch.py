"""The watch of one process: it sits down in each group, looks around while it waits, and tells the others what went wrong.

A process has one watch for each default process group. It ends with the group, or with the first verdict: from then on every
collective of every rank raises it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import WatchError
from . import judge, report, thread_errors
from .board import Board, is_near
from .page import H, State
from .relay import is_needed
from .seat import SLOT_WORDS, SLOTS, Seat
from .settings import monotonic_ns, settings
from .verdict import Verdict
from .watchdog import Watchdog

if TYPE_CHECKING:
    from ..group import Group, World
    from .relay import Relay

_SLICE, _LONG_SLICE = timedelta(milliseconds=10), timedelta(milliseconds=25)
_LONG_NS = 20_000_000  # from then on it looks at all the others' pages, before only whether there is a verdict
_SPINS = 20  # looks at a peer's row, before sleeping in between
_NAP_S, _LONGEST_NAP_S = 1e-4, 1e-2
_TO_EXPLAIN_S = 1.0  # how long a broken connection may lack an explanation
_SETTLE_S = 0.3
_TO_SHOW_S = 0.3
_ALARM = 11  # of the real-time signals, which nothing else is likely to use
_STACK_S, _FAR_STACK_S = 0.3, 1.0  # until a rank of this host, or another one, has said where it is


class Watch:
    """What this process shows to the job's other ranks, and what it learns from them.

    Attributes:
        board: the pages of all ranks.
        alarm: one word, not 0 when there is a verdict.
        seats: of the groups in which this rank has called something.
        abandoned: whether a collective may have been left under way, which torch's threads would wait for at exit.
        told: whether this rank's program has met the verdict.
    """

    def __init__(self, world: World, board: Board) -> None:
        self.world = weakref.proxy(world)
        self.board, self.page, self.alarm = board, board.page, board.alarm
        self.seats: list[Seat] = []
        self.abandoned = self.told = False
        self.pid = os.getpid()
        self.relay: Relay | None = None
        self._verdict: Verdict | None = None
        self.watchdog = Watchdog(self)

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
        return self._verdict

    def check(self) -> None:
        """Raises: WatchError when there is a verdict on the job."""
        found = self.standing()
        if found is not None:
            raise self._error(found)

    def _error(self, verdict: Verdict) -> WatchError:
        self.told = self.abandoned = True
        return verdict.error()

    def fail(self, verdict: Verdict) -> Verdict:
        """Makes it the verdict on the job, unless there is one; the one that stands, which all ranks raise."""
        self._verdict = self.board.post(verdict)
        return self._verdict

    def failed(self, verdict: Verdict) -> WatchError:
        """`fail`, and the error to raise."""
        return self._error(self.fail(verdict))

    def raised(self, error: BaseException) -> None:
        """Tells the other ranks that this one raised."""
        self.told = True
        if os.getpid() != self.pid or isinstance(error, WatchError) or self.page.words[H.STATE] != State.RUNNING:
            return
        text = "".join(traceback.format_exception(error))
        self.fail(report.raised(self.world.rank, type(error).__name__, str(error), text, self.page))
        self.page.words[H.STATE] = State.RAISED

    # -- looking around ------------------------------------------------------------------------------------------------

    def look(self, seat: Seat) -> None:
        """A neighbour differs: waits for the others to tell who is odd. Raises: WatchError, if they do differ."""
        since, sequence = monotonic_ns(), seat.called - 1
        while not judge.agree(judge.members(self, seat, sequence)):
            self._judge(seat, sequence, since)
            time.sleep(_NAP_S)

    def _judge(self, seat: Seat, sequence: int, since: int) -> None:
        self.check()
        found = judge.judge(self, seat, sequence, since)
        if found is not None:
            raise self.failed(found)

    def assemble(self, seat: Seat, sequence: int) -> None:
        """Waits until all ranks call the same: before the first collective of a group, for which torch connects them, or if strict."""

        def done(found: list[judge.Member]) -> bool:
            late = [m for m in found if m.came is False and (m.page is not None or self.sees_all)]
            return not late and judge.agree(found)

        self._meet(seat, sequence, done)
        if sequence == 0:
            seat.meet_neighbours(self.board)

    def _meet(self, seat: Seat, sequence: int, done: Callable[[list[judge.Member]], bool]) -> None:
        since = monotonic_ns()
        for _ in range(_SPINS):
            if done(judge.members(self, seat, sequence)):
                return
        nap = _NAP_S
        with self._blocked(seat, sequence, since):
            while not done(judge.members(self, seat, sequence)):
                self._judge(seat, sequence, since)
                time.sleep(nap)
                nap = min(1.5 * nap, _LONGEST_NAP_S)  # those who wait must leave the processors to those they wait for

    def meet(self, seat: Seat, sequence: int, places: Sequence[int | None]) -> None:
        """Returns when these members have come to this collective.

        A message between two ranks cannot be waited for in slices: so nobody waits for one who has not come.
        """
        ranks = [seat.group.ranks[place] for place in places if place is not None]

        def done(_: Any) -> bool:
            peers = [judge.member(self.board, seat.key, r, sequence) for r in ranks]
            return all(m.came is not False or (m.page is not None and not is_near(m.page)) for m in peers)

        self._meet(seat, sequence, done)
        wrong = judge.wrong_route(self, seat, sequence)
        if wrong is not None:
            raise self.failed(wrong)

    def compare_splits(self, seat: Seat, sequence: int) -> None:
        """Raises: WatchError where a rank sends another number of elements than its receiver expects, as far as ranks have come."""
        if judge.wrong_splits(self, seat, sequence) is not None:
            deadline = time.monotonic() + _TO_SHOW_S
            while time.monotonic() < deadline and not all(m.route for m in judge.members(self, seat, sequence)):
                time.sleep(_NAP_S)  # who is odd shows when all have said how much they send
            wrong = judge.wrong_splits(self, seat, sequence)
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
                if monotonic_ns() - since < _LONG_NS:
                    self.check()
                else:
                    self._judge(seat, sequence, since)
                    slice_ = _LONG_SLICE

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
                self._judge(seat, sequence, since)
                gone = judge.lost(self, seat, sequence)  # also one that had come to this collective
                if gone is not None:
                    raise self.failed(gone)
            except WatchError as found:
                raise found from error
            time.sleep(0.01)
        raise error

    @contextmanager
    def _blocked(self, seat: Seat, sequence: int, since: int) -> Iterator[None]:
        """Shows others what the main thread waits in. Of an asynchronous collective it need not be the newest record."""
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
        """While any rank is inside, no rank takes waiting for a stall."""
        self.page.words[H.PAUSED] += 1
        try:
            yield
        finally:
            self.page.words[H.PAUSED] -= 1

    def is_anyone_paused(self) -> bool:
        pages = (self.board.of(rank) for rank in range(self.board.size))
        return any(page.words[H.PAUSED] for page in pages if page is not None)

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
        while not self.told and self.page.words[H.STATE] == State.RUNNING and os.getpid() == self.pid:
            verdict = self.standing()
            if verdict is not None:
                print(f"shardmesh: rank {self.board.rank}: {verdict.text}", file=sys.stderr, flush=True)
                self.abandoned = self.told = True
            if time.monotonic() > deadline or all(self.is_settled(seat) for seat in self.seats):
                return
            time.sleep(0.01)

    def is_settled(self, seat: Seat) -> bool:
        """Whether all ranks have come to what this one called last, and agree."""
        if seat.settled < seat.called:
            called = seat.called
            found = judge.members(self, seat, called - 1)
            if judge.have_all_come(found) and judge.agree(found):
                seat.settled = called
        return seat.settled >= seat.called

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, state: int = State.CLOSED) -> None:
        """This rank takes no further part in the job."""
        if os.getpid() != self.pid:
            return
        if self.page.words[H.STATE] == State.RUNNING:
            self.watchdog.stop()
            self.board.leave(state)
        if self.relay is not None:
            self.relay.close()
            self.relay = None


alarm_signal: int | None = None
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_hooks: list[Any] = []


def start_watch(world: World, job: str) -> Watch | None:
    """A watch for the ranks of this world; None where no memory can be shared, after a warning."""
    try:
        board = Board(job, world.rank, world.size)
    except OSError as error:
        print(f"shardmesh: no watch over this job, since its files cannot be made: {error}", file=sys.stderr)
        return None
    _install_hooks()
    watch = Watch(world, board)
    _watches.add(watch)
    watch.watchdog.start()
    return watch


def watch_of(world: World) -> Watch | None:
    """The watch over the ranks of a world; None in simulated and null worlds, and for a process alone."""
    return world.watch


def tell_of(error: BaseException) -> None:
    """This process's program ends with an error: the other ranks of its jobs learn of it."""
    for watch in list(_watches):
        with contextlib.suppress(Exception):  # nothing must hide the error itself
            watch.raised(error)


def _install_hooks() -> None:
    if _hooks:
        return
    _hooks.append(sys.excepthook)
    _take_signal()
    sys.excepthook = _on_uncaught
    thread_errors.install(lambda: [watch.page for watch in list(_watches) if watch.pid == os.getpid()])
    atexit.register(_on_exit)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget)


def _take_signal() -> None:
    """A signal by which the watchdog's thread calls the main thread away from whatever it does, when the job has failed."""
    global alarm_signal
    wanted = getattr(signal, "SIGRTMIN", None)
    if wanted is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(wanted + _ALARM) is signal.SIG_DFL:
        signal.signal(wanted + _ALARM, _on_alarm)
        alarm_signal = wanted + _ALARM


def _on_alarm(*_: Any) -> None:
    for watch in list(_watches):
        if watch.pid == os.getpid() and not watch.told:
            watch.check()


def _on_uncaught(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    tell_of(error)
    _hooks[0](kind, error, where)


def _on_exit() -> None:
    global _last_word
    for watch in list(_watches):
        watch.settle()
    if any(w.abandoned and w.pid == os.getpid() for w in _watches):
        _last_word = _LastWord()
    for watch in list(_watches):
        watch.close(State.ENDED)


class _LastWord:
    """Ends the process when the interpreter takes its modules apart: all exit functions have run by then, and output is flushed.

    Next would be torch's groups, which wait for what is under way in gloo's threads, and others will never answer.
    """

    def __del__(self, end: Callable[[int], Any] = os._exit) -> None:
        end(1)


_last_word: _LastWord | None = None


def _forget() -> None:
    """A forked child is not the rank: it says nothing in its name."""
    _watches.clear()
