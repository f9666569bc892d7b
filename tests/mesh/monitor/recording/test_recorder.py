"""The recorder: what a collective writes into its rank's trace buffer, and the user's line that it
names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh import CollectiveMismatchError, current_world, null_world, simulate
from shardmesh.mesh.comm.call_site import user_frame
from shardmesh.mesh.comm.group import Group
from shardmesh.mesh.comm.recording.recorder import CommTag
from shardmesh.mesh.comm.recording.trace_buffer import GROUPS, LONG_SLOTS, RECORDS, Header, Record
from shardmesh.mesh.comm.world import World
from shardmesh.mesh.monitor.diagnosis.members import agree, member, read_members
from shardmesh.mesh.settings import collective_check, settings
from tests.faults.random_programs import MORE_MESHES, RandomProgram, healthy_program, mesh_of, run
from tests.mesh.monitor.driven_ranks import driven_ranks

HERE = __file__


@pytest.fixture
def world() -> Iterator[World]:
    with null_world(4) as made:
        yield made


@pytest.fixture
def group(world: World) -> Group:
    return world.group(range(4))


def places(world: World) -> list[int]:
    """Return the lines in this file that called collectives."""
    found = [record.place.rpartition(":") for record in world.trace_buffer.records()]
    assert {file for file, _, _ in found} <= {HERE}
    return [int(line) for _, _, line in found]


def line() -> int:
    """Return the caller's line."""
    return sys._getframe(1).f_lineno


# -- what is noted down ----------------------------------------------------------------------------


def test_record_has_an_end_time(world: World, group: Group) -> None:
    group.all_reduce(torch.ones(4))
    (record,) = world.trace_buffer.records()
    assert 0 < record.start <= record.end
    assert (record.sent, record.received) == (24, 24)
    assert record.call.split("\t") == ["all_reduce", "sum", "float32", "4", ""]


def test_collective_that_raises_stays_pending(world: World, group: Group) -> None:
    """After a crash, the pending records show what the rank was doing."""

    class Odd(Exception):
        pass

    def fail() -> None:
        raise Odd

    with pytest.raises(Odd):
        group.direct("copied", 1, 2, torch.uint8, fail)
    assert world.trace_buffer.last is not None
    assert world.trace_buffer.last.end == 0


def test_numbers_count_per_group(world: World, group: Group) -> None:
    pair = world.group([0, 1])
    for one in (group, pair, group, pair, pair):
        one.barrier()
    assert [(record.group, record.sequence) for record in world.trace_buffer.records()] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
        (1, 2),
    ]
    assert [world.trace_buffer.group_text(n).rpartition("\t")[2] for n in range(2)] == [
        "0,1,2,3",
        "0,1",
    ]


def test_group_of_one_records_nothing(world: World) -> None:
    world.group([0]).all_reduce(torch.ones(1))
    assert world.trace_buffer.words[Header.RECORDS] == 0


def test_fingerprints_differ_if_calls_do(tmp_path: Path) -> None:
    (rank,) = driven_ranks(tmp_path, 1)
    calls: list[dict[str, Any]] = [
        {},
        {"op": "all_gather"},
        {"how": "max"},
        {"dtype": torch.float64},
        {"size": 5},
        {"size": -1},
        {"tag": "f32[4] @ P() -> P()"},
    ]
    low48 = (1 << 48) - 1
    found = []
    for sequence, call in enumerate(calls):
        rank.call(**call)
        found.append(member(rank.monitor.directory, rank.recorder().key, 0, sequence).word & low48)
    assert len(set(found)) == len(calls)
    rank.call(tag="f32[4] @ P() -> P()")
    assert (
        member(rank.monitor.directory, rank.recorder().key, 0, len(calls)).word & low48 == found[-1]
    )


