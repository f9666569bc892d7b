"""How the members of a job take a step, and how survivors of a loss agree on how to go on.

This is the protocol as pure functions, without I/O. docs/elastic.md explains it, and
tests/mesh/elastic goes through its interleavings.

    a step     COMPUTE -> REDUCE -> VOTE -> WRITE [-> COMMIT] -> COMPUTE of the next step
                                    |                |
                                    all have voted   all have written, if an optimizer communicates

    a loss     interrupted in a wait -> RESTORE -> CONFIRM -> COMPUTE
               |                        |          |
               reports, decision        |          all have their new parts; old ones are freed
                                        parts are exchanged, old ones are kept

Each function takes what a member knows and returns what it knows then. The caller does what they
stand for: it computes, waits in collectives, and reads and writes the store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import IntEnum
from typing import NamedTuple


class Phase(IntEnum):
    """What a member is doing. Phases of one epoch are in the order in which they are entered."""

    RESTORE = 0
    CONFIRM = 1
    COMPUTE = 2
    REDUCE = 3
    VOTE = 4
    WRITE = 5
    COMMIT = 6


class Write(IntEnum):
    """How an optimizer writes.

    Attributes:
        LOCAL: its step does not communicate, so a member that has begun it finishes it.
        UNDO: its step communicates and may be cut off; a copy of all that it writes is kept until
            the commit.
        BARE: its step communicates, and there is no such copy: a member that is cut off has
            nothing.
    """

    LOCAL = 0
    UNDO = 1
    BARE = 2


class Version(NamedTuple):
    """A version of the state in one set of layouts.

    Attributes:
        step: the number of optimizer steps that it has seen.
        origin: the epoch whose members computed the last of these steps.
        epoch: the epoch in whose layouts it is.
        members: the members of that epoch, who hold it.
    """

    step: int
    origin: int
    epoch: int
    members: tuple[int, ...]


class Decision(NamedTuple):
    """What survivors have agreed on.

    Attributes:
        epoch: the number of the membership that begins, one more than the one before.
        members: the ranks that go on.
        source: the version from which they go on.
        providers: the members that hold it.
        lost: the parts of it that no member holds.
    """

    epoch: int
    members: tuple[int, ...]
    source: Version
    providers: tuple[int, ...]
    lost: tuple[int, ...]

    @property
    def is_held_by_all(self) -> bool:
        """Whether every member has the version, as far as nothing of it is lost.

        Those that have joined since are not asked.
        """
        return set(self.providers) >= set(self.members) & set(self.source.members)


class Report(NamedTuple):
    """What a survivor tells the others; it does nothing else until there is a decision.

    Attributes:
        rank: whose it is.
        epoch: the epoch that it is in.
        committed: the last version of which it knows that it is committed.
        versions: the versions that it holds, or can complete by itself.
    """

    rank: int
    epoch: int
    committed: Version
    versions: tuple[Version, ...]


class Member(NamedTuple):
    """What a rank knows of the job.

    Attributes:
        rank: the rank.
        epoch: the number of the current membership, 0 at the start.
        members: the ranks of this epoch, ascending.
        decision: by which this epoch began; None for the first.
        host: the rank that served the store when this epoch began.
        write: how the optimizer writes.
        step: the number of steps of which this rank knows that they are committed.
        origin: the epoch whose members computed the last one.
        phase: what the rank is doing, or was when it was interrupted.
        is_interrupted: whether it has left that phase, and takes part in an agreement.
        lost: members of this epoch of which it knows that they have ended.
        versions: the versions that it holds, or can complete by itself, the newest first.
    """

    rank: int
    epoch: int
    members: tuple[int, ...]
    decision: Decision | None
    host: int
    write: Write
    step: int
    origin: int
    phase: Phase
    is_interrupted: bool
    lost: frozenset[int]
    versions: tuple[Version, ...]

    @property
    def current(self) -> Version:
        """The last committed version, in the layouts of this epoch."""
        return Version(self.step, self.origin, self.epoch, self.members)

    @property
    def next(self) -> Version:
        """The version that this step makes."""
        return Version(self.step + 1, self.epoch, self.epoch, self.members)

    @property
    def survivors(self) -> tuple[int, ...]:
        """The members that are alive as far as this rank knows."""
        return tuple(rank for rank in self.members if rank not in self.lost)

    @property
    def leader(self) -> int:
        """The rank that makes the decision: the lowest survivor."""
        return self.survivors[0]

    @property
    def store_host(self) -> int:
        """The rank that serves the store: the one before, or if it is lost the lowest survivor."""
        return self.survivors[0] if self.host in self.lost else self.host


def first_member(
    rank: int, members: Collection[int], host: int, write: Write = Write.LOCAL
) -> Member:
    """Return what a rank knows at the start of a job, with its state built and no step taken."""
    ranks = tuple(sorted(members))
    start = Version(0, 0, 0, ranks)
    return Member(
        rank, 0, ranks, None, host, write, 0, 0, Phase.COMPUTE, False, frozenset(), (start,)
    )


def begin_at(member: Member, step: int) -> Member:
    """Return the member of a job that begins with the state after `step` steps: a checkpoint's."""
    _check(member, Phase.COMPUTE)
    member = member._replace(step=step)
    return member._replace(versions=(member.current,))


