"""The examples of docs/looking.md, and that its pictures are those drawn by the script."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS, blocks, check_python_examples, images_script, texts_of_pictures

PAGE = (DOCS / "looking.md").read_text()


def test_python_examples():
    assert len(blocks(PAGE, "python")) > 4
    check_python_examples(PAGE)


def test_pictures_are_drawn_by_the_script(tmp_path, capsys):
    script = images_script()
    names = [*script.LAYOUTS, "timeline"]
    assert set(re.findall(r"\(images/(\w+)\.svg\)", PAGE)) == set(names)
    script.draw_layouts(tmp_path)
    script.draw_timelines(tmp_path)
    assert capsys.readouterr().out.split() == [f"{name}.svg" for name in names]
    for name in names:
        on_page, drawn = texts_of_pictures(name, tmp_path)
        assert on_page == drawn
        assert len(on_page) > 8
