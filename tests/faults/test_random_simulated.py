"""Random programs in simulated worlds: with a random divergence on one rank, and without one."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.random_outcome import RIGHT, outcome, run_simulated
from tests.faults.random_programs import KINDS, MORE_MESHES, faulty_program, healthy_program

# benchmarks/monitor_random.py has thousands.
PROGRAMS, PARTS = 75, 5
CALLS = 8_000


@pytest.mark.one_in(9)
@pytest.mark.parametrize("part", range(PARTS))
def test_outlier_is_named_or_changes_nothing(part: int) -> None:
    """Every program ends; no result is silently wrong, no correct rank is named, and a majority
    always names the outlier.
    """
    found = Counter[str]()
    wrong = []
    for seed in range(part * PROGRAMS // PARTS, (part + 1) * PROGRAMS // PARTS):
        program = faulty_program(seed, MORE_MESHES, length=10)
        what, error = outcome(program)
        found[what] += 1
        if what not in RIGHT:
            wrong.append(f"seed {seed}: {what}: {program.divergence}: {error}")
    assert not wrong, "\n".join(wrong)
    assert found["named"] > PROGRAMS / PARTS / 3  # most divergences are observable
    assert found["unseen"] + found["local"] < PROGRAMS / PARTS / 6


def test_outlier_in_programs_that_also_call_torch() -> None:
    """In the simulated world these calls use another function on the library's groups."""
    programs = [
        faulty_program(seed, MORE_MESHES, length=10, raw=True) for seed in range(PROGRAMS // PARTS)
    ]
    found = [(program, *outcome(program)) for program in programs]
    assert [
        f"seed {p.seed}: {what}: {p.divergence}: {error}"
        for p, what, error in found
        if what not in RIGHT
    ] == []


def test_divergences_are_of_all_kinds() -> None:
    programs = [faulty_program(seed, MORE_MESHES, length=10) for seed in range(PROGRAMS)]
    counts = Counter(program.divergence.kind for program in programs if program.divergence)
    assert set(counts) == set(KINDS)
    assert min(counts.values()) >= PROGRAMS / len(KINDS) / 3
    assert {tuple(program.mesh.values()) for program in programs} == {
        tuple(mesh.values()) for mesh in MORE_MESHES
    }


def test_correct_programs_raise_no_error() -> None:
    """Ranks create separate tensors, on different lines and in threads, and inspect shared ones."""
    calls = seed = 0
    while calls < CALLS:
        calls += run_simulated(healthy_program(seed, MORE_MESHES, iterations=(2, 12)))[1]
        seed += 1


def test_benchmark_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    figures, document = tmp_path / "figures.json", tmp_path / "tables.md"
    options = "--simulated 8 --processes 0 --calls 500 --process-calls 0 --seed 0".split()
    importlib.import_module("monitor_random").main(
        [*options, "--json", str(figures), "--markdown", str(document)]
    )
    found = json.loads(figures.read_text())
    everything = found["Simulated worlds of 3, 4 and 8 ranks, one outlier"][-1]
    assert everything["divergence"] == "all"
    assert everything["programs"] == "8"
    assert sum(int(everything[what]) for what in (*RIGHT, "wrong")) == 8
    (correct,) = found["Correct programs"]
    assert int(correct["collectives called"].replace(",", "")) >= 500
    assert correct["false alarms"] == "0"
    assert "| all | 8 |" in document.read_text()
