"""Programs for two hosts: mesh axis `hosts` connects them, axis `local` is inside one host."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardmesh as sm

# files that end a healthy program, and let ranks exit that have written their result
STOP = "stop"
EXIT = "exit"
DIVERGING_STEP = 5
_LINGER_S = 10.0


def run_until_stopped(folder: str) -> None:
    """Communicate between hosts and inside them, until stopped."""
    # Otherwise the store ends with the agent of its host.
    _run_steps(folder, lambda step: _sum_all(Path(folder)), EXIT)


def diverge(folder: str) -> None:
    """Call a different reduction on rank 3."""

    def run(step: int) -> bool:
        op = "max" if step == DIVERGING_STEP and os.environ["RANK"] == "3" else "sum"
        _world().all_reduce(torch.ones(4), op)
        return True

    _run_steps(folder, run)


def fail(folder: str) -> None:
    """Raise on rank 3."""

    def run(step: int) -> bool:
        if step == DIVERGING_STEP and os.environ["RANK"] == "3":
            raise ValueError("the reason")
        return _sum_all(Path(folder))

    _run_steps(folder, run)


def _sum_all(folder: Path) -> bool:
    """Sum 1 from each rank, first between hosts. Return whether to continue; rank 0 decides, and
    all ranks agree in the same step.
    """
    mesh = _mesh()
    x = torch.ones(4)
    if mesh.get_rank() == 0 and (folder / STOP).exists():
        x += 100
    for axis in mesh.axis_names:
        mesh.group(axis).all_reduce(x)
    if x.tolist() not in ([4.0] * 4, [104.0] * 4):
        raise ArithmeticError(f"the sum over all ranks is {x.tolist()}")
    return x[0].item() == 4.0


def _mesh() -> sm.DeviceMesh:
    return sm.init_device_mesh("cpu", (2, 2), axis_names=("hosts", "local"))


def _world() -> Any:
    return sm.init_device_mesh("cpu", (4,), axis_names=("all",)).group("all")


def _run_steps(folder: str, run: Callable[[int], bool], *files: str) -> None:
    """Run steps, write their number and the final error to files, and exit once `files` exist."""
    # Not the agent's handler, which a forked process inherits.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank, steps, error = int(os.environ["RANK"]), 0, None
    try:
        while run(steps):
            steps += 1
            write(Path(folder) / f"{rank}.steps", str(steps))
            time.sleep(0.01)
    except BaseException as caught:
        error = caught
        sys.excepthook(type(error), error, error.__traceback__)
    result = {
        "error": type(error).__name__,
        "text": str(error),
        "ranks": getattr(error, "ranks", None),
    }
    write(Path(folder) / f"{rank}.json", json.dumps(result | {"steps": steps}))
    # The agent kills a rank soon after another rank of its host failed.
    for file in (f"{rank ^ 1}.json", *files):
        _wait_for(Path(folder) / file)
    atexit._run_exitfuncs()  # as in a program that is not a forked process
    if error is not None:
        os._exit(1)


def write(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.rename(path)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + _LINGER_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
