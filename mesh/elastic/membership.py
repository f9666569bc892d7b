"""`Membership`: one process's part in a job that loses ranks and goes on. It runs the protocol.

    a step       vote() and commit() are barriers of the members
    a change     who_changes()      between two steps: tells who leaves, and which processes join
                 pause()            leaves the collectives of the job, as all members do
    a failure    interrupt(error)   leaves the collectives of the job, and lets the others know
                 agree()            reports, decides or waits for the decision, and adopts it
                 regroup()          process groups, world and monitor of the members that go on
                 confirm()          waits until all members have their new parts

A member is known by its number at the start of the job. In the world of an epoch, members are
numbered anew, in the same order.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.constants import default_pg_timeout

from ..comm.agreement import gather_facts
from ..comm.recording.recorder import CommTag
from ..comm.recording.trace_buffer import Header
from ..comm.world import World
from ..errors import LaunchEnvironmentError, WatchError
from ..launch.session import abandon_groups
from ..monitor import termination, timeouts
from ..monitor.diagnosis.members import lost_ranks
from ..monitor.hosts.relay import host_lost_s
from ..monitor.monitor import Monitor, monitor_of
from ..monitor.process_hooks import forget_monitor
from ..monitor.recording.job_directory import may_span_hosts
from ..monitor.startup.rank_info import RankInfo, machine, own_rank_info
from ..monitor.store_keys import StoreKeys
from ..processes.process import ProcessWorld, default_store, process_world
from ..settings import monotonic_ns, settings, wait_before_exit
from ..text import ranks_text
from . import joining, protocol
from .joining import Entry
from .messages import (
    Announcement,
    Failure,
    ToldDecision,
    ToldReport,
    Welcome,
    kind_of_reason,
    shortened_reason,
)
from .presence import Presence
from .protocol import Decision, Version, Write
from .rank_stores import Connection, StoreAddress, StoreGoneError, seen_from_here, serve_store

_log = logging.getLogger(__name__)

_KEYS = joining.KEYS
_FIRST_PAUSE_S, _PAUSE_S = 1e-3, 2e-2  # between looks at the store
# To connect ranks that are known to be there, at most, in seconds: those of the default group, and
# of others. Neither wait is interrupted, so each ends before others count this rank as lost (the
# default group: a share of that time), or its watchdog ends it (others).
_LONGEST_START_S, _LONGEST_CONNECT_S, _START_SHARE = 30.0, 8.0, 0.8
_LOOK_S = 1.0  # between looks for processes that want to join
_TO_LEAVE_S = 10.0  # that a rank which leaves waits for the others
_NO_TOKEN = "0" * 16  # of a member
_VOTE = CommTag("elastic: vote")
_MOST_FAILURES = 2  # of one step for one reason, or of one rank

_jobs: Counter[str] = Counter()  # how many there were in a world, by its name

MissingParts = Callable[[Version, Collection[int]], tuple[int, ...]]


class ElasticJobError(RuntimeError):
    """A job cannot go on without the ranks that it has lost, or fails again and again."""


class LeftOutError(ElasticJobError):
    """The others go on without this rank, which lives."""


class Change(NamedTuple):
    """How the members change after a step; the same on all of them.

    Attributes:
        leaving: which members leave.
        joining: which processes become members, by their numbers.
    """

    leaving: tuple[int, ...]
    joining: Mapping[int, Announcement]


class Membership:
    """One process's part in a job that loses ranks.

    Args:
        world: of the processes, with their monitor.
        write: how the optimizers write.
        missing_parts: (version, ranks) -> the parts of it that none of these ranks holds, as the
            leader computes it.
        min_ranks: with fewer the job ends.
        entry: what a process has that joins a job that runs; then `regroup` is next.

    Attributes:
        size: the number of ranks at the start of the job.
        min_ranks: with fewer members the job ends.
        member: what this rank knows, for the functions of the protocol.
        world: of the members of this epoch; before `regroup` that of the epoch before.
        failures: of the last decision.
        verdict: the text of the last verdict that interrupted this rank.
        is_finished: whether a member has said that all have finished.

    Raises:
        LaunchEnvironmentError: the ranks are not monitored, or on several hosts without a store
            that these share, or SHARDMESH_EXIT_S is 0 and there are or may be other ranks. On every
            rank.

    Communication: one all_gather of small objects.
    """

    def __init__(
        self,
        world: World,
        write: Write,
        missing_parts: MissingParts,
        min_ranks: int = 1,
        entry: Entry | None = None,
    ) -> None:
        monitor = monitor_of(world)
        is_watched = monitor is not None and settings().mode != "off"
        if not isinstance(world, ProcessWorld) or (world.size > 1 and not is_watched):
            raise LaunchEnvironmentError(
                "an elastic job runs on processes that the monitor watches, which tells who is "
                "lost; here the ranks are simulated, or the monitor is off (SHARDMESH_MONITOR, "
                "sm.monitor.collective_check). Start it with sm.launch(main, n, elastic=True)"
            )
        if world.size > 1 or entry is not None or default_store() is not None:
            _check_ends(monitor)
        self.world: ProcessWorld = world
        self.failures: tuple[Failure, ...] = ()
        self.verdict = ""
        self.is_finished = False
        self._monitor = monitor
        self._suspended: list[Monitor] = []
        self._worlds_before: list[World] = []
        self._missing_parts, self.min_ranks = missing_parts, min_ranks
        self._job = f"{world.job}/{_jobs[world.job]}" if entry is None else entry.job
        self._prefix = f"{_KEYS}/{self._job}"
        _jobs[world.job] += 1
        self._own_token = _NO_TOKEN if entry is None else entry.own.token
        # whom this rank may take in if it decides, by number
        self._candidates: Mapping[int, Announcement] = {}
        # who are members by the last decisions, until all members have confirmed
        self._joining: dict[int, Announcement] = {}
        self._taken: set[str] = set()  # the tokens of those that have become members
        self._next_look = time.monotonic() + _LOOK_S
        self._failure: Failure | None = None
        self._told: ToldDecision | None = None  # by which this epoch began
        self._failed: Counter[tuple[int, str]] = Counter()  # by step and reason
        self._failed_ranks: Counter[int] = Counter()
        self._connection: tuple[int, Connection] | None = None
        self._awaited: dict[int, float] = {}  # whose reports are missing, and since when
        if entry is not None:
            self._take_over(entry)
            return
        self.size = world.size
        self._backend = _backend_of_default_group()
        self.member = protocol.first_member(world.rank, range(world.size), 0, write)
        self._world_members = self.member.members  # by their ranks in the current world
        # those of the last epoch that all of its members have confirmed
        self._electorate = self.member.members
        self._store, self._infos, self._addresses = self._introduce()
        self._presence = Presence(world.rank, self._infos, self._addresses)
        self._prepare()
        if world.rank == 0 and default_store() is not None:
            joining.register(default_store(), self._job, self._announcements())

    def _take_over(self, entry: Entry) -> None:
        """Become a member by the decision in a welcome."""
        welcome = entry.welcome
        told = self._told = welcome.decision
        self._joining = dict(told.joining)
        self._taken = {one.token for one in told.joining.values()}
        self.size, self._backend = welcome.size, welcome.backend
        self.member = protocol.joining_member(
            welcome.rank, told.decision, welcome.host, welcome.write
        )
        self._world_members = self.member.members
        self._electorate = told.decision.source.members
        self._store = entry.store
        self._infos = {rank: one.info for rank, one in welcome.members.items()}
        self._addresses = {
            rank: joining.address_from_here(one.info, one.address)
            for rank, one in welcome.members.items()
        }
        self._presence = Presence(welcome.rank, self._infos, self._addresses)
        self._presence.silent_s, self._presence.late_s = _patience(host_lost_s())

    def hosts(self) -> dict[int, int] | None:
        """Return a number of the host of each rank of the world, the same on every rank.

        None if all are on one host, or each host has as many, as the topology says.
        """
        machines = [self._infos[member].machine for member in self._world_members]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(machines))}
        if len(numbers) == 1 or node_size(machines) is not None:
            return None
        return {rank: numbers[name] for rank, name in enumerate(machines)}

    def _announcements(self) -> dict[int, Announcement]:
        """Return who all members are and have been."""
        return {
            rank: Announcement(_NO_TOKEN, info, self._addresses[rank])
            for rank, info in self._infos.items()
        }

    def _introduce(self) -> tuple[TCPStore, dict[int, RankInfo], dict[int, StoreAddress]]:
        """Serve a store, and tell the others where, and which process this is."""
        rank, size = self.world.rank, self.world.size
        spans_hosts = may_span_hosts(os.environ, size)
        store, address = serve_store(spans_hosts)
        info = own_rank_info(rank, {}, 0, os.environ)
        has_relay = self._monitor is not None and self._monitor.relay is not None
        told = gather_facts(self.world.group(range(size)), (info, address, has_relay))
        infos = {r: other for r, (other, _, _) in told.items()}
        hosts = {other.machine for other in infos.values()}
        if len(hosts) > 1 and not all(has for _, _, has in told.values()):
            raise LaunchEnvironmentError(
                f"an elastic job on {len(hosts)} hosts needs a store that they share, by which the "
                "monitor tells who is lost: start the default group at MASTER_ADDR and MASTER_PORT"
            )
        addresses = {
            r: seen_from_here(at) if spans_hosts and other.machine != info.machine else at
            for r, (other, at, _) in told.items()
        }
        return store, infos, addresses

    # -- a step ------------------------------------------------------------------------------------

    def vote(self, asks: bool = False) -> bool:
        """COMPUTE -> VOTE, and wait for the votes of all members.

        Args:
            asks: whether this rank asks for another membership after the step.

        Returns:
            Whether some member asks; the same on all.

        Raises: WatchError.

        Communication: one all_to_all of 4 bytes to each other member, which takes one message after
            the last member has voted; an all_reduce of gloo takes 2 (n - 1), one after the other.
        """
        self.member = protocol.enter_vote(protocol.enter_reductions(self.member))
        if torch.cuda.is_initialized():  # what is voted for must have arrived, not be queued
            torch.cuda.current_stream().synchronize()
        asks = asks or self._has_announcements()
        vote = torch.full((self.world.size,), int(asks), dtype=torch.int32, device="cpu")
        votes = torch.empty_like(vote)
        self.world.group(range(self.world.size)).all_to_all(votes, vote, tag=_VOTE)
        return bool(votes.any())

    def wait_for_all(self) -> None:
        """Wait for all members. Raises: WatchError."""
        self._barrier()

    def commit(self) -> None:
        """COMMIT -> COMPUTE, once all members have written. Raises: WatchError."""
        self._barrier()
        self.member = protocol.finish_commit(self.member)

    def confirm(self) -> None:
        """RESTORE -> COMPUTE, once all members have their new parts. Raises: WatchError.

        What was for the epochs before is forgotten.
        """
        self.member = protocol.enter_confirm(self.member)
        self._barrier()
        self.member = protocol.finish_confirm(self.member)
        self._electorate = self.member.members
        for monitor in self._suspended:
            forget_monitor(monitor)
        for world in self._worlds_before:
            world.end()
        self._suspended, self._worlds_before = [], []
        self._joining = {}

    def _barrier(self) -> None:
        if torch.cuda.is_initialized():  # what is voted for must have arrived, not be queued
            torch.cuda.current_stream().synchronize()
        self.world.group(range(self.world.size)).barrier()

    # -- a change between two steps ----------------------------------------------------------------

    def _has_announcements(self) -> bool:
        """Return whether processes want to join, on the rank that serves the store.

        It looks once a second.
        """
        if self.member.rank != self.member.store_host or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_S
        return bool(self._announced())

    def _announced(self) -> list[Announcement]:
        announcements = joining.announced(self._store, self._job)
        members = [self._infos[rank] for rank in self.member.members]
        return joining.newcomers(announcements, self._taken, members)

    def who_changes(self, is_leaving: bool) -> Change:
        """Tell all members whether this one leaves, and which processes have announced themselves.

        These have the same numbers for all: higher than any that some member knows. It may know
        those of an epoch that no other one of these members has begun.

        Communication: one all_gather of small objects over all members.
        """
        is_host = self.member.rank == self.member.store_host
        texts = [one.to_json() for one in self._announced()] if is_host else []
        own = is_leaving, texts, max(self._infos)
        told = gather_facts(self.world.group(range(self.world.size)), own)
        leaving = tuple(self._world_members[r] for r, (leaves, *_) in told.items() if leaves)
        announced = chain.from_iterable(of_rank for _, of_rank, _ in told.values())
        first = 1 + max(highest for *_, highest in told.values())
        return Change(leaving, dict(enumerate(map(Announcement.from_json, announced), first)))

    def pause(self, change: Change) -> None:
        """COMPUTE -> interrupted, between two steps, as all members do.

        A rank that leaves, and that a death keeps from hearing that all have met, may wait at its
        own store for those that have: so they say there that they go on without it. If it is
        stopped, it is ended after a while, as one that hangs.
        """
        self._candidates = change.joining
        self.verdict = f"{ranks_text(change.leaving)} left" if change.leaving else ""
        self._failure = None
        self._suspend()
        if self.member.rank not in change.leaving:
            for rank in change.leaving:
                with contextlib.suppress(StoreGoneError):
                    self._ask(rank, lambda keys: _sign_all(keys, change.leaving))
        self._presence.hear(change.leaving)
        self.member = protocol.interrupt(self.member)

    def _suspend(self) -> None:
        if self._monitor is not None:
            self._monitor.failed_at = self._monitor.failed_at or monotonic_ns()
            self._monitor.suspend()
            self._suspended.append(self._monitor)
            self._monitor = None

    def leave(self) -> None:
        """Leave the job, after `pause`: wait until the others have agreed without this rank.

        That all have reported says that none waits in a collective of this rank any more. Some of
        them may have ended, so this does not wait for long.
        """
        if dist.is_initialized():
            abandon_groups()
        gone = self._presence.gone
        stayers = [rank for rank in self.member.members if rank not in gone]
        if not stayers:
            return
        host = stayers[0] if self.member.host in gone else self.member.host
        epoch = self.member.epoch
        deadline = time.monotonic() + _TO_LEAVE_S

        def have_agreed(keys: StoreKeys) -> bool:
            if not keys.has("decision"):
                return False
            return keys.read("decision", ToldDecision.from_json).decision.epoch > epoch

        with contextlib.suppress(StoreGoneError):
            while time.monotonic() < deadline and not self._ask(host, have_agreed):
                time.sleep(_PAUSE_S)

    # -- a failure ---------------------------------------------------------------------------------

    def interrupt(self, error: Exception) -> None:
        """any phase -> interrupted, by an error of this rank or a verdict on the job.

        The other ranks are told of the error, and this rank's collectives are left alone.

        Raises:
            Exception: the error itself where this rank cannot go on: the job was ended from
                outside, or it is alone, or was cut off while its optimizer wrote.
        """
        monitor = self._monitor
        self._failure = None
        if len(self.member.members) == 1:
            raise error
        if monitor is None:  # while groups were made
            self._failure = Failure(-1, self.member.step, shortened_reason(error))
        else:
            if isinstance(error, WatchError) and monitor.standing() is None:
                # of an earlier epoch, such as of a collective that was left in flight
                monitor.raised(RuntimeError(f"{type(error).__name__} of an earlier epoch: {error}"))
            else:
                monitor.raised(error)
            verdict = monitor.standing()
            self.verdict = str(error) if verdict is None else verdict.text.partition("\n")[0]
            lost = {gone.rank for gone in lost_ranks(monitor.directory)}
            if verdict is not None and verdict.kind in ("lost", "left"):
                lost |= set(verdict.ranks)
            is_over = verdict is not None and verdict.is_interruption
            if is_over or self.world.rank in lost:  # other hosts go on without this rank
                raise error
            for rank, member in enumerate(self._world_members):
                buffer = monitor.directory.buffer_of(rank)
                if buffer is not None:
                    self._presence.note_heard(member, buffer.words[Header.HEARTBEAT] / 1e9)
            self._presence.suspect([self._world_members[rank] for rank in lost])
            self._note_failure(error, monitor)
            self._suspend()
        if not protocol.is_interruptible(self.member):
            raise error
        self.member = protocol.interrupt(self.member)

    def _note_failure(self, error: Exception, monitor: Monitor) -> None:
        """Note why this rank could not take the step, unless ranks are lost or another one says."""
        step, rank = self.member.step, self.member.rank
        verdict = monitor.standing()
        is_own = (
            verdict is not None and verdict.kind == "raised" and self.world.rank in verdict.ranks
        )
        is_consequence = _has_watch_error(error) or termination.is_broken_connection(error)
        if is_own or not is_consequence:
            self._failure = Failure(rank, step, shortened_reason(error))
        elif verdict is not None and verdict.kind not in ("lost", "left", "raised"):
            ranks = [self._world_members[number] for number in verdict.ranks]
            reason = f"{type(verdict.error()).__name__} of {ranks_text(ranks) or 'no rank'}"
            self._failure = Failure(rank if rank in ranks else -1, step, reason)

    def agree(self) -> Decision | None:
        """interrupted -> RESTORE: return the decision of the members that are left.

        None if one of them says that all have finished.

        Raises:
            ElasticJobError: too few members are left, or the step has failed twice for the same
                reason, with the same text on every rank; or this rank has failed twice; or it is
                cut off from the ranks that go on.
            LeftOutError: others go on without this rank.
            StoreGoneError: another rank has failed twice, and is left out; agree again.

        Communication: through the store of the lowest member; waits for all that are left.
        """
        pause = _FIRST_PAUSE_S
        self._awaited = {}
        while True:
            if self.member.rank in self._presence.gone:
                self._raise_left_out(
                    f"rank {self.member.rank} counts as lost for others, which go on without it"
                )
            self._note_deaths(self._awaited)
            host = self.member.store_host
            try:
                told = self._ask(host, self._consult)
            except StoreGoneError as error:
                _log.debug("rank %d: %s", self.member.rank, error)
                self._awaited.setdefault(host, self._presence.clock)
                told = None
            if self.is_finished:
                return None
            if told is not None:
                break
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSE_S)
        successor = told.joining.get(self.member.rank)
        is_other = successor is not None and successor.token != self._own_token
        if self.member.rank not in told.decision.members or is_other:
            self._raise_left_out(
                f"{ranks_text(told.decision.members)} count rank {self.member.rank} as lost, and "
                "go on without it"
            )
        self._take_in(told.joining)
        self.member = protocol.adopt(self.member, told.decision)
        self._failure = None
        self.failures = told.failures
        self._told = told
        self._count_failures()
        return told.decision

    def _take_in(self, arriving: Mapping[int, Announcement]) -> None:
        """Note who the members are that have joined."""
        self._candidates = {}  # others are asked again
        new = tuple(rank for rank in arriving if rank not in self.member.members)
        if new:
            joins = f"{ranks_text(new)} joined"
            self.verdict = ", ".join(filter(None, (self.verdict, joins)))
        for rank, one in arriving.items():
            self._joining[rank] = one
            address = joining.address_from_here(one.info, one.address)
            self._infos[rank], self._addresses[rank] = one.info, address
            self._presence.note_heard(rank, time.monotonic())
            self._taken.add(one.token)
        if self._presence.far(arriving):  # no monitor has told of other hosts if there were none
            self._presence.silent_s, self._presence.late_s = _patience(host_lost_s())
        self.verdict = self.verdict or "the processes that wanted to join have ended"

    def _note_deaths(self, awaited: Mapping[int, float]) -> None:
        """Note which members are lost, and end those that hang on this host.

        Args:
            awaited: the ranks of other hosts that this one waits for, and since when.

        Raises:
            ElasticJobError: those that are left may not go on.
        """
        self._end_hung()
        presence, members = self._presence, self.member.members
        doubtful = presence.cut_off.intersection(members)
        presence.look({*presence.near(members), *doubtful, *awaited})
        presence.give_up_late(awaited)
        self.member = protocol.lose(self.member, presence.gone)
        survivors = self.member.survivors
        if not self._may_continue(survivors):
            # the end of those that are away may not have been noticed, and be visible
            presence.probe(set(presence.far(self._electorate)) - presence.ended - set(survivors))
        if not self._may_continue(survivors):
            raise ElasticJobError(
                f"{ranks_text(survivors)} cannot reach {ranks_text(sorted(self.member.lost))}, and "
                "may be the ones that are cut off: of the ranks whose end nobody has seen they are "
                "not more than half, so the others may go on"
            )
        if len(survivors) < self.min_ranks:
            raise ElasticJobError(
                f"{len(survivors)} ranks are left of {len(self.member.members)}, and "
                f"min_ranks={self.min_ranks}: {self.verdict}"
            )

    def _may_continue(self, survivors: Collection[int]) -> bool:
        return protocol.may_continue(self._electorate, survivors, self._presence.ended)

    def _end_hung(self) -> None:
        for monitor in self._suspended:
            termination.end_hung(monitor)

    def _consult(self, keys: StoreKeys) -> ToldDecision | None:
        """Report, decide if it is this rank's turn, and return the decision to adopt, if any."""
        member = self.member
        self.is_finished = keys.has("finished")
        told = ToldReport(protocol.report(member), None if member.lost else self._failure)
        keys.set(f"report/{member.rank}", told.to_json())
        self._welcome(keys)
        self._tell_ends(keys)
        keys.set(f"interrupted/{member.epoch}")
        has_decision = keys.has("decision")
        last = keys.read("decision", ToldDecision.from_json) if has_decision else None
        if last is not None and (
            last.decision.epoch > member.epoch or protocol.is_left_out(member, last.decision)
        ):
            return last
        expected = member.survivors if member.rank == member.leader else (member.leader,)
        names = [f"report/{rank}" for rank in expected]
        if not keys.has(*names):
            names = [name for name in names if keys.has(name)]
        reports = keys.read_all(names, ToldReport.from_json)
        by_rank = {told.report.rank: told.report for told in reports}
        last_decision = None if last is None else last.decision
        late = set(expected) - set(protocol.current_reports(member, by_rank, last_decision))
        now = self._presence.clock
        self._awaited = {rank: self._awaited.get(rank, now) for rank in late}
        arriving = {r: one for r, one in self._candidates.items() if not one.info.is_gone()}
        decision = protocol.decide(member, by_rank, last_decision, self._missing_parts, arriving)
        if decision is None:
            return None
        failures = {told.failure for told in reports if told.failure is not None}
        joined = {rank: one for rank, one in self._joining.items() if rank in decision.members}
        proposal = ToldDecision(decision, tuple(sorted(failures)), {**joined, **arriving})
        keys.replace("decision", "" if last is None else last.to_json(), proposal.to_json())
        return keys.read("decision", ToldDecision.from_json)

    def _tell_ends(self, keys: StoreKeys) -> None:
        """Tell the others whose end this rank has seen, and hear what they have seen."""
        told = keys.signed("ended")
        self._presence.hear(told)
        for rank in sorted(self._presence.ended - told):
            keys.sign("ended", rank)

    def _count_failures(self) -> None:
        """Count failures of steps and of ranks, from what all members have read.

        Raises: as `agree`.
        """
        reasons = {(told.step, kind_of_reason(told.reason)): told.reason for told in self.failures}
        for (step, kind), reason in sorted(reasons.items()):
            self._failed[step, kind] += 1
            if self._failed[step, kind] >= _MOST_FAILURES:
                raise ElasticJobError(
                    f"step {step} has failed {_MOST_FAILURES} times for the same reason: {reason}"
                )
        for failure in self.failures:
            self._failed_ranks[failure.rank] += 1
        left_out = [
            rank
            for rank in self.member.members
            if self._failed_ranks[rank] >= _MOST_FAILURES and rank not in self._presence.gone
        ]
        self._presence.hear(left_out)
        if left_out:
            text = _text_of_failed(left_out, self.failures)
            raise (ElasticJobError if self.member.rank in left_out else StoreGoneError)(text)

    def _raise_left_out(self, text: str) -> NoReturn:
        """Raise that others go on without this rank.

        If it has failed too often, these may have left it out before it has read their decision.
        """
        rank, own = self.member.rank, self._failure
        failed_before = self._failed_ranks[rank]
        if own is not None and own.rank == rank and failed_before + 1 >= _MOST_FAILURES:
            raise ElasticJobError(_text_of_failed([rank], [own]))
        raise LeftOutError(f"{text}: {self.verdict}")

    # -- the store ---------------------------------------------------------------------------------

    def _ask(self, host: int, question: Callable[[StoreKeys], Any]) -> Any:
        """Return the answer of the store of a rank. Raises: StoreGoneError."""
        with self._connected(host) as connection:
            return connection.ask(question, self._is_lost(host))

    @contextlib.contextmanager
    def _connected(self, host: int) -> Iterator[Connection]:
        """Give the connection to the store of a rank, the last one if it is of that rank."""
        if self._connection is None or self._connection[0] != host:
            if self._connection is not None:
                self._connection[1].close()
            self._connection = host, Connection(self._addresses[host], self._prefix)
        connection = self._connection[1]
        try:
            yield connection
        except StoreGoneError:
            self._connection = None
            if host in self._presence.cut_off:
                connection.abandon()
            raise

    def _is_lost(self, host: int) -> Callable[[], bool]:
        """Return a function that says whether to wait for the store of a rank no longer."""
        awaited = {host: self._presence.clock}

        def is_lost() -> bool:
            self._end_hung()
            self._presence.look([host])
            self._presence.give_up_late(awaited)
            return host in self._presence.gone

        return is_lost

    # -- the next epoch ----------------------------------------------------------------------------

    def regroup(self) -> ProcessWorld:
        """Return the world of the members of this epoch, with process groups and a monitor.

        The groups of the epoch before are left alone: destroying one of gloo would wait for ranks
        that have ended. The variables RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are those of this epoch
        from here on.

        Raises:
            RuntimeError: a member has ended meanwhile.

        Communication: waits for all members.
        """
        member = self.member
        members = member.members
        rank = members.index(member.rank)
        self._wait_for_members()
        self._worlds_before.append(self.world)
        if dist.is_initialized():
            abandon_groups()
        on_this_host = [other for other in members if self._infos[other].machine == machine()]
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(len(members)), LOCAL_WORLD_SIZE=str(len(on_this_host))
        )
        with self._connected(member.host) as connection:
            store = connection.clone(self._is_lost(member.host))
        store.set_timeout(default_pg_timeout)
        dist.init_process_group(
            self._backend,
            store=PrefixStore(f"{self._prefix}/epoch{member.epoch}", store),
            rank=rank,
            world_size=len(members),
            timeout=timeouts.connect_timeout(_start_s(self._presence.late_s)),
        )
        timeouts.manage(dist.group.WORLD, is_own=False)
        self.world, self._world_members = process_world(), members
        # not by the environment, in which a rank knows of its own host alone
        self.world.node_size = node_size([self._infos[member].machine for member in members])
        self._monitor = monitor_of(self.world)
        if self.world.size > 1 and self._monitor is None:
            raise ElasticJobError("the monitor could not be started again, and tells who is lost")
        self._prepare()
        return self.world

    def _prepare(self) -> None:
        """Let waits of this world that nothing interrupts end before their process is ended."""
        self.world.connect_s = _connect_s(settings().exit_s)
        relay = None if self._monitor is None else self._monitor.relay
        silent_s = math.inf if relay is None else relay.lost_after_s
        self._presence.silent_s, self._presence.late_s = _patience(silent_s)
        if self._monitor is not None:
            self._monitor.deaf_s = math.inf  # then it is SHARDMESH_EXIT_S
            self._monitor.ended_elsewhere = self._ended_elsewhere

    def _ended_elsewhere(self) -> list[int]:
        """Return ranks of the current world that have ended on other hosts."""
        presence = self._presence
        presence.look(presence.far(self._world_members))
        return [r for r, member in enumerate(self._world_members) if member in presence.ended]

    def _wait_for_members(self) -> None:
        """Wait until all members have adopted the decision.

        Raises:
            StoreGoneError: one of them has ended, or has been interrupted again.
        """
        member, presence = self.member, self._presence

        def sign(keys: StoreKeys) -> None:
            keys.sign(f"here/{member.epoch}", member.rank)
            self._welcome(keys)

        def missing(keys: StoreKeys) -> set[int] | None:
            if keys.has(f"interrupted/{member.epoch}"):
                return None
            self._tell_ends(keys)
            return set(member.members) - keys.signed(f"here/{member.epoch}")

        self._ask(member.host, sign)
        since = presence.clock
        pause = _FIRST_PAUSE_S
        while awaited := self._ask(member.host, missing):
            self._end_hung()
            presence.look({*presence.near(member.members), *awaited})
            presence.give_up_late(dict.fromkeys(awaited, since))
            lost = presence.gone.intersection(member.members)
            if lost:
                raise StoreGoneError(
                    f"{ranks_text(sorted(lost))} ended before the groups were made"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSE_S)
        if awaited is None:
            raise StoreGoneError("a member was interrupted before the groups were made")

    def _welcome(self, keys: StoreKeys) -> None:
        """Tell processes that have become members by the last decision."""
        told = self._told
        for rank, one in self._joining.items():
            if told is not None and rank in self.member.members:
                welcome = Welcome(
                    rank,
                    self.member.host,
                    self.member.write,
                    self.size,
                    self._backend,
                    told,
                    self._announcements(),
                )
                keys.set(f"welcome/{one.token}", welcome.to_json())

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for all members at the end of the job. Raises: WatchError.

        Members that are interrupted in that wait read that others are through, and finish too.
        """
        self._barrier()
        since = self._presence.clock
        while len(self.member.members) > 1:
            host = self.member.store_host
            try:
                self._ask(host, lambda keys: keys.set("finished"))
                return
            except StoreGoneError:
                time.sleep(_PAUSE_S)
            with contextlib.suppress(ElasticJobError):  # it does not matter any more
                self._note_deaths({host: since})

    def close(self) -> None:
        """Forget what is left of earlier epochs, and the connections."""
        for monitor in self._suspended:
            forget_monitor(monitor)
        self._suspended = []
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None


def _check_ends(monitor: Monitor | None) -> None:
    """Check that a rank which hangs is ended: until then the others wait for it.

    A program that hosts others, such as a notebook, is never ended; it may be started all the same,
    to look for an error.

    Raises: LaunchEnvironmentError: SHARDMESH_EXIT_S is 0.
    """
    if not settings().exit_s:
        raise LaunchEnvironmentError(
            "SHARDMESH_EXIT_S=0: an elastic job goes on without a rank that hangs once it has "
            "ended, and 0 says that none is; write a number of seconds"
        )
    if monitor is not None and not monitor.buffer.words[Header.EXIT_S]:
        _log.warning(
            "rank %d runs in a debugger, a notebook or a test runner, which nothing ends: if it "
            "hangs, the other ranks of the elastic job wait for it",
            monitor.directory.rank,
        )


def _connect_s(exit_s: float) -> float:
    """Return the seconds for the ranks of a group to connect, before their watchdogs end them.

    Args:
        exit_s: after which they do; 0 for never.
    """
    return wait_before_exit(_LONGEST_CONNECT_S, exit_s)


def _start_s(late_s: float) -> float:
    """Return the seconds for the ranks of the default group to connect.

    Args:
        late_s: after which a rank that still waits for others counts as lost on other hosts.
    """
    return min(_LONGEST_START_S, _START_SHARE * late_s)


def _text_of_failed(ranks: Sequence[int], failures: Iterable[Failure]) -> str:
    reasons = "; ".join(one.reason for one in failures if one.rank in ranks)
    return f"{ranks_text(ranks)} failed {_MOST_FAILURES} times, and must leave: {reasons}"


def _sign_all(keys: StoreKeys, ranks: Collection[int]) -> None:
    """Say in a store that ranks have ended."""
    for rank in ranks:
        keys.sign("ended", rank)


def node_size(hosts: Sequence[Hashable]) -> int | None:
    """Return how many consecutive ranks share a host; None for one host, or uneven ones.

    Args:
        hosts: of each rank.
    """
    size = len(hosts) // len(set(hosts))
    is_even = size * len(set(hosts)) == len(hosts)
    are_consecutive = is_even and all(
        len(set(hosts[start : start + size])) == 1 for start in range(0, len(hosts), size)
    )
    return size if are_consecutive and size < len(hosts) else None


def _backend_of_default_group() -> str:
    """Return the backend with which the default group is started again."""
    if not dist.is_initialized():
        return "gloo"
    config = dist.get_backend_config()
    names = {part.rpartition(":")[2] for part in config.split(",")}
    return names.pop() if len(names) == 1 else config


def _patience(silent_s: float) -> tuple[float, float]:
    """Return seconds after which another host counts as silent, and a rank of it as late.

    A rank that is late has not been ended by its watchdog either, nor by the ranks of its host.

    Args:
        silent_s: the first of them.
    """
    return silent_s, silent_s + termination.longest_exit_s()


def _has_watch_error(error: BaseException) -> bool:
    """Return whether an error is a verdict of the monitor, or was raised because of one."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, WatchError):
        seen = seen.__cause__ or seen.__context__
    return seen is not None
