"""Jobs of 4 and 8 processes in which ranks fail anywhere, in any way.

`--faults 500` runs so many of them. A seed is a job: its faults are the same in each run.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.forked import Forked
from tests.sharding.elastic.faulty_jobs import SAVE_EVERY, Plan, check, run_plan
from tests.sharding.elastic.faulty_ranks import (
    PLACES,
    PLACES_AFTER_A_LOSS,
    PLACES_OF_A_SAVE,
    STEPS,
    Fault,
)

KINDS = ["kill", "kill", "exit", "raise", "stop"]
ENDING_KINDS = ["kill", "exit", "stop"]
FORMS = ["ddp", "hsdp", "tp", "two", "accumulated", "pp"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("seed", range(int(metafunc.config.getoption("--faults") or 0)))


def plan(seed: int) -> Plan:
    """Return the job of a seed."""
    random = Random(seed)
    size = random.choice([4, 4, 8])
    draw = random.choice(
        [draw_any, draw_any, draw_host, draw_save, draw_copies, draw_spares, draw_joining]
    )
    return draw(random, size)


def draw_any(random: Random, size: int) -> Plan:
    """One or two ranks fail, the second one also while the others recover."""
    return Plan(size, random.choice(FORMS), draw_faults(random, size))


def draw_host(random: Random, size: int) -> Plan:
    """Two ranks next to each other fail at one place, as those of a host do."""
    first = random.randrange(0, size, 2)
    step, place = random.randrange(STEPS), random.choice(PLACES)
    kind = random.choice(ENDING_KINDS)
    faults: list[Fault] = [(rank, step, place, kind) for rank in (first, first + 1)]
    return Plan(size, random.choice(FORMS), faults)


def draw_save(random: Random, size: int) -> Plan:
    """A rank ends while a checkpoint is written."""
    form = random.choice([*FORMS, "fsdp"])
    step = random.randrange(SAVE_EVERY - 1, STEPS, SAVE_EVERY)
    first, second = random.sample(range(size), 2)
    place, kind = random.choice(PLACES_OF_A_SAVE), random.choice(ENDING_KINDS)
    faults: list[Fault] = [(first, step, place, kind)]
    if random.random() < 0.5 and step + 1 < STEPS and form != "fsdp":
        later = random.randrange(step + 1, STEPS)
        faults.append((second, later, random.choice(PLACES), random.choice(ENDING_KINDS)))
    return Plan(size, form, faults, saves=True)


def draw_copies(random: Random, size: int) -> Plan:
    """Ranks fail of which no other one has the parts, but for copies."""
    return Plan(size, "fsdp", draw_faults(random, size), redundancy=1)


def draw_spares(random: Random, size: int) -> Plan:
    """Ranks wait outside of the mesh, and may be the ones that fail."""
    form = random.choice(FORMS)
    faults = draw_faults(random, size)
    spares = 2 if size == 8 else 1
    return Plan(size, form, faults, spares=spares, redundancy=random.choice([0, 1]))


def draw_joining(random: Random, size: int) -> Plan:
    """A process joins, and meanwhile or later a rank fails, that one or another."""
    form = random.choice(["ddp", "tp", "fsdp", "pp"])
    size = 3 if form == "pp" else min(size, 4)
    joins_after = random.randrange(STEPS - 2)
    faults: list[Fault] = [(0, joins_after, "vote", "await")]
    of_joining: list[Fault] = []
    victim = random.randrange(size + 1)
    step = random.choice([joins_after, random.randrange(joins_after + 1, STEPS)])
    places = PLACES_AFTER_A_LOSS if step == joins_after else PLACES
    fault: Fault = (victim, step, random.choice(places), random.choice(["kill", "exit", "stop"]))
    if victim < size:
        faults.append(fault)
    elif step > joins_after:
        of_joining.append((0, *fault[1:]))
    redundancy = 1 if form == "fsdp" else 0
    return Plan(
        size,
        form,
        faults,
        redundancy=redundancy,
        joins_after=joins_after,
        faults_of_joining=of_joining,
    )


def draw_faults(random: Random, size: int) -> list[Fault]:
    first, second = random.sample(range(size), 2)
    if random.random() < 0.3:
        first, second = 0, max(first, second)  # the rank that serves the stores
    step = random.randrange(STEPS)
    faults: list[Fault] = [(first, step, random.choice(PLACES), random.choice(KINDS))]
    if random.random() < 0.6:
        later = random.randrange(step, STEPS)
        places = PLACES if later > step else [*PLACES, *PLACES_AFTER_A_LOSS]
        kinds = [kind for kind in KINDS if kind != "raise" or faults[0][3] != "raise"]
        faults.append((second, later, random.choice(places), random.choice(kinds)))
    return faults


def test_random_faults(forked: Forked, tmp_path: Path, seed: int):
    job = plan(seed)
    check(job, run_plan(forked, job, tmp_path), forked, tmp_path / "replay")
