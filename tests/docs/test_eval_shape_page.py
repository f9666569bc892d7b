"""The examples of docs/eval_shape.md, and that its pictures are those drawn by the script."""

import re
from pathlib import Path

from tests.docs.pages import DOCS, blocks, check_python_examples, images_script, texts_of_pictures

PAGE = (DOCS / "eval_shape.md").read_text()


def test_python_examples():
    check_python_examples(PAGE)


def test_the_page_has_examples():
    assert len(blocks(PAGE, "python")) > 2


def test_pictures_are_drawn_by_the_script(tmp_path: Path, capsys):
    names = ["memory", "received"]
    assert re.findall(r"\(images/(\w+)\.svg\)", PAGE) == names
    images_script().draw_evaluation(tmp_path)
    assert capsys.readouterr().out.split() == [f"{name}.svg" for name in names]
    for name in names:
        on_page, drawn = texts_of_pictures(name, tmp_path)
        assert on_page == drawn
        assert len(on_page) > 5
