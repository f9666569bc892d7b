"""The benchmark of the monitor: it runs, times torch's checks too, and computes its figures
correctly.
"""

from __future__ import annotations

import pytest

COMMUNICATING = {"off", "on", "strict", "torch", "DETAIL"}


@pytest.fixture
def monitor(benchmark_module):
    return benchmark_module("monitor")


@pytest.fixture
def rank_times(benchmark_module):
    return benchmark_module("rank_times")


def cost(rank_times, *seconds, cpu=1.0):
    batch = rank_times.Batch(lambda: None, lambda: None, 2)
    batch.cpu, batch.watchdog = [99.0, *[cpu] * len(seconds)], [99.0, *[0.0] * len(seconds)]
    return batch.cost(rank_times.Times(tuple(2 * s for s in seconds)))


@pytest.mark.slow
def test_every_section_has_its_rows(run_benchmark):
    figures, document = run_benchmark("monitor.py", "--quick")
    cases = figures["cases"]
    who = {case["case"]: set(case["costs"]) for case in cases}
    assert who["all_reduce of 1 KB"] == who["f32[64, 64] rows -> columns -> rows"] == COMMUNICATING
    assert [set(c["costs"]) for c in cases if "training step" in c["case"]] == [
        COMMUNICATING - {"torch"},
        {"off", "on"},
    ]
    steps = {case["collectives"] for case in cases if "training step" in case["case"]}
    assert len(steps) == 1, "a step calls as many collectives in a null world"
    assert min(steps) > 10
    assert all(cost["wall"]["min_us"] > 0 for case in cases for cost in case["costs"].values())
    assert "| a collective, 2 processes |" in document
    assert "on against off" in document


def test_round_excludes_warm_up_calls(rank_times):
    one = cost(rank_times, 3.0, 1.0, cpu=7.0)
    assert (one.wall.rounds, one.cpu.rounds, one.watchdog.rounds) == (
        (3.0, 1.0),
        (7.0, 7.0),
        (0.0, 0.0),
    )


def test_merge_ranks_takes_slowest_wall_time_and_mean_cpu_time(rank_times):
    costs = [cost(rank_times, 1.0, 5.0, cpu=2.0), cost(rank_times, 3.0, 2.0, cpu=4.0)]
    ranks = [rank_times.TimedCase("step", "a", 4, {"on": each}) for each in costs]
    found = rank_times.merge_ranks(ranks).costs["on"]
    assert (found.wall.rounds, found.cpu.rounds) == ((3.0, 5.0), (3.0, 3.0))


def test_differences_are_of_minima_per_collective(monitor, rank_times):
    case = rank_times.TimedCase(
        "host",
        "a step",
        4,
        {"off": cost(rank_times, 1e-3, 3e-3), "on": cost(rank_times, 1.008e-3, 9e-3)},
    )
    assert monitor.host_row(case) == ["a step", "1000.00", "1008.00", "8.00", "4", "1.0080"]
    assert monitor._per_collective_us(case, case.times(), "on", "off") == pytest.approx(2.0)


def test_group_without_detail_checks_raises(monitor, monkeypatch):
    class Plain:
        def _get_backend(self, device):
            return self

    monkeypatch.setattr(monitor.dist, "new_group", lambda *_, **__: Plain())
    before = monitor.dist.get_debug_level()
    with pytest.raises(RuntimeError, match="checks nothing"):
        monitor.checked_group([0, 1])
    assert monitor.dist.get_debug_level() == before
