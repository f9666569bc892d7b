"""All programs of the table: importing this fills it."""

from __future__ import annotations

from tests.faults import (
    endings,
    healthy,
    meshes,
    stalls,
    torch_alone,
    torch_calls,
    torch_endings,
    torch_functional,
    torch_healthy,
    torch_messages,
    torch_training,
    training,
    wrong_calls,
    wrong_order,
)
from tests.faults.fault import FAULTS

__all__ = [
    "FAULTS",
    "endings",
    "healthy",
    "meshes",
    "stalls",
    "torch_alone",
    "torch_calls",
    "torch_endings",
    "torch_functional",
    "torch_healthy",
    "torch_messages",
    "torch_training",
    "training",
    "wrong_calls",
    "wrong_order",
]
