"""`benchmarks/tune_rank.py`: its arithmetic, its forms, and a quick run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import shardmesh as sm

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tune_rank(benchmark_module):
    return benchmark_module("tune_rank")


def test_rank_correlation(tune_rank):
    assert tune_rank.rank_correlation([1.0, 2.0, 3.0], [10.0, 20.0, 50.0]) == 1
    assert tune_rank.rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == -1
    assert tune_rank.rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]) == 0.8


def test_forms(tune_rank):
    """Thirty different forms of four ranks, each of which takes the whole batch."""
    forms = tune_rank.forms(quick=False)
    assert len(set(forms)) == len(forms) == 30
    assert set(tune_rank.forms(quick=True)) == {
        replace(form, rows=form.rows // 2) for form in forms[:4]
    }
    for form in forms:
        assert form.devices == tune_rank.RANKS
        assert form.dp * form.fsdp * form.rows * form.microbatches == tune_rank.WHOLE["rows"]


def test_measured_rates_price_computation(tune_rank):
    link = sm.topology.Link(1e-5, 1e9)
    topology = sm.topology.Topology(link, link, 1e10, node_size=4)
    sums = {"all_reduce": 1.5}
    rates = tune_rank.Rates(1e11, 2e10, 1e10, 2e-6, sums, topology)
    device = tune_rank.device_of_rates(rates)
    assert device.flops * device.matmul == 1e11
    assert device.flops * device.attention == device.flops * device.attention_backward == 2e10
    assert device.sums is sums
    assert device.local is link
    assert device.is_host
    assert device.sharing >= 1


@pytest.mark.slow
def test_a_quick_run():
    pytest.importorskip("transformers")
    command = [sys.executable, "benchmarks/tune_rank.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "did not run" not in done.stdout
    assert "rank correlation" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 4
    assert all(float(row.split("|")[3]) > 0 for row in rows[1:])
