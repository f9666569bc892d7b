"""The device of the tests' meshes and tensors: `DEVICE`, "cpu" or the option of
`pytest --device cuda`.

It is also torch's default device: by `torch.set_default_device` in the test process and the workers
of a pool, and by `on_device` on simulated ranks, since the default is per thread.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

VARIABLE = "SHARDMESH_TEST_DEVICE"  # an environment variable, for worker processes
DEVICE = os.environ.get(VARIABLE, "cpu")


def choose(device: str) -> None:
    """Set `DEVICE` in this process and in later child processes. The conftest calls it before test
    modules are imported.
    """
    global DEVICE
    DEVICE = os.environ[VARIABLE] = device
    set_default_device()


def set_default_device() -> None:
    """Make `DEVICE` this thread's default device. Not for the CPU, torch's default: setting it
    would add a mode to torch.
    """
    if DEVICE != "cpu":
        torch.set_default_device(DEVICE)


def on_device() -> AbstractContextManager[object]:
    """Return a context manager in which `DEVICE` is this thread's default device."""
    return nullcontext() if DEVICE == "cpu" else torch.device(DEVICE)
