"""The tutorial, typed in order: what its programs print stands on the page."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS

PAGE = DOCS / "tutorial.md"
BLOCK = re.compile(r"```(python|console)\n(.*?)```(?:\n\n?```text\n(.*?)```)?", re.DOTALL)


def printed_blocks(folder: Path) -> list[tuple[str, str]]:
    """Run the blocks of the page in a folder; return what the page says and what was printed."""
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
            printed = _run_script(sources, folder)
        if on_page or printed:
            results.append((on_page, printed))
    return results


def _run_script(sources: list[str], folder: Path) -> str:
    """Run train.py as the page says it: imports, the model's block, and the last block."""
    imports, model, training = sources[0], sources[-2], sources[-1]
    head = imports.split("\n\n\n")[0]
    (folder / "train.py").write_text("\n".join([head, model.split("def show")[0], training]))
    run = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.xdist_group("tour")
def test_outputs_are_those_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for on_page, printed in printed_blocks(tmp_path):
        assert printed == on_page
