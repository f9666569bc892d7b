"""Schedules and CSV files next to those of torch.distributed.pipelining.

Equal are GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble (`zb_h1`) and DualPipeV,
action by action, and what they do not take. Different are:

* 1F1B of one rank: the last row of torch's table begins with microbatch 1 and ends with one more
  than there is (torch 2.13; the table is for display, torch runs this schedule by other code).
* `zb_v` has another order, with the same makespan and memory for m >= 2p - 1, and a shorter
  makespan for m <= p. There torch takes the schedule of 2p - 1 microbatches and leaves out what is
  too much.
* `one_f_one_b` and `zb_h1` with one stage on each rank take any number of microbatches.
* torch's sends and receives need no buffers, as ours; with `defer_pp_recv=True` they do. Receives
  are then called so late that sends wait for each other in a ring, and in a V the receives from one
  rank are in another order than its sends. torch relies on sends that do not block.
"""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

import shardmesh as sm
from shardmesh.sharding.parallel.pipeline.actions import parse_cell
from shardmesh.sharding.parallel.pipeline.communication import check_communication
from tests.sharding.parallel.pipeline.torch_tables import texts, torch_rows, torch_schedule

Schedule = sm.parallel.Schedule
make_schedule = sm.parallel.make_schedule

SIZES = [(2, 2), (2, 4), (3, 3), (3, 5), (3, 6), (4, 4), (4, 6), (4, 8), (4, 10), (5, 10), (8, 16)]


def rows_of(schedule: Schedule) -> list[list[str]]:
    return [list(map(str, row)) for row in schedule.rows]


@pytest.mark.parametrize(
    ("torch_name", "name", "v"),
    [
        ("GPipe", "gpipe", 1),
        ("Interleaved1F1B", "interleaved", 2),
        ("Interleaved1F1B", "interleaved", 3),
        ("LoopedBFS", "looped_bfs", 2),
        ("InterleavedZeroBubble", "zb_h1", 1),
        ("InterleavedZeroBubble", "zb_h1", 2),
        ("DualPipeV", "dualpipe_v", 2),
    ],
)
def test_tables_that_are_equal(torch_name, name, v):
    compared = 0
    for p, m in SIZES:
        if name == "dualpipe_v" and m < 2 * p:
            continue
        assert rows_of(make_schedule(name, p, m, stages_per_rank=v)) == torch_rows(
            torch_name, p, m, v
        )
        compared += 1
    assert compared > 3


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_1f1b_but_for_the_last_row(p, m):
    *rows, last = rows_of(make_schedule("1f1b", p, m))
    *torch_rows_but_one, torch_last = torch_rows("1F1B", p, m, 1)
    assert torch_rows_but_one == rows
    forwards = [f"{p - 1}F{microbatch + 1}" for microbatch in range(m)]
    assert [text for text in torch_last if "F" in text] == forwards  # from 1 to m
    assert [text[:2] for text in torch_last] == [text[:2] for text in last]


@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 7), (8, 15), (8, 8)])
def test_zb_v_is_as_good_as_the_one_of_torch(p, m):
    ours = make_schedule("zb_v", p, m).check()
    theirs = Schedule(torch_rows("ZBVZeroBubble", p, m, 2)).check()
    assert max(ours.live) <= max(theirs.live)
    assert ours.span_bubble <= theirs.span_bubble
    assert ours.makespan <= theirs.makespan
    if m >= 2 * p - 1:
        assert ours.makespan == theirs.makespan
    if m <= p:
        assert ours.makespan < theirs.makespan


@pytest.mark.parametrize(
    ("name", "p", "m", "v"), [("Interleaved1F1B", 4, 9, 2), ("DualPipeV", 4, 7, 2)]
)
def test_what_both_do_not_take(name, p, m, v):
    with pytest.raises(ValueError, match="microbatches"):
        torch_schedule(name, p, m, v)
    with pytest.raises(ValueError, match="microbatches"):
        make_schedule(name, p, m)


@pytest.mark.parametrize(
    ("torch_name", "name", "v"),
    [
        ("ScheduleGPipe", "gpipe", None),
        ("Schedule1F1B", "1f1b", None),
        ("1F1B", "1f1b", None),
        ("ScheduleInterleaved1F1B", "interleaved", 2),
        ("interleaved1f1b", "interleaved", 2),
        ("ScheduleLoopedBFS", "looped_bfs", 2),
        ("ScheduleInterleavedZeroBubble", "zb_h1", 2),
        ("ScheduleZBVZeroBubble", "zb_v", None),
        ("ScheduleDualPipeV", "dualpipe_v", None),
    ],
)
def test_the_names_of_torch(torch_name, name, v):
    assert make_schedule(torch_name, 3, 6) == make_schedule(name, 3, 6, stages_per_rank=v)


