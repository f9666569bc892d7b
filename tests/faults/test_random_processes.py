"""Random programs on four processes: with a random divergence on one rank, and without one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from shardmesh.mesh import current_world
from shardmesh.mesh.comm.recording.trace_buffer import Header
from tests.faults.random_jobs import run_faulty
from tests.faults.random_outcome import RIGHT
from tests.faults.random_programs import MESHES, PROCESS_KINDS, healthy_program, mesh_of, run
from tests.faults.runner import Runner
from tests.pool import Pool

# benchmarks/monitor_random.py has hundreds.
NAMES = [
    f"{raw}{kind} {seed}" for seed in range(1) for kind in PROCESS_KINDS for raw in ("", "raw ")
]
AT_ONCE = 3  # most wait most of the time
CALLS = 1_000


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[str, Future[tuple[str, str]]]]:
    with Runner("tests.faults.random_table") as runner, ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(run_faulty, runner, name) for name in NAMES}


@pytest.mark.slow
@pytest.mark.xdist_group("random_processes")
@pytest.mark.parametrize("name", NAMES)
def test_outlier_is_named_or_changes_nothing(
    jobs: dict[str, Future[tuple[str, str]]], name: str
) -> None:
    what, said = jobs[name].result()
    assert what in RIGHT, f"{what}\n{said}"


def test_correct_programs_raise_no_error(world4: Pool) -> None:
    seeds, calls = iter(range(100, 1000)), 0
    while calls < CALLS:
        calls += sum(world4(run_correct, [next(seeds) for _ in range(5)], timeout=100))


def test_correct_programs_that_call_torch_raise_no_error(world4: Pool) -> None:
    assert all(
        count > CALLS / 10
        for count in world4(run_correct, list(range(2000, 2010)), True, timeout=100)
    )


def run_correct(seeds: list[int], raw: bool = False) -> int:
    """Return how many collectives this rank calls in these programs."""
    world = current_world()
    before = world.trace_buffer.words[Header.RECORDS]
    for seed in seeds:
        program = healthy_program(seed, MESHES, iterations=(2, 12), raw=raw)
        run(program, mesh_of(program), world.rank, False)
    return world.trace_buffer.words[Header.RECORDS] - before
