"""The device of the tests' meshes and tensors: `DEVICE`, "cpu" unless `pytest --device cuda` chooses another.

Tensors that a test makes without saying where lie there, too: in the test process and in the workers of a pool by
`torch.set_default_device`, on simulated ranks, whose threads have a default of their own, by `made_here`.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

VARIABLE = "SHARDMESH_TEST_DEVICE"  # in the environment, so that worker processes know it
DEVICE = os.environ.get(VARIABLE, "cpu")


def choose(device: str) -> None:
    """Makes it `DEVICE`, here and in processes started from now on. For the conftest, before it imports test modules."""
    global DEVICE
    DEVICE = os.environ[VARIABLE] = device
    make_tensors_here()


def make_tensors_here() -> None:
    """Makes `DEVICE` this thread's default for tensors. Not the CPU, which is it already: that would add a mode to torch."""
    if DEVICE != "cpu":
        torch.set_default_device(DEVICE)


def made_here() -> AbstractContextManager[object]:
    """The same, inside a block."""
    return nullcontext() if DEVICE == "cpu" else torch.device(DEVICE)
