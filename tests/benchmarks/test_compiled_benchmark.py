"""The benchmark of compiled steps: it runs on processes, finds equal losses, and compares."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("compiled_steps")


@pytest.mark.slow
def test_run_on_processes(steps, tmp_path):
    figures, document = tmp_path / "figures.json", tmp_path / "tables.md"
    sizes = ["--processes", "2", "--layers", "2", "--width", "16", "--rounds", "2", "--no-inductor"]
    command = [
        sys.executable,
        str(BENCHMARKS / "compiled.py"),
        *sizes,
        "--json",
        str(figures),
        "--markdown",
        str(document),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    for form in steps.FORMS:
        implementations = found[form.name]["implementations"]
        assert {steps.OURS, steps.EAGER_BACKEND} < set(implementations)
        eager, graph = (implementations[name] for name in (steps.OURS, steps.EAGER_BACKEND))
        assert graph["calls"] <= eager["calls"]
        assert graph["received"] <= eager["received"]
        assert graph["recording"] > 0 == eager["recording"]
        assert f"**{form.name}**" in document.read_text()


def test_different_losses_raise(steps):
    steps.check_losses({"ours": [1.0, 2.0], "theirs": [1.00005, 2.0]})
    with pytest.raises(RuntimeError, match="losses differ"):
        steps.check_losses({"ours": [1.0, 2.0], "theirs": [1.0, 2.001]})


def test_peak_of_a_call(steps):
    def call():
        x = torch.empty(1000)
        del x
        return torch.empty(3000)

    assert steps.peak_of(call) == 3000 * 4


def test_all_ranks_count(steps):
    times = importlib.import_module("measure").Times
    one = steps.Found(times((1.0, 4.0)), 3, 10, 5)
    other = steps.Found(times((2.0, 3.0)), 2, 20, 4, 0.5)
    assert steps.Found.of_ranks([one, other]) == steps.Found(times((2.0, 4.0)), 3, 20, 5, 0.5)
