"""The ledger: its entries for the collectives of all ranks, while they run and after a crash."""

from __future__ import annotations

import json
import socket
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import shardmesh as sm
from shardmesh.__main__ import main
from shardmesh.mesh import current_world, init_device_mesh, null_world, simulate
from shardmesh.mesh.comm.recording.trace_buffer import (
    MARKS,
    RECORD_WORDS,
    RECORDS,
    RING,
    Header,
    TraceBuffer,
)
from shardmesh.mesh.monitor.ledger.entries import LedgerEntry
from shardmesh.mesh.monitor.ledger.ledger import Ledger, ledger, mark_step, read_buffer
from shardmesh.mesh.settings import collective_check, settings
from tests.forked import Forked, statuses
from tests.mesh.monitor.four_ranks import SIZE, every_collective, ledger_of
from tests.mesh.monitor.ledger import crash
from tests.pool import Pool


def test_every_collective_is_listed_with_its_bytes() -> None:
    with null_world(4, rank=1) as world:
        every_collective(1)
        found = ledger().entries
        assert world.trace_buffer.last is not None
    assert [(e.op, e.group, e.ranks, e.reduction, e.dtype, e.elements) for e in found] == [
        ("all_reduce", "dp", (1, 3), "max", "float32", 8),
        ("all_gather", "tp", (0, 1), "", "float32", 8),
        ("reduce_scatter", "tp", (0, 1), "sum", "float32", 8),
        ("all_to_all", "dp,tp", (0, 1, 2, 3), "", "float32", None),
        ("broadcast", "dp,tp", (0, 1, 2, 3), "src=2", "bfloat16", 8),
        ("permute", "dp,tp", (0, 1, 2, 3), "", "float32", None),
        ("barrier", "dp,tp", (0, 1, 2, 3), "", "uint8", 0),
        ("all_gather_object", "dp,tp", (0, 1, 2, 3), "", "uint8", None),
    ]
    assert [e.sequence for e in found] == [0, 0, 1, 0, 1, 2, 3, 4]
    assert [e.record for e in found] == list(range(8))
    assert [(e.bytes_sent, e.bytes_received) for e in found[:6]] == [
        (32, 32),
        (32, 32),
        (16, 16),
        (24, 24),
        (0, 16),
        (32, 32),
    ]
    lines = [int(e.place.rpartition(":")[2]) for e in found]
    assert lines == list(range(lines[0], lines[0] + 8))
    assert {e.place.rpartition("/")[2].partition(":")[0] for e in found} == {"four_ranks.py"}
    assert all(e.end is not None and e.start <= e.end for e in found)


def test_times_are_wall_clock_times() -> None:
    with null_world(2) as world:
        before = time.time()
        world.group([0, 1]).all_reduce(torch.ones(1))
        (entry,) = ledger().entries
    assert before - 0.001 <= entry.start <= time.time() + 0.001


def test_redistribution_has_its_layouts_and_lineage() -> None:
    def fn() -> list[tuple[str, str]]:
        mesh = init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
        x = sm.device_put(torch.ones(8, 4), mesh, sm.P("dp"))
        before = len(ledger().entries)
        x.redistribute(sm.P()).to_local()
        (entry,) = ledger().entries[before:]
        assert entry.lineage != 0
        return [(entry.layout, entry.text)]

    found = simulate(SIZE)(fn)()
    assert found == [found[0]] * SIZE
    layout, text = found[0][0]
    assert layout.startswith("f32[8, 4] @ P('dp'")
    assert text == f"all_gather(float32, 16 elements) for {layout}"


def test_newest_4096_records_are_kept() -> None:
    with null_world(2) as world:
        for _ in range(RECORDS + 10):
            world.group([0, 1]).barrier()
        found = ledger()
    assert [e.sequence for e in found.entries] == list(range(10, RECORDS + 10))
    assert "(4076 earlier collectives are left off)" in str(found)
    assert len(str(found).splitlines()) == 2 + 1 + 20


