"""Each example equals one process on any number of ranks, however it is started."""

from __future__ import annotations

import importlib
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import shardmesh as sm
from tests.docs.pages import printed_on_the_gallery_page, without_numbers
from tests.tiers import slow

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = {  # and the most ranks that it is tried on
    "adamw": 4,
    "data_parallel": 6,
    "halo_conv": 6,
    "llama_by_plan": 4,
    "lora": 6,
    "megatron_block": 6,
    "mixture_of_experts": 4,
    "muon": 4,
    "pipeline": 6,
    "ring_attention": 6,
}
TOLERANCE = 1e-5


def simulated(ranks: int, fn: Any, *args: Any) -> list[Any]:
    return sm.simulate(ranks, prints="first")(fn)(*args)


@pytest.mark.one_in(5, each=["name"])
@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, n) for name, most in EXAMPLES.items() for n in (1, 2, 3, 4, 6) if n <= most],
)
def test_equals_one_process(name, ranks, capsys):
    differences = simulated(ranks, importlib.import_module(name).main, ranks)
    assert all(difference <= TOLERANCE for difference in differences), differences
    printed = capsys.readouterr().out
    assert f"{differences[0]:.1e}" in printed
    if ranks == 4:
        on_page = printed_on_the_gallery_page(f"{name}.py")
        assert without_numbers(printed) == without_numbers(on_page)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", EXAMPLES)
def test_equals_one_process_on_processes(name, world4):
    differences = world4(importlib.import_module(name).main, 4)
    assert all(difference <= TOLERANCE for difference in differences), differences


WRONG = {  # a function of the example, and what it is made to do
    "data_parallel": ("train_single", lambda right, params, x, y: right(params, x, 1.01 * y)),
    "llama_by_plan": (
        "place",
        lambda right, x, mesh: right(x.flip(0), mesh) if x.is_contiguous() else right(x, mesh),
    ),
    "lora": ("local_rows", lambda right, x, mesh: right(1.01 * x, mesh)),
    "halo_conv": ("network_single", lambda right, image, *kernels: right(image.flip(2), *kernels)),
    "megatron_block": (
        "sharded_block",
        lambda right, mesh: lambda params, x: right(mesh)(params, 1.01 * x),
    ),
    "pipeline": ("train_single", lambda right: [1.01 * loss for loss in right()]),
    "ring_attention": ("ring_attention", lambda right, *qkv, causal: right(*qkv, not causal)),
    "adamw": ("train_single", lambda right, params, x, y: right(params, x, 1.01 * y)),
    "mixture_of_experts": ("exchange", lambda right, x, rows: right(x, rows).flip(0)),
    "muon": (
        "by_owners",
        lambda right, matrices: right(
            [1.01 * m for m in matrices[:1]] + [-m for m in matrices[1:]]
        ),
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_difference_is_detected(name, monkeypatch):
    module, (function, wrong) = importlib.import_module(name), WRONG[name]
    monkeypatch.setattr(module, function, partial(wrong, getattr(module, function)))
    assert all(difference > 100 * TOLERANCE for difference in simulated(2, module.main, 2))


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, FOLDER / "pipeline.py"],
        slow([sys.executable, FOLDER / "muon.py"]),
        slow([sys.executable, FOLDER / "ring_attention.py", "--launch", "2"]),
        slow([sys.executable, FOLDER / "adamw.py", "--launch", "2"]),
        slow(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                "2",
                FOLDER / "megatron_block.py",
            ]
        ),
        slow(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                "2",
                FOLDER / "mixture_of_experts.py",
            ]
        ),
    ],
    ids=["simulated", "simulated again", "launch", "launch again", "torchrun", "torchrun again"],
)
def test_script(command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest" in done.stdout
    assert len(done.stdout.splitlines()) <= 3  # only one rank tells
    assert "warning" not in (done.stdout + done.stderr).lower()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_one_short_file(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) < 210
    ways = [
        f"python examples/{name}.py",
        "--launch",
        f"torchrun --nproc-per-node 4 examples/{name}.py",
    ]
    assert all(way in (importlib.import_module(name).__doc__ or "") for way in ways)
