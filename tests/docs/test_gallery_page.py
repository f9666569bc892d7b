"""docs/gallery.md has every example, with output that is that of the program.

`tests/examples/test_each_example.py` compares the output of the short ones with the page.
"""

from __future__ import annotations

import re

from tests.docs.pages import DOCS, printed_on_the_gallery_page

PAGE = (DOCS / "gallery.md").read_text()
NOT_PROGRAMS = {"tiny_model.py", "train_lm_report.py"}


def test_every_example_is_on_the_page():
    programs = {path.name for path in (DOCS.parent / "examples").glob("*.py")}
    sources = set(re.findall(r"\(\.\./examples/(\w+\.py)\)", PAGE))
    assert sources == programs - NOT_PROGRAMS


def test_every_section_has_a_command_and_what_it_printed():
    sections = re.findall(r"^### (\w+\.py)$", PAGE, re.MULTILINE)
    for name in sections:
        assert len(printed_on_the_gallery_page(name).splitlines()) >= 2


def test_pictures_exist():
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE)
    assert len(pictures) >= 2
    assert all((DOCS / picture).stat().st_size > 1000 for picture in pictures)
