"""The benchmark of the functional API: that it runs, and that its tables have their rows."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import shardmesh as sm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
AS_SCRIPT = (
    "import runpy, sys; sys.path.insert(0, {folder!r}); runpy.run_path({script!r}, "
    "run_name='__main__')"
)
WITHOUT_SPMD_TYPES = "import sys; sys.modules['spmd_types'] = None; "


@pytest.fixture
def raw(benchmark_module):
    return benchmark_module("raw_collectives")


def run_script(tmp_path, *arguments, before=""):
    """Run the script; return its figures and its document."""
    figures, document = tmp_path / "figures.json", tmp_path / "tables.md"
    code = before + AS_SCRIPT.format(
        folder=str(BENCHMARKS), script=str(BENCHMARKS / "functional.py")
    )
    files = ["--json", str(figures), "--markdown", str(document)]
    command = [sys.executable, "-c", code, "--quick", *arguments, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(figures.read_text()), document.read_text()


def implementations(cases):
    """Return the implementations timed in each case."""
    return {case["case"]: set(case["times"]) for case in cases}


@pytest.mark.slow
def test_every_section_has_its_rows(raw, tmp_path):
    figures, document = run_script(tmp_path)
    found = {name: implementations(cases) for name, cases in figures["sections"].items()}
    theirs = {"spmd_types", "spmd_types checked"} if find_spec("spmd_types") else set()
    ours = {"check=False", 'check="always"'}
    entry = {"plain", "check=True", "sm.compat.local_map", "DTensor"} | ours | theirs
    assert (
        found["boundary"]["2 arguments, 1 result"]
        == found["boundary"]["20 parameters in and out, grad"]
        == entry
    )
    assert found["collectives"]["psum, grad"] == {"plain", "functional"} | ours | theirs
    assert {name.partition(", ")[0] for name in found["collectives"]} >= {
        case.name.partition(", ")[0] for case in raw.CASES
    }
    assert found["operators"]["linear(y, w), grad"] == {"plain", "check=True"} | ours | (
        theirs - {"spmd_types"}
    )
    for case in raw.CASES:
        assert (f"{case.name}, forward + backward" in found["collectives"]) == case.differentiable
        assert f"| {case.name} |" in document


@pytest.mark.slow
def test_without_spmd_types(tmp_path):
    figures, document = run_script(tmp_path, "--only", "boundary", before=WITHOUT_SPMD_TYPES)
    assert figures["environment"]["spmd_types"] == "not installed"
    assert "spmd_types not installed" in document
    assert not any(
        who.startswith("spmd_types")
        for who in implementations(figures["sections"]["boundary"])["2 arguments, 1 result"]
    )


# -- all implementations give the same result ------------------------------------------------------


def ours(case):
    """Return value and gradient of a case's `ours` on a gloo rank."""
    mesh = sm.init_device_mesh("cpu", (8,), axis_names=("x",))

    def body(x):
        x = x.detach().requires_grad_()
        out = case.ours(x)
        return out, torch.autograd.grad(
            out, x, torch.arange(out.numel()).view_as(out).to(out.dtype)
        )[0]

    local = part(case, mesh.get_rank())
    got = []
    mapped = sm.shard_map(
        lambda x: (got.append(body(x)), x.view_as(x))[1],
        mesh=mesh,
        in_specs=sm.P("x"),
        out_specs=sm.P("x"),
        check=False,
    )
    mapped(sm.from_local(local, mesh, sm.P("x"), shape=(8 * local.shape[0], *local.shape[1:])))
    return got[0]


def by_hand(raw, case):
    """Return the same of its `raw`."""
    x = part(case, torch.distributed.get_rank()).requires_grad_()
    out = raw.ByHand(case.raw, case.back)(torch.distributed.group.WORLD, x)
    return out, torch.autograd.grad(out, x, torch.arange(out.numel()).view_as(out).to(out.dtype))[0]


def part(case, rank):
    """Return the input of this rank."""
    return torch.arange(64.0).view(case.shape) * (rank + 1) + rank


def same_on_this_rank():
    """Return the differentiable cases in which `raw` and `ours` differ on this gloo rank, and the
    number of cases.
    """
    sys.path.insert(0, str(BENCHMARKS))
    try:
        raw = importlib.import_module("raw_collectives")
    finally:
        sys.path.remove(str(BENCHMARKS))
    wrong = []
    for case in raw.CASES:
        if case.back is not None:
            pairs = zip(ours(case), by_hand(raw, case), strict=True)
            wrong += [case.name for one, other in pairs if not torch.equal(one, other)]
    return wrong, sum(case.back is not None for case in raw.CASES)


@pytest.mark.slow
def test_raw_and_ours_give_the_same(world8):
    for wrong, looked_at in world8(same_on_this_rank):
        assert wrong == []
        assert looked_at == 10
