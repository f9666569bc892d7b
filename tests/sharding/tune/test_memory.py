"""Memory by the formulas of `tune` next to the program's, on 4 and 8 ranks.

The instrument is `PeakMemory`, the library's count of bytes of live tensors, around the second step
of the printed program: rank 0 runs alone on the CPU, in a world whose other ranks send zeros. It
counts what tensors take; what an allocator reserves beyond is not in it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import shardmesh as sm
from shardmesh.mesh.comm.null import null_world
from shardmesh.mesh.comm.report import CommReport, comm_report
from shardmesh.sharding.abstract.peak_memory import PeakMemory
from shardmesh.sharding.tune.description import Description
from shardmesh.sharding.tune.devices import device_of
from shardmesh.sharding.tune.form import Form, why_not
from shardmesh.sharding.tune.memory import memory_of
from shardmesh.sharding.tune.prices import Prices
from shardmesh.sharding.tune.program import hugging_face_build, program_text
from shardmesh.sharding.tune.step_time import StepTimes
from tests.sharding.tune import tiny
from tests.tiers import slow

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
ROWS, POSITIONS = 16, 64
MEMORY = 0.05
# Rows of a unit start at multiples of some elements, and the gradients of norms under tensor
# parallelism do not depend on rows.
BYTES = 0.02
TP_LAUNCHES = 0.15  # sums of the gradients of norms, of each unit or of several together
SIMULATED = 0.07
H100 = device_of("h100")

FAST = [
    Form(fsdp=4, rows=4),
    Form(fsdp=2, tp=2, sequence_parallel=True, rows=8, recompute="selective"),
    Form(pp=2, fsdp=2, rows=2, microbatches=4),
]
SLOW = [
    Form(dp=4, rows=4),
    Form(dp=4, rows=2, microbatches=2),
    Form(dp=4, rows=2, microbatches=2, recompute="full"),
    Form(dp=8, rows=2),
    Form(fsdp=4, rows=1, microbatches=4),
    Form(fsdp=4, rows=4, recompute="full"),
    Form(fsdp=4, rows=2, microbatches=2, recompute="full"),
    Form(fsdp=4, rows=4, recompute="selective"),
    Form(fsdp=8, rows=1, microbatches=2),
    Form(fsdp=4, rows=4, zero=2),
    Form(fsdp=4, rows=2, microbatches=2, zero=2),
    Form(fsdp=4, rows=4, zero=1),
    Form(fsdp=4, rows=2, microbatches=2, zero=1),
    Form(fsdp=2, tp=2, sequence_parallel=True, rows=4, microbatches=2, zero=1),
    Form(fsdp=4, rows=4, recompute="full", zero=2),
    Form(fsdp=2, cp=2, rows=8, zero=1),
    Form(fsdp=8, rows=2, recompute="selective"),
    Form(dp=2, fsdp=2, rows=4),
    Form(dp=2, fsdp=4, rows=2),
    Form(dp=4, fsdp=2, rows=1, microbatches=2),
    Form(tp=4, rows=16),
    Form(tp=4, sequence_parallel=True, rows=8, microbatches=2),
    Form(fsdp=2, tp=2, rows=8),
    Form(fsdp=2, tp=2, sequence_parallel=True, rows=8),
    Form(fsdp=2, tp=2, sequence_parallel=True, rows=8, recompute="full"),
    Form(dp=2, fsdp=2, tp=2, rows=4),
    Form(fsdp=4, tp=2, sequence_parallel=True, rows=2, microbatches=2),
    Form(dp=2, tp=4, sequence_parallel=True, rows=8),
    Form(cp=4, rows=16),
    Form(fsdp=2, cp=2, rows=8),
    Form(fsdp=2, cp=2, rows=8, recompute="selective"),
    Form(fsdp=2, cp=2, tp=2, sequence_parallel=True, rows=8),
    Form(pp=4, rows=4, microbatches=4),
    Form(pp=4, rows=2, microbatches=8),
    Form(pp=4, rows=4, microbatches=4, schedule="gpipe"),
    Form(pp=4, rows=4, microbatches=4, schedule="gpipe", recompute="full"),
    Form(pp=4, rows=4, microbatches=4, schedule="zb_h1"),
    Form(pp=4, rows=2, microbatches=8, schedule="zb_h1"),
    Form(pp=2, dp=2, rows=2, microbatches=4),
    Form(pp=2, tp=2, rows=4, microbatches=4),
    Form(pp=2, fsdp=2, rows=2, microbatches=4, gather="step"),
    Form(pp=2, fsdp=2, rows=2, microbatches=4, recompute="full"),
    Form(pp=4, fsdp=2, rows=1, microbatches=8),
    Form(pp=2, fsdp=2, tp=2, sequence_parallel=True, rows=2, microbatches=4),
]


@pytest.fixture(scope="module")
def described() -> Description:
    return Description(tiny.model(**SIZES), tiny.ids(ROWS, POSITIONS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama")
    (path / "config.json").write_text(json.dumps(tiny.config(**SIZES).to_dict()))
    return str(path)


def program(form: Form, model: Description, folder: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "train"}
    text = program_text(form, model, hugging_face_build(folder), node=8)
    exec(compile(text, "train.py", "exec"), names)
    return names


def run(form: Form, model: Description, folder: str) -> tuple[int, CommReport]:
    """Return the peak of the program's second step on rank 0, and what it receives."""
    names = program(form, model, folder)
    rows_of = names["rows_of"]
    memory, report = PeakMemory("cpu"), comm_report()
    reports: list[CommReport] = []

    def begin(step: int, mesh: Any) -> Any:
        if step == 1:
            memory.peak = memory.live
            reports.append(report.__enter__())
        return rows_of(step, mesh)

    names["rows_of"] = begin
    with null_world(form.devices, 0), memory:
        names["main"](device="cpu", steps=2)
        report.__exit__(None, None, None)
    return memory.peak, reports[0]


