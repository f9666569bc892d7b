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


AGREED_BYTES = 24  # by which ranks agree that they passed the same shapes


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("compiled_steps")


@pytest.mark.slow
def test_run_on_processes(steps, tmp_path):
    figures, document = tmp_path / "figures.json", tmp_path / "tables.md"
    command = [
        sys.executable,
        str(BENCHMARKS / "compiled.py"),
        "--processes",
        "2",
        "--quick",
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
        unchecked = steps.EAGER_BACKEND + steps.UNCHECKED
        assert {steps.OURS, steps.EAGER_BACKEND, unchecked} < set(implementations)
        eager, graph = (implementations[name] for name in (steps.OURS, steps.EAGER_BACKEND))
        assert graph["calls"] <= eager["calls"]
        assert graph["received"] <= eager["received"] + AGREED_BYTES
        assert graph["recording"] > 0 == eager["recording"]
        assert f"**{form.name}**" in document.read_text()


def test_quick_host_time(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "compiled.py"), "--quick", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    times = json.loads(figures.read_text())["steps"]
    assert {"ours, eager", "ours, sm.jit, eager backend", "DTensor, eager"} < set(times)
    assert min(times.values()) > 0


def test_mixture_is_that_of_its_experts(steps):
    """Each token's result is the weighted sum of the two experts with the largest weights."""
    model = importlib.import_module("train_model")
    torch.manual_seed(0)
    mixture = model.Mixture(model.Size(1, 8, 2, 16, 4, 2, experts=4))
    x = torch.randn(2, 4, 8)
    result = mixture(x)
    weights = mixture.router(x).softmax(-1)
    hidden = torch.einsum("bsd,xdf->bsxf", x, mixture.gate_up_xdf)
    gate, up = hidden.chunk(2, dim=-1)
    each = torch.einsum("bsxf,xfd->bsxd", torch.nn.functional.silu(gate) * up, mixture.down_xfd)
    chosen = weights >= weights.sort(-1).values[..., -2:-1]
    expected = (each * (weights * chosen)[..., None]).sum(2)
    torch.testing.assert_close(result, expected)


def test_losses_are_compared_with_those_of_torch_in_eager_mode(steps):
    losses = {"DTensor, eager": [1.0, 2.0], "compiled": [1.0, 2.001], "ours": [1.00005, 2.0]}
    assert steps.names_with_wrong_losses(losses) == {"compiled"}


def test_peak_of_a_call(steps):
    def call():
        x = torch.empty(1000)
        del x
        return torch.empty(3000)

    assert steps.peak_of(call) == 3000 * 4


def test_all_ranks_count(steps):
    times = importlib.import_module("measure").Times
    one = steps.Found(times((1.0, 4.0)), 3, 10, 5, is_wrong=True)
    other = steps.Found(times((2.0, 3.0)), 2, 20, 4, 0.5)
    assert steps.Found.of_ranks([one, other]) == steps.Found(
        times((2.0, 4.0)), 3, 20, 5, 0.5, 0, True
    )
