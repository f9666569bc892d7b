"""Programs for two hosts: mesh axis `hosts` connects them, axis `local` stays inside one."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import shardmesh as sm

ENOUGH, LEAVE = "enough", "leave"  # files that end a healthy program, and let ranks exit that have told how it went
DIFFERENT = 5  # the step in which a rank does something else
_LINGER_S = 10.0


def endure(folder: str) -> None:
    """Communicates between hosts and inside them, for as long as it goes."""
    _tell(folder, lambda step: _sum_all(Path(folder)), LEAVE)  # else the store goes away with the agent of its host


def differ(folder: str) -> None:
    """Rank 3 calls another reduction than the others."""

    def run(step: int) -> bool:
        op = "max" if step == DIFFERENT and os.environ["RANK"] == "3" else "sum"
        _world().all_reduce(torch.ones(4), op)
        return True

    _tell(folder, run)


def fail(folder: str) -> None:
    """Rank 3 raises."""

    def run(step: int) -> bool:
        if step == DIFFERENT and os.environ["RANK"] == "3":
            raise ValueError("the reason")
        return _sum_all(Path(folder))

    _tell(folder, run)


def _sum_all(folder: Path) -> bool:
    """Adds 1 from each rank, first between hosts; whether to go on, which all ranks learn in the same step from rank 0."""
    mesh = _mesh()
    x = torch.ones(4)
    if mesh.get_rank() == 0 and (folder / ENOUGH).exists():
        x += 100
    for axis in mesh.axis_names:
        mesh.group(axis).all_reduce(x)
    if x.tolist() not in ([4.0] * 4, [104.0] * 4):
        raise ArithmeticError(f"the sum over all ranks is {x.tolist()}")
    return x[0].item() == 4.0


def _mesh() -> sm.DeviceMesh:
    return sm.init_device_mesh("cpu", (2, 2), axis_names=("hosts", "local"))


def _world() -> sm.Group:
    return sm.init_device_mesh("cpu", (4,), axis_names=("all",)).group("all")


def _tell(folder: str, run: Callable[[int], bool], *files: str) -> None:
    """Runs one step after another, and writes down how many there were and how it ended. Ends when there are these files."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the agent's, which a forked process has
    rank, steps, error = int(os.environ["RANK"]), 0, None
    try:
        while run(steps):
            steps += 1
            write(Path(folder) / f"{rank}.steps", str(steps))
            time.sleep(0.01)
    except BaseException as caught:
        error = caught
        sys.excepthook(type(error), error, error.__traceback__)
    told = {"error": type(error).__name__, "text": str(error), "ranks": getattr(error, "ranks", None)}
    write(Path(folder) / f"{rank}.json", json.dumps(told | {"steps": steps}))
    for file in (f"{rank ^ 1}.json", *files):  # the agent ends a rank soon after another of its host has failed
        _wait_for(Path(folder) / file)
    atexit._run_exitfuncs()  # as in a program that is not a forked process
    if error is not None:
        os._exit(1)


def write(path: Path, text: str) -> None:
    """Whole or not at all, for those who look for it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.rename(path)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + _LINGER_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
