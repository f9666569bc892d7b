"""The tutorial, typed in order: what its programs print stands on the page."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardmesh as sm
from tests.docs.pages import DOCS
from tests.tiers import slow

PAGE = DOCS / "tutorial.md"
BLOCK = re.compile(r"```(python|console)\n(.*?)```(?:\n\n?```text\n(.*?)```)?", re.DOTALL)


def printed_blocks(
    run_script: Callable[[list[str], dict[str, Any]], str],
) -> list[tuple[str, str]]:
    """Run the blocks of the page; return what the page says and what was printed.

    Args:
        run_script: (blocks so far, their names) -> what train.py prints.
    """
    names: dict[str, Any] = {"__name__": "tutorial"}
    sources: list[str] = []
    results = []
    for kind, source, on_page in BLOCK.findall(PAGE.read_text()):
        if kind == "python":
            sources.append(source)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(source, "tutorial.py", "exec"), names)
            printed = out.getvalue()
        else:
            printed = run_script(sources, names)
        if on_page or printed:
            results.append((on_page, printed))
    return results


def on_threads(_: list[str], names: dict[str, Any]) -> str:
    """Run the training on simulated ranks."""
    losses = sm.simulate(4)(names["train"])()[0]
    return f"loss of the first step {losses[0]:.1f}, of the last {losses[-1]:.2f}\n"


def on_processes(sources: list[str], _: dict[str, Any]) -> str:
    """Run train.py as the page says it: imports, the model's block, and the last block."""
    imports, model, training = sources[0], sources[-2], sources[-1]
    head = imports.split("\n\n\n")[0]
    Path("train.py").write_text("\n".join([head, model.split("def show")[0], training]))
    run = subprocess.run(
        [sys.executable, "train.py"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("run_script", [on_threads, slow(on_processes)])
def test_outputs_are_those_of_the_page(run_script, tmp_path, monkeypatch, one_rank_job) -> None:
    monkeypatch.chdir(tmp_path)
    for on_page, printed in printed_blocks(run_script):
        assert printed == on_page
