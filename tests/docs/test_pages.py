"""The examples of the pages run, and their names exist. (planner.md, from_dtensor.md and
from_jax.md have separate tests.)
"""

import pytest

from tests.docs.pages import DOCS, check_python_examples, unknown_names


@pytest.mark.parametrize(
    "page",
    [
        "arrays",
        "checkpoint",
        "communication",
        "finetune",
        "from_jax",
        "functional",
        "operators",
        "random",
    ],
)
def test_python_examples(page):
    check_python_examples((DOCS / f"{page}.md").read_text())


@pytest.mark.parametrize("page", sorted(path.stem for path in DOCS.glob("*.md")))
def test_names_on_the_page_exist(page):
    assert unknown_names((DOCS / f"{page}.md").read_text()) == []
