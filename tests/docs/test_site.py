"""The site: its pages are found from the first one, and its links lead somewhere. `make docs`
builds it, and fails on what Sphinx warns of.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardmesh as sm
from docs.reference import _first_sentence
from docs.versions import versions
from tests.docs.pages import DOCS

PAGES = sorted(DOCS.glob("*.md"))
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
TOCTREE = re.compile(r"```\{toctree\}\n(.*?)```", re.DOTALL)


def children(page: Path) -> list[Path]:
    """Return the pages that the tables of contents of a page name, without the API reference, which
    is written when the site is built.
    """
    entries = [
        re.search(r"<(.+)>$", line.strip())
        for block in TOCTREE.findall(page.read_text())
        for line in block.splitlines()
    ]
    names = [entry[1] for entry in entries if entry is not None]
    return [DOCS / f"{name}.md" for name in names if not name.startswith("api/")]


def anchors(page: Path) -> set[str]:
    """Return the names by which headings of a page are linked, by GitHub's rule."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def test_each_page_is_reached_from_the_first() -> None:
    reached, todo = set(), [DOCS / "index.md"]
    while todo:
        page = todo.pop()
        reached.add(page)
        todo += [child for child in children(page) if child not in reached]
    assert reached == set(PAGES)


@pytest.mark.parametrize("page", [*PAGES, DOCS.parent / "README.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)):
        path, _, anchor = link.partition("#")
        if "://" in link or path.startswith("api/"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_versions_that_the_site_switches_between() -> None:
    entries = versions(["v0.9.0", "v0.10.1", "draft", "v0.11.0"], "0.11.0", "https://host/docs/")
    assert [entry["version"] for entry in entries] == ["0.11.0", "0.10.1", "0.9.0"]
    assert entries[0]["url"] == "https://host/docs/"
    assert entries[1]["url"] == "https://host/docs/0.10.1/"


def test_summaries_of_the_reference_are_phrases() -> None:
    summaries = [_first_sentence(sm.parallel, name) for name in sm.parallel.__all__]
    assert all(text.strip() for text in summaries)
    assert [text for text in summaries if text.startswith("→") or text.endswith(":")] == []