def test_more_collectives_than_fit(tmp_path: Path) -> None:
    """Past the ring, the row and the 16 bits of numbers in fingerprints."""
    ranks = driven_ranks(tmp_path, 2)
    count = (1 << 16) + 100
    for rank in ranks:
        for _ in range(count):
            rank.call()
    buffer = ranks[0].buffer
    assert buffer.words[Header.RECORDS] == count
    records = list(buffer.records())
    assert [record.sequence for record in records] == list(range(count - RECORDS, count))
    for sequence in (count - 1, count - LONG_SLOTS):
        found = read_members(ranks[0].monitor.directory, ranks[0].recorder(), sequence)
        assert all(m.came for m in found)
        assert agree(found)
        assert [m.number for m in found] == [sequence] * 2
    assert [
        m.came
        for m in read_members(
            ranks[0].monitor.directory, ranks[0].recorder(), count - LONG_SLOTS - 1
        )
    ] == [None, None]
    assert [
        m.came for m in read_members(ranks[0].monitor.directory, ranks[0].recorder(), count)
    ] == [
        False,
        False,
    ]


def test_end_of_an_overwritten_record_is_dropped(world: World, group: Group) -> None:

    def run() -> None:
        for _ in range(RECORDS):
            group.barrier()

    group.direct("slow", 0, 0, torch.uint8, run)
    assert world.trace_buffer.record(0) is None
    newest = world.trace_buffer.record(RECORDS)
    assert newest is not None
    assert newest.end >= newest.start
    assert all(record.call.startswith("barrier") for record in world.trace_buffer.records())


def test_groups_beyond_the_table_are_recorded(tmp_path: Path) -> None:
    (rank,) = driven_ranks(tmp_path, 1)
    rank.buffer.words[Header.GROUPS] = GROUPS
    rank.call()
    rank.call("barrier", "", torch.uint8, 0)
    first, last = rank.buffer.records()
    assert (first.call.split("\t")[0], last.call.split("\t")[0]) == ("all_reduce", "barrier")
    assert (first.sequence, last.sequence) == (0, 1)
    assert first.group == last.group >= GROUPS


# -- collective_check("off") -----------------------------------------------------------------------


@pytest.fixture
def set_check() -> Iterator[Callable[[str], None]]:
    before = settings().mode
    yield collective_check
    collective_check(before)


def test_off_records_nothing_and_on_continues(
    world: World, group: Group, set_check: Callable[[str], None]
) -> None:
    set_check("off")
    group.all_reduce(torch.ones(4))
    assert world.trace_buffer.words[Header.RECORDS] == 0
    set_check("on")
    group.barrier()
    assert [record.call.split("\t")[0] for record in world.trace_buffer.records()] == ["barrier"]


def test_off_still_notifies_observers(
    world: World, group: Group, set_check: Callable[[str], None]
) -> None:
    set_check("off")
    with sm.debug.comm_budget() as used:
        group.all_reduce(torch.ones(4))
    assert used.launches == 1


# -- tags ------------------------------------------------------------------------------------------

X, FLAT = torch.ones(4), torch.ones(16)
CALLS: dict[str, Callable[[Group, CommTag | None], Any]] = {
    "all_gather": lambda group, tag: group.all_gather(FLAT.clone(), X, tag=tag),
    "reduce_scatter": lambda group, tag: group.reduce_scatter(X.clone(), FLAT, tag=tag),
    "all_reduce": lambda group, tag: group.all_reduce(X.clone(), tag=tag),
    "all_to_all": lambda group, tag: group.all_to_all(X.clone(), X, [1] * 4, [1] * 4, tag=tag),
    "broadcast": lambda group, tag: group.broadcast(X.clone(), 0, tag=tag),
    "permute": lambda group, tag: group.permute(
        X.clone(), X, dst=(group.rank + 1) % 4, src=(group.rank - 1) % 4, tag=tag
    ),
    "barrier": lambda group, tag: group.barrier(tag=tag),
    "all_gather_object": lambda group, tag: group.all_gather_object(None, tag=tag),
    "direct": lambda group, tag: group.direct("direct", 0, 0, torch.float32, lambda: None, tag=tag),
}


