"""Every interleaving of a step and of the agreement after one and two deaths, by `model.py`."""

from __future__ import annotations

from itertools import combinations

import pytest

from shardmesh.mesh.elastic import protocol
from shardmesh.mesh.elastic.protocol import Phase, Report, Version, Write
from tests.mesh.elastic.model import Model, Violation, World, explore
from tests.tiers import slow

LOCAL, UNDO, BARE = Write.LOCAL, Write.UNDO, Write.BARE


@pytest.mark.parametrize(
    "model",
    [
        Model(2, 2, deaths=1, steps=2),
        Model(2, 2, deaths=1, write=UNDO),
        Model(2, 2, deaths=1, write=BARE),
        Model(2, 2, deaths=1, host=3),
        Model(2, 2, deaths=0, failures=1),
        slow(Model(2, 2, deaths=0, steps=2, failures=2)),
        slow(Model(2, 2, deaths=1, failures=1)),
        slow(Model(2, 2, deaths=1, failures=1, write=UNDO)),
        slow(Model(2, 2, deaths=2, failures=1)),
        slow(Model(2, 2, deaths=2)),
        slow(Model(2, 2, deaths=2, host=3)),
        slow(Model(2, 2, deaths=2, steps=2)),
        slow(Model(2, 2, deaths=2, write=UNDO)),
        slow(Model(2, 2, deaths=2, write=BARE)),
        slow(Model(1, 4, deaths=3)),
        Model(2, 1, deaths=0, steps=2, leavers=1),
        Model(1, 3, deaths=1, leavers=1),
        Model(1, 3, deaths=1, leavers=1, host=2),
        slow(Model(1, 3, deaths=1, leavers=2)),
        slow(Model(2, 1, deaths=1, leavers=1, write=UNDO)),
        slow(Model(2, 2, deaths=1, leavers=1)),
        slow(Model(1, 3, deaths=2, leavers=1)),
        Model(2, 1, deaths=0, steps=2, joiners=1),
        Model(1, 2, deaths=1, steps=2, joiners=1),
        Model(1, 2, deaths=1, host=1, joiners=1),
        slow(Model(1, 2, deaths=1, write=UNDO, joiners=1)),
        slow(Model(1, 3, deaths=2, joiners=1)),
        slow(Model(2, 2, deaths=1, joiners=1)),
        slow(Model(1, 2, deaths=0, failures=1, joiners=1)),
        slow(Model(3, 2, deaths=1, steps=2)),
        slow(Model(3, 2, deaths=1, host=5, write=UNDO)),
    ],
    ids=repr,
)
def test_no_interleaving_is_wrong(model: Model):
    counts = explore(model)
    assert counts.finished
    # a rank that has left holds nothing any more, and one alone does not leave
    gone = model.deaths + (model.leavers if model.deaths and model.parts > 1 else 0)
    one_part_can_end = gone >= model.replicas or model.write is BARE
    assert bool(counts.lost) == one_part_can_end


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("host", [0, 5])
def test_three_parts_on_two_replicas_with_two_deaths(host: int):
    counts = explore(Model(3, 2, deaths=2, host=host))
    assert counts.finished
    assert counts.lost


@pytest.mark.parametrize(
    ("mutation", "violation", "deaths", "write"),
    [
        ("no vote", "parts are lost; each had a holder|goes back|have not got", 1, LOCAL),
        ("commit alone", "goes back|committed twice|have not got", 1, UNDO),
        ("not persisted", "deadlock", 1, LOCAL),
        ("every rank decides", "has members", 2, LOCAL),
        ("stale reports", "parts are lost; all of", 2, LOCAL),
        ("no confirm", "parts are lost; each had a holder", 2, LOCAL),
    ],
)
def test_a_broken_protocol_is_noticed(mutation: str, violation: str, deaths: int, write: Write):
    with pytest.raises(Violation, match=violation):
        explore(Model(2, 2, deaths, write=write, mutation=mutation))


@pytest.mark.parametrize("mutation", ["no hand-over", "no meeting"])
def test_parts_are_lost_with_a_rank_that_leaves_too_early(mutation: str):
    assert explore(Model(2, 1, deaths=0, leavers=1, mutation=mutation)).lost


