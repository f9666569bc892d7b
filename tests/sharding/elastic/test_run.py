"""Jobs of processes that lose ranks go on as if the same meshes had had no fault, to the bit."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.forked import Ended, Forked, by_hand, statuses
from tests.sharding.elastic.faulty_jobs import Plan, Replays, check, happened, run_plan
from tests.sharding.elastic.faulty_ranks import (
    PLACES,
    PLACES_AFTER_A_LOSS,
    STEPS,
    Fault,
    misuses,
    replay,
    train,
)
from tests.tiers import slow

RANKS = 4
LIMIT_S = 250.0  # for a job of some seconds, on a machine that is busy
pytestmark = pytest.mark.timeout(550)  # a job, and the same without faults


def run_job(
    forked: Forked,
    form: str,
    faults: Sequence[Fault],
    checkpoint: str = "",
    spares: int = 0,
    **env: Any,
) -> list[Ended]:
    planned = list(map(list, faults))
    return forked(train, RANKS, form, planned, checkpoint, spares, limit_s=LIMIT_S, **env)


def check_against_replay(ended: list[Ended], forked: Forked, form: str, dead: set[int]) -> None:
    """Compare the ranks that are left with a run without faults on the same meshes."""
    for rank, one in enumerate(ended):
        assert (one.status == 0) == (rank not in dead), one.output
    size = len(ended)
    left = [rank for rank in range(size) if rank not in dead]
    values = [ended[rank].value for rank in left]
    schedule: list[tuple[int, Any]] = [(0, list(range(size)))]
    schedule += [(step, ranks) for step, _, ranks, _ in values[0]["events"]]
    expected = forked(replay, size, form, schedule, limit_s=LIMIT_S)
    for rank, value in zip(left, values, strict=True):
        assert [event[:3] for event in value["events"]] == [
            event[:3] for event in values[0]["events"]
        ]
        assert expected[rank].value is not None, expected[rank].output
        assert value["losses"] == expected[rank].value["losses"]
        assert value["hashes"] == expected[rank].value["hashes"]
    assert schedule[-1][1] == left
    assert len(values[0]["losses"]) == STEPS


@pytest.mark.parametrize(
    ("form", "faults"),
    [
        ("ddp", [(0, 2, "backward", "kill")]),
        slow("hsdp", [(3, 2, "write", "kill")]),
        slow("ddp", [(0, 2, "data", "kill")]),
        slow("ddp", [(3, 2, "vote", "kill")]),
        slow("ddp", [(0, 2, "write", "exit")]),
        slow("ddp", [(2, 2, "after", "kill")]),
        slow("hsdp", [(0, 1, "backward", "exit")]),
        slow("hsdp", [(2, 3, "forward", "kill"), (0, 4, "backward", "kill")]),
        slow("two", [(1, 2, "vote", "kill")]),
        slow("two", [(0, 2, "write", "kill")]),
        slow("two", [(3, 2, "after", "kill")]),
        slow("tp", [(1, 2, "forward", "kill")]),
        slow("tp", [(0, 0, "backward", "kill")]),
    ],
    ids=str,
)
def test_ranks_that_end(forked: Forked, form: str, faults: list[Fault]):
    ended = run_job(forked, form, faults)
    check_against_replay(ended, forked, form, {fault[0] for fault in faults})


@pytest.mark.slow
@pytest.mark.parametrize("place", ["agree", "regroup", "build", "exchange", "confirm"])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_second_rank_ends_while_the_others_recover(forked: Forked, place: str, rank: int):
    faults = [(0, 2, "backward", "kill"), (rank, 2, place, "kill")]
    ended = run_job(forked, "ddp", faults)
    check_against_replay(ended, forked, "ddp", {0, rank})


@pytest.mark.slow
def test_a_step_that_raises_is_taken_again(forked: Forked):
    ended = run_job(forked, "tp", [(1, 3, "forward", "raise")])
    check_against_replay(ended, forked, "tp", set())
    assert [event[:3] for event in ended[0].value["events"]] == [[3, [], [0, 1, 2, 3]]]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["regroup", "build", "exchange"])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_rank_fails_and_lives_while_the_others_recover(forked: Forked, rank: int, place: str):
    """The others wait for it, and go back to an agreement with it."""
    faults = [(0, 2, "backward", "kill"), (rank, 2, place, "raise")]
    ended = run_job(forked, "ddp", faults)
    check_against_replay(ended, forked, "ddp", {0})
    assert [event[:3] for event in ended[1].value["events"]] == [[2, [0], [1, 2, 3]]]
    assert max(event[3] for event in ended[1].value["events"]) < 25.0


@pytest.mark.slow
@pytest.mark.parametrize("place", ["write", "after"])
def test_a_step_that_raises_while_two_optimizers_write_is_undone(forked: Forked, place: str):
    ended = run_job(forked, "two", [(1, 3, place, "raise")])
    check_against_replay(ended, forked, "two", set())
    assert ended[0].value["events"][0][0] == 3


@pytest.mark.slow
def test_a_check_that_fails_on_all_ranks_after_two_optimizers_undoes_the_step(forked: Forked):
    faults = [(rank, 3, "after", "raise") for rank in range(RANKS)]
    ended = run_job(forked, "two", faults)
    check_against_replay(ended, forked, "two", set())
    assert [event[:3] for event in ended[0].value["events"]] == [[3, [], [0, 1, 2, 3]]]


@pytest.mark.slow
def test_a_check_that_fails_on_all_ranks_after_one_optimizer_ends_the_job(forked: Forked):
    """All have written, and nobody has a copy of the version before."""
    ended = run_job(forked, "ddp", [(rank, 3, "after", "raise") for rank in range(RANKS)])
    assert statuses(ended) == [1] * RANKS
    for one in ended:
        assert "ArithmeticError: a bad batch in step 3" in one.output


@pytest.mark.slow
def test_a_rank_that_raises_while_one_optimizer_writes_is_lost(forked: Forked):
    """It can neither complete the step nor undo it; the others have completed it."""
    ended = run_job(forked, "ddp", [(1, 3, "write", "raise")])
    check_against_replay(ended, forked, "ddp", {1})
    assert "ArithmeticError: a bad batch in step 3" in ended[1].output
    assert ended[0].value["events"][0][0] == 4


@pytest.mark.slow
def test_a_rank_that_fails_in_the_agreement_after_its_vote_is_lost(forked: Forked):
    """The others count on it to complete the step, and its program has left the step."""
    faults = [(0, 2, "vote", "kill"), (2, 2, "agree", "raise")]
    ended = run_job(forked, "ddp", faults)
    check_against_replay(ended, forked, "ddp", {0, 2})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_faults(forked: Forked, seed: int):
    """One or two ranks fail anywhere; of the places in a recovery only the second one."""
    random = Random(seed)
    form = random.choice(["ddp", "hsdp", "tp", "two"])
    first, second = random.sample(range(RANKS), 2)
    step = random.randrange(STEPS)
    faults = [(first, step, random.choice(PLACES), random.choice(["kill", "exit"]))]
    if random.random() < 0.6:
        later = random.randrange(step, STEPS)
        places = PLACES if later > step else [*PLACES, *PLACES_AFTER_A_LOSS]
        faults.append((second, later, random.choice(places), random.choice(["kill", "exit"])))
    ended = run_job(forked, form, faults)
    dead = {rank for rank, one in enumerate(ended) if "fault: " in one.output}
    check_against_replay(ended, forked, form, dead)


@pytest.mark.parametrize(
    "faults",
    [
        [(3, 2, "forward", "kill")],
        slow([(2, 2, "backward", "kill")]),
        slow([(0, 2, "backward", "kill"), (2, 4, "vote", "kill")]),
        slow([(1, 3, "forward", "raise")]),
        slow([(2, 1, "write", "kill"), (1, 1, "exchange", "kill")]),
    ],
    ids=str,
)
def test_a_replica_of_a_stage_ends(forked: Forked, faults: list[Fault], tmp_path: Path):
    """Pipelines of two stages with two replicas, of one with three, of two without."""
    job = Plan(RANKS, "pp", faults)
    check(job, run_plan(forked, job, tmp_path), Replays(forked, tmp_path))


@pytest.mark.slow
def test_a_stopped_rank_is_ended(forked: Forked):
    ended = run_job(forked, "ddp", [(2, 2, "forward", "stop")], SHARDMESH_STALL_TIMEOUT_S="5")
    check_against_replay(ended, forked, "ddp", {2})


@pytest.mark.slow
def test_a_step_that_fails_twice_ends_the_job(forked: Forked):
    faults = [(1, 2, "data", "raise"), (1, 2, "forward", "raise")]
    ended = run_job(forked, "ddp", faults)
    assert statuses(ended) == [1] * RANKS
    text = "step 2 has failed 2 times for the same reason: ArithmeticError: a bad batch in step 2"
    for one in ended:
        assert f"ElasticJobError: {text}" in one.output


@pytest.mark.slow
def test_a_rank_that_fails_twice_is_left_out(forked: Forked):
    faults = [(1, 2, "data", "raise"), (1, 4, "forward", "raise")]
    ended = run_job(forked, "ddp", faults)
    check_against_replay(ended, forked, "ddp", {1})
    assert "ElasticJobError: rank 1 failed 2 times, and must leave" in ended[1].output


@pytest.mark.slow
def test_parts_that_are_lost_come_from_the_newest_checkpoint(forked: Forked, tmp_path: Path):
    """All go back to step 2, though 3 was committed, as a job does that begins there."""
    ended = run_job(forked, "fsdp", [(2, 3, "backward", "kill")], str(tmp_path / "lost"))
    assert statuses(ended) == [0, 0, -9, 0], ended[0].output
    values = [ended[rank].value for rank in (0, 1, 3)]
    assert values[0]["events"][0][:3] == [2, [2], [0, 1, 3]]
    shutil.copytree(tmp_path / "lost" / "step-00000002", tmp_path / "again" / "step-00000002")
    again = forked(train, 3, "fsdp", [], str(tmp_path / "again"), limit_s=LIMIT_S)
    for value, expected in zip(values, again, strict=True):
        assert expected.value is not None, expected.output
        assert value["losses"][2:] == expected.value["losses"]
        assert value["hashes"] == expected.value["hashes"]


def as_from_checkpoint(
    forked: Forked, form: str, folder: Path, step: int, ranks: int
) -> list[Ended]:
    """Run the rest of a job on other ranks, from what it has saved at this step."""
    name = f"step-{step:08}"
    again = folder.parent / "again"
    shutil.copytree(folder / name, again / name)
    return forked(train, ranks, form, [], str(again), limit_s=LIMIT_S)


@pytest.mark.parametrize("form", ["fsdp", slow("ddp"), slow("tp")])
def test_a_rank_that_is_told_to_go_hands_over_its_state(forked: Forked, form: str, tmp_path: Path):
    """It takes the step to its end, and no step is taken again, though it alone held its parts."""
    ended = run_job(forked, form, [(2, 1, "forward", "term")], str(tmp_path / "saved"))
    assert statuses(ended) == [0] * RANKS, ended[0].output
    assert ended[2].value is None
    expected = as_from_checkpoint(forked, form, tmp_path / "saved", 2, 3)
    for one, other in zip([ended[0], ended[1], ended[3]], expected, strict=True):
        assert other.value is not None, other.output
        assert [event[:3] for event in one.value["events"]] == [[2, [2], [0, 1, 3]]]
        assert one.value["losses"][2:] == other.value["losses"]
        assert one.value["hashes"] == other.value["hashes"]


@pytest.mark.slow
def test_ranks_that_are_told_to_go_all_at_once_save_a_checkpoint(forked: Forked, tmp_path: Path):
    faults = [(rank, 2, "forward", "term") for rank in range(RANKS)]
    ended = run_job(forked, "ddp", faults, str(tmp_path / "saved"))
    assert statuses(ended) == [128 + 15] * RANKS, ended[0].output
    assert (tmp_path / "saved" / "step-00000003").exists()


@pytest.mark.slow
@pytest.mark.parametrize("leaving", [[0], [0, 1]])
def test_the_rank_that_serves_the_store_leaves(forked: Forked, leaving: list[int]):
    faults = [(rank, 1, "data", "term") for rank in leaving]
    ended = run_job(forked, "ddp", [*faults, (3, 4, "backward", "kill")])
    dead = {*leaving, 3}
    assert {rank for rank, one in enumerate(ended) if one.value is None} == dead, ended[2].output
    value = ended[2].value
    left = [rank for rank in range(RANKS) if rank not in leaving]
    assert value["events"][0][:3] == [2, leaving, left]
    assert value["events"][1][:3] == [4, [3], [rank for rank in left if rank != 3]]
    assert len(value["losses"]) == STEPS


@pytest.mark.parametrize("form", ["fsdp", slow("ddp"), slow("tp"), slow("pp")])
def test_a_process_joins(forked: Forked, form: str, tmp_path: Path):
    """From then on the job equals one of all ranks that begins with the checkpoint of the step."""
    more = str(tmp_path / "saved"), 0, int(form == "fsdp")  # without replicas: with copies
    args = [(form, [(0, 1, "vote", "await")], *more)] * 3 + [(form, [], *more)]
    env = by_hand(3)
    env.append({**env[2], "SHARDMESH_ELASTIC_JOIN": "1"})
    ended = forked.run(train, args, env, forked.new_folder(), limit_s=LIMIT_S)
    assert statuses(ended) == [0] * 4, "".join(one.output for one in ended)
    expected = as_from_checkpoint(forked, form, tmp_path / "saved", 2, 4)
    for one, other in zip(ended, expected, strict=True):
        assert other.value is not None, other.output
        assert [event[:3] for event in one.value["events"]] == [[2, [], [0, 1, 2, 3]]]
        assert one.value["losses"] == ended[0].value["losses"]
        assert one.value["losses"][2:] == other.value["losses"]
        assert one.value["hashes"] == other.value["hashes"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["build", "exchange", "confirm"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_ends_while_a_process_joins(forked: Forked, place: str, rank: int):
    faults = [(0, 1, "vote", "await"), (rank, 1, place, "kill")]
    env = by_hand(3)
    env.append({**env[2], "SHARDMESH_ELASTIC_JOIN": "1"})
    args = [("ddp", faults)] * 3 + [("ddp", [])]
    ended = forked.run(train, args, env, forked.new_folder(), limit_s=LIMIT_S)
    left = [other for other in range(4) if other != rank]
    assert [ended[other].status for other in left] == [0] * 3, ended[left[0]].output
    for other in left:
        assert ended[other].value["events"][-1][2] == left
        assert ended[other].value["hashes"] == ended[left[0]].value["hashes"]
        assert len(ended[other].value["losses"]) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("place", ["backward", "vote", "write"])
def test_copies_on_other_ranks_take_the_place_of_replicas(
    forked: Forked, place: str, tmp_path: Path
):
    faults = [(2, 3, place, "kill")]
    args = ("fsdp", faults, "", 0, 1)
    ended = forked(train, RANKS, *args, limit_s=LIMIT_S)
    assert statuses(ended) == [0, 0, -9, 0], ended[0].output
    step, lost, ranks, _ = ended[0].value["events"][0]
    assert step in (2, 3)
    assert (lost, ranks) == ([2], [0, 1, 3])
    whole = run_job(forked, "fsdp", [], str(tmp_path / "saved"))[0].value
    assert ended[0].value["losses"][:step] == whole["losses"][:step]
    if step == 2:
        expected = as_from_checkpoint(forked, "fsdp", tmp_path / "saved", 2, 3)[0].value
        assert ended[0].value["losses"][2:] == expected["losses"]
        assert ended[0].value["hashes"] == expected["hashes"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["confirm", "again"])
def test_the_next_loss_finds_copies_whenever_it_comes(forked: Forked, place: str, tmp_path: Path):
    """Before all have confirmed the new mesh, and in the first step after a loss, before copies of
    a step on the new mesh have been made.
    """
    job = Plan(RANKS, "fsdp", [(2, 2, "backward", "kill"), (0, 2, place, "kill")], redundancy=1)
    ended = run_plan(forked, job, tmp_path)
    check(job, ended, Replays(forked, tmp_path / "replay"), tmp_path / "saved")
    assert statuses(ended) == [-9, 0, -9, 0]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2])
def test_a_spare_takes_the_place_of_a_lost_rank(forked: Forked, lost: int):
    """The mesh keeps its shape, so the run equals one on three ranks without faults."""
    ended = run_job(forked, "ddp", [(lost, 3, "backward", "kill")], spares=1)
    expected = forked(replay, RANKS, "ddp", [(0, [0, 1, 2])], limit_s=LIMIT_S)[0].value
    for rank in {0, 1, 2, 3} - {lost}:
        assert ended[rank].value is not None, ended[rank].output
        assert ended[rank].value["losses"] == expected["losses"]
        assert ended[rank].value["hashes"] == expected["hashes"]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "lost"), [("hsdp", 0), ("pp", 1), ("fsdp", 0)])
def test_a_spare_that_has_built_nothing_takes_a_place(
    forked: Forked, form: str, lost: int, tmp_path: Path
):
    """`fully_shard` and `pipeline` are for ranks of the mesh; a spare takes part in checkpoints."""
    job = Plan(RANKS, form, [(lost, 3, "backward", "kill")], spares=1, saves=True)
    ended = run_plan(forked, job, tmp_path)
    check(job, ended, Replays(forked, tmp_path / "replay"), tmp_path / "saved")
    assert (tmp_path / "saved" / "step-00000006").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        [(3, 2, "vote", "kill")],
        [(0, 2, "vote", "kill"), (3, 2, "agree", "raise")],  # it has nothing to complete
    ],
    ids=str,
)
def test_a_spare_fails_while_it_waits(forked: Forked, faults: list[Fault], tmp_path: Path):
    job = Plan(RANKS, "ddp", faults, spares=1)
    ended = run_plan(forked, job, tmp_path)
    assert happened(job, ended) == faults
    check(job, ended, Replays(forked, tmp_path))


@pytest.mark.slow
def test_what_only_a_lost_rank_held_is_named(forked: Forked):
    ended = run_job(forked, "fsdp", [(2, 1, "forward", "kill")])
    assert statuses(ended) == [1, 1, -9, 1]
    for rank in (0, 1, 3):
        assert "StateLostError" in ended[rank].output
        assert "state.model.first.weight" in ended[rank].output


def test_steps_that_would_break_the_promise_are_refused(forked: Forked):
    ended = forked(misuses, 2, limit_s=LIMIT_S)
    for one in ended:
        assert one.value is not None, one.output
        # the vote; running mean, variance and count of the norm; nothing over a store
        assert one.value["costs"] == [[["all_to_all"], 2 * 14 + 1, []]] * 3
        save, outside, without_an_end, without_a_vote, communicating = one.value["errors"]
        assert save.startswith("ValueError: job.save(): write ElasticJob(..., checkpoint=folder)")
        assert outside.startswith("RuntimeError: optimizer.step() outside of `with job.attempt()`")
        assert without_an_end.startswith("LaunchEnvironmentError: SHARDMESH_EXIT_S=0: an elastic")
        assert without_a_vote.startswith("ElasticJobError: the step has written parameters without")
        assert communicating.startswith("RuntimeError: a step communicates (all_reduce over ranks")
