"""The examples of docs/tune.md, and its table of published runs."""

from __future__ import annotations

import pytest

from tests.docs.pages import DOCS, blocks, check_python_examples

PAGE = (DOCS / "tune.md").read_text()


def test_python_examples():
    pytest.importorskip("transformers")
    check_python_examples(PAGE)


def test_the_page_has_examples():
    assert len(blocks(PAGE, "python")) >= 1


def test_the_table_has_all_published_runs():
    from benchmarks.tune_published import RUNS

    for run in RUNS:
        row = f"| {run.source} | {run.model}, {run.positions:,} | {run.form.devices:,} | {run.form}"
        assert f"{row} | {run.published:,g} {run.unit} |" in PAGE
