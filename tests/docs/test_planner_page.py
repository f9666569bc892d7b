"""The examples, commands and pictures of docs/planner.md."""

from __future__ import annotations

import re
import shlex

import pytest
import torch

import shardmesh as sm
from shardmesh.__main__ import main
from tests.docs.pages import DOCS, blocks, check_python_examples, images_script

PAGE = (DOCS / "planner.md").read_text()


def commands():
    """(command, what it prints) of every console block."""
    return [
        part.split("\n", 1) for block in blocks(PAGE, "console") for part in block.split("$ ")[1:]
    ]


def test_python_examples():
    check_python_examples(PAGE)


@pytest.mark.parametrize(("command", "expected"), commands())
def test_commands(command, expected, capsys):
    *python, module = shlex.split(command)[:3]
    assert [*python, module] == ["python", "-m", "shardmesh"]
    try:
        main(shlex.split(command)[3:])
    except SystemExit:
        assert ": error: " in expected
    shown = capsys.readouterr()
    assert shown.out + shown.err == expected


def test_the_page_has_examples():
    assert len(blocks(PAGE, "python")) > 4
    assert len(commands()) > 4


@pytest.fixture(scope="module")
def pictures():
    return images_script()


def test_pictures_are_drawn_by_the_script(pictures):
    names = set(pictures.PICTURES)
    assert {path.stem for path in (DOCS / "images").iterdir()} == names | set(pictures.LAYOUTS) | {
        "soak",  # by benchmarks/soak.py
        "train_lm",  # by docs/make_gallery.py
        "finetune_loss",
        "timeline",
        "check_before",
        "check_after",
        "memory",
        "received",
    }
    assert set(re.findall(r"\(images/(\w+)\.svg\)", PAGE)) == names


def test_pictures_show_the_steps_in_their_names(pictures):
    for name, (shape, src, dst, topology) in pictures.PICTURES.items():
        explained = sm.debug.explain(
            sm.Layout.of(pictures.MESH, src, shape, torch.bfloat16), dst, topology=topology
        )
        assert [step.op for step in explained.steps] == ([] if src == dst else [name])
        drawn = (DOCS / "images" / f"{name}.svg").read_text()
        assert all(f"{cost.bytes_received:,} bytes" in drawn for cost in explained.costs)


def test_the_script_writes_them(pictures, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pictures, "PICTURES", {"slice": pictures.PICTURES["slice"]})
    pictures.main(tmp_path / "images")
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["slice.svg"]
    assert capsys.readouterr().out == "slice.svg: slice\n"
