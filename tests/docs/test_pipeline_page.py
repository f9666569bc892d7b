"""The examples of docs/pipeline.md, its table, and that its pictures are drawn by the script."""

from __future__ import annotations

import importlib.util
import re

from shardmesh.sharding.parallel.pipeline.make_schedule import SCHEDULE_NAMES
from tests.docs.pages import DOCS, blocks, check_python_examples

PAGE = (DOCS / "pipeline.md").read_text()


def test_python_examples():
    assert len(blocks(PAGE, "python")) > 5
    check_python_examples(PAGE)


def test_the_table_has_every_schedule():
    assert tuple(re.findall(r"^\| `([a-z0-9_]{4,})` \|", PAGE, re.MULTILINE)) == SCHEDULE_NAMES


def test_pictures_are_drawn_by_the_script(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("make_images", DOCS / "make_images.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    names = re.findall(r"\(images/(\w+)\.svg\)", PAGE)
    script.draw_schedules(tmp_path)
    assert capsys.readouterr().out.split() == [f"{name}.svg" for name in names]
    for name in names:
        drawn = (DOCS / "images" / f"{name}.svg").read_text()
        texts = [
            re.findall(r">([^<>\n]+)</text>", svg)
            for svg in (drawn, (tmp_path / f"{name}.svg").read_text())
        ]
        assert texts[0] == texts[1]
        assert len(texts[0]) > 40
