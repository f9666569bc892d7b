"""All interleavings of the elastic protocol: the functions of `mesh/elastic/protocol.py`, with
collectives, stores, memory and deaths as data, and a search through all states that can be
reached.

The members are 0 to `parts * replicas - 1`; rank r holds part `r % parts` of the state at first,
and member number i of those that are left holds part `i % parts` after a loss.

What may happen at any moment: a death, which is final; a waiting member learns of a death, in any
order and after any time; a collective completes on some ranks and not yet, or never, on others. A
barrier can complete on a rank once all members have entered it, also if some have died since. The
reductions of a rank complete once those that hold the same part have entered them, which is less
than real programs wait for. Reading and writing the store are one step each. A rank whose turn it
is to serve the store serves an empty one, and a store ends with its host.

Next to what a member believes to hold (`Member.versions`), the model has what is in its memory:
whole versions, and reduced gradients.

A process that joins announces itself, and the rank that serves the store asks in a vote. After that
step all members hear of it, meet, and are interrupted. It becomes a member when it reads, in the
store of any rank, a decision that names it; members write it there when they have adopted one, and
again when they report. Its number is the same for all. A decision that names it may be lost with a
store; if the next one does not name it, it ends.

A rank that is told to go asks for it in its next vote. After that step all members exchange what
only it holds, meet, and are interrupted; those that stay count it as lost. It waits outside of the
protocol, and ends at any time. What can come between is a death, after which some have met and
others have not.

Some events are taken at once (`Model.settled`), so that the search need not go through their
orders:

- A member reports, or enters the reductions, as soon as it can. A death before that leads nowhere
  that a death after it does not: others may always act as if the message had not arrived yet.
- A member that waits for one that will not come is interrupted: nothing else can happen to it.
- A member in the agreement that will not be its leader knows of all deaths: only a leader's
  knowledge counts.
- When nobody will die any more, a member whose epoch has no deaths goes on: nothing can interrupt
  it, and members do not disturb each other.

`test_reduced_search` compares with a search without these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from shardmesh.mesh.elastic import protocol
from shardmesh.mesh.elastic.protocol import Decision, Member, Phase, Report, Version, Write


class Memory(NamedTuple):
    """What a process has in memory.

    Attributes:
        versions: whole versions of its parts.
        grads: the version that its reduced gradients lead to; None without gradients.
    """

    versions: frozenset[Version]
    grads: Version | None = None


class Store(NamedTuple):
    """The contents of the store that a rank serves."""

    host: int
    decision: Decision | None = None
    reports: tuple[Report, ...] = ()
    gone: frozenset[int] = frozenset()
    welcome: tuple[Decision, int] | None = None  # which names who joins; the host of its writer

    def with_report(self, report: Report) -> Store:
        others = [told for told in self.reports if told.rank != report.rank]
        return self._replace(reports=tuple(sorted([*others, report])))


class Process(NamedTuple):
    """A process: `member` stays after its death, since what it has sent may still arrive."""

    member: Member
    memory: Memory
    is_alive: bool = True
    reported_to: int | None = None
    is_stopped: bool = False  # the decision says that parts are lost
    is_told_to_go: bool = False
    change: tuple[int, int, int] = (-1, 0, 0)  # epoch and step of the last one, and how far it is
    copies: tuple[Version, tuple[int, ...]] | None = None  # handed over by these: see `receiver`
    gone: frozenset[int] = frozenset()  # who has left, as far as it knows
    has_left: bool = False
    is_announced: bool = False  # it wants to join, and has read no decision that names it
    is_new: bool = False  # it has joined, and has not confirmed
    candidates: tuple[int, ...] = ()  # whom it may take in if it decides


class World(NamedTuple):
    """A state of the search.

    Attributes:
        committed: the versions that some rank, dead or alive, has taken for committed, by step.
        failed: the epochs in which a step has failed on a rank that lives; the others hear of it.
        changes: epoch and step of the votes in which a rank has asked to go, or for one that joins.
        strays: the epochs of processes that have joined and been interrupted before they confirmed.
    """

    processes: tuple[Process, ...]
    stores: tuple[Store, ...]
    committed: tuple[Version, ...]
    deaths_left: int
    failures_left: int = 0
    failed: tuple[int, ...] = ()
    leavers_left: int = 0
    changes: tuple[tuple[int, int], ...] = ()
    joiners_left: int = 0
    strays: tuple[int, ...] = ()


class Violation(AssertionError):
    """A property does not hold."""


@dataclass(frozen=True)
class Model:
    """A job and what can happen to it.

    Attributes:
        parts, replicas: how the state is laid out at the start.
        deaths: how many processes may die.
        failures: how often a step may fail on a rank that lives.
        leavers: how many ranks may be told to go.
        joiners: how many processes may join: 0 or 1, and no rank leaves then.
        steps: how many steps are taken; then members wait.
        host: the rank that serves the store.
        mutation: a way in which the protocol is broken, for tests of the search itself.
        is_reduced: whether what comes next in any case is taken at once; see above.
    """

    parts: int
    replicas: int
    deaths: int
    steps: int = 1
    host: int = 0
    failures: int = 0
    leavers: int = 0
    joiners: int = 0
    write: Write = Write.LOCAL
    mutation: str = ""
    is_reduced: bool = True
    _holders: dict[Version, dict[int, list[int]]] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        return self.parts * self.replicas

    def start(self) -> World:
        processes: list[Process] = []
        for rank in range(self.size):
            member = protocol.first_member(rank, range(self.size), self.host, self.write)
            processes.append(Process(member, Memory(frozenset({member.current}))))
        for rank in range(self.size, self.size + self.joiners):
            processes.append(Process(_no_member(rank), Memory(frozenset()), False))
        return World(
            tuple(processes),
            (Store(self.host),),
            (),
            self.deaths,
            self.failures,
            leavers_left=self.leavers,
            joiners_left=self.joiners,
        )

    # -- where parts are ---------------------------------------------------------------------------

    def holders(self, version: Version) -> dict[int, list[int]]:
        """Return for each part the members that hold it in the layouts of a version."""
        holders = self._holders.get(version)
        if holders is None:
            holders = {part: [] for part in range(self.parts)}
            for part in holders:
                if len(version.members) < self.parts:
                    holders[part] = [version.members[part % len(version.members)]]
                else:
                    holders[part] = list(version.members[part :: self.parts])
            self._holders[version] = holders
        return holders

    def missing_parts(self, version: Version, ranks: Collection[int]) -> tuple[int, ...]:
        return tuple(
            part for part, holders in self.holders(version).items() if not set(holders) & set(ranks)
        )

    def receiver(self, version: Version, part: int, leaving: Collection[int]) -> int:
        """Return which member has a copy of a part of ranks that leave."""
        stayers = [rank for rank in version.members if rank not in leaving]
        return stayers[part % len(stayers)]

    def missing_with_copies(
        self, process: Process, version: Version, ranks: Collection[int]
    ) -> tuple[int, ...]:
        """Return `missing_parts` as a member knows it, with what has been handed over."""
        missing = self.missing_parts(version, ranks)
        if process.copies is None or process.copies[0] != version:
            return missing
        leaving = process.copies[1]
        return tuple(
            part
            for part in missing
            if not set(self.holders(version)[part]) <= set(leaving)
            or self.receiver(version, part, leaving) not in ranks
        )

    # -- what can happen next ----------------------------------------------------------------------

    def successors(self, world: World) -> Iterator[tuple[str, World]]:
        """Yield what can happen next, in words, and the state after it."""
        for event, after in self.events(world):
            yield event, self.settled(after) if self.is_reduced else after

    def events(self, world: World) -> Iterator[tuple[str, World]]:
        for rank, process in enumerate(world.processes):
            if not process.is_alive:
                continue
            if process.has_left:
                yield f"{rank} ends", self.end(world, rank)
                continue
            if world.deaths_left:
                yield f"{rank} dies", self.die(world, rank)
            if process.is_announced:
                yield from self.join(world, rank)
                continue
            can_be_told = process.member.phase is Phase.REDUCE and not process.is_told_to_go
            if world.leavers_left and can_be_told and not process.member.is_interrupted:
                told = replaced(world, rank, process._replace(is_told_to_go=True))
                yield f"{rank} is told to go", told._replace(leavers_left=world.leavers_left - 1)
            if process.member.is_interrupted:
                yield from self.agree(world, rank)
            else:
                yield from self.proceed(world, rank)
            yield from self.fail(world, rank)
            for other in process.member.survivors:
                if not world.processes[other].is_alive:
                    yield f"{rank} learns that {other} died", self.learn(world, rank, [other])

    def fail(self, world: World, rank: int) -> Iterator[tuple[str, World]]:
        """Yield a failure of this rank, which lives, in a step or after a loss; and that it hears
        of one.
        """
        member = world.processes[rank].member
        if member.is_interrupted or not protocol.is_interruptible(member):
            return
        can_fail = member.phase in (Phase.REDUCE, Phase.RESTORE, Phase.CONFIRM)
        interrupted = self.write_report(self.move(world, rank, protocol.interrupt(member)), rank)
        if world.failures_left and can_fail:
            failed = tuple(sorted({*world.failed, member.epoch}))
            left = world.failures_left - 1
            yield f"{rank} fails", interrupted._replace(failures_left=left, failed=failed)
        if self.may_hear(world, member):
            failed = tuple(sorted({*world.failed, member.epoch}))
            yield f"{rank} hears of a failure", interrupted._replace(failed=failed)

    def may_hear(self, world: World, member: Member) -> bool:
        """Return whether a member can hear that another one has been interrupted in its epoch."""
        is_meeting = member.phase is Phase.RESTORE
        return member.epoch in world.failed or (is_meeting and member.epoch in world.strays)

    def settled(self, world: World) -> World:
        """Return the state after what comes next in any case, so that the search has fewer orders
        to go through (the module's docstring says why none of interest is left out).
        """
        before = None
        while before is not world:
            before = world
            for rank in range(self.size + self.joiners):
                world = self.settle_rank(world, rank)
        return world

    def settle_rank(self, world: World, rank: int) -> World:
        """Return the state after what this rank does next in any case; the same one if that is
        nothing.
        """
        process = world.processes[rank]
        member = process.member
        if not process.is_alive or process.is_stopped or process.has_left or process.is_announced:
            return world
        if member.phase is Phase.COMPUTE and not member.is_interrupted:
            if self.begins_change(world, process):
                change = (member.epoch, member.step, 1)
                return replaced(world, rank, process._replace(change=change))
            if member.step < self.steps and not self.is_changing(process):
                return self.move(world, rank, protocol.enter_reductions(member))
            if not self.is_changing(process):
                return world
        dead = [other for other in member.survivors if not world.processes[other].is_alive]
        if dead and (member.is_interrupted or self.is_stuck(world, rank)):
            lowest = next(r for r in member.members if world.processes[r].is_alive)
            if rank != lowest or (len(dead) == 1 and not member.lost):
                return self.learn(world, rank, dead)
        may_fail = world.failures_left or self.may_hear(world, member)
        some_leave = world.leavers_left or any(
            other.is_told_to_go and other.is_alive for other in world.processes
        )
        some_join = world.joiners_left or any(
            other.candidates or (other.is_announced and other.is_alive) for other in world.processes
        )
        if (
            not dead
            and not world.deaths_left
            and not some_leave
            and not some_join
            and (member.is_interrupted or not may_fail)
        ):
            events = self.agree if member.is_interrupted else self.proceed
            for _, after in events(world, rank):
                return after
        return world

    def is_stuck(self, world: World, rank: int) -> bool:
        """Return whether a member waits for one that will not come: it is dead, or has been
        interrupted, before it entered the collective.
        """
        own = world.processes[rank]
        member = own.member
        if member.phase is Phase.COMPUTE and not self.is_changing(own):
            return False
        for other in self.awaited(own):
            process = world.processes[other]
            if member.phase is Phase.COMPUTE:
                has_entered = process.change >= own.change
            else:
                has_entered = self.all_entered(world, member, [other], member.phase)
            if has_entered:
                continue
            if not process.is_alive or process.member.is_interrupted:
                return True
        return False

    def die(self, world: World, rank: int) -> World:
        return self.end(world, rank)._replace(deaths_left=world.deaths_left - 1)

    def end(self, world: World, rank: int) -> World:
        """A process ends: it dies, or has left."""
        process = world.processes[rank]
        sent = _sent(process.member)
        if self.joiners:  # another epoch of this number may have other members
            sent = sent._replace(members=process.member.members)
        dead = Process(sent, Memory(frozenset()), False, change=process.change)
        dead = dead._replace(is_told_to_go=process.is_told_to_go)
        stores = tuple(store for store in world.stores if store.host != rank)
        return self.forget(replaced(world, rank, dead)._replace(stores=stores))

    def forget(self, world: World) -> World:
        """Return the state without what no living process can see any more: what processes that
        died in earlier epochs had sent.
        """
        epochs = {process.member.epoch for process in world.processes if process.is_alive}
        for rank, process in enumerate(world.processes):
            if not process.is_alive and process.member.epoch not in epochs:
                member = process.member._replace(epoch=-1, step=0, phase=Phase.RESTORE)
                world = replaced(world, rank, process._replace(member=member))
        return world

    def learn(self, world: World, rank: int, others: Collection[int]) -> World:
        """A waiting member learns of deaths, and reports at once if it can reach the store: nobody
        can see what it does between the two.
        """
        process = world.processes[rank]
        process = process._replace(member=protocol.lose(process.member, others))
        return self.write_report(replaced(world, rank, process), rank)

    def write_report(self, world: World, rank: int) -> World:
        process = world.processes[rank]
        host = process.member.store_host
        if not process.member.is_interrupted or process.reported_to == host:
            return world
        if not world.processes[host].is_alive:
            return world  # it will learn of that
        self.check_claims(process)
        stores = {store.host: store for store in world.stores}
        store = stores.get(host, Store(host)).with_report(protocol.report(process.member))
        stores[host] = store._replace(gone=store.gone | process.gone)
        world = replaced(world, rank, process._replace(reported_to=host))._replace(
            stores=tuple(stores[at] for at in sorted(stores))
        )
        if process.is_new:  # members of another epoch of this number hear of it while they meet
            strays = tuple(sorted({*world.strays, process.member.epoch}))
            world = world._replace(strays=strays)
        return self.welcome(world, rank, host)

    def check_claims(self, process: Process) -> None:
        """Raise a Violation if a member reports a version that it neither has nor can complete."""
        member, (versions, grads) = process.member, process.memory
        for version in member.versions:
            can_complete = version == grads and member.current in versions
            if version not in versions and not can_complete:
                raise Violation(f"rank {member.rank} reports {version} and has {process.memory}")

    # -- a step ------------------------------------------------------------------------------------

    def proceed(self, world: World, rank: int) -> Iterator[tuple[str, World]]:
        """Yield what a member does that is not interrupted."""
        member, memory = world.processes[rank].member, world.processes[rank].memory
        phase = member.phase
        if phase is Phase.COMPUTE and self.is_changing(world.processes[rank]):
            yield from self.proceed_change(world, rank)
            return
        if phase is Phase.COMPUTE:
            if member.step < self.steps:
                yield f"{rank} reduces", self.move(world, rank, protocol.enter_reductions(member))
            return
        skipped = {Phase.VOTE: "no vote", Phase.COMMIT: "commit alone", Phase.CONFIRM: "no confirm"}
        if self.mutation != skipped.get(phase, "none") and not self.all_entered(
            world, member, self.awaited(world.processes[rank]), phase
        ):
            return
        if phase is Phase.REDUCE:
            after = self.move(
                world, rank, protocol.enter_vote(member), memory._replace(grads=member.next)
            )
            if world.processes[rank].is_told_to_go:
                changes = {*world.changes, (member.epoch, member.step)}
                after = after._replace(changes=tuple(sorted(changes)))
            yield f"{rank} votes", after
            if rank == member.store_host and self.can_ask(world):
                yield f"{rank} votes, and asks for one that joins", self.ask(after, rank)
        elif phase is Phase.VOTE and self.write is Write.LOCAL:
            # nothing interrupts it, and if it dies meanwhile nobody sees what it had written
            written = protocol.finish_write(protocol.enter_write(member))
            yield f"{rank} writes", self.commit(world, rank, written)
        elif phase is Phase.VOTE:
            kept = memory.versions if self.write is Write.UNDO else frozenset()
            yield (
                f"{rank} starts to write",
                self.move(
                    world, rank, protocol.enter_write(member), memory._replace(versions=kept)
                ),
            )
        elif phase is Phase.WRITE:
            versions = memory.versions | {member.next}
            yield (
                f"{rank} has written",
                self.move(world, rank, protocol.finish_write(member), Memory(versions)),
            )
        elif phase is Phase.COMMIT:
            yield f"{rank} commits", self.commit(world, rank, protocol.finish_commit(member))
        elif phase is Phase.RESTORE:
            yield (
                f"{rank} has its parts",
                self.move(
                    world,
                    rank,
                    protocol.enter_confirm(member),
                    Memory(memory.versions | {member.current}),
                ),
            )
        else:
            after = self.move(
                world, rank, protocol.finish_confirm(member), Memory(frozenset({member.current}))
            )
            after = replaced(after, rank, after.processes[rank]._replace(is_new=False))
            yield f"{rank} frees what it had", self.without_copies(after, rank)

    # -- ranks that leave --------------------------------------------------------------------------

    def begins_change(self, world: World, process: Process) -> bool:
        """Return whether members change after the step that this one has committed."""
        member = process.member
        voted = (member.epoch, member.step - 1)
        return voted in world.changes and process.change[:2] != (member.epoch, member.step)

    def is_changing(self, process: Process) -> bool:
        """Return whether a member hands over parts, or waits for the others to have done so."""
        epoch, step, stage = process.change
        return (epoch, step) == (process.member.epoch, process.member.step) and stage in (1, 2)

    def proceed_change(self, world: World, rank: int) -> Iterator[tuple[str, World]]:
        """Yield what a member does between two steps after which others, or itself, leave."""
        process = world.processes[rank]
        member = process.member
        skips = self.mutation == "no meeting" and process.change[2] == 2
        late = any(world.processes[other].change < process.change for other in member.members)
        if late and not skips:
            return
        leaving = tuple(r for r in member.members if world.processes[r].is_told_to_go)
        epoch, step, stage = process.change
        if stage == 1:
            after = process._replace(change=(epoch, step, 2))
            if self.joiners:
                yield f"{rank} has heard who joins", replaced(world, rank, after)
                return
            copies = None if self.mutation == "no hand-over" else (member.current, leaving)
            yield f"{rank} has handed over", replaced(world, rank, after._replace(copies=copies))
            return
        after = process._replace(change=(epoch, step, 3))
        if self.joiners:
            candidates = tuple(range(self.size, self.size + self.joiners))
            after = after._replace(member=protocol.interrupt(member), candidates=candidates)
            yield f"{rank} pauses", self.write_report(replaced(world, rank, after), rank)
            return
        if rank in leaving:
            yield f"{rank} leaves", replaced(world, rank, after._replace(has_left=True))
            return
        stores = {store.host: store for store in world.stores}
        for other in leaving if self.mutation != "not told" else ():
            if world.processes[other].is_alive:
                store = stores.get(other, Store(other))
                stores[other] = store._replace(gone=store.gone | set(leaving))
        world = world._replace(stores=tuple(stores[at] for at in sorted(stores)))
        member = protocol.interrupt(protocol.lose(member, leaving))
        after = after._replace(member=member, gone=process.gone | set(leaving))
        yield f"{rank} pauses", self.write_report(replaced(world, rank, after), rank)

    # -- a process that joins ----------------------------------------------------------------------

    def ask(self, world: World, rank: int) -> World:
        """The rank that serves the store asks in its vote for the process that wants to join."""
        member = world.processes[rank].member
        if world.joiners_left:
            announced = Process(_no_member(self.size), Memory(frozenset()), is_announced=True)
            world = replaced(world, self.size, announced)._replace(joiners_left=0)
        changes = {*world.changes, (member.epoch, member.step)}
        return world._replace(changes=tuple(sorted(changes)))

    def can_ask(self, world: World) -> bool:
        """Return whether a process wants to join, or may begin to."""
        return world.joiners_left > 0 or any(p.is_announced and p.is_alive for p in world.processes)

    def welcome(self, world: World, rank: int, host: int) -> World:
        """Return the state after a member has told the process, in a store, that it is a member."""
        member = world.processes[rank].member
        if member.decision is None or not any(
            world.processes[other].is_announced and world.processes[other].is_alive
            for other in member.members
        ):
            return world
        stores = {store.host: store for store in world.stores}
        if host in stores:
            stores[host] = stores[host]._replace(welcome=(member.decision, member.host))
        return world._replace(stores=tuple(stores[at] for at in sorted(stores)))

    def join(self, world: World, rank: int) -> Iterator[tuple[str, World]]:
        """Yield that a process reads in some store that it is a member."""
        welcomes = {store.welcome for store in world.stores if store.welcome is not None}
        stores = tuple(store._replace(welcome=None) for store in world.stores)
        for decision, host in sorted(welcomes):
            member = protocol.joining_member(rank, decision, host, self.write)
            process = Process(member, Memory(frozenset()), is_new=True)
            after = replaced(world, rank, process)._replace(stores=stores)
            yield f"{rank} joins by {decision}", after

    # -- collectives -------------------------------------------------------------------------------

    def move(self, world: World, rank: int, member: Member, memory: Memory | None = None) -> World:
        process = world.processes[rank]
        memory = process.memory if memory is None else memory
        return replaced(world, rank, process._replace(member=member, memory=memory))

    def awaited(self, process: Process) -> Collection[int]:
        """Return the members that must enter the collective that this one waits in."""
        member = process.member
        if member.phase is Phase.REDUCE:
            parts = [held for held in self.holders(member.current).values() if member.rank in held]
            return set(chain([member.rank], *parts))
        if member.phase is Phase.RESTORE and not self.joiners:
            return self.senders(process)
        return member.members

    def senders(self, process: Process) -> set[int]:
        """Return the members from which one receives its parts of the new layouts."""
        member = process.member
        assert member.decision is not None
        source, providers = member.decision.source, member.decision.providers
        senders: set[int] = set()
        for part, ranks in self.holders(member.current).items():
            if member.rank not in ranks:
                continue
            holding = [rank for rank in self.holders(source)[part] if rank in providers]
            if not holding and process.copies is not None and process.copies[0] == source:
                holding = [self.receiver(source, part, process.copies[1])]
            if not holding:
                raise Violation(f"rank {member.rank} finds no part {part} of {source}")
            senders.add(member.rank if member.rank in holding else holding[0])
        return senders

    def all_entered(
        self, world: World, member: Member, ranks: Collection[int], phase: Phase
    ) -> bool:
        """Return whether these ranks have, at some time, entered a collective of this member's
        epoch and step.
        """
        wanted = (member.step, phase)
        for rank in ranks:
            other = world.processes[rank].member
            if other.epoch != member.epoch or (other.step, other.phase) < wanted:
                return False
            if self.joiners and other.members != member.members:
                return False
        return True

    def commit(self, world: World, rank: int, after: Member) -> World:
        version = after.current
        for other in world.committed:
            if other.step == version.step and other.origin != version.origin:
                raise Violation(f"step {version.step} is committed twice: {other} and {version}")
        committed = tuple(sorted({*world.committed, version}))
        world = self.move(world, rank, after, Memory(frozenset({version})))
        return self.without_copies(world, rank)._replace(committed=committed)

    def without_copies(self, world: World, rank: int) -> World:
        return replaced(world, rank, world.processes[rank]._replace(copies=None))

    # -- a loss ------------------------------------------------------------------------------------

    def agree(self, world: World, rank: int) -> Iterator[tuple[str, World]]:
        """Yield what a member does that takes part in an agreement."""
        process = world.processes[rank]
        member = process.member
        store = next((s for s in world.stores if s.host == member.store_host), None)
        if store is None or process.reported_to != store.host:
            return
        last = store.decision
        if rank in store.gone:
            yield f"{rank} hears that others go on without it", self.end(world, rank)
            return
        gone = (store.gone - {rank}) & set(member.members)
        if gone - member.lost:
            heard = process._replace(member=protocol.lose(member, gone), gone=process.gone | gone)
            after = self.write_report(replaced(world, rank, heard), rank)
            yield f"{rank} hears that {set(gone)} have left", after
            return
        if last is not None and protocol.is_left_out(member, last):
            # one that leaves: others have met it before a death, and it has not
            if not process.is_new and not process.is_told_to_go:
                raise Violation(f"rank {rank} lives, and would end since it is not in {last}")
            if last.epoch > member.epoch or self.mutation != "waits when left out":
                yield f"{rank} hears that others go on without it", self.end(world, rank)
            return
        if last is not None and last.epoch > member.epoch:
            yield f"{rank} adopts {last}", self.adopt(world, rank, last)
            return
        reports = {told.rank: told for told in store.reports}
        if self.mutation == "stale reports":
            last = None
        if self.mutation == "every rank decides":
            member = member._replace(rank=member.leader)
        arriving = {process.candidates}
        if not all(world.processes[other].is_alive for other in process.candidates):
            arriving.add(())  # it may have seen that or not
        for candidates in sorted(arriving):
            decision = protocol.decide(
                member,
                reports,
                last,
                lambda v, ranks: self.missing_with_copies(process, v, ranks),
                candidates,
            )
            if decision is None:
                return
            if self.mutation in ("not persisted", "every rank decides"):
                yield f"{rank} decides by itself {decision}", self.adopt(world, rank, decision)
                return
            stores = tuple(
                s._replace(decision=decision) if s.host == store.host else s for s in world.stores
            )
            yield f"{rank} writes {decision}", world._replace(stores=stores)

    def adopt(self, world: World, rank: int, decision: Decision) -> World:
        process = world.processes[rank]
        self.check_decision(world, rank, decision)
        if decision.lost or not self.have_copies(world, decision):
            return replaced(world, rank, process._replace(is_stopped=True))
        member = protocol.adopt(process.member, decision)
        versions, grads = process.memory
        if decision.source in member.versions and decision.source not in versions:
            # the step is completed: the optimizer writes the version before, with the gradients
            before = process.member.current
            if grads != decision.source or before not in versions:
                raise Violation(f"rank {rank} cannot make {decision.source}: {process}")
            versions = (versions - {before}) | {decision.source}
        elif decision.source in member.versions:
            versions = frozenset({decision.source})
        process = process._replace(
            member=member, memory=Memory(versions), reported_to=None, candidates=()
        )
        world = self.forget(replaced(world, rank, process))
        world = self.welcome(world, rank, member.host)
        if process.gone & set(member.members):
            # a leader that has not heard of it has decided: the members agree again
            failed = tuple(sorted({*world.failed, member.epoch}))
            process = process._replace(member=protocol.lose(member, process.gone))
            world = replaced(world, rank, process)._replace(failed=failed)
            return self.write_report(world, rank)
        return world

    def have_copies(self, world: World, decision: Decision) -> bool:
        """Return whether all members have what was handed over, if they need it.

        They tell each other before they exchange parts.
        """
        if not self.missing_parts(decision.source, decision.providers):
            return True
        for rank in decision.members:
            copies = world.processes[rank].copies
            if world.processes[rank].is_alive and (copies is None or copies[0] != decision.source):
                self.check_loss(world, decision)
                return False
        return True

    def check_decision(self, world: World, rank: int, decision: Decision) -> None:
        for other in world.processes:
            if not other.is_alive or other.member.epoch != decision.epoch:
                continue
            if other.member.rank in world.processes[rank].gone:
                continue  # it will hear that others have gone on without it, and end
            if other.is_new:
                continue  # it has joined by a decision that was lost, and will hear of this one
            if other.member.members != decision.members:
                raise Violation(
                    f"epoch {decision.epoch} has members {decision.members} for rank {rank}, and "
                    f"{other.member.members} for rank {other.member.rank}"
                )
        if rank not in decision.members:
            raise Violation(f"rank {rank} lives and is not in {decision}")
        if decision.lost:
            self.check_loss(world, decision)
            return
        if self.write is not Write.BARE and not decision.is_held_by_all:
            # a job takes this for lost: members were cut off in the write of this version
            raise Violation(f"{decision} asks members for a version that they have not got")
        newest = max(world.committed, default=None)
        if newest is not None and decision.source.step < newest.step:
            raise Violation(f"{newest} was committed, and {decision} goes back")
        for committed in world.committed:
            is_same = committed.step == decision.source.step
            if is_same and committed.origin != decision.source.origin:
                raise Violation(f"{committed} was committed, and {decision} has another")

    def check_loss(self, world: World, decision: Decision) -> None:
        """Raise a Violation if parts are said to be lost though each has a holder that lives, has
        not left, and was not cut off in its write.
        """
        left: set[int] = set()  # as soon as one has met all others
        for process in world.processes:
            left |= process.gone
        living = [
            process
            for process in world.processes
            if process.is_alive and not process.is_announced and process.member.rank not in left
        ]
        for version in {version for process in living for version in process.memory.versions}:
            holding = [
                process.member.rank for process in living if version in process.memory.versions
            ]
            if not self.missing_parts(version, holding):
                raise Violation(f"{decision} says that parts are lost; all of {version} is there")
        # no version is whole: some part of the newest layouts must have lost all of its holders
        layouts: set[Version] = set()
        for process in living:
            member = process.member
            if member.phase > Phase.CONFIRM or member.decision is None:
                layouts.add(member.current)
            else:
                layouts.add(member.decision.source)
        newest = max(layouts, key=lambda layout: layout.epoch)
        whole = [
            process.member.rank
            for process in living
            if self.write is not Write.BARE
            or any(version.epoch == newest.epoch for version in process.memory.versions)
        ]
        if not self.missing_parts(newest, whole):
            raise Violation(f"{decision} says that parts are lost; each had a holder in {newest}")


def replaced(world: World, rank: int, process: Process) -> World:
    processes = world.processes
    return world._replace(processes=(*processes[:rank], process, *processes[rank + 1 :]))


def _no_member(rank: int) -> Member:
    """Return what stands for the member that a process is not yet."""
    return Member(rank, -1, (), None, -1, Write.LOCAL, 0, 0, Phase.RESTORE, False, frozenset(), ())


def _sent(member: Member) -> Member:
    """Return what others can see of a member that has died: which collectives it has entered."""
    return member._replace(
        members=(),
        decision=None,
        host=-1,
        origin=0,
        is_interrupted=False,
        lost=frozenset(),
        versions=(),
    )


# -- the search ------------------------------------------------------------------------------------


class Counts(NamedTuple):
    """The number of states of a search, and of those at the end of a run, by how it ended."""

    states: int
    finished: int
    lost: int


def explore(model: Model, at_end: Callable[[World], object] = lambda world: None) -> Counts:
    """Go through all states that can be reached, each once; `at_end` is called with those in which
    nothing can happen any more but a death.

    Raises:
        Violation: a property does not hold; with the events that lead there.
    """
    # equal processes, and equal stores, become one object with a number: hashing them takes longest
    interned: dict[object, tuple[int, Any]] = {}
    numbers: dict[int, int] = {}
    seen: set[tuple[object, ...]] = set()
    finished = lost = 0

    def intern(value: Any) -> Any:
        if id(value) in numbers:
            return value
        number, value = interned.setdefault(value, (len(interned), value))
        numbers[id(value)] = number
        return value

    def canonical(world: World) -> tuple[tuple[object, ...], World]:
        processes = tuple(map(intern, world.processes))
        stores = intern(world.stores)
        key = [numbers[id(process)] for process in processes]
        key.append(numbers[id(stores)])
        rest = (
            world.committed,
            world.deaths_left,
            world.failures_left,
            world.failed,
            world.leavers_left,
            world.changes,
            world.joiners_left,
            world.strays,
        )
        return (*key, *rest), World(processes, stores, *rest)

    start = model.start()
    key, start = canonical(start)
    seen.add(key)
    path: list[str] = []
    stack = [iter([("start", start)])]
    try:
        while stack:
            following = next(stack[-1], None)
            if following is None:
                stack.pop()
                if path:
                    path.pop()
                continue
            event, world = following
            path.append(event)
            if any(process.is_stopped for process in world.processes):
                lost += 1  # what follows is a job that starts again, from a checkpoint
                path.pop()
                continue
            successors: list[tuple[str, World]] = []
            can_go_on = False
            for next_event, after in model.successors(world):
                is_fault = _faults_left(after) < _faults_left(world)
                can_go_on = can_go_on or not is_fault
                key, after = canonical(after)
                if key not in seen:
                    seen.add(key)
                    successors.append((next_event, after))
            if not can_go_on:
                finished += 1
                check_finished(model, world)
                at_end(world)
            stack.append(iter(successors))
    except Violation as violation:
        violation.add_note("\n".join(path))
        raise
    return Counts(len(seen), finished, lost)


def _faults_left(world: World) -> int:
    return world.deaths_left + world.failures_left + world.leavers_left


def check_finished(model: Model, world: World) -> None:
    """Raise a Violation unless all living members have finished, together."""
    # a process that no member has asked for reads that all have finished
    living = [p for p in world.processes if p.is_alive and not p.has_left and not p.is_announced]
    for process in living:
        member = process.member
        if member.is_interrupted or member.step < model.steps or member.phase is not Phase.COMPUTE:
            raise Violation(f"deadlock: rank {member.rank} waits in {member}")
        if process.memory.versions != {member.current}:
            raise Violation(f"rank {member.rank} has {process.memory}, not {member.current}")
    if len({process.member.epoch for process in living}) > 1:
        raise Violation(f"members of several epochs: {living}")
