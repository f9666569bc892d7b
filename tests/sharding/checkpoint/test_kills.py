"""Ranks killed in the middle of a save: the folder has the old or the new checkpoint, and surviving
ranks raise an error.

benchmarks/checkpoint_faults.py runs every call and 500 random times.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.runner import Runner
from tests.sharding.checkpoint.kills import FAULTS, VARIABLE, loaded_step
from tests.tiers import parameters

pytestmark = pytest.mark.xdist_group("faults")

NAMES = [
    "save one 0 3 half",
    "save one 0 9 before",
    "save all 0 16 half",
    "save one 2 1 half",
    "save all 1 4 before",
    "replace one 0 19 before",
    "replace all 0 20 before",
    "save one 3 0.01 after",
    "async one 0 12 before",
    "async one 1 2 half",
]


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Start the programs of the selected tests."""
    base = tmp_path_factory.mktemp("kills")
    selected = parameters(request.session, "name")
    os.environ[VARIABLE] = str(base)
    try:
        with Runner("tests.sharding.checkpoint.kills") as runner, ThreadPoolExecutor(2) as pool:
            yield (
                base,
                {name: pool.submit(runner.run, FAULTS[name]) for name in NAMES if name in selected},
            )
    finally:
        del os.environ[VARIABLE]


@pytest.mark.one_in(11)
@pytest.mark.parametrize("name", NAMES)
def test_old_or_new_checkpoint_remains(name, outcomes):
    base, jobs = outcomes
    outcome = jobs[name].result()
    assert outcome.killed == [], "nothing hangs"
    statuses = [rank.status for rank in outcome.ranks]
    if name.endswith("after"):
        assert set(statuses) <= {-9, 0, 1}
    elif " all " in name:
        assert statuses == [-9] * 4
    else:
        assert statuses.count(-9) == 1
        assert {rank.error for rank in outcome.ranks if rank.status != -9} == {"RankLostError"}
    assert loaded_step(base, name) in (1, 2)
