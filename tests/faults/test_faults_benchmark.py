"""benchmarks/faults.py: it runs, and describes outcomes correctly."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fault import Fault
from tests.faults.programs import FAULTS
from tests.faults.runner import Outcome, RankOutcome

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def fault_outcomes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fault_outcomes")


def rank(value: Any = 1, text: str = "", status: int | None = 0) -> RankOutcome:
    error = "RuntimeError" if text else ""
    return RankOutcome(error, text, None, value, not text and status == 0, status, None, "")


HEALTHY = rank()
REPORT = (
    "Detected mismatch between collectives on ranks. Rank 0 is running collective: A, but Rank 2 "
    "is running collective: B"
)
BARRIER = "[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 5000 ms"


@pytest.mark.parametrize(
    ("program", "ranks", "killed", "expected"),
    [
        ("skips_a_redistribute", [HEALTHY] * 4, [], "nothing"),
        ("skips_a_redistribute", [rank(2), *[HEALTHY] * 3], [], "wrong result"),
        (
            "skips_a_redistribute",
            [rank(text="Timed out waiting 5000ms"), *[HEALTHY] * 3],
            [],
            "hang",
        ),
        ("skips_a_redistribute", [*[HEALTHY] * 3, rank(status=None)], [3], "hang"),
        (
            "skips_a_redistribute",
            [rank(2), rank(text="Connection closed by peer"), *[HEALTHY] * 2],
            [],
            "wrong result; connection closed",
        ),
        ("skips_a_redistribute", [rank(status=-6), *[HEALTHY] * 3], [], "abort"),
        (
            "skips_a_redistribute",
            [rank(text=REPORT), *[HEALTHY] * 3],
            [],
            "mismatch reported (names the rank)",
        ),
        ("repeats_a_redistribute", [rank(text=REPORT), *[HEALTHY] * 3], [], "mismatch reported"),
        (
            "two_die",
            [rank(text=BARRIER), rank(status=-9), HEALTHY, rank(status=-9)],
            [],
            "missing rank reported (names the rank)",
        ),
        ("is_killed", [HEALTHY, HEALTHY, rank(status=-9), HEALTHY], [], "nothing"),
    ],
)
def test_outcomes_of_torch(
    fault_outcomes: Any, program: str, ranks: list[RankOutcome], killed: list[int], expected: str
) -> None:
    assert (
        fault_outcomes.torch_outcome(FAULTS[program], Outcome(ranks, killed), [1] * 4).text
        == expected
    )


def test_percentiles(fault_outcomes: Any) -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [fault_outcomes.percentile(values, p) for p in (0, 50, 99, 100)] == [1, 50, 99, 100]


def test_counts_of_programs_that_call_torch(
    fault_outcomes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is in one row, and docs/faults.md has the numbers of programs."""
    faults = importlib.import_module("faults")

    def outcome(fault: Fault) -> Any:
        return fault_outcomes.MonitoredOutcome("", (), (), frozenset(), bool(fault.named), True)

    rows = [
        faults.FaultRow(fault, None, None, outcome(fault), False)
        for fault in FAULTS.values()
        if fault.kinds
    ]
    calls_torch = [row for row in rows if ".torch_" in row.fault.program.__module__]
    _, lines = faults.torch_counts(rows)
    assert lines[-1][1] == str(len(calls_torch))
    page = (BENCHMARKS.parent / "docs" / "faults.md").read_text()
    for line in lines:
        assert f"| {' | '.join(line)} |" in page


@pytest.mark.slow
def test_script_runs(tmp_path: Path) -> None:
    figures, document = tmp_path / "figures.json", tmp_path / "faults.md"
    command = [
        sys.executable,
        str(BENCHMARKS / "faults.py"),
        "--ours",
        "--passes",
        "1",
        "--only",
        "is_killed",
    ]
    done = subprocess.run(
        [*command, "--json", str(figures), "--markdown", str(document)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(figures.read_text())["rows"]
    assert not row["wrong"]
    assert len(row["latencies_s"]) == 3
    assert "| `RankLostError`: rank 2 |" in document.read_text()
