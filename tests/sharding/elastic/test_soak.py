"""Jobs of 4 and 8 processes in which one or two ranks fail anywhere, in any way. `--faults 500`
runs so many of them. A seed is a job: its faults are the same in each run.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.forked import Ended, Forked
from tests.sharding.elastic.faulty_ranks import (
    PLACES,
    PLACES_AFTER_A_LOSS,
    STEPS,
    Fault,
    train,
)
from tests.sharding.elastic.test_run import check_against_replay

LIMIT_S = 200.0
STALL_S = "20"  # after which a rank that is stopped counts as hung: healthy ones may be slow here
KINDS = ["kill", "kill", "exit", "raise", "stop"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("seed", range(int(metafunc.config.getoption("--faults") or 0)))


def plan(seed: int) -> tuple[int, str, list[Fault]]:
    """Return how many ranks a job has, its form, and the faults."""
    random = Random(seed)
    size = random.choice([4, 4, 8])
    form = random.choice(["ddp", "hsdp", "tp", "two"])
    first, second = random.sample(range(size), 2)
    step = random.randrange(STEPS)
    faults: list[Fault] = [(first, step, random.choice(PLACES), random.choice(KINDS))]
    if random.random() < 0.6:
        later = random.randrange(step, STEPS)
        places = PLACES if later > step else [*PLACES, *PLACES_AFTER_A_LOSS]
        kinds = [kind for kind in KINDS if kind != "raise" or faults[0][3] != "raise"]
        faults.append((second, later, random.choice(places), random.choice(kinds)))
    return size, form, faults


def ends(form: str, fault: Fault, output: str) -> bool:
    """Return whether a fault has ended its rank, by what the rank has printed: one that raises
    while its optimizer writes without an undo copy can neither complete the step nor undo it.
    """
    _, step, place, kind = fault
    if f"fault: {kind} in {place} of step {step}" not in output:
        return False
    return kind != "raise" or (form != "two" and place in ("write", "after"))


def check_lost(ended: list[Ended], form: str, failed: set[int]) -> None:
    """Check that two ranks which held the same half of the state alone may have ended together."""
    assert form in ("hsdp", "tp", "two")
    assert len(ended) == 4
    assert sorted(failed) in ([0, 2], [1, 3])
    for rank in {0, 1, 2, 3} - failed:
        assert ended[rank].status == 1
        assert "StateLostError: after step" in ended[rank].output


def test_random_faults(forked: Forked, seed: int):
    size, form, faults = plan(seed)
    planned = list(map(list, faults))
    ended: list[Ended] = forked(
        train, size, form, planned, "", 0, limit_s=LIMIT_S, SHARDMESH_STALL_TIMEOUT_S=STALL_S
    )
    if any("StateLostError" in one.output for one in ended):
        check_lost(ended, form, {fault[0] for fault in faults})
        return
    dead = {fault[0] for fault in faults if ends(form, fault, ended[fault[0]].output)}
    check_against_replay(ended, forked, form, dead)
