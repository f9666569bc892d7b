"""The proof accepts the tables that run to the end, and names the first violation of others."""

from __future__ import annotations

import random
import re

import pytest

import shardmesh as sm
from shardmesh.sharding.parallel.pipeline.actions import Communication, parse_cell
from shardmesh.sharding.parallel.pipeline.communication import (
    check_communication,
    with_communication,
)
from tests.sharding.parallel.pipeline.brute_force import (
    CAPACITIES,
    runs_with_channels,
    runs_with_shared_memory,
)
from tests.sharding.parallel.pipeline.random_tables import (
    changed,
    random_schedule,
    shuffled,
    with_late_receives,
    with_other_backwards,
)

Schedule = sm.parallel.Schedule


def is_accepted(check, *args) -> bool:
    try:
        check(*args)
    except ValueError:
        return False
    return True


SEEDS = [range(start, start + 250) for start in range(0, 2000, 250)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_the_proof_accepts_exactly_the_tables_that_run_to_the_end(seeds):
    """Those that are accepted also run with any buffering, and others not with all there is."""
    accepted = 0
    for seed in seeds:
        rng = random.Random(seed)
        rows = with_other_backwards(rng, random_schedule(rng).rows)
        rows = shuffled(rng, rows) if rng.random() < 0.05 else changed(rng, rows, rng.randint(0, 2))
        table = Schedule(rows)
        runs = runs_with_shared_memory(table.rows)
        assert is_accepted(table.check) == runs, (seed, table)
        if runs:
            accepted += 1
            instructions = with_communication(table.rows)
            assert all(runs_with_channels(instructions, size) for size in CAPACITIES), seed
    assert 60 < accepted < 190


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_communication_is_accepted_exactly_if_it_runs_without_buffers(seeds):
    """Some of the tables deadlock, some only without buffers, some lack a partner."""
    outcomes: dict[tuple[bool, ...], int] = {}
    for seed in seeds:
        rng = random.Random(seed)
        instructions = with_communication(random_schedule(rng).rows)
        if rng.random() < 0.5:
            instructions = with_late_receives(rng, instructions)
        instructions = changed(rng, instructions, rng.randint(0, 2))
        runs = tuple(runs_with_channels(instructions, size) for size in CAPACITIES)
        assert is_accepted(check_communication, instructions) == all(runs), seed
        assert sorted(runs) == list(runs), "more buffers never hurt"
        outcomes[runs] = outcomes.get(runs, 0) + 1
    assert outcomes[True, True, True, True] > 50
    assert outcomes[False, False, False, False] > 50
    assert outcomes[False, True, True, True] > 5  # only if the backend buffers a message


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([["0F0", "0B0"], []], "rank 1 has no action: leave it out of the schedule"),
        (
            [["0F0", "1B0"], ["1F0", "0B0"]],
            "rank 1, slot 0: 1F0 is of stage 1, which is on rank 0. A stage is on one rank.",
        ),
        ([["0F0", "0F1", "0F0", "0B0"]], "rank 0: 0F0 is in slots 0 and 2"),
        (
            [["0F0", "0B0", "0B1"]],
            "stage 0 has no forward of microbatch 1 (0F1), of 1 stages and 2 microbatches",
        ),
        (
            [["0F0", "0B0"], ["2F0", "2B0"]],
            "stage 1 has no forward of microbatch 0 (1F0), of 3 stages and 1 microbatches",
        ),
        (
            [["0F0", "0B0", "0W0"]],
            "stage 0 has both 0B0 and 0W0: a backward is one action, or two for inputs and weights",
        ),
        (
            [["0F0", "0F1", "0B0"]],
            "stage 0 has no whole backward of microbatch 1: 0B1, or 0I1 and 0W1, is not in the "
            "schedule",
        ),
        (
            [["0F0", "0I0"]],
            "stage 0 has no whole backward of microbatch 0: 0B0, or 0W0, is not in the schedule",
        ),
        (
            [["0F0", "(0B0;1F0)OVERLAP_F_B", "1B0"]],
            "rank 0, slot 1: (0B0;1F0)OVERLAP_F_B is not a forward and a backward, in this order",
        ),
        (
            [["0B0", "0F0"]],
            "the schedule deadlocks: rank 0 waits in slot 0 (0B0) for slot 1 (0F0) of rank 0",
        ),
        (
            [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]],
            "the schedule deadlocks: rank 0 waits in slot 1 (0B0) for slot 2 (1B0) of rank 1; "
            "rank 1 waits in slot 1 (1F1) for slot 2 (0F1) of rank 0",
        ),
        (
            [["0F0", "0W0", "0I0"], ["1F0", "1B0"]],
            "the schedule deadlocks: rank 0 waits in slot 1 (0W0) for slot 2 (0I0) of rank 0",
        ),
    ],
)
def test_the_error_is_the_first_violation(rows, text):
    schedule = Schedule(rows)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        schedule.check()
    assert str(schedule).splitlines()[-1] == f"not valid: {text}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        schedule.simulate()


def instructions(*rows: str) -> list[list]:
    return [[parse_cell(text) for text in row.split()] for row in rows]


RIGHT = ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
STEADY = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ((RIGHT[0], "1RECV_F0 1F0 1B0"), "rank 1: 1SEND_B0 is missing"),
        ((RIGHT[0] + " 0SEND_F0", RIGHT[1]), "rank 0: 0SEND_F0 is there twice"),
        ((RIGHT[0] + " 0SEND_B0", RIGHT[1]), "rank 0: nothing needs 0SEND_B0"),
        (
            ("0F0 0SEND_F0 0RECV_B0 0B0 1RECV_F0", "1F0 1B0 1SEND_B0"),
            "rank 0: 1RECV_F0 belongs to rank 1, which has stage 1",
        ),
        (
            ("0SEND_F0 0F0 0RECV_B0 0B0", RIGHT[1]),
            "rank 0: 0SEND_F0 comes before 0F0 is computed",
        ),
        (
            ("0F0 0SEND_F0 0B0 0RECV_B0", RIGHT[1]),
            "rank 0: 0B0 comes before 1I0 is computed or received",
        ),
        (
            (
                "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1",
                STEADY[1],
            ),
            "message 0 from rank 0 to rank 1 is 0SEND_F1, and is received as 1RECV_F0: receives "
            "must have the order of the sends",
        ),
        (
            STEADY,
            "without buffers the communication deadlocks: rank 0 blocks in 0SEND_F1 (instruction "
            "3) until rank 1 gets to its part; rank 1 blocks in 1SEND_B0 (instruction 3) until "
            "rank 0 gets to its part. Call a receive before sends that its sender waits for",
        ),
    ],
)
def test_communication_that_is_wrong(rows, text):
    check_communication(instructions(*RIGHT))
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        check_communication(instructions(*rows))


def test_stages_of_one_rank_do_not_communicate():
    rows = sm.parallel.make_schedule("zb_v", 2, 3).rows
    moved = [item for row in with_communication(rows) for item in row]
    between = {
        frozenset((item.stage, item.peer_stage))
        for item in moved
        if isinstance(item, Communication)
    }
    assert between == {frozenset((0, 1)), frozenset((2, 3))}  # stages 1 and 2 are on rank 1


def test_a_limit_to_the_memory():
    schedule = sm.parallel.make_schedule("interleaved", 4, 8)
    schedule.check(max_live_microbatches=5.5)
    with pytest.raises(ValueError, match=r"rank 0 holds .* of 5\.5 microbatches .* more than 5$"):
        schedule.check(max_live_microbatches=5)
