"""Selection of the cases of a table for the default run."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import hypothesis
import pytest

from tests import tiers

TESTS = Path(__file__).parent
CASES = [{"kind": kind, "size": size} for kind, size in product("abcd", range(6))]
NAMES = [f"{case['kind']}-{case['size']}]" for case in CASES]


def test_one_in_n_keeps_the_same_cases() -> None:
    kept = tiers.select_cases(CASES, NAMES, 5)
    assert len(kept) == 5
    assert kept == tiers.select_cases(CASES, NAMES, 5)
    assert kept < tiers.select_cases(CASES, NAMES, 2)
    assert tiers.select_cases(CASES, NAMES, 1) == set(range(24))


@pytest.mark.parametrize("n", [3, 100])
def test_every_value_is_kept(n: int) -> None:
    kept = tiers.select_cases(CASES, NAMES, n, each=["kind", "size"])
    assert {CASES[i]["kind"] for i in kept} == set("abcd")
    assert {CASES[i]["size"] for i in kept} == set(range(6))
    assert len(kept) < 10


def test_named_files_exist() -> None:
    assert [part for part in tiers.NOT_FAST if not (TESTS / part).exists()] == []
    source = "".join(path.read_text() for path in TESTS.rglob("*.py"))
    assert set(re.findall(r'mark\.xdist_group\("(.+?)"\)', source)) == set(tiers.GROUPS)


def test_examples_scale_with_profile() -> None:
    share = hypothesis.settings().max_examples / tiers.THOROUGH
    assert tiers.examples(200) == round(200 * share)
    assert tiers.examples(1) == 5


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", range(9))
def test_mark(number: int, request: pytest.FixtureRequest) -> None:
    cases = [item for item in request.session.items if item.name.startswith("test_mark[")]
    slow = [item for item in cases if item.get_closest_marker("slow")]
    if len(cases) == 9:
        assert len(slow) == 6
    elif not slow:
        assert sum(item.get_closest_marker("fast") is not None for item in cases) <= 1
