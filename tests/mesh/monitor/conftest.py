"""Fixtures for jobs of the monitor's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mesh.monitor.forked import Forked


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Run jobs whose ranks end as programs do; started by the first test that uses it."""
    found = Forked()
    yield found
    found.close()
