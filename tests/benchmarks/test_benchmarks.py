"""The benchmarks: their arithmetic, and that they run."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def redistribute(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("redistribute")


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("measure")


@pytest.mark.parametrize(
    ("mesh", "src", "dst", "bound"),
    [
        ((4,), "S0", "R", 3 * 1024 * 4),
        ((4,), "S0", "S1", 3 * 256 * 4),
        ((4,), "R", "S0", 0),
        ((2, 2), "S0 S0", "R R", 3 * 1024 * 4),
        ((2, 2), "S0 R", "R S0", 1024 * 4 * 2),
        ((4,), "P", "R", None),
    ],
)
def test_the_bound(redistribute, mesh, src, dst, bound):
    assert redistribute.Pair(mesh, (64, 64), src, dst, "even").bound() == bound


def test_there_are_pairs_for_every_promise(redistribute):
    pairs = [pair for pairs in redistribute.PAIRS.values() for pair in pairs]
    assert len(pairs) >= 20
    assert any("P" in src for src, _, _ in pairs)
    assert any(kind == redistribute.UNEVEN for _, _, kind in pairs)


def test_interleaved_takes_turns(measure):
    seen = []
    calls = {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}
    times = measure.interleaved(calls, rounds=4, batch_s=0)
    assert "".join(seen[-8:]) == "abbaabba"
    assert all(len(t.rounds) == 4 and 0 < t.best <= t.median for t in times.values())


def test_slowest_rank_of_each_round(measure):
    assert measure.slowest([measure.Times((1.0, 5.0)), measure.Times((3.0, 2.0))]).rounds == (3.0, 5.0)


def test_dispatch_runs_and_writes_its_figures(tmp_path):
    figures, document = tmp_path / "figures.json", tmp_path / "tables.md"
    command = [sys.executable, str(BENCHMARKS / "dispatch.py"), "--only", "moves"]
    done = subprocess.run(
        [*command, "--json", str(figures), "--markdown", str(document)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    cases = json.loads(figures.read_text())["sections"]["moves"]
    assert {"plain", "DTensor", "ours"} <= set(cases[0]["times"])
    assert "| partial -> replicated |" in document.read_text()
