"""docs/jit.md: its examples."""

from __future__ import annotations

from tests.docs.pages import DOCS, check_python_examples


def test_python_examples() -> None:
    check_python_examples((DOCS / "jit.md").read_text())
