"""Messages between two simulated ranks: sent without waiting, and received in order.

    rank 0   send a    send b    ...                   mailbox of 0 -> 1   [a b]
    rank 1   post x    post y    wait x    wait y      x takes message 0, y message 1

A message is copied when it is sent, so the sender never waits. A receiver waits in `wait()` only.
"""

from __future__ import annotations

import copy
from typing import Protocol

import torch
from torch import Tensor

from ..comm.work import Work
from . import diagnosis as verdict
from .arrival import Arrival
from .rendezvous import Rendezvous


class RankScheduler(Protocol):
    """What a receive needs of the scheduler."""

    def wait_in(self, ranks: tuple[int, ...], rank: int, rendezvous: Rendezvous) -> None: ...


class Mailbox:
    """The messages from one rank to another that have not been received.

    Attributes:
        messages: by number, in the order of sending.
        sent: how many have been sent.
        posted: how many receives have been posted; the next one takes the message of this number.
        awaited: the number of the message that the receiver waits for; None if it does not wait.
    """

    __slots__ = ("awaited", "messages", "posted", "sent")

    def __init__(self) -> None:
        self.messages: dict[int, Arrival] = {}
        self.sent = 0
        self.posted = 0
        self.awaited: int | None = None

    def put(self, call: Arrival) -> bool:
        """Add a message; return whether it is the one that the receiver waits for."""
        self.messages[self.sent] = call
        self.sent += 1
        return self.awaited == self.sent - 1

    def post(self) -> int:
        """Return the number of the message that a new receive takes."""
        self.posted += 1
        return self.posted - 1


class MessageWork(Work):
    """A posted receive of a simulated rank."""

    __slots__ = ("_call", "_mailbox", "_number", "_rank", "_ranks", "_scheduler")

    def __init__(
        self,
        scheduler: RankScheduler,
        mailbox: Mailbox,
        ranks: tuple[int, ...],
        rank: int,
        call: Arrival,
    ) -> None:
        self._scheduler = scheduler
        self._mailbox = mailbox
        self._ranks = ranks
        self._rank = rank
        self._call: Arrival | None = call
        self._number = mailbox.post()

    def is_completed(self) -> bool:
        return self._call is None or self._number in self._mailbox.messages

    def wait(self) -> None:
        """Wait until the message is there, and copy it.

        Raises:
            CollectiveMismatchError: sender and receiver do not describe the message alike.
            DeadlockError: no rank can go on.
        """
        call = self._call
        if call is None:
            return
        if not self.is_completed():
            self._mailbox.awaited = self._number
            pending = Rendezvous()
            pending.calls[self._rank] = call
            self._scheduler.wait_in(self._ranks, self._rank, pending)
            if pending.error is not None:
                raise copy.copy(pending.error)  # each rank adds its own traceback
        message = self._mailbox.messages.pop(self._number)
        self._call = None
        self._check(message, call)
        out: Tensor = call.buffers[0]
        with torch.inference_mode():
            out.view(-1).copy_(message.buffers[1].reshape(-1))

    def _check(self, message: Arrival, call: Arrival) -> None:
        sender = next(rank for rank in self._ranks if rank != self._rank)
        sent, expected = message.buffers[1].numel(), call.buffers[0].numel()
        problem = None
        if message.agree != call.agree or message.tag != call.tag:
            problem = "a message is received as another one"
        elif sent != expected:
            problem = (
                f"rank {sender} sends {sent} elements to rank {self._rank}, which expects "
                f"{expected}"
            )
        if problem is not None:
            raise verdict.different_collectives(
                problem, (sender, self._rank), [message, call], [None, None]
            )
