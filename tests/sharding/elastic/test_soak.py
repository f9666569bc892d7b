"""Jobs of 4 and 8 processes in which ranks fail anywhere, in any way.

`--faults 500` runs so many of them. A seed is a job: its faults are the same in each run. Jobs run
at the same time, since those with a rank that is stopped wait much of theirs; each prints the
faults that its ranks have come to (`-rP` shows them).
"""

from __future__ import annotations

import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.forked import Forked
from tests.sharding.elastic.faulty_jobs import (
    SAVE_EVERY,
    Plan,
    Replays,
    check,
    happened,
    run_plan,
    text_of,
)
from tests.sharding.elastic.faulty_ranks import (
    PLACES,
    PLACES_AFTER_A_LOSS,
    PLACES_OF_A_SAVE,
    STEPS,
    Fault,
)

AT_ONCE = 8  # jobs of a test
KINDS = ["kill", "kill", "exit", "raise", "stop"]
ENDING_KINDS = ["kill", "kill", "exit", "exit", "stop"]
FORMS = ["ddp", "hsdp", "tp", "two", "accumulated", "pp"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        all_seeds = seeds_of(str(metafunc.config.getoption("--faults")))
        starts = range(0, len(all_seeds), AT_ONCE)
        metafunc.parametrize("seeds", [all_seeds[start : start + AT_ONCE] for start in starts])


def seeds_of(option: str) -> range:
    """Return the seeds that `--faults` names: "20", or "100:600"."""
    first, _, last = option.rpartition(":")
    return range(int(first or 0), int(last))


def plan(seed: int) -> Plan:
    """Return the job of a seed."""
    random = Random(seed)
    size = random.choice([4, 4, 8])
    draw = random.choice(
        [draw_any, draw_any, draw_host, draw_save, draw_copies, draw_spares, draw_joining]
    )
    return replace(draw(random, size), holds=seed % 4 != 0)


def draw_any(random: Random, size: int) -> Plan:
    """Ranks fail one after the other, the later ones also while the others recover."""
    return Plan(size, random.choice(FORMS), draw_faults(random, size))


def draw_host(random: Random, size: int) -> Plan:
    """Two ranks next to each other fail at one place, as those of a host do."""
    first = random.randrange(0, size, 2)
    step, place = random.randrange(STEPS), random.choice(PLACES)
    kind = random.choice(ENDING_KINDS)
    faults: list[Fault] = [(rank, step, place, kind) for rank in (first, first + 1)]
    if size == 8 and step + 1 < STEPS:  # and a rank of another one later
        other = random.choice([rank for rank in range(size) if rank not in (first, first + 1)])
        later = random.randrange(step + 1, STEPS)
        faults.append((other, later, random.choice(PLACES), random.choice(KINDS)))
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
    for number, (rank, step, _, kind) in enumerate(faults):
        before = [fault[1] for fault in faults[:number]]
        if rank >= size - spares and not any(other < step for other in before):  # it waits
            places = ["vote", *PLACES_AFTER_A_LOSS] if before else ["vote"]
            faults[number] = rank, step, random.choice(places), kind
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
    """Return one or two faults of four ranks, two to four of eight."""
    count = random.choice([1, 2, 2] if size == 4 else [2, 3, 4])
    ranks = random.sample(range(size), count)
    if random.random() < 0.3 and 0 not in ranks:
        ranks[0] = 0  # the rank that serves the stores
    faults: list[Fault] = []
    kinds = KINDS
    before = -1
    for rank, step in zip(ranks, sorted(random.choices(range(STEPS), k=count)), strict=True):
        places = [*PLACES, *PLACES_AFTER_A_LOSS] if step == before else PLACES
        kind = random.choice(kinds)
        if kind == "raise":  # a second one would end the job, or not count
            kinds = [other for other in kinds if other != "raise"]
        faults.append((rank, step, random.choice(places), kind))
        before = step
    return faults


@pytest.fixture(scope="module")
def replays(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Replays:
    return Replays(forked, tmp_path_factory.mktemp("replays"))


def run_seed(seed: int, forked: Forked, replays: Replays, folder: Path) -> str:
    """Run a job and check what has come of it; return that as a line."""
    job = plan(seed)
    folder.mkdir()
    since = time.monotonic()
    ended = run_plan(forked, job, folder)
    job_s = time.monotonic() - since
    check(job, ended, replays, folder / "saved" if job.saves else None)
    seconds = f"{job_s:.1f} s and {time.monotonic() - since - job_s:.1f} s"
    faults = text_of(happened(job, ended))
    return f"seed {seed}: {job.form} on {job.size} ranks: {faults}: {seconds}"


def test_random_faults(forked: Forked, replays: Replays, tmp_path: Path, seeds: range):
    with ThreadPoolExecutor(len(seeds)) as pool:
        jobs = {
            seed: pool.submit(run_seed, seed, forked, replays, tmp_path / str(seed))
            for seed in seeds
        }
    failed: list[Exception] = []
    for seed, job in jobs.items():
        error = job.exception()
        if isinstance(error, Exception):
            error.add_note(f"seed {seed}: {plan(seed)}")
            traceback.print_exception(error)
            failed.append(error)
        else:
            print(job.result())
    if failed:
        raise ExceptionGroup("jobs with faults", failed)
