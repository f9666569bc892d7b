"""comm_budget and the null world: what is counted, and what raises before it communicates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import shardmesh as sm
from shardmesh.mesh import (
    CommBudgetError,
    CommReport,
    MeshError,
    comm_budget,
    current_world,
    init_device_mesh,
    null_world,
    simulate,
)


def work() -> None:
    mesh = init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    x, out = torch.ones(10), torch.empty(20)
    mesh.group("tp").all_gather(out, x)
    mesh.group("dp").all_reduce(x)
    mesh.group().all_reduce(x)


def test_the_same_program_counts_the_same_in_both_worlds() -> None:
    def fn() -> CommReport:
        with comm_budget() as used:
            work()
        return used

    found = simulate(4)(fn)()
    with null_world(4, rank=2):
        found.append(fn())
    for used in found:
        assert used.by_op == {"all_gather": (1, 40), "all_reduce": (2, 40 + 60)}
        assert (used.launches, used.bytes_received, used.bytes_sent) == (3, 140, 140)


def test_budget_around_a_world_counts_all_ranks() -> None:
    with comm_budget() as used:
        simulate(4)(work)()
        with null_world(4):
            work()
    assert used.launches == 5 * 3
    with comm_budget(launches=0):
        pass
    assert current_world().observers == []


def test_report_names_lines() -> None:
    with null_world(4), comm_budget() as used:
        work()
    lines = used.report().splitlines()
    assert lines[0].split() == [
        "operator",
        "collective",
        "axis",
        "launches",
        "received",
        "sent",
        "line",
    ]
    assert lines[1].split()[:6] == ["all_gather", "all_gather", "tp", "1", "40", "40"]
    assert "test_report.py:" in lines[1]
    assert len(lines) == 5
    assert lines[-1].split() == ["total", "3", "140", "140"]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"bytes": 70},
            r"test_report.py:\d+: all_reduce over ranks 0,1 .2 ranks.*40 bytes of "
            r"float32.*bytes=70.*40 are used",
        ),
        ({"launches": 1}, r"launches=1\), of which 1 are used"),
    ],
)
def test_exceeding_the_limit_raises_before_communication(
    limits: dict[str, int], message: str
) -> None:
    def fn() -> None:
        group = current_world().group([0, 1])
        x = torch.ones(10)
        with comm_budget(**limits) as used:
            group.all_reduce(x)
            with pytest.raises(CommBudgetError, match=message):
                group.all_reduce(x)
        assert x.tolist() == [2.0] * 10
        assert used.launches == 1

    simulate(2)(fn)()


def test_zero_budget_allows_barriers() -> None:
    with null_world(2), comm_budget(bytes=0) as used:
        current_world().group([0, 1]).barrier()
        current_world().group([0]).all_reduce(torch.ones(2))
    assert used.by_op == {"barrier": (1, 0)}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_null_collectives_return_defined_values(device: str) -> None:
    with null_world(3, rank=1):
        group = current_world().group([0, 1, 2])
        x, big = torch.ones(2, device=device), torch.full((6,), 5.0, device=device)
        group.all_reduce(x)
        group.broadcast(x, 0)
        if device == "cpu":
            assert x.tolist() == [1, 1]
        group.all_gather(big, x)
        group.reduce_scatter(x, big)
        group.all_to_all(big, big.clone(), [2, 2, 2], [2, 2, 2])
        assert group.all_gather_object("a") == ["a"] * 3
        if device == "cpu":
            assert big.tolist() == [0] * 6
            assert x.tolist() == [0, 0]


def test_worlds_nest_and_end() -> None:
    before = current_world()
    with null_world(4) as outer:
        with null_world(8, rank=3) as inner:
            assert current_world() is inner
        with pytest.raises(KeyError), null_world(8):
            raise KeyError
        assert current_world() is outer
    assert current_world() is before


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_invalid_null_worlds_raise(size: int, rank: int) -> None:
    with pytest.raises(MeshError, match="from 0 to size - 1"), null_world(size, rank):
        pass


def test_calls_of_modules_are_named_forward() -> None:
    def program() -> dict[str, tuple[int, int]]:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("fsdp",))
        model = sm.parallel.fully_shard(torch.nn.Linear(4, 4), mesh)
        with sm.debug.comm_report() as report:
            model(torch.ones(2, 4)).sum().backward()
        return report.by_operator

    for by_operator in sm.simulate(2)(program)():
        assert set(by_operator) == {"forward", "backward"}


def test_picture_has_a_bar_for_each_axis(tmp_path: Path) -> None:
    def program() -> str:
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
        x = sm.ones(8, 8, device_mesh=mesh, placements=sm.P("dp", "tp"))
        with sm.debug.comm_report() as report:
            x.redistribute(sm.P(None, "tp"))
            x.softmax(1)
            if mesh.get_rank() == 0:
                report.picture(tmp_path / "report.svg")
        with pytest.raises(ValueError, match="without communication"), sm.debug.comm_report() as r:
            r.picture()
        return ""

    sm.simulate(4)(program)()
    texts = re.findall(r">([^<>\n]+)</text>", (tmp_path / "report.svg").read_text())
    assert {"dp", "tp", "redistribute", "softmax", "3 collectives"} <= set(texts)
