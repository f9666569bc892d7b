"""Of the sides of a cut network at most one goes on, in every interleaving: ranks that suspect each
other without reason, at any time and in any pairs, never commit two versions of a step.

What a rank does with a suspicion is what `membership.py` does: it asks `may_continue` with the
members of the last epoch that all of its members have confirmed, and ends if it may not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from shardmesh.mesh.elastic import protocol
from shardmesh.mesh.elastic.protocol import Decision, Member, Phase, Report, Version
from tests.tiers import slow

STEPS = 2
PAIRS = ((0, 2), (1, 0), (2, 0), (0, 1))

# what ranks have entered: (epoch, members, step, phase, rank)
Entry = tuple[int, tuple[int, ...], int, Phase, int]


class Rank(NamedTuple):
    """A process.

    Attributes:
        electorate: the members of the last epoch that it knows to be confirmed by all of them.
        is_over: whether it has ended, since it may not go on.
    """

    member: Member
    electorate: tuple[int, ...]
    is_over: bool = False


class Store(NamedTuple):
    """What is in the store that a rank serves."""

    decision: Decision | None = None
    reports: tuple[Report, ...] = ()


class World(NamedTuple):
    """A state of the search.

    Attributes:
        committed: (step, epoch, members) of the steps that some rank has taken for committed.
        suspicions: how many are still to come.
    """

    ranks: tuple[Rank, ...]
    stores: tuple[Store, ...]
    entered: frozenset[Entry]
    committed: frozenset[tuple[int, int, tuple[int, ...]]]
    suspicions: int


class Violation(AssertionError):
    """Two versions of a step are committed."""


@dataclass(frozen=True)
class Model:
    """A job whose ranks all hold the whole state.

    Attributes:
        size: of the job.
        suspicions: how often a rank takes another one, which lives, for lost.
        pairs: which rank may suspect which other one; all if there are none.
        counts_adopted: whether ranks ask `may_continue` with the members of the epoch that they
            have adopted, confirmed or not: a protocol that is broken.
    """

    size: int
    suspicions: int
    counts_adopted: bool = False
    pairs: tuple[tuple[int, int], ...] = ()

    def start(self) -> World:
        members = tuple(range(self.size))
        ranks = tuple(Rank(protocol.first_member(r, members, 0), members) for r in members)
        stores = (Store(),) * self.size
        return World(ranks, stores, frozenset(), frozenset(), self.suspicions)

    def successors(self, world: World) -> Iterator[World]:
        """Yield the states that may be next, in each of which ranks have done what only adds to
        what others may wait for: reported, entered barriers.
        """
        return map(self.settled, self.events(world))

    def settled(self, world: World) -> World:
        for rank in world.ranks:
            member = rank.member
            if rank.is_over:
                continue
            if member.is_interrupted:
                world = self.report(world, member)
            elif member.phase is Phase.COMPUTE and member.step < STEPS:
                world = entered(world, rank, protocol.enter_vote(protocol.enter_reductions(member)))
            elif member.phase is Phase.RESTORE:
                world = entered(world, rank, protocol.enter_confirm(member))
        return world

    def report(self, world: World, member: Member) -> World:
        """Return the state after a report, if the store that the rank turns to is there."""
        host = member.store_host
        store, told = world.stores[host], protocol.report(member)
        if world.ranks[host].is_over or told in store.reports:
            return world
        others = [one for one in store.reports if one.rank != member.rank]
        return replaced(world, host, store._replace(reports=tuple(sorted([*others, told]))))

    def events(self, world: World) -> Iterator[World]:
        for number, rank in enumerate(world.ranks):
            if rank.is_over:
                continue
            member = rank.member
            if world.suspicions:
                for other in member.survivors:
                    if other != number and (not self.pairs or (number, other) in self.pairs):
                        yield self.suspect(world, rank, other)
            if member.is_interrupted:
                yield from self.agree(world, rank)
                continue
            yield from self.proceed(world, rank)
            if self.is_disturbed(world, member):
                yield moved(world, rank._replace(member=protocol.interrupt(member)))

    def suspect(self, world: World, rank: Rank, other: int) -> World:
        member = protocol.lose(rank.member, [other])
        electorate = member.members if self.counts_adopted else rank.electorate
        goes_on = protocol.may_continue(electorate, member.survivors, ())
        after = rank._replace(member=member, is_over=not goes_on)
        return moved(world, after)._replace(suspicions=world.suspicions - 1)

    def is_disturbed(self, world: World, member: Member) -> bool:
        """Return whether another member of its epoch has left the step, which it may hear of."""
        for other in (world.ranks[number] for number in member.members):
            has_left = other.member.is_interrupted and other.member.epoch == member.epoch
            if has_left or other.is_over or other.member.epoch > member.epoch:
                return True
        return False

    def proceed(self, world: World, rank: Rank) -> Iterator[World]:
        member = rank.member
        if member.phase is Phase.VOTE and have_all_entered(world, member):
            written = protocol.finish_write(protocol.enter_write(member))
            committed = world.committed | {(written.step, member.epoch, member.members)}
            if len({version for version in committed if version[0] == written.step}) > 1:
                raise Violation(sorted(committed))
            yield moved(world, rank._replace(member=written))._replace(committed=committed)
        elif member.phase is Phase.CONFIRM and have_all_entered(world, member):
            done = protocol.finish_confirm(member)
            yield moved(world, rank._replace(member=done, electorate=member.members))

    def agree(self, world: World, rank: Rank) -> Iterator[World]:
        member = rank.member
        host = member.store_host
        if world.ranks[host].is_over:
            return  # it will be suspected
        store = world.stores[host]
        last = store.decision
        if last is not None and last.epoch > member.epoch:
            if member.rank in last.members:
                yield moved(world, rank._replace(member=protocol.adopt(member, last)))
            else:
                yield moved(world, rank._replace(is_over=True))
            return
        reports = {one.rank: one for one in store.reports}
        decision = protocol.decide(member, reports, last, _missing)
        if decision is not None:
            yield replaced(world, host, store._replace(decision=decision))


def _missing(version: Version, ranks: Collection[int]) -> tuple[int, ...]:
    return () if ranks else (0,)


def moved(world: World, rank: Rank) -> World:
    number = rank.member.rank
    return world._replace(ranks=(*world.ranks[:number], rank, *world.ranks[number + 1 :]))


def replaced(world: World, host: int, store: Store) -> World:
    return world._replace(stores=(*world.stores[:host], store, *world.stores[host + 1 :]))


def entered(world: World, rank: Rank, member: Member) -> World:
    entry = (member.epoch, member.members, member.step, member.phase, member.rank)
    return moved(world, rank._replace(member=member))._replace(entered=world.entered | {entry})


def have_all_entered(world: World, member: Member) -> bool:
    """Return whether all members have entered this member's barrier, at some time."""
    place = member.epoch, member.members, member.step, member.phase
    return all((*place, other) in world.entered for other in member.members)


def explore(model: Model) -> tuple[int, set[frozenset[tuple[int, int, tuple[int, ...]]]]]:
    """Return the number of states that can be reached, and what was committed at ends.

    Raises:
        Violation: two versions of a step are committed.
    """
    start = model.settled(model.start())
    seen = {start}
    stack = [start]
    ends = set()
    while stack:
        world = stack.pop()
        following = list(model.successors(world))
        if not following:
            ends.add(world.committed)
        for after in following:
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return len(seen), ends


@pytest.mark.parametrize(
    "model",
    [Model(2, 2), Model(3, 2), slow(Model(3, 3))],
    ids=repr,
)
def test_ranks_that_suspect_each_other_commit_one_version(model: Model):
    _, ends = explore(model)
    assert any(ends)  # somebody goes on


def test_the_members_of_an_epoch_count_once_all_have_confirmed_it():
    """Rank 0 decides on ranks 0 and 1, and rank 1 goes on with rank 2, before it reads that. Of the
    two members that rank 0 has adopted it is the lowest, and would go on alone.
    """
    with pytest.raises(Violation):
        explore(Model(3, 4, True, PAIRS))
    _, ends = explore(Model(3, 4, pairs=PAIRS))
    assert any(ends)