def test_a_process_that_joins_must_hear_that_others_go_on_without_it():
    """It has joined by a decision that two deaths have kept from the others."""
    with pytest.raises(Violation, match="deadlock: rank 3 waits"):
        explore(Model(1, 3, deaths=2, joiners=1, mutation="waits when left out"))


def test_a_member_that_takes_itself_for_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """It reads the decision of its own epoch when it is interrupted again."""
    monkeypatch.setattr(protocol, "is_left_out", lambda one, read: read.epoch == one.epoch)
    with pytest.raises(Violation, match="lives, and would end"):
        explore(Model(1, 2, deaths=0, failures=2))


def test_a_rank_that_leaves_must_hear_that_others_have_met():
    """Or it waits for them for ever: they have met before a death of which it hears first."""
    with pytest.raises(Violation, match="deadlock: rank 0 waits"):
        explore(Model(1, 3, deaths=1, leavers=1, mutation="not told"))


def test_the_newest_version_alone_is_not_enough(monkeypatch: pytest.MonkeyPatch):
    """If survivors went on from the newest version that is whole, though not all of them have it,
    those that do would give up the one before, and a second death could leave neither."""

    def newest(reports, missing_parts):
        versions = {version for told in reports for version in told.versions}
        providers = {
            version: tuple(sorted(told.rank for told in reports if version in told.versions))
            for version in versions
        }
        best = max(
            sorted(versions),
            key=lambda v: (not missing_parts(v, providers[v]), v.step, v.epoch),
        )
        return best, providers[best]

    monkeypatch.setattr(protocol, "_choose_version", newest)
    with pytest.raises(Violation):
        explore(Model(2, 2, deaths=2))


@pytest.mark.parametrize(
    "model", [Model(1, 2, deaths=1), slow(Model(2, 2, deaths=1)), slow(Model(1, 3, deaths=2))]
)
def test_reduced_search(model: Model):
    """The search that takes some events at once ends where one that tries all orders ends."""
    assert _ends(model) == _ends(Model(model.parts, model.replicas, model.deaths, is_reduced=False))


def _ends(model: Model) -> set[tuple[object, ...]]:
    """Return how runs end: for each rank the epoch and the version that it has."""
    ends: set[tuple[object, ...]] = set()

    def add(world: World) -> None:
        living = [process.member for process in world.processes if process.is_alive]
        ends.add(tuple((member.rank, member.current) for member in living))

    explore(model, add)
    return ends


# -- what the functions say ------------------------------------------------------------------------


def _reports(*versions: tuple[Version, ...]) -> dict[int, Report]:
    committed = Version(0, 0, 0, (0, 1, 2, 3))
    return {rank: Report(rank, 0, committed, held) for rank, held in enumerate(versions)}


def _missing(version: Version, ranks: object) -> tuple[int, ...]:
    """Return the missing ones of two parts, of which ranks 0, 2 and 1, 3 have one each."""
    return tuple(part for part in (0, 1) if not {part, part + 2} & set(ranks))  # type: ignore[call-overload]


def test_a_step_that_all_can_complete_is_completed():
    members = (0, 1, 2, 3)
    before, after = Version(0, 0, 0, members), Version(1, 0, 0, members)
    leader = protocol.lose(protocol.first_member(1, members, 0), [0])
    reports = _reports((), (after, before), (after, before), (after,))
    decision = protocol.decide(leader, reports, None, _missing)
    assert decision is not None
    assert (decision.epoch, decision.members, decision.source) == (1, (1, 2, 3), after)
    assert decision.lost == ()


def test_a_step_that_some_cannot_complete_is_replayed():
    members = (0, 1, 2, 3)
    before, after = Version(0, 0, 0, members), Version(1, 0, 0, members)
    leader = protocol.lose(protocol.first_member(0, members, 0), [3])
    decision = protocol.decide(
        leader, _reports((after, before), (after, before), (before,)), None, _missing
    )
    assert decision is not None
    assert decision.source == before


