"""benchmarks/soak.py runs, takes a sample every few steps and requests, and draws them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

# Processes import transformers first.
pytestmark = [pytest.mark.timeout(420), pytest.mark.xdist_group("tour")]


@pytest.mark.slow
def test_a_short_soak(run_benchmark, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = tmp_path / "soak.png"
    sizes = "--ranks 2 --steps 4 --requests 4 --every 2 --save-every 3".split()
    figures, document = run_benchmark("soak.py", *sizes, "--figure", str(figure))
    for kind in ("training", "serving"):
        ranks = figures["samples"][kind]
        assert len(ranks) == 2
        for samples in ranks:
            assert samples[0][0] == 0
            assert samples[-1][0] == 4
            assert len(samples) == 3
            assert all(all(value > 0 for value in held) for _, *held in samples)
        assert f"| {kind}, resident memory, MiB |" in document
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_figures_of_an_earlier_run(benchmark_module, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    soak = benchmark_module("soak")
    samples = [[[n, 300.0 + n, 30, 1000, 10] for n in (0, 100, 200)] for _ in range(2)]
    path, document = tmp_path / "soak.json", tmp_path / "soak.md"
    env = soak.environment()
    path.write_text(json.dumps({"samples": {"training": samples}, "environment": env}))
    soak.main(["--redraw", str(path), "--markdown", str(document)])
    text = document.read_text()
    assert "| training, resident memory, MiB | 300 | 400 | 500 |" in text
    assert text.rstrip().splitlines()[-1].startswith("200 steps, ")
