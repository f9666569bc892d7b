"""Faulty programs on four gloo processes: every surviving rank names the outlier, the difference
and the line; nothing hangs.

Healthy programs, in which ranks do different things, raise no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.faults.expectations import problems
from tests.faults.programs import FAULTS
from tests.faults.runner import Outcome, Runner
from tests.tiers import parameters, slow

pytestmark = pytest.mark.xdist_group("faults")  # one worker of `pytest -n` has the processes

AT_ONCE = 3  # jobs; those about stalls mostly wait
LIMIT_S = 75.0  # of a program that hangs

FAULTY = [name for name, fault in FAULTS.items() if fault.kinds]
HEALTHY = [name for name, fault in FAULTS.items() if not fault.kinds]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Outcome]]]:
    """Start every selected program of this module; return the futures of the outcomes by name."""
    names = parameters(request.session, "program")
    with Runner() as runner, ThreadPoolExecutor(AT_ONCE) as pool:
        chosen = sorted(
            (fault for name, fault in FAULTS.items() if name in names),
            key=lambda fault: not fault.has_short_timeout,
        )
        yield {fault.name: pool.submit(runner.run, fault, limit_s=LIMIT_S) for fault in chosen}
        pool.shutdown(cancel_futures=True)


def _each_outcome(names: list[str]) -> Iterator[Any]:
    """Yield the programs; slow are those whose file, verdict, differences and ends of the outlier
    all occur in programs before them.
    """
    seen: set[tuple[str, Any]] = set()
    for name in names:
        fault = FAULTS[name]
        shown = {("file", fault.program.__module__), ("kinds", fault.kinds)}
        shown |= {("field", field) for field in fault.fields}
        shown |= {("end", end) for end in fault.ends}
        yield slow(name) if shown <= seen else name
        seen |= shown


@pytest.mark.parametrize("program", list(_each_outcome(FAULTY)))
def test_fault_is_named(program: str, outcomes: dict[str, Future[Outcome]]) -> None:
    assert not problems(FAULTS[program], outcomes[program].result())


@pytest.mark.one_in(7)
@pytest.mark.parametrize("program", HEALTHY)
def test_no_false_alarm(program: str, outcomes: dict[str, Future[Outcome]]) -> None:
    assert not problems(FAULTS[program], outcomes[program].result())


def test_table() -> None:
    """Every rank is the outlier in several programs, and every faulty program has an expected
    error.
    """
    assert len(FAULTY) >= 60
    for rank in range(4):
        assert sum(FAULTS[name].outliers == (rank,) for name in FAULTY) >= 10
    for name in FAULTY:
        fault = FAULTS[name]
        assert fault.places("others") or fault.places("outlier")
        assert fault.says