def test_what_nobody_holds_is_said():
    members = (0, 1, 2, 3)
    before = Version(0, 0, 0, members)
    leader = protocol.lose(protocol.first_member(0, members, 0), [1, 3])
    decision = protocol.decide(leader, _reports((before,), (), (before,)), None, _missing)
    assert decision is not None
    assert decision.lost == (1,)
    decision = protocol.decide(leader, _reports((), (), ()), None, _missing)
    assert decision is not None
    assert (decision.source, decision.providers, decision.lost) == (before, (), (0, 1))


BEFORE_IT_JOINED, AFTER_IT_JOINED = Version(5, 0, 0, (0, 1, 2)), Version(5, 0, 1, (0, 1, 2, 3))
BOTH = (AFTER_IT_JOINED, BEFORE_IT_JOINED)


@pytest.mark.parametrize(
    ("lost", "versions"),
    [
        # some have confirmed, and all have what was before, but for the one that has joined
        (2, {0: BOTH, 1: (BEFORE_IT_JOINED,), 3: (AFTER_IT_JOINED,)}),
        # it has received nothing yet, and all others have both
        (0, {1: BOTH, 2: BOTH, 3: ()}),
    ],
)
def test_a_loss_while_a_rank_joins(lost: int, versions: dict[int, tuple[Version, ...]]):
    """Survivors go on from what was before it has joined, and do not ask it for that."""
    before, after = BEFORE_IT_JOINED, AFTER_IT_JOINED
    decision = protocol.Decision(1, after.members, before, before.members, ())
    leader = protocol.interrupt(protocol.first_member(min(versions), before.members, 0))
    leader = protocol.lose(protocol.adopt(leader, decision), [lost])
    reports = {rank: Report(rank, 1, after, held) for rank, held in versions.items()}
    decision = protocol.decide(leader, reports, None, lambda *_: ())
    assert decision is not None
    assert decision.source == before
    assert decision.providers == tuple(rank for rank in before.members if rank != lost)
    assert decision.is_held_by_all


def test_a_leader_waits_for_all_that_it_does_not_know_to_be_lost():
    before = Version(0, 0, 0, (0, 1, 2, 3))
    leader = protocol.lose(protocol.first_member(0, (0, 1, 2, 3), 0), [1])
    reports = _reports((before,), (before,), (before,))
    assert protocol.decide(leader, reports, None, _missing) is None
    follower = protocol.lose(protocol.first_member(2, (0, 1, 2, 3), 0), [1, 3])
    assert protocol.decide(follower, reports, None, _missing) is None


def test_the_store_moves_only_with_its_host():
    member = protocol.first_member(2, (0, 1, 2, 3), host=1)
    assert protocol.lose(member, [0]).store_host == 1
    assert protocol.lose(member, [1]).store_host == 0
    assert protocol.lose(member, [0, 1]).store_host == 2


def test_an_optimizer_that_does_not_communicate_is_not_interrupted():
    member = protocol.first_member(0, (0, 1), 0)
    member = protocol.enter_write(protocol.enter_vote(protocol.enter_reductions(member)))
    member = protocol.lose(member, [1])
    assert not member.is_interrupted
    member = protocol.finish_write(member)
    assert member.step == 1
    assert protocol.lose(member, []).is_interrupted


def test_phases_are_taken_in_order():
    member = protocol.first_member(3, (0, 3), 0)
    with pytest.raises(ValueError, match="rank 3 is in COMPUTE, and cannot leave VOTE"):
        protocol.enter_write(member)
    with pytest.raises(ValueError, match="interrupted in COMPUTE"):
        protocol.enter_reductions(protocol.lose(member, [0]))
    assert member.phase is Phase.COMPUTE


def test_at_most_one_side_of_a_cut_network_goes_on():
    members = range(5)
    for n in range(6):
        for side in combinations(members, n):
            other = set(members) - set(side)
            sides = [protocol.may_continue(members, ranks, ()) for ranks in (side, other)]
            assert sum(sides) == 1
    assert protocol.may_continue([0, 1, 2, 3], [0, 1], [])
    assert not protocol.may_continue([0, 1, 2, 3], [2, 3], [])
    assert protocol.may_continue([0, 1, 2, 3], [2, 3], [0])
    assert protocol.may_continue([0, 1, 2, 3], [3], [0, 1, 2])
    assert not protocol.may_continue([0, 1, 2, 3], [], [0, 1, 2, 3])
