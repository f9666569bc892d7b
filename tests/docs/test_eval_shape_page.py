"""The examples of docs/eval_shape.md."""

from tests.docs.pages import DOCS, blocks, check_python_examples

PAGE = (DOCS / "eval_shape.md").read_text()


def test_python_examples():
    check_python_examples(PAGE)


def test_the_page_has_examples():
    assert len(blocks(PAGE, "python")) > 2
