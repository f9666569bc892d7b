"""The examples of docs/looking.md, and that its pictures are those drawn by the script."""

from __future__ import annotations

import importlib.util
import re

from tests.docs.pages import DOCS, blocks, check_python_examples

PAGE = (DOCS / "looking.md").read_text()


def images():
    spec = importlib.util.spec_from_file_location("make_images", DOCS / "make_images.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_python_examples():
    assert len(blocks(PAGE, "python")) > 4
    check_python_examples(PAGE)


def test_pictures_are_drawn_by_the_script(tmp_path, capsys):
    script = images()
    names = [*script.LAYOUTS, "timeline"]
    assert set(re.findall(r"\(images/(\w+)\.svg\)", PAGE)) == set(names)
    script.draw_layouts(tmp_path)
    script.draw_timelines(tmp_path)
    assert capsys.readouterr().out.split() == [f"{name}.svg" for name in names]
    for name in names:
        drawn = (DOCS / "images" / f"{name}.svg").read_text()
        texts = [
            re.findall(r">([^<>\n]+)</text>", svg)
            for svg in (drawn, (tmp_path / f"{name}.svg").read_text())
        ]
        assert texts[0] == texts[1]
        assert len(texts[0]) > 8
