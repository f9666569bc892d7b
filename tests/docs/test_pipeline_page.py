"""The examples of docs/pipeline.md, its table, and that its pictures are drawn by the script."""

from __future__ import annotations

import re

from shardmesh.sharding.parallel.pipeline.make_schedule import SCHEDULE_NAMES
from tests.docs.pages import DOCS, blocks, check_python_examples, images_script, texts_of_pictures

PAGE = (DOCS / "pipeline.md").read_text()


def test_python_examples():
    assert len(blocks(PAGE, "python")) > 5
    check_python_examples(PAGE)


def test_the_table_has_every_schedule():
    assert tuple(re.findall(r"^\| `([a-z0-9_]{4,})` \|", PAGE, re.MULTILINE)) == SCHEDULE_NAMES


def test_pictures_are_drawn_by_the_script(tmp_path, capsys):
    script = images_script()
    names = re.findall(r"\(images/(\w+)\.svg\)", PAGE)
    script.draw_schedules(tmp_path)
    assert capsys.readouterr().out.split() == [f"{name}.svg" for name in names]
    for name in names:
        on_page, drawn = texts_of_pictures(name, tmp_path)
        assert on_page == drawn
        assert len(on_page) > 40