def joining_member(rank: int, decision: Decision, host: int, write: Write) -> Member:
    """Return what a rank knows that a decision has made a member: it holds nothing yet.

    Args:
        host: the rank that serves the store in which the decision is.
    """
    source = decision.source
    return Member(
        rank,
        decision.epoch,
        decision.members,
        decision,
        host,
        write,
        source.step,
        source.origin,
        Phase.RESTORE,
        False,
        frozenset(),
        (),
    )


# -- a step ----------------------------------------------------------------------------------------


def enter_reductions(member: Member) -> Member:
    """COMPUTE -> REDUCE: backward has been computed, and the gradients' reductions are called."""
    _check(member, Phase.COMPUTE)
    return member._replace(phase=Phase.REDUCE)


def enter_vote(member: Member) -> Member:
    """REDUCE -> VOTE: this rank has the reduced gradients of all that it holds, and says so.

    With an optimizer that does not communicate it can now complete the step by itself.
    """
    _check(member, Phase.REDUCE)
    versions = (member.current,)
    if member.write is Write.LOCAL:
        versions = (member.next, *versions)
    return member._replace(phase=Phase.VOTE, versions=versions)


def enter_write(member: Member) -> Member:
    """VOTE -> WRITE: all members have voted, and the optimizer starts to write in place."""
    _check(member, Phase.VOTE)
    versions = {
        Write.LOCAL: (member.next,),
        Write.UNDO: (member.current,),
        Write.BARE: (),
    }[member.write]
    return member._replace(phase=Phase.WRITE, versions=versions)


def finish_write(member: Member) -> Member:
    """WRITE -> COMPUTE or COMMIT: this rank has written.

    If the optimizer does not communicate, the step is committed: all members have voted, so each
    that lives has written or can write by itself. Else it is once all have written: this rank says
    that it has, and waits.
    """
    _check(member, Phase.WRITE)
    if member.write is Write.LOCAL:
        return _committed(member)
    versions = (member.next,)
    if member.write is Write.UNDO:
        versions = (*versions, member.current)
    return member._replace(phase=Phase.COMMIT, versions=versions)


def finish_commit(member: Member) -> Member:
    """COMMIT -> COMPUTE: all members have written, and the step is committed.

    The copy of the version before is freed.
    """
    _check(member, Phase.COMMIT)
    return _committed(member)


def _committed(member: Member) -> Member:
    """Return the member after a step that cannot be lost while each part has a holder.

    The step's loss may be shown, and its state saved.
    """
    return member._replace(
        phase=Phase.COMPUTE, step=member.step + 1, origin=member.epoch, versions=(member.next,)
    )


# -- a loss ----------------------------------------------------------------------------------------


def is_interruptible(member: Member) -> bool:
    """Return whether a loss stops the member now: not while its optimizer writes by itself."""
    return not (member.phase is Phase.WRITE and member.write is Write.LOCAL)


def lose(member: Member, ranks: Collection[int]) -> Member:
    """any phase -> interrupted: members have ended, as the monitor says.

    A member that is in the middle of an optimizer step without communication only notes it; it is
    interrupted by its next call of this function.
    """
    lost = member.lost | (set(ranks) & set(member.members))
    stops = bool(lost) and is_interruptible(member)
    return member._replace(lost=lost, is_interrupted=member.is_interrupted or stops)


def interrupt(member: Member) -> Member:
    """any phase -> interrupted: a step has failed on a member that lives, and all give it up.

    Nobody has ended. What follows is the same agreement, among all that are left. Between two steps
    members are interrupted like this for ranks that join.
    """
    if not is_interruptible(member):
        raise ValueError(f"rank {member.rank} is in {member.phase.name}, which is not interrupted")
    return member._replace(is_interrupted=True)


def report(member: Member) -> Report:
    """Return what this survivor writes to the store, at each host that it turns to."""
    return Report(member.rank, member.epoch, member.current, member.versions)


def decide(
    member: Member,
    reports: Mapping[int, Report],
    last: Decision | None,
    missing_parts: Callable[[Version, Collection[int]], tuple[int, ...]],
    joining: Collection[int] = (),
) -> Decision | None:
    """decide(member, reports, last, missing_parts) -> what this rank is to write into the store.

    The decision takes the place of `last`; it is None if it is not this rank's turn. The leader
    waits for the reports of all that it does not know to be lost. Those of earlier epochs than
    `last` are from before it, and count as missing.

    Args:
        reports: by rank, as read from the store.
        last: the decision read from the store before; None if this store has none, because it is
            the first, or because its host took the place of one that is lost.
        missing_parts: (version, ranks) -> the parts of it that none of these ranks holds.
        joining: ranks that become members, as this rank knows.
    """
    if member.rank != member.leader or not member.is_interrupted:
        return None
    if last is not None and last.epoch > member.epoch:
        return None  # to be adopted first
    current = current_reports(member, reports, last)
    if len(current) < len(member.survivors):
        return None
    source, providers = _choose_version(list(current.values()), missing_parts)
    return Decision(
        max(told.epoch for told in current.values()) + 1,
        tuple(sorted({*member.survivors, *joining})),
        source,
        providers,
        missing_parts(source, providers),
    )


