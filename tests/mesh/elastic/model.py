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

Next to what a member believes to hold (`Member.copies`), the model has what is in its memory: whole
versions, and reduced gradients.

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
from shardmesh.mesh.elastic.protocol import Copy, Decision, Member, Phase, Report, Write


class Memory(NamedTuple):
    """What a process has in memory.

    Attributes:
        versions: whole versions of its parts.
        grads: the version that its reduced gradients lead to; None without gradients.
    """

    versions: frozenset[Copy]
    grads: Copy | None = None


class Store(NamedTuple):
    """The contents of the store that a rank serves."""

    host: int
    decision: Decision | None = None
    reports: tuple[Report, ...] = ()

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


class World(NamedTuple):
    """A state of the search.

    Attributes:
        committed: the versions that some rank, dead or alive, has taken for committed, by step.
        failed: the epochs in which a step has failed on a rank that lives; the others hear of it.
    """

    processes: tuple[Process, ...]
    stores: tuple[Store, ...]
    committed: tuple[Copy, ...]
    deaths_left: int
    failures_left: int = 0
    failed: tuple[int, ...] = ()


class Violation(AssertionError):
    """A property does not hold."""


@dataclass(frozen=True)
class Model:
    """A job and what can happen to it.

    Attributes:
        parts, replicas: how the state is laid out at the start.
        deaths: how many processes may die.
        failures: how often a step may fail on a rank that lives.
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
    write: Write = Write.LOCAL
    mutation: str = ""
    is_reduced: bool = True
    _holders: dict[Copy, dict[int, list[int]]] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        return self.parts * self.replicas

    def start(self) -> World:
        processes: list[Process] = []
        for rank in range(self.size):
            member = protocol.first_member(rank, range(self.size), self.host, self.write)
            processes.append(Process(member, Memory(frozenset({member.current}))))
        return World(tuple(processes), (Store(self.host),), (), self.deaths, self.failures)

    # -- where parts are ---------------------------------------------------------------------------

    def holders(self, version: Copy) -> dict[int, list[int]]:
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

    def missing_parts(self, version: Copy, ranks: Collection[int]) -> tuple[int, ...]:
        return tuple(
            part for part, holders in self.holders(version).items() if not set(holders) & set(ranks)
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
            if world.deaths_left:
                yield f"{rank} dies", self.die(world, rank)
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
        if member.epoch in world.failed:
            yield f"{rank} hears of a failure", interrupted

    def settled(self, world: World) -> World:
        """Return the state after what comes next in any case, so that the search has fewer orders
        to go through (the module's docstring says why none of interest is left out).
        """
        before = None
        while before is not world:
            before = world
            for rank in range(self.size):
                world = self.settle_rank(world, rank)
        return world

    def settle_rank(self, world: World, rank: int) -> World:
        """Return the state after what this rank does next in any case; the same one if that is
        nothing.
        """
        process = world.processes[rank]
        member = process.member
        if not process.is_alive or process.is_stopped:
            return world
        if member.phase is Phase.COMPUTE and not member.is_interrupted:
            if member.step < self.steps:
                return self.move(world, rank, protocol.enter_reductions(member))
            return world
        dead = [other for other in member.survivors if not world.processes[other].is_alive]
        if dead and (member.is_interrupted or self.is_stuck(world, rank)):
            lowest = next(r for r in member.members if world.processes[r].is_alive)
            if rank != lowest or (len(dead) == 1 and not member.lost):
                return self.learn(world, rank, dead)
        may_fail = world.failures_left or member.epoch in world.failed
        if not dead and not world.deaths_left and (member.is_interrupted or not may_fail):
            events = self.agree if member.is_interrupted else self.proceed
            for _, after in events(world, rank):
                return after
        return world

    def is_stuck(self, world: World, rank: int) -> bool:
        """Return whether a member waits for one that will not come: it is dead, or has been
        interrupted, before it entered the collective.
        """
        member = world.processes[rank].member
        if member.phase is Phase.COMPUTE:
            return False
        for other in self.awaited(member):
            process = world.processes[other]
            if self.all_entered(world, member, [other], member.phase):
                continue
            if not process.is_alive or process.member.is_interrupted:
                return True
        return False

    def die(self, world: World, rank: int) -> World:
        process = world.processes[rank]
        dead = Process(_sent(process.member), Memory(frozenset()), False)
        stores = tuple(store for store in world.stores if store.host != rank)
        after = replaced(world, rank, dead)
        return self.forget(after._replace(stores=stores, deaths_left=world.deaths_left - 1))

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
        stores[host] = stores.get(host, Store(host)).with_report(protocol.report(process.member))
        return replaced(world, rank, process._replace(reported_to=host))._replace(
            stores=tuple(stores[at] for at in sorted(stores))
        )

    def check_claims(self, process: Process) -> None:
        """Raise a Violation if a member reports a version that it neither has nor can complete."""
        member, (versions, grads) = process.member, process.memory
        for version in member.copies:
            can_complete = version == grads and member.current in versions
            if version not in versions and not can_complete:
                raise Violation(f"rank {member.rank} reports {version} and has {process.memory}")

    # -- a step ------------------------------------------------------------------------------------

    def proceed(self, world: World, rank: int) -> Iterator[tuple[str, World]]:
        """Yield what a member does that is not interrupted."""
        member, memory = world.processes[rank].member, world.processes[rank].memory
        phase = member.phase
        if phase is Phase.COMPUTE:
            if member.step < self.steps:
                yield f"{rank} reduces", self.move(world, rank, protocol.enter_reductions(member))
            return
        skipped = {Phase.VOTE: "no vote", Phase.COMMIT: "commit alone", Phase.CONFIRM: "no confirm"}
        if self.mutation != skipped.get(phase, "none") and not self.all_entered(
            world, member, self.awaited(member), phase
        ):
            return
        if phase is Phase.REDUCE:
            yield (
                f"{rank} votes",
                self.move(
                    world, rank, protocol.enter_vote(member), memory._replace(grads=member.next)
                ),
            )
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
            yield (
                f"{rank} frees what it had",
                self.move(
                    world,
                    rank,
                    protocol.finish_confirm(member),
                    Memory(frozenset({member.current})),
                ),
            )

    def move(self, world: World, rank: int, member: Member, memory: Memory | None = None) -> World:
        process = world.processes[rank]
        memory = process.memory if memory is None else memory
        return replaced(world, rank, process._replace(member=member, memory=memory))

    def awaited(self, member: Member) -> Collection[int]:
        """Return the members that must enter the collective that this one waits in."""
        if member.phase is Phase.REDUCE:
            parts = [held for held in self.holders(member.current).values() if member.rank in held]
            return set(chain([member.rank], *parts))
        if member.phase is Phase.RESTORE:
            assert member.decision is not None
            held = self.holders(member.decision.source)
            wanted = [
                part for part, ranks in self.holders(member.current).items() if member.rank in ranks
            ]
            providers = member.decision.providers
            senders = [[r for r in held[part] if r in providers] for part in wanted]
            return {member.rank if member.rank in ranks else ranks[0] for ranks in senders}
        return member.members

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
        return True

    def commit(self, world: World, rank: int, after: Member) -> World:
        version = after.current
        for other in world.committed:
            if other.step == version.step and other.origin != version.origin:
                raise Violation(f"step {version.step} is committed twice: {other} and {version}")
        committed = tuple(sorted({*world.committed, version}))
        world = self.move(world, rank, after, Memory(frozenset({version})))
        return world._replace(committed=committed)

    # -- a loss ------------------------------------------------------------------------------------

    def agree(self, world: World, rank: int) -> Iterator[tuple[str, World]]:
        """Yield what a member does that takes part in an agreement."""
        process = world.processes[rank]
        member = process.member
        store = next((s for s in world.stores if s.host == member.store_host), None)
        if store is None or process.reported_to != store.host:
            return
        last = store.decision
        if last is not None and last.epoch > member.epoch:
            yield f"{rank} adopts {last}", self.adopt(world, rank, last)
            return
        reports = {told.rank: told for told in store.reports}
        if self.mutation == "stale reports":
            last = None
        if self.mutation == "every rank decides":
            member = member._replace(rank=member.leader)
        decision = protocol.decide(member, reports, last, self.missing_parts)
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
        if decision.lost:
            return replaced(world, rank, process._replace(is_stopped=True))
        member = protocol.adopt(process.member, decision)
        versions, grads = process.memory
        if decision.source in member.copies and decision.source not in versions:
            # the step is completed: the optimizer writes the version before, with the gradients
            before = process.member.current
            if grads != decision.source or before not in versions:
                raise Violation(f"rank {rank} cannot make {decision.source}: {process}")
            versions = (versions - {before}) | {decision.source}
        elif decision.source in member.copies:
            versions = frozenset({decision.source})
        process = Process(member, Memory(versions))
        return self.forget(replaced(world, rank, process))

    def check_decision(self, world: World, rank: int, decision: Decision) -> None:
        for other in world.processes:
            if not other.is_alive or other.member.epoch != decision.epoch:
                continue
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
        newest = max(world.committed, default=None)
        if newest is not None and decision.source.step < newest.step:
            raise Violation(f"{newest} was committed, and {decision} goes back")
        for committed in world.committed:
            is_same = committed.step == decision.source.step
            if is_same and committed.origin != decision.source.origin:
                raise Violation(f"{committed} was committed, and {decision} has another")

    def check_loss(self, world: World, decision: Decision) -> None:
        """Raise a Violation if parts are said to be lost though each has a holder that lives, and
        that was not cut off in its write.
        """
        living = [process for process in world.processes if process.is_alive]
        for version in {copy for process in living for copy in process.memory.versions}:
            holding = [
                process.member.rank for process in living if version in process.memory.versions
            ]
            if not self.missing_parts(version, holding):
                raise Violation(f"{decision} says that parts are lost; all of {version} is there")
        # no version is whole: some part of the newest layouts must have lost all of its holders
        layouts: set[Copy] = set()
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

    def exchange(self, world: World, rank: int) -> Iterator[tuple[str, World]]:
        """A member receives its parts of the new layouts from members that hold them, once these
        have entered the exchange.
        """
        process = world.processes[rank]
        member = process.member
        decision = member.decision
        assert decision is not None
        held = self.holders(decision.source)
        wanted = [part for part, ranks in self.holders(member.current).items() if rank in ranks]
        for part in wanted:
            senders = [other for other in held[part] if other in decision.providers]
            sender = rank if rank in senders else senders[0]
            if not self.all_entered(world, member, [sender], Phase.RESTORE):
                return
        yield (
            f"{rank} has its parts",
            replaced(
                world,
                rank,
                process._replace(
                    member=protocol.enter_confirm(member),
                    memory=Memory(process.memory.versions | {member.current}),
                ),
            ),
        )


def replaced(world: World, rank: int, process: Process) -> World:
    processes = world.processes
    return world._replace(processes=(*processes[:rank], process, *processes[rank + 1 :]))


def _sent(member: Member) -> Member:
    """Return what others can see of a member that has died: which collectives it has entered."""
    return member._replace(
        members=(),
        decision=None,
        host=-1,
        origin=0,
        is_interrupted=False,
        lost=frozenset(),
        copies=(),
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
        rest = world.committed, world.deaths_left, world.failures_left, world.failed
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
    return world.deaths_left + world.failures_left


def check_finished(model: Model, world: World) -> None:
    """Raise a Violation unless all living members have finished, together."""
    living = [process for process in world.processes if process.is_alive]
    for process in living:
        member = process.member
        if member.is_interrupted or member.step < model.steps or member.phase is not Phase.COMPUTE:
            raise Violation(f"deadlock: rank {member.rank} waits in {member}")
        if process.memory.versions != {member.current}:
            raise Violation(f"rank {member.rank} has {process.memory}, not {member.current}")
    if len({process.member.epoch for process in living}) > 1:
        raise Violation(f"members of several epochs: {living}")
