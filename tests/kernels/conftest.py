"""Kernels in Triton's interpreter take a quarter of the time."""

from __future__ import annotations

import pytest

from tests.kernels.device import DEVICE
from tests.kernels.shared_memory import hasten_interpreter


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    if DEVICE == "cpu":
        pytest.importorskip("triton")
        hasten_interpreter()
