"""The ledger exported as a trace and in the format of torch's Flight Recorder."""

from __future__ import annotations

import argparse
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmesh.mesh import comm_report, init_device_mesh, null_world
from shardmesh.mesh.comm.recording.trace_buffer import Header
from shardmesh.mesh.monitor.ledger import flight_recorder, trace_export
from shardmesh.mesh.monitor.ledger.ledger import Ledger, ledger, mark_step
from tests.mesh.monitor.four_ranks import every_collective, ledger_of, run, set_times

fr_trace: Any = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
fr_types: Any = pytest.importorskip("torch.distributed.flight_recorder.components.types")
needs_gloo = pytest.mark.skipif(
    '"gloo"' not in Path(fr_types.__file__).read_text(),
    reason="torch 2.11 analyzes dumps of NCCL only",
)


# -- trace -----------------------------------------------------------------------------------------


def stepping(rank: int) -> None:
    for step in range(2):
        mark_step(step)
        every_collective(rank)


def _slices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X"]


def test_the_trace_has_every_collective_and_step_of_every_rank(tmp_path: Path) -> None:
    found = ledger_of(stepping)
    found.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = _slices(events)
    assert len(slices) == 4 * (16 + 2)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == sorted(["steps", "dp", "tp", "dp,tp"] * 4)
    for e in slices:
        assert names[e["pid"], e["tid"]] == (e["args"]["axis"] if e["cat"] != "step" else "steps")
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {r: f"rank {r} (simulated, alive)" for r in range(4)}
    assert [e["name"] for e in slices if e["cat"] == "step"] == ["step 0", "step 1"] * 4


def test_the_same_collective_has_the_same_name_on_all_ranks() -> None:
    where: dict[str, set[int]] = {}
    for e in _slices(trace_export.events(ledger_of(every_collective).ranks)):
        where.setdefault(e["args"]["collective"], set()).add(e["pid"])
        assert e["pid"] in e["args"]["ranks"]
    assert sorted(map(sorted, where.values())) == sorted(
        [[0, 2], [1, 3], *[[0, 1], [2, 3]] * 2, *[[0, 1, 2, 3]] * 5]
    )


def test_overlapping_collectives_are_on_different_threads() -> None:
    buffers = run(
        lambda rank: (
            [init_device_mesh("cpu", (4,)).group().all_reduce(torch.ones(2)) for _ in range(4)]
            and None
        )
    )
    for buffer in buffers.values():
        for number, times in enumerate([(1000, 9000), (2000, 3000), (4000, 5000), (9000, 9500)]):
            set_times(buffer, number, *times)
    slices = [e for e in _slices(trace_export.events(Ledger(buffers).ranks)) if e["pid"] == 0]
    assert [e["tid"] for e in slices] == [1, 2, 2, 1]


def test_arrows_lead_from_the_last_rank_to_waiting_ranks() -> None:
    buffers = run(lambda rank: init_device_mesh("cpu", (4,)).group().all_reduce(torch.ones(2)))
    for rank, buffer in buffers.items():
        set_times(buffer, 0, 1_000_000 * (rank + 1 if rank != 1 else 7), 9_000_000)
    events = trace_export.events(Ledger(buffers).ranks)
    starts, ends = ([e for e in events if e["ph"] == phase] for phase in "sf")
    assert {e["pid"] for e in starts} == {1}
    assert {e["pid"] for e in ends} == {0, 2, 3}
    assert [e["id"] for e in starts] == [e["id"] for e in ends]
    slices = {e["pid"]: e for e in _slices(events)}
    for e in (*starts, *ends):
        its = slices[e["pid"]]
        assert its["ts"] <= e["ts"] <= its["ts"] + its["dur"]
        assert e["tid"] == its["tid"]


def test_unfinished_collectives_last_until_the_last_heartbeat() -> None:
    buffers = run(lambda rank: init_device_mesh("cpu", (4,)).group().all_reduce(torch.ones(2)))
    set_times(buffers[0], 0, 1000, 0)
    buffers[0].words[Header.HEARTBEAT] = 5000
    (event,) = [e for e in _slices(trace_export.events(Ledger(buffers).ranks)) if e["pid"] == 0]
    assert event["args"]["under way"] is True
    assert (event["ts"], event["dur"]) == pytest.approx((1.0, 4.0), abs=0.01)


def test_report_and_ledger_have_the_same_event_format() -> None:
    with null_world(4), comm_report() as report:
        every_collective(0)
        mine = _slices(trace_export.events(ledger().ranks))
    theirs = report.trace()
    assert [e.keys() for e in mine] == [e.keys() for e in theirs]
    for name in ("axis", "ranks", "bytes_sent", "bytes_received", "line"):
        assert [e["args"][name] for e in mine] == [e["args"][name] for e in theirs]


# -- Flight Recorder -------------------------------------------------------------------------------


