"""Passes keep every bit: random programs with several groups, views, writes in place and uneven
parts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh.sharding.jit.passes.agreement import fits
from tests.pool import Pool
from tests.sharding.jit.passes.programs import ALL, OFF, ROOMY, SINGLE, run
from tests.tiers import examples


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10**6),
    options=st.sampled_from([*SINGLE, ALL, ROOMY]),
    shape=st.sampled_from([(2, 2), (3, 1), (2, 3)]),
)
def test_results_have_the_bits_of_eager(seed: int, options: Any, shape: tuple[int, int]) -> None:
    simulated = sm.simulate(shape[0] * shape[1])
    expected, found = simulated(run)(seed, None, shape), simulated(run)(seed, options, shape)
    for (one, _), (other, _) in zip(expected, found, strict=True):
        assert all(
            torch.equal(a, b)
            for x, y in zip(one, other, strict=True)
            for a, b in zip(x, y, strict=True)
        )
    assert fits({rank: schedule for rank, (_, schedule) in enumerate(found)})


@pytest.mark.one_in(7)
@pytest.mark.parametrize("seed", range(4))
def test_processes(world4: Pool, seed: int) -> None:
    plain, packed = (world4(run, seed, options) for options in (OFF, ROOMY))
    for (one, _), (other, _) in zip(plain, packed, strict=True):
        torch.testing.assert_close(one, other)
    assert fits({rank: schedule for rank, (_, schedule) in enumerate(packed)})
