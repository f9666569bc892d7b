"""docs/functional.md: the errors that it shows. (Its other examples run in test_pages.py.)"""

from __future__ import annotations

import doctest
import re

import pytest
import torch

import shardmesh as sm
from tests.docs.pages import DOCS, blocks

PAGE = (DOCS / "functional.md").read_text()
SHOWN = re.findall(r"```python\n((?:(?!>>>|```).)*?)```\s+```text\n(.*?)```", PAGE, re.DOTALL)


def names():
    """What the first example of the page defines, and what every page has."""
    found = {"sm": sm, "P": sm.P, "torch": torch}
    for example in doctest.DocTestParser().get_examples(blocks(PAGE, "python")[0]):
        exec(example.source, found)
    return found


def test_each_error_follows_the_program_that_raises_it():
    assert len(SHOWN) == len(blocks(PAGE, "text")) > 6
    assert len(SHOWN) == sum(">>>" not in block for block in blocks(PAGE, "python"))


@pytest.mark.parametrize(("program", "text"), SHOWN, ids=[text.split()[1] for _, text in SHOWN])
def test_error(program, text):
    with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
        exec(compile(program, "train.py", "exec"), names())
    assert f"{raised.type.__name__}: {raised.value}".split() == text.split()
