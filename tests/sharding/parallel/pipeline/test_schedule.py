"""Tables, their simulation at any costs, and their charts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest

import shardmesh as sm
from shardmesh.sharding.parallel.pipeline.actions import Action, actions_of
from shardmesh.sharding.parallel.pipeline.simulation import Costs, makespan_on_shared_cores
from tests.sharding.parallel.pipeline.random_tables import random_schedule, with_other_backwards

Schedule = sm.parallel.Schedule
make_schedule = sm.parallel.make_schedule


def test_a_table_of_texts_and_its_parts():
    schedule = Schedule(
        [["0F0", "", "3F0", None, "(0F1;3B0)OVERLAP_F_B"], ["1F0", " 2I0 "]], name="part"
    )
    assert [list(map(str, row)) for row in schedule.rows] == [
        ["0F0", "3F0", "(0F1;3B0)OVERLAP_F_B"],
        ["1F0", "2I0"],
    ]
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (2, 4, 2)
    assert schedule.placement == (0, 1, 1, 0)
    assert repr(schedule) == "Schedule(part: 2 ranks, 4 stages, 2 microbatches)"


def test_a_schedule_is_a_value():
    one, two = make_schedule("1f1b", 2, 2), Schedule(make_schedule("1f1b", 2, 2).rows, name="two")
    assert one == two
    assert len({one, two, make_schedule("gpipe", 2, 2)}) == 2
    with pytest.raises(AttributeError):
        one.rows = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        ([["0F0", "F1"]], ValueError, "rank 0, slot 1: 'F1' is not an action of a pipeline"),
        ([["0F0", "0F"]], ValueError, "rank 0, slot 1: '0F' is not an action"),
        ([["0F0", "(0F0)OVERLAP_F_B"]], ValueError, r"'\(0F0\)OVERLAP_F_B' is not an action"),
        ([["0F0", "0SEND_F0"]], ValueError, "rank 0, slot 1: 0SEND_F0 is communication"),
        ([["0F0", 3]], TypeError, "rank 0, slot 1: 3 is no action; write a text such as '0F0'"),
        ([[], []], ValueError, "the schedule has no actions"),
    ],
)
def test_what_is_no_table(rows, error, text):
    with pytest.raises(error, match=text):
        Schedule(rows)


def test_a_stage_that_is_nowhere():
    with pytest.raises(ValueError, match="stage 1 of 3 is on no rank: number stages from 0"):
        _ = Schedule([["0F0", "2F0"]]).placement


def relaxed_times(schedule: Schedule, costs: dict, latency) -> dict[tuple[int, int], float]:
    """Return the end of every cell: the longest path to it.

    All edges are relaxed until none is left to relax (Bellman and Ford).
    """
    rows = schedule.rows
    ends = {(rank, slot): 0.0 for rank, row in enumerate(rows) for slot in range(len(row))}
    owners = {
        action.result: (rank, slot)
        for rank, slot in ends
        for action in actions_of(rows[rank][slot])
        if action.kind != "W"
    }
    changed = True
    while changed:
        changed = False
        for rank, slot in ends:
            start = ends[rank, slot - 1] if slot else 0
            for action in actions_of(rows[rank][slot]):
                for operand in action.operands(schedule.stages - 1):
                    owner = owners[operand]
                    start = max(start, ends[owner] + (latency if owner[0] != rank else 0))
            actions = actions_of(rows[rank][slot])
            duration = sum(costs[action.kind][action.stage] for action in actions)
            if start + duration > ends[rank, slot]:
                ends[rank, slot] = start + duration
                changed = True
    return ends


def test_times_are_those_of_the_longest_path():
    for seed in range(40):
        rng = random.Random(seed)
        schedule = Schedule(with_other_backwards(rng, random_schedule(rng).rows))
        values = {
            kind: [Fraction(rng.randint(0, 8), 4) for _ in range(schedule.stages)] for kind in "FIW"
        }
        values["B"] = [one + other for one, other in zip(values["I"], values["W"], strict=True)]
        latency = Fraction(rng.randint(0, 4), 4)
        timeline = schedule.simulate(
            forward=values["F"],  # type: ignore[arg-type]
            backward_input=values["I"],  # type: ignore[arg-type]
            backward_weight=values["W"],  # type: ignore[arg-type]
            latency=latency,  # type: ignore[arg-type]
        )
        ends = relaxed_times(schedule, values, latency)
        for (rank, slot), end in ends.items():
            assert timeline.events[rank][slot].end == end, seed
        assert timeline.makespan == max(ends.values())


def test_overlaps_and_whole_backwards_have_their_own_costs():
    schedule = make_schedule("dualpipe_v", 2, 4)
    overlapped = schedule.simulate(overlap=0.5, backward=3)
    durations = {
        str(event.cell): event.end - event.start for event in overlapped.events[0] if event.cell
    }
    assert durations["0F0"] == 1
    assert durations["3B2"] == 3
    assert durations["(0F3;3B1)OVERLAP_F_B"] == 0.5 * (1 + 3)


def test_live_activations_end_with_the_backward_for_weights():
    assert Schedule([["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"]]).simulate().live == (2,)
    assert Schedule([["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"]]).simulate().live == (1,)
    assert Schedule([["0F0", "0B0", "0F1", "0B1"]]).simulate().live == (1,)
    pair = Schedule([["0F0", "1F0", "(0F1;1B0)OVERLAP_F_B", "0B0", "1F1", "1B1", "0B1"]])
    assert pair.simulate().live == (3,)
    assert pair.simulate().live_microbatches == (1.5,)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"forward": -1}, "forward=-1: a cost is a finite number, 0 or more"),
        ({"forward": None}, "forward=None: a cost is a finite number"),
        ({"backward_input": [1, "1"]}, "backward_input=.*: a cost is a finite number"),
        ({"latency": math.inf}, "latency=inf: a cost is a finite number"),
        ({"backward": [1, 2, 3]}, "backward has 3 values, and the schedule has 2 stages"),
        ({"steps": 0}, "steps=0: the number of steps is 1 or more"),
        ({"gradient_check": "late"}, "gradient_check='late': write 'before' or 'after'"),
    ],
)
def test_costs_that_are_none(options, text):
    with pytest.raises(ValueError, match=text):
        make_schedule("1f1b", 2, 2).simulate(**options)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
def test_a_check_before_the_step_ends_the_zero_bubble(p, m):
    """Steps of zb_v follow each other without a gap, unless ranks wait for all gradients."""
    schedule = make_schedule("zb_v", p, m)
    steps = 3
    late = schedule.simulate(steps=steps, optimizer=2)
    assert late.span_bubble == 0
    assert late.makespan == steps * (6 * m + 2) + p - 1
    early = schedule.simulate(steps=steps, optimizer=2, gradient_check="before")
    assert early.makespan == steps * (6 * m + 2 + p - 1)
    for row in range(p):
        starts = [event.start for event in early.events[row] if event.cell is None]
        assert starts == [(step + 1) * (6 * m + p - 1) + 2 * step for step in range(steps)]


def test_the_latency_of_the_check_counts():
    schedule = make_schedule("gpipe", 2, 2)
    early = schedule.simulate(latency=0.5, optimizer=1, gradient_check="before")
    late = schedule.simulate(latency=0.5, optimizer=1)
    assert early.makespan == late.makespan + 0.5


def columns(line: str) -> list[str]:
    return line.removeprefix("rank ").split()[1:]


def test_the_chart_of_uneven_times():
    chart = make_schedule("1f1b", 2, 3).simulate(latency=0.5).chart().splitlines()
    assert chart == [
        "rank 0  F0- F1- . . . . . . B0----- F2- B1----- . . . . B2-----",
        "rank 1  . . . F0- B0----- F1- B1----- . . F2- B2----- . . . . .",
    ]


def test_the_chart_of_times_without_a_common_unit():
    timeline = make_schedule("1f1b", 2, 3).simulate(forward=1.234567, backward_input=0.98765)
    rows = [columns(line) for line in timeline.chart().splitlines()]
    for row, cells in zip(make_schedule("1f1b", 2, 3).rows, rows, strict=True):
        shown = [cell.rstrip("-") for cell in cells if cell != "."]
        assert shown == [f"{action.kind}{action.microbatch}" for action in _actions(row)]


def _actions(row: Sequence) -> list[Action]:
    return [action for cell in row for action in actions_of(cell)]


def test_a_picture_has_a_bar_for_each_action(tmp_path):
    pytest.importorskip("matplotlib")
    schedule = make_schedule("dualpipe_v", 2, 4)
    figure = schedule.picture(tmp_path / "chart.png")
    (axes,) = figure.axes
    assert len(axes.collections) == sum(map(len, schedule.rows))
    assert axes.get_title().startswith("dualpipe_v: 2 ranks, 4 stages, 4 microbatches\nmakespan 26")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert (tmp_path / "chart.png").stat().st_size > 1000
    two = schedule.simulate(steps=2, optimizer=1)
    two.picture(tmp_path / "one.svg", title="two steps")
    two.picture(tmp_path / "two.svg", title="two steps")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


# -- gathers of fully_shard ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
def test_gathers_for_each_microbatch_prolong_each_action(name):
    schedule = make_schedule(name, 2, 4)
    gathered = schedule.simulate(gather=0.5, reduce=0.25, latency=0.125)
    longer = schedule.simulate(
        forward=1.5, backward=2.75, backward_input=1.5, backward_weight=1.25, latency=0.125
    )
    assert gathered.makespan == longer.makespan
    assert gathered.busy == longer.busy
    assert gathered.gathered == (1, 1)


def test_gathers_once_a_step():
    schedule = Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    timeline = schedule.simulate(gather=[3, 1], reduce=[1, 2], gather_per="step", steps=2)
    first, second = ([str(event.cell) for event in row] for row in timeline.events)
    assert first == 2 * ["0G", "0F0", "0F1", "0B0", "0B1", "0R"]
    assert second == 2 * ["1G", "1F0", "1B0", "1F1", "1B1", "1R"]
    assert timeline.busy == (2 * (3 + 6 + 1), 2 * (1 + 6 + 2))
    assert "gathered stages: 1, 1" in timeline.summary()
    assert timeline.chart().splitlines()[0].startswith("rank 0  G ------ F0 F1")


def test_how_many_stages_are_gathered():
    schedule = make_schedule("interleaved", 2, 4, stages_per_rank=3)
    assert schedule.simulate().gathered == (1, 1)
    assert schedule.simulate(gather_per="step").gathered == (3, 3)
    one_by_one = Schedule([["0F0", "0F1", "1F0", "1F1", "1B0", "1B1", "0B0", "0B1"]])
    assert one_by_one.simulate(gather_per="step").gathered == (2,)
    overlap = make_schedule("dualpipe_v", 2, 4)
    assert overlap.simulate().gathered == (2, 2)
    assert "gathered" not in overlap.simulate().summary()


def test_errors_of_gathers():
    schedule = make_schedule("1f1b", 2, 2)
    with pytest.raises(ValueError, match="gather has 3 values, and the schedule has 2 stages"):
        schedule.simulate(gather=[1, 1, 1])
    with pytest.raises(ValueError, match="gather_per='epoch': write 'microbatch' or 'step'"):
        schedule.simulate(gather_per="epoch")


def test_ranks_with_cores_of_their_own_end_as_in_a_simulation():
    rng = random.Random(0)
    for _ in range(200):
        schedule = random_schedule(rng)
        costs = {name: rng.choice([0.0, 1.0, 1.5]) for name in ("forward", "backward_input")}
        costs |= {"backward_weight": 1.0, "latency": rng.choice([0.0, 0.25])}
        alone = makespan_on_shared_cores(schedule.rows, Costs(**costs), lambda ranks: 1.0)
        assert alone == pytest.approx(schedule.simulate(**costs).makespan)


def test_ranks_that_share_cores_compute_faster_while_others_wait():
    two = Schedule([["0F0", "0B0"], ["1F0", "1B0"]])  # one of both computes at a time
    assert makespan_on_shared_cores(two.rows, Costs(), lambda ranks: 2 / ranks) == 3.0
    rng = random.Random(1)
    for _ in range(200):
        schedule = random_schedule(rng)
        costs = Costs(forward=rng.choice([1.0, 2.0]), latency=rng.choice([0.0, 0.5]))
        cores = rng.choice([1, 2])
        n = schedule.ranks

        def speed(ranks: int, cores: int = cores, n: int = n) -> float:
            return min(1.0, cores / ranks) * n / cores  # 1 if all compute

        work = sum(costs.of(cell) for row in schedule.rows for cell in row)
        ends = makespan_on_shared_cores(schedule.rows, costs, speed)
        assert work / n <= ends + 1e-9
        assert (
            ends <= schedule.simulate(forward=costs.forward, latency=costs.latency).makespan + 1e-9
        )
