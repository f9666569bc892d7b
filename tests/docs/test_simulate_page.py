"""The examples of docs/simulate.md, and the error that it shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.docs.pages import DOCS, blocks, check_python_examples

PAGE = (DOCS / "simulate.md").read_text()


def test_python_examples() -> None:
    check_python_examples(PAGE)


def test_shown_error(tmp_path: Path) -> None:
    (script,) = [block for block in blocks(PAGE, "python") if ">>>" not in block]
    (shown,) = blocks(PAGE, "text")
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    assert done.stderr.replace(f"{tmp_path}/", "").endswith(shown)