def test_steps() -> None:
    with null_world(2) as world:
        group = world.group([0, 1])
        group.barrier()
        for step in range(40):
            if step % 2:
                mark_step()
            else:
                mark_step(step)
            group.barrier()
        found = ledger()
        with pytest.raises(ValueError, match="step must be an integer >= 0 or None, got -1"):
            mark_step(-1)
    steps, first = found.ranks[0].steps, 40 - MARKS
    assert [s.number for s in steps] == list(range(first, 40))
    assert [e.step for e in found.entries] == [None] * (first + 1) + list(range(first, 40))
    assert "in step 39" in str(found)
    assert all(a.start <= b.start for a, b in pairwise(steps))


def test_off_records_nothing() -> None:
    before = settings().mode
    collective_check("off")
    try:
        with null_world(2) as world:
            world.group([0, 1]).barrier()
            assert ledger().entries == ()
            assert str(ledger()).endswith("0 collectives")
    finally:
        collective_check(before)


def test_ledger_can_be_read_while_the_rank_runs() -> None:
    """A record read concurrently belongs to one collective."""
    traces: list[TraceBuffer] = []
    over = threading.Event()

    def program() -> None:
        with null_world(2) as world:
            traces.append(world.trace_buffer)
            group, tensors = world.group([0, 1]), [torch.ones(n) for n in range(1, 20)]
            while not over.is_set():
                for tensor in tensors:
                    group.all_reduce(tensor)

    thread = threading.Thread(target=program)
    thread.start()
    try:
        while not traces or traces[0].words[Header.RECORDS] < RECORDS:
            time.sleep(0.001)
        for _ in range(5):
            entries = read_buffer(traces[0]).entries
            assert all(e.bytes_sent == 4 * (e.elements or 0) for e in entries)
            assert all(
                b.sequence == a.sequence + 1 and a.start <= b.start for a, b in pairwise(entries)
            )
    finally:
        over.set()
        thread.join()


def test_records_missing_from_a_copy_are_omitted() -> None:
    """Copies from other hosts only have the records since the copying began, and not all groups."""
    with null_world(4) as world:
        every_collective(0)
        buffer = world.trace_buffer
    buffer.data[RING * 8 : (RING + 3 * RECORD_WORDS) * 8] = bytes(3 * RECORD_WORDS * 8)
    buffer.words[RING + 4 * RECORD_WORDS] |= 0xFFFF << 48
    found = read_buffer(buffer)
    assert [e.op for e in found.entries] == [
        "all_to_all",
        "broadcast",
        "permute",
        "barrier",
        "all_gather_object",
    ]
    assert [e.group for e in found.entries] == ["dp,tp", "?", "dp,tp", "dp,tp", "dp,tp"]
    assert "broadcast(src=2, bfloat16, 8 elements)" in found.report()


def test_current_collective_of_a_waiting_rank_is_shown() -> None:
    with null_world(4) as world:
        every_collective(0)
        words = world.trace_buffer.words
        words[Header.BLOCKED], words[Header.BLOCKED_SINCE], words[Header.HEARTBEAT] = (
            1,
            1_000_000_000,
            3_500_000_000,
        )
        words[Header.CLOCK] = 7
        found = ledger().ranks[0]
    assert found.blocked == found.entries[0]
    assert found.blocked_since == pytest.approx(1.0)
    waiting = found.report(last=0).splitlines()[1]
    assert "in number 0 over dp: all_reduce(max, float32, 8 elements) at " in waiting


def test_collectives_match_across_ranks() -> None:
    found = ledger_of(every_collective)
    parts = list(found.collectives())
    assert len(parts) == 2 + 2 * 2 + 5
    for each in parts:
        entries = list(each.values())
        assert set(each) == set(entries[0].ranks)
        assert len({(e.op, e.group_key, e.sequence, e.elements, e.place) for e in entries}) == 1
    assert [e.start for e in found.entries] == sorted(
        e.start for r in found.ranks.values() for e in r.entries
    )


# -- real processes --------------------------------------------------------------------------------


def _meet() -> tuple[str, dict[int, str], list[LedgerEntry], str]:
    """Return the job's folder, the states of all ranks, each rank's last entry as seen by this
    rank, and the ledger's text.
    """
    mesh = init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    world = current_world()
    mesh.group().all_reduce(torch.ones(3 + 4))
    mesh.group().barrier()
    found = ledger()
    assert world.monitor is not None
    states = {rank: each.state for rank, each in found.ranks.items()}
    last = [
        next(e for e in reversed(each.entries) if e.op == "all_reduce")
        for each in found.ranks.values()
    ]
    return str(world.monitor.directory.folder), states, last, str(found)


