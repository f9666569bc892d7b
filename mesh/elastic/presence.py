"""`Presence`: which ranks of an elastic job have ended, and which this one does not reach.

    on this host       the number of its process and when that began
    on another host    a connection to the port at which the rank serves its store:
                         refused      nobody listens there any more: its process has ended
                         accepted     it is there, or stopped
                         no answer    it is cut off, or its host is down

A store listens for as long as its process lives, so the system of the rank's host answers for it.
That a process has ended means that it has not gone on without this rank only if it was heard of a
short time before: others count this rank as lost when they have not heard of it for much longer.
"""

from __future__ import annotations

import errno
import math
import selectors
import socket
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from enum import Enum, auto

from ..monitor.hosts.relay import OwnClock
from ..monitor.startup.rank_info import RankInfo, machine
from .rank_stores import StoreAddress

_PROBE_S = 1.0  # for an answer: a host that is there answers within milliseconds
_EVERY_S = 0.5  # between two probes
_SHARE = 0.5  # share of the time until a host counts as silent in which its end must be seen


class Answer(Enum):
    """What the host of a rank answers to a connection."""

    ENDED = auto()
    THERE = auto()
    NONE = auto()


class Presence:
    """What a rank knows of the others.

    Args:
        rank: this rank.
        infos: the process of each rank; those that join are added later.
        addresses: where each rank serves its store.

    Attributes:
        silent_s: seconds without an answer after which a host counts as cut off.
        late_s: seconds after which a rank of another host counts as cut off that is there, and does
            not do what this one waits for.
        ended: ranks whose process has ended, without having gone on without this rank.
        cut_off: ranks of other hosts that count as lost, though nobody has seen their end.
    """

    def __init__(
        self,
        rank: int,
        infos: Mapping[int, RankInfo],
        addresses: Mapping[int, StoreAddress],
    ) -> None:
        self._rank, self._infos, self._addresses = rank, infos, addresses
        self.silent_s = self.late_s = math.inf
        self.ended: set[int] = set()
        self.cut_off: set[int] = set()
        self._clock = OwnClock()
        self._next_probe = 0.0
        self._silent_since: dict[int, float] = {}
        self._heard_at = dict.fromkeys(infos, time.monotonic())

    @property
    def clock(self) -> float:
        """Seconds, without those in which this process did not run."""
        return self._clock.seconds

    @property
    def gone(self) -> set[int]:
        """The ranks that count as lost."""
        return self.ended | self.cut_off

    def is_near(self, rank: int) -> bool:
        """Return whether a rank is on this host."""
        return self._infos[rank].machine == machine()

    def near(self, ranks: Collection[int]) -> list[int]:
        """Return those of these ranks that are on this host."""
        return [rank for rank in ranks if self.is_near(rank)]

    def far(self, ranks: Collection[int]) -> list[int]:
        """Return those of these ranks that are on other hosts."""
        return [rank for rank in ranks if not self.is_near(rank)]

    def hear(self, ranks: Collection[int]) -> None:
        """Note ranks whose end others have seen."""
        self.ended |= set(ranks) & set(self._infos)

    def note_heard(self, rank: int, at: float) -> None:
        """Note when a rank was last heard of, on the clock of `time.monotonic`."""
        self._heard_at[rank] = max(self._heard_at.get(rank, at), at)

    def suspect(self, ranks: Collection[int]) -> None:
        """Look at ranks that the monitor says are lost.

        Those of other hosts are asked once more: one that is there may have lost only what the
        monitor hears of it by.
        """
        self.look(self.near(ranks))
        far = set(self.far(ranks)) - self.ended
        self.probe(far)
        self.cut_off |= far.intersection(self._silent_since)

    def look(self, ranks: Collection[int]) -> None:
        """Look which of these ranks have ended or do not answer.

        Ranks of other hosts are asked from time to time; that takes up to a second if one does not
        answer.
        """
        self._clock.advance()
        near = self.near(ranks)
        self.ended |= {rank for rank in near if rank != self._rank and self._infos[rank].is_gone()}
        far = set(ranks) - set(near) - self.ended
        if far and self.clock >= self._next_probe:
            self.probe(far)
            self._next_probe = self.clock + _EVERY_S

    def probe(self, ranks: Collection[int]) -> None:
        """Ask ranks of other hosts, now."""
        self._clock.advance()
        answers = ask({rank: self._addresses[rank] for rank in ranks})
        now = time.monotonic()
        self._clock.advance(_PROBE_S)
        for rank, answer in answers.items():
            if answer is Answer.ENDED:
                is_fresh = now - self._heard_at[rank] < _SHARE * self.silent_s
                (self.ended if is_fresh else self.cut_off).add(rank)
            elif answer is Answer.THERE:
                self._heard_at[rank] = now
                self._silent_since.pop(rank, None)
            elif self.clock - self._silent_since.setdefault(rank, self.clock) > self.silent_s:
                host = self._infos[rank].machine
                self.cut_off |= {r for r, info in self._infos.items() if info.machine == host}

    def give_up_late(self, since: Mapping[int, float]) -> None:
        """Count ranks of other hosts as cut off for which this one has waited for too long.

        Args:
            since: by rank, the time on `clock` from which on it has been waited for.
        """
        late = [rank for rank, start in since.items() if self.clock - start > self.late_s]
        self.cut_off.update(self.far(late))


def ask(addresses: Mapping[int, StoreAddress]) -> dict[int, Answer]:
    """Return what the hosts of these ranks answer to a connection, all at the same time."""
    answers = dict.fromkeys(addresses, Answer.NONE)
    deadline = time.monotonic() + _PROBE_S
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for rank, address in addresses.items():
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            probe.setblocking(False)
            status = probe.connect_ex((address.host, address.port))
            if status == errno.EINPROGRESS:
                selector.register(probe, selectors.EVENT_WRITE, (rank, probe))
            else:
                answers[rank] = _answer(status)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                rank, probe = key.data
                answers[rank] = _answer(probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                selector.unregister(probe)
    return answers


def _answer(status: int) -> Answer:
    if status == 0:
        return Answer.THERE
    return Answer.ENDED if status == errno.ECONNREFUSED else Answer.NONE
