"""The benchmark of parallel layers: it runs, finds equal losses, and counts correctly."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

import shardmesh as sm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def train(benchmark_module):
    return benchmark_module("train")


@pytest.mark.slow
def test_quick_run(train, run_benchmark):
    figures, document = run_benchmark("train.py", "--quick")
    found = {one["implementation"]: one for one in figures["implementations"]}
    assert list(found) == list(train.MAKERS)
    assert all(
        one["wall"]["min_us"] > 0 and one["peak"] >= one["rest"] > 0 for one in found.values()
    )
    # Two blocks and the root: each gathered in forward, gathered again in backward, reduced.
    units = 3
    assert [found[name]["calls"] for name in ("ours FSDP", "torch FSDP2")] == [3 * units] * 2
    assert [found[name]["calls"] for name in ("ours FSDP, kept", "torch FSDP2, kept")] == [
        2 * units
    ] * 2
    assert found["ours TP + SP"]["calls"] < found["DTensor TP + SP"]["calls"]
    assert all(f"| {pair.name} |" in document for pair in train.PAIRS)


# -- arithmetic ------------------------------------------------------------------------------------


def use(train, *losses):
    return train.Usage(calls=1, received=4, peak=8, rest=2, losses=losses)


def test_different_losses_raise(train):
    train.check_losses({"ours": use(train, 1.0, 2.0)}, [1.00005, 2.0])
    with pytest.raises(
        RuntimeError, match=r"ours has the losses \(1\.0, 2\.0\), one process has \(1\.0, 2\.001\)"
    ):
        train.check_losses({"ours": use(train, 1.0, 2.0)}, [1.0, 2.001])


def test_maximum_over_ranks_counts(train):
    uses = [train.Usage(1, 40, 80, 20, (1.0,)), train.Usage(3, 30, 90, 10, (1.0,))]
    assert train.max_over_ranks(uses) == train.Usage(3, 40, 90, 20, (1.0,))


def test_memory_is_measured_between_operators(train):
    memory = train.Memory()

    def step():
        x = torch.zeros(1000)  # 4000 bytes
        y = x + 1
        del x
        return y.view(10, 100) + kept[:100]  # 4000 bytes, while y lives

    with memory:
        kept = torch.zeros(500)  # 2000 bytes
        memory.measured(step)
    assert (memory.rest, memory.peak) == (2000, 10_000)


# -- bytes -----------------------------------------------------------------------------------------


def differences():
    """Return the calls and bytes counted by `CountC10d` and by `comm_budget` on this gloo rank."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        counts = importlib.import_module("train_counts")
    finally:
        sys.path.remove(str(BENCHMARKS))
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("x",))
    part = sm.from_local(torch.ones(3, 8), mesh, sm.P("x"), shape=(12, 8))
    pending = sm.from_local(torch.ones(12, 8), mesh, sm.P(unreduced={"x"}), shape=(12, 8))
    with counts.CountC10d() as counted, sm.debug.comm_budget() as used:
        for x, spec in (
            (part, sm.P()),
            (part, sm.P(None, "x")),
            (pending, sm.P()),
            (pending, sm.P("x")),
        ):
            x.redistribute(spec)
    return counted.calls, counted.received, used.launches, used.bytes_received


def test_bytes_equal_comm_budget(world4):
    for calls, received, launches, bytes_received in world4(differences):
        assert (calls, received) == (launches, bytes_received)
        assert (calls, received) == (4, 288 + 72 + 576 + 288)
