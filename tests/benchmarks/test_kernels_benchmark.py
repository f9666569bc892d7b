"""The benchmarks of the kernels: they compare equal results, count correctly, and report a missing
GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardmesh.kernels.backend import using_kernels

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = 1 << 12  # bytes
NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU"
)


@pytest.fixture
def cases(benchmark_module):
    return {case.name: case for case in benchmark_module("kernel_cases").CASES}


def run_script(name, *arguments):
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


# -- all implementations give the same result ------------------------------------------------------


def test_torch_equals_our_torch_implementation(benchmark_module, cases):
    disagreeing = benchmark_module("kernel_cases").disagreeing
    for case in cases.values():
        assert disagreeing(case, case.make(SMALL, "cpu")) == [], case.name


@NO_GPU
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, for infinities
@pytest.mark.parametrize("kind", ["pack", "unpack", "cast", "sum", "quantise", "dequantise"])
def test_torch_equals_our_kernels(benchmark_module, cases, kind):
    disagreeing = benchmark_module("kernel_cases").disagreeing
    with using_kernels():
        for case in cases.values():
            # Which takes seconds in the interpreter.
            if case.name.startswith(kind) and "middle" not in case.name:
                assert disagreeing(case, case.make(SMALL, "cpu")) == [], case.name


def test_what_must_be_moved(benchmark_module, cases):
    assert cases["pack, first dim, bf16"].make(SMALL, "cpu").needed() == 0
    assert cases["pack, last dim, bf16"].make(1 << 16, "cpu").needed() == 2 << 16
    assert cases["cast, scale, pack, last dim"].make(1 << 16, "cpu").needed() == (1 << 16) * 6 // 4


# -- kernel_bytes.py -------------------------------------------------------------------------------


def amounts(moved):
    return moved.launches, moved.read, moved.written


def test_bytes_of_torch(benchmark_module):
    moved_by_torch = benchmark_module("kernel_bytes").moved_by_torch
    x = torch.zeros(4, 8)  # 128 bytes
    assert amounts(moved_by_torch(lambda x: x.t().view(8, 2, 2)[1:], (x,))) == (0, 0, 0)
    assert amounts(moved_by_torch(lambda x: x.t().contiguous(), (x,))) == (1, 128, 128)
    assert amounts(moved_by_torch(lambda x: torch.cat(x.chunk(2, 1)), (x,))) == (1, 128, 128)
    assert amounts(moved_by_torch(lambda x: x.to(torch.float64).mul_(2), (x,))) == (
        2,
        128 + 256,
        256 + 256,
    )
    assert amounts(
        moved_by_torch(lambda x: torch.empty(4, 8).copy_(x[:, :1].expand(4, 8)), (x,))
    ) == (1, 16, 128)
    out = torch.empty(8, 4)
    assert amounts(moved_by_torch(lambda x: torch.cat(x.chunk(2, 1), out=out), (x,))) == (
        1,
        128,
        128,
    )


def test_sectors(benchmark_module):
    """Rows of 16 bytes use half of each sector; contiguous elements use all of it."""
    kernel_bytes = benchmark_module("kernel_bytes")
    traffic = benchmark_module("kernel_bytes").KernelTraffic()
    everywhere = torch.ones(64, 4, dtype=torch.bool).numpy()
    rows = (torch.arange(64)[:, None] * 64 + torch.arange(4) * 4).numpy()  # 16 of every 64 bytes
    traffic.add(kernel_bytes.Access("load", (0, 0), rows, everywhere, 4))
    assert (traffic.read, traffic.used("load"), traffic.from_memory) == (1024, 0.5, 64 * 32)
    # Contiguous along dim 0 of the block.
    together = torch.arange(256).mul(4).view(64, 4).t().numpy()
    traffic.add(kernel_bytes.Access("store", (0, 0), together, everywhere.T, 4))
    assert (traffic.written, traffic.used("store"), traffic.from_memory) == (
        1024,
        1.0,
        64 * 32 + 1024,
    )


@NO_GPU
def test_bytes_of_kernels(benchmark_module, cases):
    traffic_of = benchmark_module("kernel_bytes").traffic_of
    size = 1 << 16
    for name, read, written in [
        ("pack, last dim, bf16", size, size),
        ("unpack, last dim, uneven, fp32", None, None),
        ("cast, scale, pack, last dim", size, size // 2),
        ("sum of 8, bf16", size, size // 8),
    ]:
        work = cases[name].make(size, "cpu")
        moved = traffic_of(work)
        result = sum(
            x.nbytes for x in benchmark_module("kernel_cases").tensors_in(work.ours(*work.inputs))
        )
        assert (moved.launches, moved.read, moved.written) == (
            1,
            read or result,
            written or result,
        ), name
        assert moved.from_memory >= moved.bytes


@NO_GPU
@pytest.mark.slow
def test_bytes_script(tmp_path):
    done = run_script(
        "kernel_bytes.py",
        "--size",
        "0.02",
        "--only",
        "pack, last dim, bf16",
        "--markdown",
        str(tmp_path / "tables.md"),
    )
    assert done.returncode == 0, done.stderr
    document = (tmp_path / "tables.md").read_text()
    assert "| pack, last dim, bf16 | ours | 1 | 2.00 | 2.00 |  | 100 % | 100 % | 4.00 |" in document
    assert "| pack, last dim, bf16 | DTensor: cat of chunks | 1 | 2.00 | 2.00 | 1.00x |" in document
    assert "no GPU" in document


# -- kernels.py ------------------------------------------------------------------------------------


@NO_GPU
def test_without_a_gpu():
    done = run_script("kernels.py", "--quick")
    assert (done.returncode, done.stderr) == (0, "")
    assert "needs a CUDA device" in done.stdout
    assert "kernel_bytes.py" in done.stdout


@pytest.fixture
def kernels(benchmark_module, monkeypatch):
    """The script without the clock: a call takes as many microseconds as its name has letters."""
    kernels = benchmark_module("kernels")

    def medians(calls, rounds):
        for call in calls.values():
            call()
        return {name: 1e-6 * len(name) for name in calls}

    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(kernels, "medians", medians)
    monkeypatch.setattr(kernels, "hardware", lambda: "a GPU")
    return kernels


def test_tables_of_times(kernels, cases):
    chosen = [cases["pack, first dim, bf16"], cases["pack, last dim, uneven, bf16"]]
    found = list(kernels.all_measured(chosen, [0.01], 3, compiling=False))
    # Of views nothing.
    assert [one.who for one in found] == [
        "ours",
        "DTensor: pad, cat, cat",
        "cat of flattened chunks",
    ]
    ours, dtensor, _ = found
    assert (ours.of_copy, ours.missed) == (1.0, False)  # both names have four letters
    assert (dtensor.slower, dtensor.wanted, dtensor.missed) == (len(dtensor.who) / 4, 2.0, False)
    document = kernels.document(found, 4e12)
    assert "2 of 2 targets are met." in document
    assert "4000 GB/s" in document
    assert f"| {ours.case} | 0.01 | ours |" in document


def test_wrong_results_are_not_timed(kernels, cases, benchmark_module):
    peer = benchmark_module("kernel_cases").Peer

    def make(size, device):
        work = cases["sum of 8, fp32"].make(size, device)
        return type(work)(
            work.elements, work.inputs, work.ours, {"twice": peer(lambda flat: 2 * work.ours(flat))}
        )

    wrong = type(cases["sum of 8, fp32"])("sum", make, 0.9)
    with pytest.raises(RuntimeError, match=r"sum, 0\.01 MB: twice and ours give different results"):
        kernels.measured(wrong, 0.01, 3, compiling=False)


# -- launch_time.py --------------------------------------------------------------------------------


@pytest.mark.slow
def test_host_time_of_launches():
    done = run_script("launch_time.py", "--rounds", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[1:]] == [
        "pack",
        "pack of 8",
        "uniform",
        "one-shot all_reduce",
        "symmetric all_gather (4 launches)",
    ]