def test_running_job_is_read_from_one_rank_and_from_outside(world4: Pool) -> None:
    found = world4(_meet)
    for folder, states, last, text in found:
        assert folder == found[0][0]
        assert states == dict.fromkeys(range(4), "alive")
        assert len({(e.group_key, e.sequence, e.place) for e in last}) == 1
        assert {(e.op, e.elements, e.layout) for e in last} == {("all_reduce", 7, "")}
        assert "barrier" in text.splitlines()[-1]
    outside = Ledger.read(found[0][0])
    assert outside.verdict is None
    assert sorted(outside.ranks) == [0, 1, 2, 3]
    for rank, (_, _, last, _) in enumerate(found):
        its = outside.ranks[rank]
        assert (its.state, its.size, its.blocked) == ("alive", 4, None)
        assert last[rank] in its.entries


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> Path:
    """Return the folder left behind by a job whose rank 2 was killed."""
    folder = tmp_path_factory.mktemp("watch")
    ended = forked(crash.main, 4, own=False, SHARDMESH_WATCH_DIR=str(folder))
    assert statuses(ended) == [7, 7, -9, 7], [rank.output for rank in ended]
    (job,) = folder.iterdir()
    return job


def test_collectives_of_a_killed_rank_are_kept(crashed: Path) -> None:
    found = Ledger.read(crashed)
    assert found.verdict is not None
    assert (found.verdict.kind, found.verdict.ranks) == ("lost", (2,))
    killed = found.ranks[2]
    assert killed.state == "dead"
    assert [e.op for e in killed.entries[-6:]] == ["all_gather", "all_reduce"] * 3
    assert [e.step for e in killed.entries[-6:]] == [0, 0, 1, 1, 2, 2]
    assert killed.entries[-2].layout == "f32[8] @ P('dp') on (dp=2, tp=2) -> P(None)"
    assert all(e.end is not None for e in killed.entries)
    for rank in (0, 1, 3):
        last = found.ranks[rank].entries[-1]
        assert (last.op, last.reduction, last.elements) in {
            ("all_reduce", "max", 5),
            ("all_reduce", "sum", 3),
        }
    assert any(found.ranks[rank].entries[-1].is_under_way for rank in (0, 1, 3))


def test_command_shows_what_happened(
    crashed: Path, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDMESH_WATCH_DIR", str(crashed.parent))
    trace, dumps = tmp_path / "trace.json", tmp_path / "dumps"
    assert (
        main(["ledger", "--last", "2", "--trace", str(trace), "--flight-recorder", str(dumps)]) == 0
    )
    said = capsys.readouterr().out
    assert said.startswith(f"{crashed}\n")
    assert f"rank 2 of 4 on {socket.gethostname()}" in said
    assert "why the job could not go on (lost):\nrank 2 died" in said
    assert said.count("all_reduce(") >= 4
    assert trace.stat().st_size > 0
    assert {path.name for path in dumps.iterdir()} == {f"trace_rank_{r}" for r in range(4)} | {
        f"rank_{r}.json" for r in range(4)
    }


def test_the_command_prints_json(crashed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", str(crashed), "--json", "--last", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1, 2, 3]
    assert told["ranks"][2]["state"] == "dead"
    assert [one["op"] for one in told["ranks"][2]["collectives"]] == ["all_gather", "all_reduce"]
    assert told["verdict"]["kind"] == "lost"


def test_the_command_shows_stragglers(crashed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", str(crashed), "--stragglers"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line[:2] in ("0 ", "1 ", "2 ")] == [
        "0",
        "1",
        "2",
    ]


def test_command_without_jobs_says_where_it_looked(
    tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDMESH_WATCH_DIR", str(tmp_path))
    for arguments in ([], [str(tmp_path / "nowhere")]):
        with pytest.raises(SystemExit):
            main(["ledger", *arguments])
        assert str(tmp_path) in capsys.readouterr().err
