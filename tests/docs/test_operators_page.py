"""docs/operators.md shows what really comes out."""

from tests.docs.pages import DOCS, check_python_examples, unknown_names

PAGE = (DOCS / "operators.md").read_text()


def test_python_examples():
    check_python_examples(PAGE)


def test_names_on_the_page_exist():
    assert unknown_names(PAGE) == []
