"""The table of collectives against JAX: values, dtypes, first and second derivatives."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator

import numpy as np
import pytest

import shardmesh as sm
from tests.sharding.functional.differences import DIFFERENCES
from tests.sharding.functional.jax_oracle import Jax
from tests.sharding.functional.mapped_cases import defined, ours, same_answer
from tests.sharding.functional.table import CASES

needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="needs the extra jax-oracle"
)
# One worker of `pytest -n` has the JAX process.
pytestmark = [needs_jax, pytest.mark.xdist_group("jax")]


@pytest.fixture(scope="session")
def jax(request: pytest.FixtureRequest) -> Iterator[Jax]:
    with Jax(
        [
            _asked_for(item)
            for item in request.session.items
            if "jax" in getattr(item, "fixturenames", ())
        ]
    ) as process:
        yield process


def _asked_for(item: pytest.Item) -> str:
    """Return the name of the case of a test."""
    params = getattr(item, "callspec").params  # noqa: B009 - pytest gives it only to items with parameters
    return params["case"].name if "case" in params else params["name"]


@pytest.mark.one_in(14)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case(case, jax):
    """Values, dtypes and derivatives are JAX's, on every rank."""
    found = sm.simulate(math.prod(case.mesh))(lambda: ours(case))()
    answer = jax.answer(case.name)
    assert not answer.refused, answer.refused
    for mine in found:
        same_answer(case, mine, answer)
        assert (mine.dtypes != answer.dtypes) == bool(case.dtypes)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_difference(name, jax):
    """For differences from JAX (see `MappedCase.differs`), JAX's result is that of the table, and
    we do what the plain definition says.
    """
    case = DIFFERENCES[name]
    answer, wanted = jax.answer(name), defined(case)
    if case.refused:
        assert case.refused in answer.refused
    else:
        assert not answer.refused, answer.refused
        assert not np.array_equal(answer.values[0], wanted.values[0]), "no difference any more"
    for mine in sm.simulate(math.prod(case.mesh))(lambda: ours(case))():
        same_answer(case, mine, wanted)
        assert mine.dtypes == wanted.dtypes


@pytest.mark.one_in(14)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_definition(case, jax):
    """JAX does what the plain definitions say: so those can stand in for it where it refuses."""
    answer = jax.answer(case.name)
    same_answer(case, defined(case), answer)