@pytest.mark.parametrize("op", CALLS)
def test_what_a_collective_is_for(world: World, group: Group, op: str) -> None:
    for tag in (CommTag("a"), CommTag("b"), None):
        CALLS[op](group, tag)
    assert [tuple(record.call.split("\t"))[::4] for record in world.trace_buffer.records()] == [
        (op, "a"),
        (op, "b"),
        (op, ""),
    ]


@pytest.mark.parametrize("op", [op for op in CALLS if op != "direct"])
def test_ranks_that_say_it_is_for_something_else(op: str) -> None:
    def fn() -> None:
        group = current_world().group(range(4))
        CALLS[op](group, CommTag.of("the same"))
        # An equal text.
        CALLS[op](group, CommTag("the same") if group.rank == 2 else CommTag.of("the same"))
        CALLS[op](group, CommTag.of("the other" if group.rank == 2 else "the one"))

    with pytest.raises(
        CollectiveMismatchError,
        match=r"outlier: rank 2\.(.|\n)* for the one\s+at (.|\n)* for the other\s+at ",
    ) as caught:
        simulate(4)(fn)()
    assert caught.value.verdict.field == "layout"


def test_a_call_that_fails_leaves_nothing_to_the_next(world: World, group: Group) -> None:
    def refuse(_: object) -> None:
        raise ZeroDivisionError

    x = sm.device_put(
        torch.ones(8, 8),
        sm.init_device_mesh("cpu", (4,), axis_names=("x",)),
        P("x"),
        src_data_rank=None,
    )
    x.redistribute(P())
    world.observers.append(refuse)
    for move in (
        lambda: x.redistribute(P()),
        lambda: x.redistribute(P(), async_op=True),
        lambda: sm.training.get_total_norm([x]),
    ):
        with pytest.raises(ZeroDivisionError):
            move()
    world.observers.remove(refuse)
    for call in CALLS.values():
        call(group, None)
    assert {
        record.call.split("\t")[4] for record in [*world.trace_buffer.records()][-len(CALLS) :]
    } == {""}


def test_collectives_inside_others_are_for_the_same() -> None:
    """Rounds, exchanges between and inside nodes, quantized ones, and buckets of several."""

    def fn() -> list[str]:
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("n", "x"))
        mesh.topology = sm.topology.Topology.default("cuda", node_size=2)
        x = sm.device_put(
            torch.arange(4096.0).view(64, 64), mesh, P(("n", "x")), src_data_rank=None
        )
        words = current_world().trace_buffer.words
        before = words[Header.RECORDS]
        x.redistribute(P(None, ("n", "x")))
        x.redistribute(P(None, ("n", "x")), max_bytes=14_000)
        x.redistribute(P(), transport="int8")
        sm.redistribute_many([x, x], [P(), P(None, ("n", "x"))])
        return [record.call for record in current_world().trace_buffer.records()][before:]

    for calls in simulate(4)(fn)():
        tags = [call.split("\t")[4] for call in calls]
        assert len(tags) > len(set(tags)) == 3
        assert all("f32[64, 64] @ P(('n', 'x'), None)" in tag for tag in tags)


# -- lines -----------------------------------------------------------------------------------------


def reduce(group: Group) -> int:
    group.all_reduce(torch.ones(4))
    return line() - 1


def test_alternating_lines(world: World, group: Group) -> None:
    expected = []
    for _ in range(3):
        group.all_reduce(torch.ones(4))
        expected.append(line() - 1)
        group.all_reduce(torch.ones(4))
        expected.append(line() - 1)
    assert places(world) == expected


def test_two_calls_on_one_line(world: World, group: Group) -> None:
    x = torch.ones(4)
    _ = group.all_reduce(x), group.all_reduce(x), group.barrier(), group.all_reduce(x)
    assert places(world) == [line() - 1] * 4


