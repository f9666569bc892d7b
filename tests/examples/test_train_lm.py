"""The example trains the same model on any mesh as in one process, and rejects invalid options."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import train_lm
import train_lm_report as report

import shardmesh as sm
from tests.tiers import slow

SCRIPT = Path(__file__).parents[2] / "examples" / "train_lm.py"
ARGUMENTS = ["--size", "tiny", "--steps", "6", "--every", "2"]
# Of each eager step of the tiny model, with 2 layers of 4 weights: an axis of size 1 communicates
# nothing.
CALLS = {
    "fsdp=2,tp=2": {
        "all_gather": 2 * 4 + 1,  # every weight once, the embedding over both axes
        "reduce_scatter": 2 * 4 + 1,  # their gradients, the embedding's over both axes at once
        "all_reduce": 2 * (2 + 2)
        + 1
        + 1
        + 1,  # two sums into the stream, forward and backward; norms; number of targets; clipping
    },
    "fsdp=4,tp=1": {"all_gather": 2 * 4 + 1, "reduce_scatter": 2 * 4 + 1, "all_reduce": 1 + 1 + 1},
    "fsdp=1,tp=4": {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2 * (2 + 2) + 1 + 1 + 1},
}


@pytest.fixture(scope="module")
def single() -> report.Run:
    return train_lm.train(train_lm.parse(ARGUMENTS), None)


def check_same_losses(run: report.Run, single: report.Run) -> None:
    assert [row.step for row in run.rows] == [row.step for row in single.rows] == [1, 2, 4, 6]
    for ours, theirs in zip(run.rows, single.rows, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=train_lm.TOLERANCE)
        assert ours.valid_loss == pytest.approx(theirs.valid_loss, rel=train_lm.TOLERANCE)


def eager_and_graph(arguments: list[str]) -> list[report.Run]:
    options = [train_lm.parse([*arguments, *jit]) for jit in (["--no-jit"], [])]
    return [sm.simulate(4)(train_lm.train_on_mesh)(one)[0] for one in options]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("mesh", CALLS)
def test_training_on_any_mesh_equals_one_process(mesh, single):
    eager, graph = eager_and_graph([*ARGUMENTS, "--mesh", mesh])
    check_same_losses(eager, single)
    assert graph.rows == [
        replace(a, tokens_per_s=b.tokens_per_s) for a, b in zip(eager.rows, graph.rows, strict=True)
    ]
    assert {op: calls for op, (calls, _) in eager.collectives.items()} == CALLS[mesh]
    # The graph packs small ones, and sends the same bytes.
    assert {op: sent for op, (_, sent) in graph.collectives.items()} == {
        op: sent for op, (_, sent) in eager.collectives.items()
    }
    assert sum(calls for calls, _ in graph.collectives.values()) < sum(CALLS[mesh].values())


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "axes", ["dp=2,fsdp=2", "zero1=2,tp=2", "zero2=4", "dp=4", "fsdp=2,tp=2", "fsdp=2,sp=2"]
)
def test_training_with_layers_equals_one_process(axes, single):
    run = sm.simulate(4)(train_lm.train_on_mesh)(train_lm.parse([*ARGUMENTS, "--parallel", axes]))[
        0
    ]
    check_same_losses(run, single)
    assert run.sample == single.sample


STAGES_ON_EIGHT_RANKS = [
    f"pp=2,{data}=2,{inner}=2"
    for data in ("dp", "zero1", "zero2", "fsdp")
    for inner in ("tp", "sp")
]


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    "axes",
    [
        "pp=2",
        "pp=2,fsdp=2",
        "pp=2,tp=2",
        "pp=2,zero1=2",
        "pp=2,zero2=2",
        "pp=2,sp=2",
        "pp=2,dp=2",
        "pp=2,dp=2,fsdp=2",
        *STAGES_ON_EIGHT_RANKS,
    ],
)
def test_training_in_stages_equals_one_process(axes, single):
    options = train_lm.parse([*ARGUMENTS, "--parallel", axes])
    run = sm.simulate(math.prod(options.mesh.values()))(train_lm.train_on_mesh)(options)[0]
    check_same_losses(run, single)
    assert run.sample  # of other random numbers: each step of a pipeline takes one
    assert run.parameters == single.parameters


@pytest.mark.parametrize(
    "how",
    [
        ["--mesh", "fsdp=2,tp=2"],
        slow(["--parallel", "fsdp=4"]),
        slow(["--parallel", "zero2=2,sp=2"]),
    ],
    ids=" ".join,
)
def test_accumulating_equals_one_process(how):
    options = [*ARGUMENTS, "--accumulate", "2"]
    reference = train_lm.train(train_lm.parse(options), None)
    eager, graph = eager_and_graph([*options, *how])
    check_same_losses(eager, reference)
    assert [(row.loss, row.valid_loss) for row in graph.rows] == [
        (row.loss, row.valid_loss) for row in eager.rows
    ]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp=2,tp=2", "zero1=4"),
        ("dp=2", "fsdp=2,sp=2"),
        ("pp=2,fsdp=2", "fsdp=2,tp=2"),
        ("tp=2", "pp=2,tp=2"),
    ],
)
def test_resumes_on_another_mesh(before, after, single, tmp_path):
    saving = ["--save", str(tmp_path), "--save-every", "3"]
    first = train_lm.parse([*ARGUMENTS, "--parallel", before, *saving])
    sm.simulate(math.prod(first.mesh.values()))(train_lm.train_on_mesh)(first)
    shutil.rmtree(tmp_path / "step-00000006")
    run = sm.simulate(4)(train_lm.train_on_mesh)(
        train_lm.parse([*ARGUMENTS, "--parallel", after, *saving, "--resume"])
    )[0]
    assert [row.step for row in run.rows] == [4, 6]
    for ours, theirs in zip(run.rows, single.rows[2:], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=train_lm.TOLERANCE)


@pytest.mark.slow
def test_training_on_processes_equals_one_process(world4, single):
    run = world4(train_lm.train_on_mesh, train_lm.parse(ARGUMENTS))[0]
    check_same_losses(run, single)
    assert run.sample == single.sample != ""


def test_loss_decreases():
    run = train_lm.train(train_lm.parse([*ARGUMENTS, "--steps", "12"]), None)
    assert run.rows[-1].loss < run.rows[0].loss - 1
    assert run.rows[0].loss == pytest.approx(math.log(train_lm.VOCABULARY), rel=0.1)


@pytest.mark.slow
def test_script_compares_and_writes_metrics(tmp_path):
    command = [
        sys.executable,
        str(SCRIPT),
        "--compare",
        *ARGUMENTS,
        "--mesh",
        "fsdp=2",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()
    assert all(
        text in done.stdout for text in ("all_gather", "rows", "largest relative difference")
    )
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert [run["name"] for run in metrics["runs"]] == ["fsdp=2 tp=1", "one process"]
    assert [row["step"] for row in metrics["runs"][0]["rows"]] == [1, 2, 4, 6]
    assert metrics["largest_relative_difference"] <= train_lm.TOLERANCE
    assert metrics["options"]["seed"] == 0


def test_single_writes_metrics_and_plot(tmp_path):
    assert (
        train_lm.main(
            ["--single", "--size", "tiny", "--steps", "2", "--out", str(tmp_path / "new")]
        )
        == 0
    )
    metrics = json.loads((tmp_path / "new" / "metrics.json").read_text())
    assert metrics["largest_relative_difference"] is None
    assert (tmp_path / "new" / "loss.png").stat().st_size > 0


@pytest.mark.parametrize(("loss", "expected"), [(2.0, 0.0), (2.1, 0.05), (math.nan, math.nan)])
def test_comparison_finds_the_largest_difference(loss, expected):
    rows = [report.Row(step, 2.0, 2.0, 0.0) for step in range(3)]
    other = [rows[0], replace(rows[1], valid_loss=loss), rows[2]]
    largest = report.compare(report.Run("a", 0, other), report.Run("b", 0, rows), 1e-4)
    assert largest == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "fsdp=1,tp=3"], "tp=3 does not divide the 4 heads"),
        (["--mesh", "fsdp=3"], "fsdp=3 x tp=1 does not divide the batch of 8"),
        (["--mesh", "dp=2,tp=2"], "write the sizes of fsdp and tp"),
        (["--mesh", "fsdp=0,tp=2"], "write the sizes of fsdp and tp"),
        (["--steps", "0"], "all must be at least 1"),
        (["--accumulate", "0"], "--accumulate 0: all must be at least 1"),
        (["--parallel", "ddp=4"], "write sizes of axes among dp, zero1"),
        (["--parallel", "tp=2,sp=2"], "of tp and sp only one"),
        (["--parallel", "pp=4"], "pp=4 is more than the 2 layers"),
        (["--parallel", "pp=2,fsdp=4"], "into 4 x 4 microbatches"),
        (["--resume"], "--resume continues from a checkpoint"),
        (["--device", "abacus"], "invalid choice"),
        (["--single", "--compare"], "not allowed with"),
    ],
)
def test_invalid_options_exit(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        train_lm.parse([*ARGUMENTS, *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_mesh_must_fit_the_processes_started(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        train_lm.parse(ARGUMENTS)
    assert "needs 4 processes, and 2 were started" in capsys.readouterr().err
