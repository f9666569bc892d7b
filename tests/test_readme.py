"""The code in README.md and in docstrings runs with the documented output."""

from __future__ import annotations

import builtins
import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

import shardmesh as sm
from tests.public import public_names

ROOT = Path(__file__).parent.parent
MODULES = [
    "layout.spec",
    "layout.layout",
    "redistribute.plan.planner",
    "debug.plan_command",
    "debug.explain",
    "debug.picture",
    "debug.visualize",
    "ops.rules.notation",
    "parallel.pipeline.actions",
    "parallel.pipeline.make_schedule",
    "parallel.pipeline.schedule",
]


def test_readme_example_runs():
    """Runs the first Python block of the README."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    shown = []
    exec(code.group(1).replace("print(", "shown.append("), {"shown": shown})
    spec, loss, grad_spec = shown[0]
    assert spec == sm.P("dp", "tp")
    assert grad_spec == sm.P("tp", None)
    assert loss > 0


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(f"shardmesh.sharding.{name}")
    names = {n: x for n, x in public_names().items() if not hasattr(builtins, n)}
    results = doctest.testmod(module, globs={**names, **vars(module), "torch": torch})
    assert results.failed == 0
    assert results.attempted > 0


def test_links_in_documents_exist():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!api/)([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (
                f"{page.name} links to {target}, which is not there"
            )


def test_every_public_name_is_documented():
    for name, value in public_names().items():
        assert value.__doc__, name
