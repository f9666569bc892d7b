"""Stragglers: which rank waited for which."""

from __future__ import annotations

import time

import pytest
import torch

from shardmesh.mesh import init_device_mesh
from shardmesh.mesh.comm.recording.trace_buffer import TraceBuffer
from shardmesh.mesh.monitor.ledger.ledger import Ledger, mark_step
from shardmesh.mesh.monitor.ledger.stragglers import StragglerReport, Wait, straggler_report
from tests.mesh.monitor.four_ranks import run, set_times
from tests.pool import Pool

MS = 1_000_000


def two_steps(rank: int) -> None:
    group = init_device_mesh("cpu", (4,), axis_names=("dp",)).group()
    for step in range(2):
        mark_step(step)
        group.all_reduce(torch.ones(2))
        group.broadcast(torch.ones(2), 0)


def report(times: dict[int, list[tuple[int, int]]]) -> StragglerReport:
    """Return the report of `two_steps`, with these starts and ends in ms for each rank."""
    buffers = run(two_steps)
    _set(buffers, times)
    return StragglerReport.of(Ledger(buffers))


def _set(buffers: dict[int, TraceBuffer], times: dict[int, list[tuple[int, int]]]) -> None:
    for rank, buffer in buffers.items():
        for number, (start, end) in enumerate(times[rank]):
            set_times(buffer, number, (1000 + start) * MS, (1000 + end) * MS if end else 0)


LATE = {
    0: [(0, 31), (40, 41), (100, 125), (130, 131)],
    1: [(10, 31), (40, 50), (105, 125), (130, 140)],
    2: [(30, 31), (40, 50), (110, 125), (130, 140)],
    3: [(20, 31), (48, 50), (120, 125), (130, 140)],
}


def test_ranks_wait_for_the_last_one_and_sources_until_they_are_done() -> None:
    found = report(LATE)
    assert found.ranks == [0, 1, 2, 3]
    assert found.left_out == 0
    all_reduce = {(0, 2): 0.030, (1, 2): 0.020, (3, 2): 0.010}
    broadcast = {(0, 3): 0.001, (1, 3): 0.008, (2, 3): 0.008}
    assert found.steps[0].between == pytest.approx(all_reduce | broadcast, abs=1e-5)
    assert (found.steps[0].straggler, found.steps[1].straggler) == (2, 3)
    assert found.steps[1].by_rank == pytest.approx({0: 0.020, 1: 0.015, 2: 0.010, 3: 0.0}, abs=1e-5)
    assert found.all.for_rank == pytest.approx({0: 0.0, 2: 0.060, 3: 0.062}, abs=1e-5)
    assert found.all.straggler == 3


def test_the_tables() -> None:
    steps, ranks, lines = str(report(LATE)).split("\n\n")
    heads, first, second, total = (line.split() for line in steps.splitlines())
    assert heads[-2:] == ["rank", "3"]
    assert first[:4] == ["0", "rank", "2", "78%"]
    assert (float(first[4]), float(first[5])) == pytest.approx((77, 31), abs=0.01)
    assert second[:3] == ["1", "rank", "3"]
    assert (total[0], float(total[4])) == ("all", pytest.approx(122, abs=0.01))
    assert ranks.splitlines()[1].split()[:2] == ["rank", "0"]
    assert [line.split()[0] for line in lines.splitlines()[1:]] == ["all_reduce", "broadcast"]
    assert "four_ranks.py" not in lines
    assert "test_stragglers.py:" in lines


def test_collectives_not_reached_by_all_are_omitted() -> None:
    buffers = run(lambda rank: two_steps(rank) if rank != 1 else None)
    found = StragglerReport.of(Ledger(buffers))
    assert (found.steps, found.left_out) == ({}, 4)
    assert str(found) == "no collective that all ranks have come to (4 others)"


def test_simultaneous_ranks_do_not_wait() -> None:
    found = report({rank: [(0, 1), (2, 3), (4, 5), (6, 7)] for rank in range(4)})
    assert found.all.total == 0
    assert found.all.straggler is None
    assert str(found).splitlines()[1].split() == [
        "0",
        "-",
        "0.000",
        "0.000",
        "0.000",
        "0.000",
        "0.000",
    ]


def test_of_many_ranks_the_latest_are_shown() -> None:
    entry = Ledger(run(two_steps)).ranks[0].entries[0]
    waits = [Wait(0, rank, float(rank), entry) for rank in range(1, 40)]
    found = StragglerReport(list(range(40)), waits, 0)
    heads = str(found).splitlines()[0]
    assert heads.count("rank ") == 16
    assert heads.endswith("rank 38  rank 39")
    assert found.all.straggler == 39


def _sleepy() -> tuple[int | None, float, dict[int, float]]:
    """Sleep on rank 2 in the last step, before each of two collectives."""
    mesh = init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    for step in (7001, 7002):
        mesh.group().barrier()
        mark_step(step)
        for _ in range(2):
            time.sleep(0.3 if step == 7002 and mesh.world.rank == 2 else 0)
            mesh.group().all_reduce(torch.ones(4))
    mesh.group().barrier()
    waits = straggler_report().steps[7002]
    return waits.straggler, waits.total, waits.by_rank


def test_sleeping_rank_is_found(world4: Pool) -> None:
    for straggler, total, by_rank in world4(_sleepy):
        assert straggler == 2
        assert total > 3 * 2 * 0.2
        assert all(by_rank[rank] > 0.4 for rank in (0, 1, 3))