def test_one_line_at_different_depths(world: World, group: Group) -> None:
    """At the depth of the last call there is now another function, or no frame."""

    def deep(n: int) -> int:
        return reduce(group) if n == 0 else deep(n - 1)

    expected = [deep(n) for n in (30, 0, 5, 5, 0, 30)]
    group.all_reduce(torch.ones(4))
    assert places(world) == [*expected, line() - 1]


def test_two_functions_of_the_same_shape(world: World, group: Group) -> None:
    """Their calls have the same offset in their code."""
    made: dict[str, Any] = {}
    exec(compile("def f(group, x):\n    group.all_reduce(x)\n", HERE, "exec"), made)
    exec(compile("\n\n\n\ndef g(group, x):\n    group.all_reduce(x)\n", HERE, "exec"), made)
    x = torch.ones(4)
    for f in (made["f"], made["g"], made["g"], made["f"]):
        f(group, x)
    assert places(world) == [2, 6, 6, 2]


def test_lambdas_and_comprehensions(world: World, group: Group) -> None:
    x = torch.ones(4)
    first = lambda: group.all_reduce(x)  # noqa: E731
    second = lambda: group.all_reduce(x)  # noqa: E731
    here = line()
    [f() for f in (first, second, second, first)]
    list(map(group.all_reduce, [x, x]))
    assert places(world) == [here - 2, here - 1, here - 1, here - 2, here + 2, here + 2]


def test_a_call_from_the_outermost_frame(group: Group, world: World) -> None:
    """With fewer frames than the last call."""
    import threading

    reduce(group)
    thread = threading.Thread(target=group.all_reduce, args=(torch.ones(4),))
    thread.start()
    thread.join()
    assert world.trace_buffer.last is not None
    assert world.trace_buffer.last.place.rpartition("/")[2].startswith("threading.py:")


def test_calls_through_different_methods_name_the_users_line(world: World) -> None:
    """The same collective with the same tag, from methods of different depth."""
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("x",))
    x = sm.device_put(torch.ones(8, 8), mesh, P("x"), src_data_rank=None)
    before = world.trace_buffer.words[Header.RECORDS]
    expected = []
    for _ in range(3):
        x.full_tensor()
        expected.append(line() - 1)
        x.redistribute(P())
        expected.append(line() - 1)
        sm.redistribute(x, P())
        expected.append(line() - 1)
        x.tolist()
        expected.append(line() - 1)
    assert places(world)[before:] == expected


def test_backward_names_the_line_that_called_it(world: World) -> None:
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("x",))
    w = sm.device_put(torch.ones(8, 8), mesh, P(), src_data_rank=None).requires_grad_()
    x = sm.device_put(torch.ones(8, 8), mesh, P("x"), src_data_rank=None)
    for _ in range(2):
        loss = (x @ w).sum()
        before = world.trace_buffer.words[Header.RECORDS]
        loss.backward()
        here = line() - 1
        found = places(world)[before:]
        assert found
        assert set(found) == {here}


class Truth:
    """An observer that walks up the stack each time."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, _: Any) -> None:
        frame, _ = user_frame(2)
        self.lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")


@pytest.mark.parametrize("seed", range(6))
def test_the_lines_of_random_programs(seed: int) -> None:
    """The cached line equals the result of a full stack walk, in every collective of every rank."""
    found: dict[int, tuple[list[str], list[Record]]] = {}

    def one_rank(program: RandomProgram, mesh: Any) -> None:
        world, truth = current_world(), Truth()
        world.observers.append(truth)
        before = world.trace_buffer.words[Header.RECORDS]
        run(program, mesh, world.rank, False)
        found[world.rank] = truth.lines, list(world.trace_buffer.records())[before:]

    program = healthy_program(seed, MORE_MESHES, iterations=(3, 6))
    simulate(program.size, prints="plain")(lambda: one_rank(program, mesh_of(program)))()
    assert found
    for truth, records in found.values():
        assert len(truth) == len(records)
        assert [record.place for record in records] == truth