MULTI = [
    ("interleaved", "Interleaved1F1B"),
    ("looped_bfs", "LoopedBFS"),
    ("zb_h1", "InterleavedZeroBubble"),
    ("zb_v", "ZBVZeroBubble"),
    ("v_half", "ZBVZeroBubble"),
    ("v_min", "ZBVZeroBubble"),
    ("dualpipe_v", "DualPipeV"),
]


@pytest.mark.parametrize("communication", [False, True])
@pytest.mark.parametrize(("name", "torch_name"), MULTI)
def test_torch_reads_what_we_write(name, torch_name, communication, tmp_path):
    schedule = make_schedule(name, 3, 6, stages_per_rank=2)
    path = tmp_path / "schedule.csv"
    schedule.to_csv(path, communication=communication)
    assert Schedule.from_csv(path) == schedule
    theirs = torch_schedule(torch_name, 3, 6, 2)
    theirs._load_csv(str(path), format="compute_comms" if communication else "compute_only")
    lowered = theirs.pipeline_order_with_comms
    assert [texts(lowered[rank]) for rank in range(3)] == rows_of(schedule)
    assert [theirs.stage_index_to_group_rank[stage] for stage in range(6)] == list(
        schedule.placement
    )
    counts = [str(action)[-11:] for rank in range(3) for action in lowered[rank]]
    assert counts.count("REDUCE_GRAD") == 6  # once for each stage, or gradients are not scaled
    if name != "dualpipe_v":  # torch's own simulation, which does not know overlaps
        moved = {
            rank: [action for action in row if not is_for_fsdp(str(action))]
            for rank, row in lowered.items()
        }
        torch_schedules._simulate_comms_compute(moved, lambda stage: schedule.placement[stage], 6)


@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("torch_name", sorted({name for _, name in MULTI}))
def test_we_read_what_torch_writes(torch_name, format, tmp_path):
    theirs = torch_schedule(torch_name, 4, 8, 2)
    path = tmp_path / "schedule.csv"
    theirs._dump_csv(str(path), format=format)
    schedule = Schedule.from_csv(path)
    assert rows_of(schedule) == [texts(theirs.pipeline_order[rank]) for rank in range(4)]
    assert schedule.name == "schedule"
    schedule.check()


def communication_of(torch_name: str, *, defer: bool) -> list[list]:
    theirs = torch_schedule(torch_name, 4, 8, 2)
    lowered = theirs.pipeline_order_with_comms
    if defer:
        rank_of = theirs.stage_index_to_group_rank
        lowered = torch_schedules._defer_recv_ops(lowered, lambda stage: rank_of[stage])
    rows = [[str(action) for action in lowered[rank]] for rank in range(4)]
    return [[parse_cell(text) for text in row if not is_for_fsdp(text)] for row in rows]


@pytest.mark.parametrize(
    ("torch_name", "deferred"),
    [
        ("Interleaved1F1B", "without buffers the communication deadlocks"),
        ("LoopedBFS", "without buffers the communication deadlocks"),
        ("InterleavedZeroBubble", "without buffers the communication deadlocks"),
        ("ZBVZeroBubble", "receives must have the order of the sends"),
        ("DualPipeV", "receives must have the order of the sends"),
    ],
)
def test_the_communication_of_torch_needs_no_buffers_unless_it_is_deferred(torch_name, deferred):
    check_communication(communication_of(torch_name, defer=False))
    with pytest.raises(ValueError, match=deferred):
        check_communication(communication_of(torch_name, defer=True))


def test_wrong_communication_of_a_file_is_an_error_or_left_out(tmp_path):
    path = tmp_path / "deferred.csv"
    rows = communication_of("ZBVZeroBubble", defer=True)
    path.write_text("\n".join(",".join(map(str, row)) for row in rows))
    with pytest.raises(ValueError, match=r"message 6 from rank 0 to rank 1 is 0SEND_F6"):
        Schedule.from_csv(path)
    schedule = Schedule.from_csv(path, ignore_communication=True)
    assert rows_of(schedule) == torch_rows("ZBVZeroBubble", 4, 8, 2)


def test_a_cell_that_is_no_action(tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,,0B0\n1F0,1X0\n")
    with pytest.raises(ValueError, match=r"^line 2, cell 2: '1X0' is not an action of a pipeline"):
        Schedule.from_csv(path)
    path.write_text("0F0,,0B0\n1F0,,1B0\n")
    assert Schedule.from_csv(path, name="two") == Schedule([["0F0", "0B0"], ["1F0", "1B0"]])


def is_for_fsdp(text: str) -> bool:
    return text.lstrip("0123456789") in ("UNSHARD", "RESHARD", "REDUCE_GRAD")