@pytest.mark.parametrize("form", [*FAST, *map(slow, SLOW)], ids=str)
def test_memory_and_bytes_of_the_program(form, described, folder):
    assert why_not(form, described) is None
    peak, report = run(form, described, folder)
    memory = memory_of(form, described, 0)
    assert memory.total == pytest.approx(peak, rel=MEMORY)
    device = device_of("h100")
    time = StepTimes(described, Prices(device, device.topology(8), 8)).of(form, rank=0)
    if form.pp > 1 and form not in FAST:
        return
    assert sum(time.moved.values()) == pytest.approx(report.bytes_received, rel=BYTES)
    launches = collectives(report)
    tp = launches.pop("tp", 0)
    assert launches == {axis: n for axis, n in time.launches.items() if axis != "tp"}
    assert time.launches.get("tp", 0) == pytest.approx(tp, rel=TP_LAUNCHES)


def collectives(report: CommReport) -> dict[str, int]:
    """Return the launches over each axis, without sums of a few numbers, and over dp."""
    launches: dict[str, int] = {}
    for source, (count, received) in report.by_source.items():
        axis = source.axis
        if received <= 64 * count or axis.startswith("dp"):
            continue
        if source.op in ("all_gather", "reduce_scatter") and axis != "tp":
            axis = "fsdp"  # over the shards, whatever their axes are
        launches[axis] = launches.get(axis, 0) + count
    return launches


def reports_of_ranks(form: Form, model: Description, folder: str) -> list[CommReport]:
    """Return what each of simulated ranks communicates in the program's second step."""
    names, begins = program(form, model, folder), {}
    rows_of = names["rows_of"]

    def begin(step: int, mesh: Any) -> Any:
        if step == 1:
            report = comm_report()
            begins[sm.process_index()] = report, report.__enter__()
        return rows_of(step, mesh)

    def rank() -> CommReport:
        names["main"](device="cpu", steps=2)
        report, counts = begins[sm.process_index()]
        report.__exit__(None, None, None)
        return counts

    names["rows_of"] = begin
    return sm.simulate(form.devices)(rank)()