def _analysed(found: Ledger, folder: Path) -> Any:
    """Return the output of torch's analyzer for the files."""
    found.save_flight_recorder(folder)
    out = folder.parent / "analysis"
    fr_trace.main([str(folder), "--output", str(out)])
    return pickle.loads(out.read_bytes())[1]


@needs_gloo
def test_torchs_analyzer_finds_nothing_in_a_healthy_program(tmp_path: Path) -> None:
    found = _analysed(ledger_of(stepping), tmp_path / "dumps")
    assert len(found.collectives) == 2 * (2 + 2 * 2 + 5)
    assert all(c.pass_check and not c.missing_ranks for c in found.collectives)
    assert sorted(g.desc for g in found.groups) == ["dp", "dp", "dp,tp", "tp", "tp"]


def _odd(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    mesh.group().all_reduce(torch.ones(4))
    if rank == 2:
        mesh.group().all_gather(torch.empty(16), torch.ones(4))
    else:
        mesh.group().all_reduce(torch.ones(4))


def _odd_size(rank: int) -> None:
    init_device_mesh("cpu", (4,)).group().all_reduce(torch.ones(4 + (rank == 2)))


def _odd_dtype(rank: int) -> None:
    init_device_mesh("cpu", (4,)).group().all_reduce(
        torch.ones(4, dtype=torch.float64 if rank == 2 else torch.bfloat16)
    )


@needs_gloo
@pytest.mark.parametrize(
    ("program", "kind", "sequence"),
    [
        (_odd, "COLLECTIVE_TYPE_MISMATCH", 2),
        (_odd_size, "SIZE_OR_SYNTAX_MISMATCH", 1),
        (_odd_dtype, "COLLECTIVE_DTYPE_MISMATCH", 1),
    ],
)
def test_torchs_analyzer_finds_the_outlier(
    program: Any, kind: str, sequence: int, tmp_path: Path
) -> None:
    found = _analysed(ledger_of(program), tmp_path / "dumps")
    (bad,) = [c for c in found.collectives if not c.pass_check]
    assert bad.collective_seq_id == sequence
    assert {
        rank: str(c.type_of_mismatch.state.name) for rank, c in bad.mismatch_collectives.items()
    } == {2: kind}
    (frame,) = bad.mismatch_collectives[2].collective_frames
    assert frame["filename"] == __file__
    assert frame["line"] > 0


@needs_gloo
def test_torchs_analyzer_finds_the_missing_rank(tmp_path: Path) -> None:
    found = _analysed(
        ledger_of(lambda rank: every_collective(rank) if rank != 3 else None), tmp_path / "dumps"
    )
    missing = [c.missing_ranks for c in found.collectives if c.missing_ranks]
    assert missing
    assert all(ranks == {3} for ranks in missing)


def test_files_have_torchs_fields(tmp_path: Path) -> None:
    ledger_of(every_collective).save_flight_recorder(tmp_path)
    dump = pickle.loads((tmp_path / "trace_rank_1").read_bytes())
    assert json.loads((tmp_path / "rank_1.json").read_text())["pg_config"] == dump["pg_config"]
    first, gather, scatter = dump["entries"][:3]
    assert first["profiling_name"] == "gloo:all_reduce"
    assert (first["input_sizes"], first["input_dtypes"], first["state"]) == (
        [[8]],
        ["Float"],
        "completed",
    )
    assert (gather["input_sizes"], gather["output_sizes"]) == ([[8]], [[16]])
    assert (scatter["input_sizes"], scatter["output_sizes"]) == ([[8]], [[4]])
    assert dump["entries"][4]["input_dtypes"] == ["BFloat16"]
    assert {tuple(json.loads(g["ranks"])) for g in dump["pg_config"].values()} == {
        (1, 3),
        (0, 1),
        (0, 1, 2, 3),
    }
    assert [s["last_completed_collective"] for s in dump["pg_status"].values()] == [1, 2, 5]
    assert first["frames"][0]["filename"].endswith("four_ranks.py")


def test_every_field_of_torchs_entries_is_present() -> None:
    """The fields that `build_collectives` of torch's analyzer reads."""
    entry = flight_recorder.dumps(ledger_of(every_collective).ranks)[0]["entries"][0]
    wanted = {
        "record_id",
        "pg_id",
        "process_group",
        "collective_seq_id",
        "p2p_seq_id",
        "op_id",
        "profiling_name",
        "time_created_ns",
        "input_sizes",
        "output_sizes",
        "input_dtypes",
        "output_dtypes",
        "state",
        "time_discovered_started_ns",
        "time_discovered_completed_ns",
        "retired",
        "timeout_ms",
        "is_p2p",
        "frames",
    }
    assert wanted == set(entry)
    assert isinstance(argparse.Namespace(**entry).time_created_ns, int)