def current_reports(
    member: Member, reports: Mapping[int, Report], last: Decision | None
) -> dict[int, Report]:
    """current_reports(member, reports, last) -> those of survivors that are not from before `last`.

    Args: as `decide`.
    """
    first_epoch = 0 if last is None else last.epoch
    return {
        rank: reports[rank]
        for rank in member.survivors
        if rank in reports and reports[rank].epoch >= first_epoch
    }


def _choose_version(
    reports: Collection[Report],
    missing_parts: Callable[[Version, Collection[int]], tuple[int, ...]],
) -> tuple[Version, tuple[int, ...]]:
    """Return the version from which to go on, and the ranks that hold it.

    A version that nothing of is missing comes before others; then one that every survivor holds who
    holds any and was a member then: otherwise a further loss could leave some with this one and
    some with the one before. Then the newest step; of the same step the layouts that every survivor
    holds who was a member then, so not those that a process was to get that joins; then the newest
    layouts. If nobody holds anything, it is the last committed one, without providers.
    """
    with_any = [told for told in reports if told.versions]
    versions = {version for told in with_any for version in told.versions}
    if not versions:
        return max(told.committed for told in reports), ()

    def rank_of(version: Version) -> tuple[bool, bool, int, bool, int]:
        providers = _providers(version, reports)
        return (
            not missing_parts(version, providers),
            len(providers) == sum(told.rank in version.members for told in with_any),
            version.step,
            len(providers) == sum(told.rank in version.members for told in reports),
            version.epoch,
        )

    best = max(sorted(versions), key=rank_of)
    return best, _providers(best, reports)


def _providers(version: Version, reports: Collection[Report]) -> tuple[int, ...]:
    return tuple(sorted(told.rank for told in reports if version in told.versions))


def is_left_out(member: Member, decision: Decision) -> bool:
    """Return whether the ranks of a decision that this one reads go on without it.

    It may be of this rank's own epoch: one that has joined by a decision which was lost with the
    store before any other rank had read it.
    """
    return decision.epoch >= member.epoch and member.rank not in decision.members


def adopt(member: Member, decision: Decision) -> Member:
    """interrupted -> RESTORE: this rank has read a decision of a later epoch than its own.

    It first completes or undoes its step, so that it has `decision.source` if it is a provider, and
    keeps that until all members have confirmed.
    """
    if not member.is_interrupted or decision.epoch <= member.epoch:
        raise ValueError(
            f"rank {member.rank} of epoch {member.epoch} cannot adopt epoch {decision.epoch}: it "
            "must be interrupted, and the decision later"
        )
    source = decision.source
    return Member(
        member.rank,
        decision.epoch,
        decision.members,
        decision,
        member.store_host,
        member.write,
        source.step,
        source.origin,
        Phase.RESTORE,
        False,
        frozenset(),
        (source,) if source in member.versions else member.versions,
    )


def go_back(member: Member, step: int) -> Member:
    """RESTORE -> RESTORE: all members go back to the version of an earlier `step`.

    Parts of the decided version are lost, and a checkpoint or copies have all of the other one.
    """
    _check(member, Phase.RESTORE)
    return member._replace(step=step, origin=member.epoch)


def enter_confirm(member: Member) -> Member:
    """RESTORE -> CONFIRM: this rank has its parts of the new layouts, next to what it had."""
    _check(member, Phase.RESTORE)
    return member._replace(phase=Phase.CONFIRM, versions=(member.current, *member.versions))


def finish_confirm(member: Member) -> Member:
    """CONFIRM -> COMPUTE: all members have their new parts; what this rank had before is freed."""
    _check(member, Phase.CONFIRM)
    return member._replace(phase=Phase.COMPUTE, versions=(member.current,))


def _check(member: Member, phase: Phase) -> None:
    if member.phase is not phase or member.is_interrupted:
        state = "interrupted in" if member.is_interrupted else "in"
        raise ValueError(
            f"rank {member.rank} is {state} {member.phase.name}, and cannot leave {phase.name}"
        )


# -- who may go on ---------------------------------------------------------------------------------


def may_continue(
    members: Collection[int], survivors: Collection[int], known_dead: Collection[int]
) -> bool:
    """may_continue(members, survivors, known_dead) -> whether they may go on without the others.

    The others may only be cut off from them. Members whose end has been seen (the exit of their
    process, on their own host) count for nothing. Of the others the survivors must be more than
    half, or half with the lowest of them: so of two sides of a cut network at most one goes on.
    """
    possible = sorted(set(members) - set(known_dead))
    alive = set(survivors) & set(possible)
    if 2 * len(alive) == len(possible):
        return bool(possible) and possible[0] in alive
    return 2 * len(alive) > len(possible)