@pytest.mark.parametrize("schedule", [slow("1f1b"), "zb_h1"])
def test_bytes_of_the_last_rank_of_a_pipeline(schedule, described, folder):
    """It runs one forward before its first backward, which frees the gathered parameters."""
    form = Form(pp=2, fsdp=2, rows=2, microbatches=4, schedule=schedule)
    reports = reports_of_ranks(form, described, folder)
    times = StepTimes(described, Prices(H100, H100.topology(8), 8))
    for rank in range(form.pp):
        time = times.of(form, rank=rank)
        report = reports[rank * form.fsdp]
        size = sum(n for source, (_, n) in report.by_source.items() if source.axis == "fsdp")
        assert time.moved["fsdp"] == pytest.approx(size, rel=BYTES)
        assert time.launches["fsdp"] == collectives(report)["fsdp"]


@pytest.mark.parametrize("sequence_parallel", [True, slow(False)])
def test_bytes_over_tp_of_each_rank_of_a_pipeline(sequence_parallel, described, folder):
    """The first has those of the embedding, the last those of the head and the loss."""
    form = Form(
        pp=2, tp=2, sequence_parallel=sequence_parallel, rows=4, microbatches=4, schedule="1f1b"
    )
    reports = reports_of_ranks(form, described, folder)
    times = StepTimes(described, Prices(H100, H100.topology(8), 8))
    for rank in range(form.pp):
        time = times.of(form, rank=rank)
        by_source = reports[rank * form.tp].by_source
        uses = [use for source, use in by_source.items() if source.axis.endswith("tp")]
        launches, size = map(sum, zip(*uses, strict=True))
        assert time.moved["tp"] == pytest.approx(size, rel=BYTES)
        assert time.launches["tp"] == pytest.approx(launches, rel=TP_LAUNCHES)


def test_time_of_gathers_of_the_edges(described):
    """With gpipe all forwards come before the first backward, and gather the embedding once."""
    times = StepTimes(described, Prices(H100, H100.topology(8), 8))
    form = Form(pp=2, fsdp=2, rows=2, microbatches=4, schedule="gpipe")
    once, often = times.of(form, rank=0), times.of(replace(form, schedule="1f1b"), rank=0)
    elements = SIZES["vocab_size"] * SIZES["hidden_size"]
    prices = Prices(H100, H100.topology(8), 8)
    gather = prices.seconds("all_gather", 2 * elements / 2, form.group("shards", 8))
    assert often.fsdp - once.fsdp == pytest.approx(2 * gather)  # of 1 and of 3


RANKS = [
    Form(pp=4, rows=4, microbatches=4),
    Form(pp=4, rows=2, microbatches=8, schedule="zb_h1"),
]


@pytest.mark.parametrize("form", [*map(slow, RANKS)], ids=str)
def test_memory_of_every_rank_of_a_pipeline(form, described, folder):
    """On simulated ranks, whose messages are copied in one process: a rank then takes up to 5 %
    more than alone.
    """
    names, begins = program(form, described, folder), {}
    rows_of = names["rows_of"]

    def begin(step: int, mesh: Any) -> Any:
        memory = begins[sm.process_index()]
        if step == 1:
            memory.peak = memory.live
        return rows_of(step, mesh)

    def rank() -> int:
        memory = begins[sm.process_index()] = PeakMemory("cpu")
        with memory:
            names["main"](device="cpu", steps=2)
        return memory.peak

    names["rows_of"] = begin
    peaks = sm.simulate(form.devices)(rank)()
    for number, peak in enumerate(peaks):
        assert memory_of(form, described, number).total == pytest.approx(peak, rel=SIMULATED)
