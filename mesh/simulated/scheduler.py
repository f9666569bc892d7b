"""Scheduler: choose the simulated rank that runs, one at a time, until it blocks.

    ready    [2 3]             can run, in this order
    running  1                 until it blocks in a collective: then it waits, and 2 runs
    waiting  {0: rendezvous}   until the last rank of its group arrives: then all of them are ready

On each switch the scheduler also exchanges the state that a process has once and each rank must
have separately: the state of torch's CPU generator, and `sys.stdout`.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from .arrival import Arrival
from .diagnosis import BlockedRank, no_rank_can_go_on
from .messages import Mailbox, MessageWork
from .output import RankOrder
from .rendezvous import Move, Rendezvous
from .threads import RankEnded, Worker


class Scheduler:
    """Runs one rank at a time. Only that one changes the state: no locks but the ranks' gates.

    Attributes:
        done: a lock, released when the run has ended.
        failure: the error that ended the run, None if there was none.
        running: the rank that runs.
        inner: the scheduler of a simulation inside the running rank.
        abandoned: the caller has returned, so generator and `sys.stdout` must not be exchanged any
            more.
    """

    def __init__(self, workers: Sequence[Worker], outputs: list[Any]) -> None:
        self.size = size = len(workers)
        self.workers = workers
        self.done = threading.Lock()
        self.done.acquire()
        self.ready: deque[int] = deque(range(size))
        self.waiting: dict[int, tuple[tuple[int, ...], Rendezvous]] = {}
        self.rendezvous: dict[tuple[int, ...], Rendezvous] = {}  # by the ranks of the group
        # by the ranks of the group and the receiver
        self.mailboxes: dict[tuple[tuple[int, ...], int], Mailbox] = {}
        self.finished: set[int] = set()
        self.failure: BaseException | None = None
        self.running = -1
        self.inner: Scheduler | None = None
        self.abandoned = False
        self.generators = [torch.default_generator.get_state()] * size
        self.outputs = list(outputs)
        self.order = RankOrder(outputs)

    def resume(self, rank: int) -> None:
        """Install this rank's generator state and output, in its thread, at its turn's start."""
        self.running = rank
        if not self.abandoned:
            torch.default_generator.set_state(self.generators[rank])
            sys.stdout = self.outputs[rank]
        if self.failure is not None:
            raise RankEnded

    def suspend(self, rank: int) -> None:
        """Save this rank's generator state and output, and let the next rank run."""
        if not self.abandoned:
            self.generators[rank] = torch.default_generator.get_state()
            self.outputs[rank] = sys.stdout
        self.run_next()

    def run_next(self) -> None:
        """Let the next rank that is ready run, or end the run if there is none."""
        if not self.ready and self.waiting:
            self._break_deadlock()
        if self.ready:
            self.workers[self.ready.popleft()].gate.release()
        else:
            self.done.release()

    def run_collective(self, ranks: tuple[int, ...], rank: int, call: Arrival, move: Move) -> Any:
        """Wait for the group's other ranks; the last moves the data. Return `move`'s result."""
        if self.failure is not None:
            raise RankEnded
        self.order.has_run(rank)
        rendezvous = self.rendezvous.get(ranks)
        if rendezvous is None:
            rendezvous = self.rendezvous[ranks] = Rendezvous()
        rendezvous.calls[rank] = call
        if len(rendezvous.calls) < len(ranks):
            self.wait_in(ranks, rank, rendezvous)
        else:
            rendezvous.complete(ranks, move, self._line_of)
            self._release(ranks, others := [r for r in ranks if r != rank])
            self.order.runs_before(rank, others)
        if rendezvous.error is not None:
            # A copy for each rank, since each adds its own traceback.
            raise copy.copy(rendezvous.error)
        return rendezvous.result

    def send(self, ranks: tuple[int, ...], rank: int, call: Arrival) -> None:
        """Put a message in the mailbox of the group's other rank; wake it if it waits for it."""
        if self.failure is not None:
            raise RankEnded
        self.order.has_run(rank)
        receiver = next(r for r in ranks if r != rank)
        mailbox = self._mailbox(ranks, receiver)
        if mailbox.put(call):
            mailbox.awaited = None
            del self.waiting[receiver]
            self.ready.append(receiver)

    def post_receive(self, ranks: tuple[int, ...], rank: int, call: Arrival) -> MessageWork:
        """Return the receive of the next message from the group's other rank."""
        return MessageWork(self, self._mailbox(ranks, rank), ranks, rank, call)

    def _mailbox(self, ranks: tuple[int, ...], receiver: int) -> Mailbox:
        return self.mailboxes.setdefault((ranks, receiver), Mailbox())

    def wait_in(self, ranks: tuple[int, ...], rank: int, rendezvous: Rendezvous) -> None:
        """Let other ranks run until the rendezvous has a result or an error."""
        if self.failure is not None:
            raise RankEnded
        self.waiting[rank] = (ranks, rendezvous)
        self.suspend(rank)
        self.workers[rank].gate.acquire()
        self.resume(rank)

    def _release(self, ranks: tuple[int, ...], waiting: Sequence[int]) -> None:
        """Make the ranks that waited in this group ready."""
        for r in waiting:
            del self.waiting[r]
        self.ready.extend(waiting)
        del self.rendezvous[ranks]

    def _line_of(self, rank: int) -> str | None:
        return self.workers[rank].line()

    def _break_deadlock(self) -> None:
        waits = [
            BlockedRank(
                r,
                rendezvous.calls[r],
                ranks,
                [m for m in ranks if m not in rendezvous.calls],
                self._line_of(r),
            )
            for r, (ranks, rendezvous) in sorted(self.waiting.items())
        ]
        error = no_rank_can_go_on(waits, sorted(self.finished))
        for _, rendezvous in self.waiting.values():
            rendezvous.error = error
        self.ready.extend(self.waiting)
        self.waiting.clear()
        self.rendezvous.clear()

    def finish(self, rank: int) -> None:
        self.finished.add(rank)
        try:
            self.order.has_run(rank)
        except BaseException as error:  # held output cannot be written: a closed pipe
            self.fail(error, f"raised when output of simulate({self.size}) was written")
        self.suspend(rank)

    def fail(self, error: BaseException, note: str | None = None) -> None:
        """End the run with an error: wake every rank that waits or has not started, to unwind."""
        if self.failure is None:
            self.failure = error
            if note is not None:
                error.add_note(note)
            self.ready.extend(self.waiting)
            self.waiting.clear()
            self.rendezvous.clear()

    def interrupt(self, error: BaseException) -> None:
        """End the run from the caller's thread.

        Ranks that wait unwind at once, the running one at its next bytecode.

        If the running rank runs a simulation itself, the running rank of that one is interrupted.
        """
        self.fail(error)
        for worker in self.workers:
            worker.last = True
        if self.inner is not None:
            self.inner.interrupt(error)
        elif self.running >= 0:
            self.workers[self.running].interrupt()

    def abandon(self) -> None:
        """Stop exchanging the process's state: the caller has returned while ranks still run."""
        self.abandoned = True
        if self.inner is not None:
            self.inner.abandon()
