"""Fixtures to import and run the benchmarks."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a file of `benchmarks/` by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # transformers looks for a package named `kernels`, and on pytest's path finds the folder of
    # ours
    if "kernels" in sys.modules and not (sys.modules["kernels"].__file__ or "").startswith(
        str(BENCHMARKS)
    ):
        monkeypatch.delitem(sys.modules, "kernels")
    return importlib.import_module


@pytest.fixture
def run_benchmark(tmp_path: Path) -> Callable[..., tuple[Any, str]]:
    """Run a file of `benchmarks/` with these arguments; return its figures and its document."""

    def run(name: str, *arguments: str) -> tuple[Any, str]:
        figures, document = tmp_path / "figures.json", tmp_path / "tables.md"
        command = [
            sys.executable,
            str(BENCHMARKS / name),
            *arguments,
            "--json",
            str(figures),
            "--markdown",
            str(document),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
        return json.loads(figures.read_text()), document.read_text()

    return run
