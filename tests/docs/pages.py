"""Run the examples of a page of docs/ as a reader would type them."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path
from typing import Any

import torch

import shardmesh as sm

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, kind: str) -> list[str]:
    """Return the code blocks of one language."""
    return re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)


def check_python_examples(page: str) -> None:
    """Run every block of `>>>` examples in order, with shared names."""
    names = {"sm": sm, "P": sm.P, "torch": torch}
    for number, block in enumerate(block for block in blocks(page, "python") if ">>>" in block):
        test = doctest.DocTestParser().get_doctest(block, names, f"block {number}", "page", 0)
        runner, shown = doctest.DocTestRunner(), []
        assert test.examples
        runner.run(test, out=shown.append, clear_globs=False)
        assert runner.summarize(verbose=False).failed == 0, "".join(shown)
        names = test.globs


def printed_on_the_gallery_page(name: str) -> str:
    """Return what docs/gallery.md has as the output of an example, such as "adamw.py"."""
    page = (DOCS / "gallery.md").read_text()
    match = re.search(rf"```console\n\$ python examples/{name}[^\n]*\n(.*?)```", page, re.DOTALL)
    assert match is not None, name
    return match[1]


def without_numbers(text: str) -> str:
    """Return a text with `#` for each number, as 3, 1.25, 1,024 and 1e-05 are."""
    return re.sub(r"\d[\d,.]*(e-\d+)?", "#", text)


def unknown_names(page: str) -> list[str]:
    """Return names written as `sm.name` on the page that the package does not have."""
    return [name for name in set(re.findall(r"\bsm\.(\w+)", page)) if not hasattr(sm, name)]


def images_script() -> Any:
    """Return docs/make_images.py as a module."""
    spec = importlib.util.spec_from_file_location("make_images", DOCS / "make_images.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts_of_pictures(name: str, folder: Path) -> tuple[list[str], list[str]]:
    """Return the texts of a picture of docs/, and of the one of this name in a folder."""
    on_page, drawn = (
        re.findall(r">([^<>\n]+)</text>", (where / f"{name}.svg").read_text())
        for where in (DOCS / "images", folder)
    )
    return on_page, drawn
