"""Tests that the benchmarks run, and of their arithmetic."""

from __future__ import annotations

import pytest


@pytest.fixture
def redistribute(benchmark_module):
    return benchmark_module("redistribute")


@pytest.fixture
def measure(benchmark_module):
    return benchmark_module("measure")


@pytest.fixture
def plan_scale(benchmark_module):
    return benchmark_module("plan_scale")


# -- measure ---------------------------------------------------------------------------------------


def test_interleaved_takes_turns(measure):
    seen = []
    calls = {name: lambda name=name: seen.append(name) for name in "abc"}
    times = measure.interleaved(calls, rounds=20, batch_s=0)
    rounds = ["".join(seen[i : i + 3]) for i in range(len(seen) - 60, len(seen), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(set(rounds)) > 1, "the order should change"
    assert all(len(t.rounds) == 20 and 0 < t.best <= t.median for t in times.values())


def test_ranks_call_equally_often(measure):
    """Even if they disagree about how many calls fill a batch."""
    counted = []
    for mine in (0, 5):
        seen = []
        measure.interleaved(
            {"a": lambda seen=seen: seen.append(0)},
            rounds=2,
            batch_s=1e-9 * mine,
            agree=lambda _: 7,
        )
        counted.append(len(seen))
    assert counted[0] == counted[1]


def test_slowest_rank_of_each_round(measure):
    assert measure.slowest([measure.Times((1.0, 5.0)), measure.Times((3.0, 2.0))]).rounds == (
        3.0,
        5.0,
    )


# -- redistribute ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "src", "dst", "bound"),
    [
        ((4,), "S0", "R", 3 * 1024 * 4),
        ((4,), "S0", "S1", 3 * 256 * 4),
        ((4,), "R", "S0", 0),
        ((4,), "R", "P", 0),
        ((2, 2), "S0 S0", "R R", 3 * 1024 * 4),
        ((2, 2), "S0 R", "R S0", 1024 * 4 * 2),
        ((4,), "P", "R", None),
    ],
)
def test_the_bound(redistribute, mesh, src, dst, bound):
    assert redistribute.Pair(mesh, (64, 64), src, dst).bound() == bound


def test_pairs_exist_for_every_guarantee(redistribute):
    for mesh, moves in (((4,), 6), ((2, 4), 72), ((4, 2), 72), ((2, 2, 2), 702)):
        pairs = redistribute.pairs_on(mesh, 64)
        assert len(set(pairs)) == len(pairs)
        assert sum("P" not in p.src + p.dst and p.shape == (64, 64) for p in pairs) == moves
        assert sum(p.timed for p in pairs) == len(pairs) - max(
            0, moves - redistribute.TIMED_OF_MANY
        ) * (moves > 72)
        assert any("P" in p.src for p in pairs)
        assert any("uneven" in str(p) for p in pairs)


@pytest.mark.slow
def test_redistribute_runs_and_finds_the_bound_reached(run_benchmark):
    figures, document = run_benchmark("redistribute.py", "--quick")
    assert len(figures["pairs"]) == 15
    for pair in figures["pairs"]:
        ours, theirs = pair["ours"], [pair["greedy"], pair["min-cost"]]
        assert ours["right"]
        assert ours["launches"] <= min(one["launches"] for one in theirs)
        assert pair["bound"] is None or ours["bytes_received"] == pair["bound"]
        assert all(one["median_us"] > 0 for one in (ours, *theirs))
    assert "| (2,) S0 -> S1" in document
    assert "Bytes received over the bound" in document


# -- plan_scale ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "peers"),
    [
        ("S0 -> R, all axes", 31),
        ("S0 -> S1, all axes", 31),
        ("FSDP all_gather", 3),
        ("FSDP all_gather, minor", 3),
    ],
)
def test_peers(plan_scale, pair, peers):
    assert (
        plan_scale.time_rank(plan_scale.PlanCase((4, 8), None, pair, plan_scale.EVEN)).result
        == peers
    )


@pytest.mark.slow
def test_plan_scale_runs_and_writes_its_figures(run_benchmark):
    figures, document = run_benchmark("plan_scale.py", "--quick")
    assert {case["ranks"] for case in figures["cases"]} == {8}
    assert len({case["case"] for case in figures["cases"]}) == len(figures["cases"])
    assert all(
        case[part] > 0
        for case in figures["cases"]
        for part in ("plan", "explain", "rank", "allocated")
    )
    assert "| (2, 2, 2) flat, FSDP all_gather |" in document


# -- dispatch --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dispatch_runs_and_writes_its_figures(run_benchmark):
    figures, document = run_benchmark("dispatch.py", "--only", "moves")
    cases = figures["sections"]["moves"]
    assert {"plain", "DTensor", "ours"} <= set(cases[0]["times"])
    assert "| partial -> replicated |" in document


# -- pipelines -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pipelines_are_compared_with_those_of_torch(run_benchmark):
    """Each schedule, those of several stages also with `defer_pp_recv`, if its losses are right."""
    figures, document = run_benchmark("pipeline.py", "--quick")
    costs = {case["case"]: case["costs"] for case in figures["cases"]}
    assert list(costs) == ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"]
    for name, by_whom in costs.items():
        assert {"shardmesh", "torch"} <= set(by_whom)
        if name not in ("gpipe", "1f1b"):
            assert f"| {name} | torch, defer_pp_recv |" in document
