"""The tutorial, typed in order: what its programs print stands on the page."""

from __future__ import annotations

import code
import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardmesh as sm
from tests.docs.pages import DOCS
from tests.tiers import slow

PAGE = DOCS / "tutorial.md"
BLOCK = re.compile(r"```(python|console)\n(.*?)```(?:\n\n?```text\n(.*?)```)?", re.DOTALL)


def printed_blocks(
    run_script: Callable[[list[str]], str],
) -> list[tuple[str, str]]:
    """Run the blocks of the page; return what the page says and what was printed.

    Args:
        run_script: (blocks so far) -> what train.py prints.
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
            printed = run_script(sources)
        if on_page or printed:
            results.append((on_page, printed))
    return results


def write_script(sources: list[str]) -> None:
    """Write train.py as the page says it: imports, the model's block, and the last block."""
    imports, model, training = sources[0], sources[-2], sources[-1]
    head = imports.split("\n\n\n")[0]
    Path("train.py").write_text("\n".join([head, model.split("def show")[0], training]))


def on_threads(sources: list[str]) -> str:
    """Run the training on simulated ranks."""
    write_script(sources)
    losses = sm.simulate(4)(importlib.import_module("train").train)()[0]
    return f"loss of the first step {losses[0]:.1f}, of the last {losses[-1]:.2f}\n"


def on_processes(sources: list[str]) -> str:
    write_script(sources)
    run = subprocess.run(
        [sys.executable, "train.py"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in a folder whose modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    other = sys.modules.pop("train", None)  # that of the benchmarks
    yield
    sys.modules.pop("train", None)
    if other is not None:
        sys.modules["train"] = other


@pytest.mark.parametrize("run_script", [on_threads, slow(on_processes)])
def test_outputs_are_those_of_the_page(run_script, folder, one_rank_job) -> None:
    for on_page, printed in printed_blocks(run_script):
        assert printed == on_page


def test_programs_can_be_typed_into_an_interpreter() -> None:
    """A line after the other, as Python before 3.13 takes them: an empty line ends a block."""
    console = code.InteractiveInterpreter()
    for kind, source, _ in BLOCK.findall(PAGE.read_text()):
        if kind != "python" or "__main__" in source:
            continue
        typed: list[str] = []
        for line in [*source.splitlines(), ""]:
            typed.append(line)
            compiled = console.compile("\n".join(typed), "tutorial.py", "single")
            if compiled is not None:
                typed = []
        assert typed == [], source
