"""Who of the simulated ranks runs: the one that has the baton.

    ready    [2 3]          may go on, in this order
    running  1              until it blocks in a collective: then it waits, and 2 takes the baton
    waiting  {0: meeting}   until the last rank of its group has come: then all of them are ready

With the baton go the things that a process has once and each rank must have of its own: the state of torch's CPU generator
and `sys.stdout`.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from .diagnosis import BlockedRank, no_rank_can_go_on
from .output import RankOrder
from .rendezvous import Call, Meeting, Move
from .threads import RankEnded, Worker


class Baton:
    """Lets one rank run at a time. Only the holder touches the state, so nothing here is locked but the waiting.

    Attributes:
        done: released when the run is over.
        failure: what ended the run, if it did not end well.
        running: the rank that has the baton.
        inner: the baton of a simulation that the running rank runs.
        abandoned: the caller has gone, so generator and `sys.stdout` are no longer the ranks' to exchange.
    """

    def __init__(self, workers: Sequence[Worker], outputs: list[Any]) -> None:
        self.size = size = len(workers)
        self.workers = workers
        self.done = threading.Lock()
        self.done.acquire()
        self.ready: deque[int] = deque(range(size))
        self.waiting: dict[int, tuple[tuple[int, ...], Meeting]] = {}
        self.meetings: dict[tuple[int, ...], Meeting] = {}
        self.finished: set[int] = set()
        self.failure: BaseException | None = None
        self.running = -1
        self.inner: Baton | None = None
        self.abandoned = False
        self.generators = [torch.default_generator.get_state()] * size
        self.outputs = list(outputs)
        self.order = RankOrder(outputs)

    def take(self, rank: int) -> None:
        """Goes on when it is this rank's turn, with its own generator state and output, as a process has."""
        self.running = rank
        if not self.abandoned:
            torch.default_generator.set_state(self.generators[rank])
            sys.stdout = self.outputs[rank]
        if self.failure is not None:
            raise RankEnded

    def give(self, rank: int) -> None:
        """Hands the baton to the next rank that can run, or ends the run."""
        if not self.abandoned:
            self.generators[rank] = torch.default_generator.get_state()
            self.outputs[rank] = sys.stdout
        self.give_away()

    def give_away(self) -> None:
        if not self.ready and self.waiting:
            self._break_deadlock()
        if self.ready:
            self.workers[self.ready.popleft()].gate.release()
        else:
            self.done.release()

    def meet(self, ranks: tuple[int, ...], rank: int, call: Call, move: Move) -> Any:
        """Waits for the other ranks of the group; the last one moves the data. Returns what `move` returned."""
        if self.failure is not None:
            raise RankEnded
        self.order.has_run(rank)
        meeting = self.meetings.get(ranks)
        if meeting is None:
            meeting = self.meetings[ranks] = Meeting()
        meeting.calls[rank] = call
        if len(meeting.calls) < len(ranks):
            self._wait(ranks, rank, meeting)
        else:
            meeting.complete(ranks, move, self._place_of)
            self._part(ranks, meeting, others := [r for r in ranks if r != rank])
            self.order.ahead(rank, others)
        if meeting.error is not None:
            raise copy.copy(meeting.error)  # one for each rank: a traceback is of one thread
        return meeting.result

    def _wait(self, ranks: tuple[int, ...], rank: int, meeting: Meeting) -> None:
        self.waiting[rank] = (ranks, meeting)
        self.give(rank)
        self.workers[rank].gate.acquire()
        self.take(rank)

    def _part(self, ranks: tuple[int, ...], meeting: Meeting, others: Sequence[int]) -> None:
        """The meeting is over: those who waited in it may go on."""
        for r in others:
            del self.waiting[r]
        self.ready.extend(others)
        del self.meetings[ranks]

    def _place_of(self, rank: int) -> str | None:
        return self.workers[rank].place()

    def _break_deadlock(self) -> None:
        waits = [
            BlockedRank(r, meeting.calls[r], ranks, [m for m in ranks if m not in meeting.calls], self._place_of(r))
            for r, (ranks, meeting) in sorted(self.waiting.items())
        ]
        error = no_rank_can_go_on(waits, sorted(self.finished))
        for ranks, meeting in list(self.meetings.items()):
            meeting.error = error
            self._part(ranks, meeting, list(meeting.calls))

    def finish(self, rank: int) -> None:
        self.finished.add(rank)
        self.order.has_run(rank)
        self.give(rank)

    def fail(self, error: BaseException, note: str | None = None) -> None:
        """Ends the run: every rank that waits or has not started is woken to unwind."""
        if self.failure is None:
            self.failure = error
            if note is not None:
                error.add_note(note)
            self.ready.extend(self.waiting)
            self.waiting.clear()
            self.meetings.clear()

    def interrupt(self, error: BaseException) -> None:
        """Ends the run from outside: ranks that wait unwind at once, the running one at its next bytecode.

        Where the running rank simulates others, it is one of those that runs.
        """
        self.fail(error)
        for worker in self.workers:
            worker.last = True
        if self.inner is not None:
            self.inner.interrupt(error)
        elif self.running >= 0:
            self.workers[self.running].interrupt()

    def abandon(self) -> None:
        """What is left of the run goes on without the caller: it must leave the process's state alone."""
        self.abandoned = True
        if self.inner is not None:
            self.inner.abandon()
