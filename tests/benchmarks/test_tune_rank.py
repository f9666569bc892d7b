"""`benchmarks/tune_rank.py`: its arithmetic, its forms, and a quick run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmesh.sharding.tune.form import Group
from shardmesh.sharding.tune.prices import Prices

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


def rates_of(tune_rank: Any, factor: float) -> Any:
    collectives = {"all_gather": {2: (1e-5, 1e9), 4: (3e-5 * factor, 1e9)}}
    again, arrival = {"full": 3e-6, "selective": 1e-5}, {2: 1e-4, 4: 2e-4}
    sums = {"all_reduce": 1.5}
    return tune_rank.Rates(
        1e11 * factor, 2e10, 1e10, 2e-6, again, 1e-3, 1e-6, sums, collectives, arrival
    )


def test_measured_rates_price_computation(tune_rank):
    rates = rates_of(tune_rank, 1.0)
    device = tune_rank.device_of_rates(rates)
    assert device.flops * device.matmul == 1e11
    assert device.flops * device.attention == device.flops * device.attention_backward == 2e10
    assert device.is_host
    assert device.sharing >= 1
    for name in ("launch", "again", "message", "split_backward", "sums", "collectives", "arrival"):
        assert getattr(device, name) == getattr(rates, name)
    prices = Prices(device, device.topology(4), 4)
    assert prices.source(Group(4, 4), "all_gather") == "table"


def test_the_median_of_rates_is_that_of_each_number(tune_rank):
    middle = tune_rank.median_of([rates_of(tune_rank, factor) for factor in (3.0, 1.0, 2.0)])
    assert middle == rates_of(tune_rank, 2.0)


def test_tiny_programs_have_the_operators_of_the_whole_model(tune_rank):
    pytest.importorskip("transformers")
    tiny = tune_rank.tiny_programs(tune_rank._config(16, 16, 4), "def build(): ...")
    costs = tune_rank._described(tune_rank._config(64, 32, 4), 4, 32).costs(1)
    block, edges = costs.block, costs.edges
    phases = [block.forward, block.backward] * 4 + [edges.forward, edges.backward]
    assert tiny.operators == sum(sum(phase.kernels.values()) for phase in phases)
    assert tiny.again["full"] == 4 * sum(block.again_whole.kernels.values())
    assert len(set(tiny.texts.values())) == len(tiny.texts)


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
