"""Run the examples of a page of docs/ as a reader would type them."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import torch

import shardmesh as sm

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, kind: str) -> list[str]:
    """Return the code blocks of one language."""
    return re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)


def check_python_examples(page: str) -> None:
    """Run every block of `>>>` examples in order, with shared names."""
    names = {"sm": sm, "P": sm.P, "torch": torch}
    for number, block in enumerate(block for block in blocks(page, "python") if ">>>" in block):
        test = doctest.DocTestParser().get_doctest(block, names, f"block {number}", "page", 0)
        runner, shown = doctest.DocTestRunner(), []
        assert test.examples
        runner.run(test, out=shown.append, clear_globs=False)
        assert runner.summarize(verbose=False).failed == 0, "".join(shown)
        names = test.globs


def unknown_names(page: str) -> list[str]:
    """Return names written as `sm.name` on the page that the package does not have."""
    return [name for name in set(re.findall(r"\bsm\.(\w+)", page)) if not hasattr(sm, name)]
