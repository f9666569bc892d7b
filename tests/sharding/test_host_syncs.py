"""What the host waits for in a training step, on a stand-in for a GPU: nothing, but for what is listed here."""

from __future__ import annotations

import pytest

from tests.stand_in.child import call
from tests.stand_in.scenarios import SCENARIOS, all_waits

# What and why: see docs/communication.md.
KNOWN = {
    "FSDP, parameters on the host": {"gradients": 1, "norm": 1},
    "experts": {"counts": 1},
    "experts with a capacity": {"counts": 1},
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, int]]:
    return call(all_waits)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_step(name: str, found: dict[str, dict[str, int]]) -> None:
    waits = found[name]
    assert isinstance(waits, dict), waits
    assert all(wait.startswith("Event.synchronize at kernels/host_copies.py") for wait in waits), waits
    assert sum(waits.values()) == sum(KNOWN.get(name, {}).values()), waits
