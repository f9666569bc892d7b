"""Bubbles and live activations are those of the papers, in the domains that docstrings state."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

import shardmesh as sm
from shardmesh.sharding.parallel.pipeline.make_schedule import SCHEDULE_NAMES
from shardmesh.sharding.parallel.pipeline.repeated_block import (
    schedule_blocks,
    v_block,
    v_placement,
)
from tests.tiers import slow

make_schedule = sm.parallel.make_schedule


@dataclass(frozen=True)
class Formula:
    """What is published of a schedule, for p ranks and m microbatches.

    Attributes:
        name: of the schedule.
        v: stages on each rank.
        bubble: makespan minus busy, of p and the costs f, i, w of a stage.
        live: activations of each rank, of p and m; or the most of any rank.
        domain: of p and m.
        costs: domain of f, i, w.
    """

    name: str
    v: int
    bubble: Callable[[int, int, int, int], float]
    live: Callable[[int, int], list[int] | int]
    domain: Callable[[int, int], bool]
    costs: Callable[[int, int, int], bool] = lambda f, i, w: True

    def __str__(self) -> str:
        return f"{self.name}-{self.v}"


def whole_backward(p, f, i, w):
    return (p - 1) * (f + i + w)


def at_equal_costs(f, i, w):
    return f == i == w


def interleaved(v: int) -> Formula:
    def live(p, m):
        return [min(v * m, (v - 1) * p + 2 * (p - 1 - rank) + 1) for rank in range(p)]

    return Formula("interleaved", v, whole_backward, live, lambda p, m: m % p == 0)


def looped_bfs(v: int) -> Formula:
    return Formula("looped_bfs", v, whole_backward, lambda p, m: [v * m] * p, lambda p, m: m >= p)


def zb_h1(v: int) -> Formula:
    return Formula(
        "zb_h1",
        v,
        lambda p, f, i, w: (p - 1) * (f + i - w),
        lambda p, m: [v * p] * p,
        lambda p, m: m >= p if v == 1 else m % p == 0,
        lambda f, i, w: min(f, i) >= w,
    )


FORMULAS = [
    Formula("gpipe", 1, whole_backward, lambda p, m: [m] * p, lambda p, m: True),
    Formula(
        "1f1b",
        1,
        whole_backward,
        lambda p, m: [min(m, p - rank) for rank in range(p)],
        lambda p, m: True,
    ),
    interleaved(2),
    interleaved(3),
    looped_bfs(2),
    looped_bfs(4),
    zb_h1(1),
    zb_h1(2),
    Formula(
        "zb_v",
        2,
        lambda p, f, i, w: (p - 1) * f,
        lambda p, m: 2 * p,
        lambda p, m: m >= p,
        at_equal_costs,
    ),
    Formula(
        "v_half",
        2,
        lambda p, f, i, w: (3 * p - (5 if p % 2 == 0 and p > 2 else 4)) * f,
        lambda p, m: 2 * ((p + 2) // 2),
        lambda p, m: m >= p,
        at_equal_costs,
    ),
    Formula(
        "v_min",
        2,
        lambda p, f, i, w: (4 * p - 5) * f,
        lambda p, m: 2 * ((p + 4) // 3),
        lambda p, m: m >= p,
        at_equal_costs,
    ),
    Formula(
        "dualpipe_v",
        2,
        lambda p, f, i, w: (p - 1) * (f + 2 * (i + w) - 3 * w),
        lambda p, m: [2 * p + 1] * p,
        lambda p, m: m >= 2 * p,
        at_equal_costs,
    ),
]
COSTS = [(1, 1, 1), (2, 3, 1), (3, 2, 2), (1, 3, 2), (2, 2, 2)]
FEW = [(2, 2), (2, 3), (2, 64), (3, 6), (3, 7), (4, 4), (4, 10), (5, 15), (6, 12), (8, 16), (9, 9)]
ALL = [(p, m) for p in range(2, 17) for m in range(2, 65) if m % 8 == p % 8 or m % p == 0]


@pytest.mark.parametrize("sizes", [FEW, [(16, 64)], slow(ALL)], ids=["few", "largest", "all"])
@pytest.mark.parametrize("formula", FORMULAS, ids=str)
def test_bubble_and_live_activations_are_the_published_ones(formula, sizes):
    compared = 0
    for p, m in sizes:
        if not formula.domain(p, m):
            continue
        schedule = make_schedule(formula.name, p, m, stages_per_rank=formula.v)
        for f, i, w in COSTS if m <= 16 else COSTS[:1]:
            if not formula.costs(f, i, w):
                continue
            timeline = schedule.simulate(forward=f, backward_input=i, backward_weight=w)
            expected = formula.bubble(p, f, i, w)
            assert timeline.bubble == expected, (p, m, f, i, w)
            live = formula.live(p, m)
            assert (list(timeline.live) if isinstance(live, list) else max(timeline.live)) == live
            compared += 1
    assert compared


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 5), (4, 7), (4, 20), (7, 13), (8, 16), (16, 31)])
def test_zb_v_is_free_of_bubbles_by_the_spans_of_ranks(p, m):
    timeline = make_schedule("zb_v", p, m).simulate()
    assert timeline.span_bubble == 0
    assert timeline.bubble == p - 1


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 8, 12, 16])
def test_v_schedules_stay_within_the_rates_of_the_paper(p):
    """p / 2m and 2p / 3m of a step without bubble, and a half and a third of the memory."""
    for m in (2 * p, 3 * p):
        ideal = 6 * m
        half = make_schedule("v_half", p, m).simulate()
        least = make_schedule("v_min", p, m).simulate()
        assert half.bubble / ideal <= p / (2 * m)
        assert least.bubble / ideal <= 2 * p / (3 * m)
        assert max(half.live_microbatches) == (p + 2) // 2
        assert max(least.live_microbatches) == (p + 4) // 3


def test_every_schedule_is_proved():
    for name in SCHEDULE_NAMES:
        for p, m in [(1, 2), (1, 3), (2, 4), (3, 1), (3, 2), (3, 6), (4, 3), (4, 9), (5, 11)]:
            try:
                schedule = make_schedule(name, p, m)
            except ValueError:
                assert name in ("dualpipe_v", "interleaved")
                continue
            schedule.check()
            stages = {"gpipe": 1, "1f1b": 1, "zb_h1": 1}.get(name, 2) * p
            assert (schedule.ranks, schedule.stages, schedule.microbatches) == (p, stages, m)
            in_a_v = name in ("zb_v", "v_half", "v_min", "dualpipe_v")
            loop = tuple(stage % p for stage in range(stages))
            assert schedule.placement == (v_placement(p) if in_a_v else loop)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (
            ("interleaved", 4, 9),
            {},
            "9 microbatches on 4 ranks: with several stages on each rank they must divide into "
            "9 // 4 = 2 rounds of equal length, as 8 do; a multiple of 4 always does",
        ),
        (
            ("zb_h1", 2, 5),
            {"stages_per_rank": 2},
            "5 microbatches on 2 ranks: with several stages on each rank they must divide into "
            "5 // 2 = 2 rounds of equal length, as 4 do; a multiple of 2 always does",
        ),
        (
            ("dualpipe_v", 4, 7),
            {},
            "dualpipe_v takes at least twice as many microbatches as ranks: 7 is less than 2 * 4",
        ),
        (("1f1b", 0, 4), {}, "ranks=0: a schedule takes a whole number from 1"),
        (("1f1b", 4, 2.5), {}, "microbatches=2.5: a schedule takes a whole number from 1"),
        (
            ("interleaved", 4, 4),
            {"stages_per_rank": 0},
            "stages_per_rank=0: a schedule takes a whole number from 1",
        ),
        (
            ("zb_v", 4, 4),
            {"stages_per_rank": 3},
            "stages_per_rank=3: zb_v has 2 on each rank; interleaved, looped_bfs, zb_h1 take any "
            "number",
        ),
        (
            ("zbv", 4, 4),
            {},
            "unknown schedule 'zbv': the names are gpipe, 1f1b, interleaved, looped_bfs, zb_h1, "
            "zb_v, v_half, v_min, dualpipe_v, and torch's GPipe, 1F1B, Interleaved1F1B, LoopedBFS, "
            "InterleavedZeroBubble, ZBVZeroBubble, DualPipeV",
        ),
    ],
)
def test_what_a_schedule_does_not_take_is_one_error(arguments, options, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        make_schedule(*arguments, **options)


def test_the_blocks_of_microbatches_interlock():
    for p in range(1, 40):
        for block, limit in (
            (v_block(p, hops=(4, 2)), 2 * p),
            (v_block(p, hops=(2, 1), gradient_turn=2 if p % 2 else 5), 2 * ((p + 2) // 2)),
            (v_block(p, hops=(1, 1), turn=1 if p % 3 else 3), 2 * ((p + 4) // 3)),
        ):
            for rank in range(p):
                down, up = rank, 2 * p - 1 - rank
                slots = [block.forward[down], block.forward[up]]
                slots += [block.backward_input[up], block.backward_input[down]]
                assert slots == sorted(slots)
                assert len({slot % block.period for slot in slots}) == 4
                assert block.in_flight(rank) <= limit


def test_a_limit_that_is_too_low_for_a_block():
    assert schedule_blocks(v_block(3, hops=(4, 2)), 4, limit=6)
    with pytest.raises(ValueError, match="the block needs 6 activations on a rank, more than 5"):
        schedule_blocks(v_block(3, hops=(4, 2)), 4, limit=5)
