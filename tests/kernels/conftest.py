"""Speeds up Triton's interpreter for the tests of kernels."""

from __future__ import annotations

import pytest

from tests.kernels.device import DEVICE
from tests.kernels.shared_memory import speed_up_interpreter


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> None:
    if DEVICE == "cpu":
        pytest.importorskip("triton")
        speed_up_interpreter()
