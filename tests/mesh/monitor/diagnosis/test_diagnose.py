"""Diagnoses from trace buffers that the tests write by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardmesh.mesh.comm.recording.recorder import differ, route_of, unlike
from shardmesh.mesh.comm.recording.trace_buffer import LONG_SLOTS, Header, RankState, TraceBuffer
from shardmesh.mesh.monitor.diagnosis import diagnose
from shardmesh.mesh.monitor.diagnosis.members import Member, agree, have_all_come, read_members
from shardmesh.mesh.monitor.diagnosis.votes import minority, parties_by, worst_correspondent
from shardmesh.mesh.settings import settings
from tests.mesh.monitor.driven_ranks import DrivenRank, driven_ranks

LONG_S = 5.0  # longer than any timeout except that of stalls


@pytest.fixture
def four(tmp_path: Path) -> list[DrivenRank]:
    return driven_ranks(tmp_path, 4)


def call_on(job: list[DrivenRank], *chosen: int, **call: object) -> None:
    for rank in chosen:
        job[rank].call(**call)  # type: ignore[arg-type]


# -- nothing wrong ---------------------------------------------------------------------------------


def test_equal_calls_are_healthy(four: list[DrivenRank]) -> None:
    call_on(four, 0, 1, 2, 3)
    assert [rank.diagnosed(waited=LONG_S) for rank in four] == [None] * 4


def test_missing_ranks_are_waited_for(four: list[DrivenRank]) -> None:
    call_on(four, 1, 2)
    assert four[1].diagnosed(waited=LONG_S) is None


def test_rank_that_is_far_ahead_has_arrived(four: list[DrivenRank]) -> None:
    """Its row holds only the last collectives: what it called before is no longer known, only that
    it did.
    """
    call_on(four, 0, 1, 2)
    for _ in range(LONG_SLOTS + 6):
        four[3].call()
    found = read_members(four[0].monitor.directory, four[0].recorder(), 0)
    assert [m.came for m in found] == [True, True, True, None]
    assert four[0].diagnosed(waited=LONG_S) is None


@pytest.mark.parametrize("ahead", [1, 63, 64, 65, 1000])
def test_fingerprint_numbers_wrap(four: list[DrivenRank], ahead: int) -> None:
    """Fingerprints carry 16 bits of the number, so numbers repeat after 65,536 collectives."""
    for rank in four:
        rank.recorder().called = (1 << 16) - 2
    for _ in range(4):
        call_on(four, 0, 1, 2, 3)
    assert four[0].diagnosed((1 << 16) + 1, waited=LONG_S) is None
    assert have_all_come(read_members(four[0].monitor.directory, four[0].recorder(), (1 << 16) + 1))
    for _ in range(ahead):
        four[0].call()
    (late,) = {
        m.came
        for m in read_members(four[0].monitor.directory, four[0].recorder(), (1 << 16) + 1 + ahead)
        if m.rank
    }
    assert late is False


def test_row_of_an_earlier_round_is_ignored(four: list[DrivenRank]) -> None:
    """Collective 1024 is stored in the place of collective 0, which a slow rank still shows."""
    call_on(four, 0, 1, 2, 3)
    for _ in range(LONG_SLOTS):
        four[0].call("all_gather")
    assert [
        m.came for m in read_members(four[0].monitor.directory, four[0].recorder(), LONG_SLOTS)
    ] == [
        True,
        False,
        False,
        False,
    ]
    assert four[0].diagnosed(LONG_SLOTS, waited=LONG_S) is None


# -- mismatches ------------------------------------------------------------------------------------

OUTLIER_CALLS = {
    "operation": {"op": "all_gather", "how": ""},
    "reduction": {"how": "max"},
    "dtype": {"dtype": torch.float64},
    "shape": {"size": 8},
    "layout": {"tag": "f32[4] @ P('x') -> P(None)"},
    "purpose": {"tag": "blocks.0: sum gradients of 3 parameters"},
}


@pytest.mark.parametrize("field", OUTLIER_CALLS)
@pytest.mark.parametrize("outlier", range(4))
def test_outlier_of_four_ranks(four: list[DrivenRank], field: str, outlier: int) -> None:
    rest = [rank for rank in range(4) if rank != outlier]
    call_on(four, *rest, tag="f32[4] @ P() -> P()")
    four[outlier].call(**{"tag": "f32[4] @ P() -> P()"} | OUTLIER_CALLS[field])  # type: ignore[arg-type]
    verdicts = [rank.diagnosed() for rank in four]
    assert verdicts == [verdicts[0]] * 4
    found = verdicts[0]
    assert found is not None
    assert (found.kind, found.ranks, found.field) == ("mismatch", (outlier,), field)
    assert found.seen[0].rank == outlier
    assert {seen.rank for seen in found.seen} == {0, 1, 2, 3}
    assert all(seen.place.rpartition("/")[2].startswith("driven_ranks.py:") for seen in found.seen)
    assert (
        f"rank {outlier} called another collective than ranks {', '.join(map(str, rest))}"
        in found.text
    )


def test_the_source_of_a_broadcast(four: list[DrivenRank]) -> None:
    call_on(four, 0, 1, 2, op="broadcast", how="src=0")
    four[3].call("broadcast", "src=3")
    found = four[0].diagnosed()
    assert found is not None
    assert (found.ranks, found.field) == ((3,), "source")


@pytest.mark.parametrize(
    ("tag", "field"),
    [
        ("f64[4] @ P() -> P()", "dtype"),
        ("f32[2, 2] @ P() -> P()", "shape"),
        ("f32[4] @ P('x') -> P()", "layout"),
    ],
)
def test_layout_difference_is_named(four: list[DrivenRank], tag: str, field: str) -> None:
    call_on(four, 0, 1, 2, tag="f32[4] @ P() -> P()")
    four[3].call(tag=tag)
    found = four[0].diagnosed()
    assert found is not None
    assert (found.ranks, found.field) == ((3,), field)


def lineage(line: int, order: int, since: int, layout: int = 0) -> int:
    return line << 48 | order << 32 | since << 16 | layout


def test_lineage_difference_is_an_outlier(four: list[DrivenRank]) -> None:
    call_on(four, 0, 1, 3, lineage=lineage(1, 2, 3))
    four[2].call(lineage=lineage(4, 5, 6))
    found = four[0].diagnosed()
    assert found is not None
    assert (found.ranks, found.field) == ((2,), "lineage")
    assert "made differently" in found.text


@pytest.mark.parametrize(
    "other", [lineage(1, 5, 6), lineage(4, 2, 6), lineage(4, 5, 3), lineage(1, 2, 6), 0]
)
def test_one_common_hash_is_enough(four: list[DrivenRank], other: int) -> None:
    call_on(four, 0, 1, 3, lineage=lineage(1, 2, 3))
    four[2].call(lineage=other)
    assert four[0].diagnosed(waited=LONG_S) is None


def test_unlike_compares_all_three_hashes() -> None:
    top = (1 << 16) - 1
    assert unlike(lineage(1, 2, 3), lineage(4, 5, 6))
    assert unlike(lineage(top, top, top), lineage(0, 0, 1))
    for same in range(3):
        one, other = [1, 2, 3], [4, 5, 6]
        other[same] = one[same]
        assert not unlike(lineage(*one), lineage(*other))
    assert not unlike(0, lineage(4, 5, 6))
    assert not unlike(lineage(4, 5, 6), 0)


@pytest.mark.parametrize(
    ("ours", "theirs", "layout", "expected"),
    [
        ((1, 2), (1, 2), 7, True),
        ((1, 2, 3), (1, 2), 7, True),  # one rank has skipped the line, or made a tensor for itself
        ((1, 3), (1, 2), 7, True),  # one rank has made its tensor on another line
        ((1, 3, 4), (1, 2), 7, False),  # both
        ((1, 3, 4), (1, 2), 8, True),  # both, and the operators differ
        ((1, 3, 64 + 4, 128 + 5), (1, 2), 7, False),
    ],
)
def test_rank_with_its_own_line_and_tensor(ours, theirs, layout: int, expected: bool) -> None:
    buffers = TraceBuffer.private(0, 2), TraceBuffer.private(1, 2)
    for buffer, lines in zip(buffers, (ours, theirs), strict=True):
        for line in lines:
            buffer.note_line(line)
    one, other = lineage(1, 2, 3, 7), lineage(4, 5, 6, layout)
    assert (
        differ(one, buffers[0], other, buffers[1])
        is differ(other, buffers[1], one, buffers[0])
        is expected
    )
    assert not differ(one, buffers[0], lineage(1, 5, 6, layout), buffers[1])
    assert differ(one, None, other, buffers[1])


def test_healthy_rank_with_its_own_line_is_not_an_outlier(four: list[DrivenRank]) -> None:
    """Ranks 0 and 1 differ in one hash, which is allowed; rank 3 differs from both in all
    hashes.
    """
    call_on(four, 0, 2, lineage=lineage(1, 2, 3))
    four[1].call(lineage=lineage(9, 2, 3))
    four[3].call(lineage=lineage(4, 5, 6))
    found = four[0].diagnosed()
    assert found is not None
    assert found.ranks == (3,)


def test_two_against_two_is_a_tie(four: list[DrivenRank]) -> None:
    call_on(four, 0, 3)
    call_on(four, 1, 2, how="max")
    found = four[0].diagnosed()
    assert found is not None
    assert (found.ranks, found.field) == ((), "reduction")
    assert {seen.rank for seen in found.seen} == {0, 1, 2, 3}
    assert "with equal votes" in found.text


def test_one_against_one_is_a_tie(tmp_path: Path) -> None:
    two = driven_ranks(tmp_path, 2)
    two[0].call()
    two[1].call(how="max")
    found = two[0].diagnosed()
    assert found is not None
    assert found.ranks == ()


def test_two_different_outliers(tmp_path: Path) -> None:
    five = driven_ranks(tmp_path, 5)
    call_on(five, 0, 1, 4)
    five[2].call(how="max")
    five[3].call("barrier", "", torch.uint8, 0)
    found = five[0].diagnosed()
    assert found is not None
    assert found.ranks == (2, 3)


def test_undecided_votes_are_waited_for(four: list[DrivenRank]) -> None:
    four[0].call()
    four[1].call(how="max")
    assert four[0].diagnosed() is None  # ranks 2 and 3 decide
    four[2].call()
    assert four[0].diagnosed() is None  # two of four: rank 3 can make it a tie
    four[3].call()
    found = four[0].diagnosed()
    assert found is not None
    assert found.ranks == (1,)


def test_majority_does_not_wait(four: list[DrivenRank]) -> None:
    call_on(four, 0, 1, 2)
    for _ in range(3):
        call_on(four, 0, 1, 2)
    four[3].call("all_gather", "")
    found = four[3].diagnosed()
    assert found is not None
    assert found.ranks == (3,)


def test_missing_votes_make_a_tie(four: list[DrivenRank]) -> None:
    """They are waited for first: on a busy machine a rank may need seconds to load a module."""
    four[0].call()
    four[1].call(how="max")
    assert four[0].diagnosed(waited=LONG_S) is None
    found = four[0].diagnosed(waited=11.0)
    assert found is not None
    assert found.ranks == ()
    assert "ranks 2, 3: not there yet" in found.text


def test_groups_vote_separately(four: list[DrivenRank]) -> None:
    four[0].call(ranks=(0, 1, 2))
    four[1].call(ranks=(0, 1, 2))
    four[2].call("barrier", "", torch.uint8, 0, ranks=(0, 1, 2))
    four[3].call(how="max")
    found = four[0].diagnosed(ranks=(0, 1, 2))
    assert found is not None
    assert found.ranks == (2,)
    assert {seen.rank for seen in found.seen} == {0, 1, 2}


# -- messages --------------------------------------------------------------------------------------


def send(rank: DrivenRank, dst: int | None, src: int | None, moved: int = 16) -> None:
    rank.call("permute", "", size=-1, route=route_of(dst, src), moved=moved)


def test_ring_matches(four: list[DrivenRank]) -> None:
    for n, rank in enumerate(four):
        send(rank, (n + 1) % 4, (n - 1) % 4)
    assert diagnose.wrong_route(four[0].monitor, four[0].recorder(), 0) is None


def test_rank_that_sends_in_the_other_direction(four: list[DrivenRank]) -> None:
    for n, rank in enumerate(four[:3]):
        send(rank, (n + 1) % 4, (n - 1) % 4)
    send(four[3], 2, 0)
    found = diagnose.wrong_route(four[1].monitor, four[1].recorder(), 0)
    assert found is not None
    assert (found.kind, found.ranks, found.field) == ("mismatch", (3,), "route")


def test_message_of_another_size(four: list[DrivenRank]) -> None:
    send(four[0], 1, None, moved=8)
    send(four[1], None, 0, moved=16)
    found = diagnose.wrong_route(four[1].monitor, four[1].recorder(), 0)
    assert found is not None
    assert (found.ranks, found.field) == ((), "route")  # who of two is wrong?
    assert "8 bytes to rank 1" in found.text
    assert "16 bytes from rank 0" in found.text


def test_unexpected_message(four: list[DrivenRank]) -> None:
    send(four[0], 1, None)
    send(four[1], None, None)
    assert diagnose.wrong_route(four[0].monitor, four[0].recorder(), 0) is not None


def test_messages_of_missing_ranks_are_not_diagnosed(four: list[DrivenRank]) -> None:
    send(four[0], 1, 3)
    assert diagnose.wrong_route(four[0].monitor, four[0].recorder(), 0) is None


# -- ranks that do not come ------------------------------------------------------------------------


def test_a_dead_rank(four: list[DrivenRank]) -> None:
    call_on(four, 0, 1, 3)
    four[2].call("barrier", "", torch.uint8, 0, ranks=(2, 3))
    four[2].die()
    found = four[0].diagnosed()
    assert found is not None
    assert (found.kind, found.ranks) == ("lost", (2,))
    assert "rank 2 died, while ranks 0, 1, 3 wait" in found.text
    assert found.seen[0].rank == 2
    assert "last entered barrier" in found.seen[0].call


def test_all_dead_ranks_are_named_together(four: list[DrivenRank]) -> None:
    call_on(four, 0, 3, ranks=(0, 1, 3))
    four[1].die()
    four[2].die()  # of another group
    found = four[0].diagnosed(ranks=(0, 1, 3))
    assert found is not None
    assert found.ranks == (1, 2)


def test_dead_rank_that_had_arrived_is_not_waited_for(four: list[DrivenRank]) -> None:
    call_on(four, 0, 1, 2, 3)
    four[2].die()
    assert four[0].diagnosed() is None  # the collective may have what it needs
    found = diagnose.lost(four[0].monitor, four[0].recorder(), 0)
    assert found is not None
    assert found.ranks == (2,)
    assert "rank 2 died, while ranks 0, 1, 3 wait" in found.text


def test_rank_that_ended_normally_is_no_error(four: list[DrivenRank]) -> None:
    call_on(four, 0, 1, 2, 3)
    four[2].end()
    four[2].die()
    assert four[0].diagnosed(waited=LONG_S) is None
    assert diagnose.lost(four[0].monitor, four[0].recorder(), 0) is None


def test_unreachable_host(four: list[DrivenRank]) -> None:
    call_on(four, 0, 1, 2, 3)
    for rank in (2, 3):
        four[rank].buffer.words[Header.DOING] = four[rank].buffer.text("host b is silent")
        four[rank].end(RankState.LOST)
    found = four[0].diagnosed()
    assert found is not None
    assert (found.kind, found.ranks) == ("lost", (2, 3))
    assert "cannot be reached (host b is silent)" in found.text


def test_rank_that_ended_early(four: list[DrivenRank]) -> None:
    call_on(four, 0, 1, 2)
    four[3].end()
    found = four[0].diagnosed()
    assert found is not None
    assert (found.kind, found.ranks) == ("left", (3,))
    assert "rank 3 ended the program while ranks 0, 1, 2 wait" in found.text


def test_rank_with_an_extra_call(four: list[DrivenRank]) -> None:
    call_on(four, 0, 1, 2, 3)
    four[1].call("all_gather", "")
    for rank in (0, 2, 3):
        four[rank].end()
    found = four[1].diagnosed(1)
    assert found is not None
    assert (found.kind, found.ranks) == ("left", (1,))
    assert "rank 1 called a collective that ranks 0, 2, 3 never called" in found.text


def test_half_of_the_ranks_ended(four: list[DrivenRank]) -> None:
    call_on(four, 0, 1)
    four[2].end()
    four[3].end(RankState.CLOSED)
    found = four[0].diagnosed()
    assert found is not None
    assert (found.kind, found.ranks) == ("left", ())


def test_ranks_that_may_still_arrive_are_waited_for(four: list[DrivenRank]) -> None:
    four[0].call()
    four[3].end()
    assert four[0].diagnosed() is None
    found = four[0].diagnosed(waited=LONG_S)
    assert found is not None
    assert (found.kind, found.ranks) == ("left", ())
    call_on(four, 1, 2)
    found = four[0].diagnosed()
    assert found is not None
    assert found.ranks == (3,)


def test_worst_correspondent_by_share_then_count() -> None:
    worst = worst_correspondent
    # All of rank 2's, a third of rank 0's.
    assert worst([0, 1, 2, 3], [(0, 1, True), (0, 2, False), (0, 3, True)]) == (2,)
    assert worst([4, 5, 6, 7], [(0, 1, False), (0, 2, False), (0, 3, False)]) == (4,)
    assert worst([0, 1, 2, 3], [(0, 1, False), (2, 3, True)]) == ()


@pytest.mark.parametrize("why", ["it waits elsewhere", "it has died", "it has ended"])
def test_votes_of_ended_ranks_are_not_waited_for(four: list[DrivenRank], why: str) -> None:
    four[0].call()
    four[1].call(how="max")
    for rank in four[2:]:
        if why == "it waits elsewhere":
            rank.block(rank.call(ranks=(2, 3)))
        elif why == "it has died":
            rank.die()
        else:
            rank.end()
    assert four[0].diagnosed() is None
    found = four[0].diagnosed(waited=1.0)
    assert found is not None
    assert (found.kind, found.ranks) == ("mismatch", ())


# -- deadlocks -------------------------------------------------------------------------------------

ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))


def of(groups: tuple[tuple[int, ...], ...], rank: int) -> tuple[int, ...]:
    return next(group for group in groups if rank in group)


def wait_in(rank: DrivenRank, groups: tuple[tuple[int, ...], ...], **call: object) -> None:
    rank.block(rank.call(ranks=of(groups, rank.rank), **call))  # type: ignore[arg-type]


def test_wait_cycle_is_a_deadlock(four: list[DrivenRank]) -> None:
    """0 waits for 1 in its row, 1 for 3 in its column, 3 for 2 in its row, 2 for 0 in its
    column.
    """
    for rank, groups in ((0, ROWS), (1, COLUMNS), (3, ROWS), (2, COLUMNS)):
        wait_in(four[rank], groups)
    found = four[0].diagnosed(ranks=(0, 1), waited=LONG_S)
    assert found is not None
    assert (found.kind, found.ranks, found.field) == ("deadlock", (), "order")
    assert {seen.rank for seen in found.seen} == {0, 1, 2, 3}


def test_wait_cycle_is_not_diagnosed_at_once(four: list[DrivenRank]) -> None:
    for rank, groups in ((0, ROWS), (1, COLUMNS), (3, ROWS), (2, COLUMNS)):
        wait_in(four[rank], groups)
    assert four[0].diagnosed(ranks=(0, 1)) is None


@pytest.mark.parametrize(("rank", "waits_in"), [(0, (0, 1, 2, 3)), (1, (0, 1, 2, 3)), (3, (1, 3))])
def test_rank_that_waits_on_another_axis(
    rank: int, waits_in: tuple[int, ...], four: list[DrivenRank]
) -> None:
    """Ranks 0, 1, 2 wait for rank 3 in the group of all, rank 3 waits for rank 1 in its column:
    whichever rank diagnoses it, all that wait vote.
    """
    everyone = ((0, 1, 2, 3),)
    for other in (0, 1, 2):
        wait_in(four[other], everyone)
    wait_in(four[3], ((1, 3),))
    found = four[rank].diagnosed(ranks=waits_in, waited=LONG_S)
    assert found is not None
    assert (found.kind, found.ranks) == ("deadlock", (3,))
    assert [seen.rank for seen in found.seen] == [3, 0, 1, 2]


def test_rank_in_another_group_is_the_outlier_whatever_came_before(four: list[DrivenRank]) -> None:
    """Ranks have called different numbers of collectives before, so that their histories cannot be
    compared.
    """
    everyone = ((0, 1, 2, 3),)
    for _ in range(3):
        four[1].call(ranks=(1, 3))
    for rank in (1, 2, 3):
        wait_in(four[rank], everyone)
    wait_in(four[0], ((0, 2),))
    found = four[1].diagnosed(waited=LONG_S)
    assert found is not None
    assert (found.kind, found.ranks) == ("deadlock", (0,))


def test_computing_rank_breaks_the_cycle(four: list[DrivenRank]) -> None:
    everyone = ((0, 1, 2, 3),)
    for rank in (0, 1, 2):
        wait_in(four[rank], everyone)
    four[3].call(ranks=(1, 3))  # it has called this, and does not wait
    assert four[0].diagnosed(waited=LONG_S) is None


# -- stalls ----------------------------------------------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings(), "timeout", 1.0)


@pytest.mark.usefixtures("soon")
def test_missing_rank_is_a_stall(four: list[DrivenRank]) -> None:
    call_on(four, 0, 1, 2, 3)
    call_on(four, 0, 1, 2)
    assert four[0].diagnosed(1, waited=0.5) is None
    found = four[0].diagnosed(1, waited=1.5)
    assert found is not None
    assert (found.kind, found.ranks) == ("stall", (3,))
    assert "ranks 0, 1, 2 have waited 1.5 s for rank 3" in found.text
    assert "rank 3 is alive and busy elsewhere" in found.text


@pytest.mark.usefixtures("soon")
def test_stall_is_not_reported_while_a_rank_is_paused(four: list[DrivenRank]) -> None:
    call_on(four, 0, 1, 2)
    with four[3].monitor.paused():
        assert four[0].diagnosed(waited=1.5) is None


@pytest.mark.usefixtures("soon")
def test_paused_time_does_not_count_towards_a_stall(four: list[DrivenRank]) -> None:
    call_on(four, 0, 1, 2)
    with four[3].monitor.paused():
        pass
    assert four[0].diagnosed(waited=1.5) is None
    four[3].buffer.words[Header.RESUMED] -= 1_100_000_000
    found = four[0].diagnosed(waited=1.5)
    assert found is not None
    assert "have waited 1.5 s for rank 3" in found.text


@pytest.mark.usefixtures("soon")
def test_stall_names_the_end_of_the_chain(four: list[DrivenRank]) -> None:
    """0 waits for 1, which waits for 3, which computes."""
    wait_in(four[0], ((0, 1),))
    wait_in(four[1], ((1, 3),))
    found = four[0].diagnosed(ranks=(0, 1), waited=1.5)
    assert found is not None
    assert (found.kind, found.ranks) == ("stall", (3,))


@pytest.mark.usefixtures("soon")
def test_frozen_rank_is_reported_as_frozen(four: list[DrivenRank]) -> None:
    call_on(four, 0, 1, 2)
    four[3].buffer.words[Header.HEARTBEAT] -= 5_000_000_000
    found = four[0].diagnosed(waited=1.5)
    assert found is not None
    assert "rank 3 is frozen" in found.text


# -- votes -----------------------------------------------------------------------------------------


def test_minority() -> None:
    assert minority([]) == ()
    assert minority([[0, 1, 2]]) == ()
    assert minority([[2], [0, 1]]) == (2,)
    assert minority([[0, 1], [2, 3]]) == ()
    assert minority([[3], [0, 4, 5], [1], [2]]) == (1, 2, 3)
    assert minority([[0, 1], [2, 3], [4]]) == ()


def test_parties_by() -> None:
    assert parties_by(range(5), lambda n: n % 2) == [[0, 2, 4], [1, 3]]


def test_missing_ranks_agree_with_all_parties() -> None:
    assert agree([])
    assert agree([Member(0, None, False), Member(1, None, True, 7), Member(2, None, None)])
    assert not agree([Member(0, None, True, 8), Member(1, None, True, 7)])
