"""A program of four ranks that fails in a different way in each of torchrun's attempts, and
finishes in the last one.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import torch

import shardmesh as sm
from shardmesh.mesh.errors import WatchError

RAISES, SLEEPS, STOPS, SWALLOWS, LAST = range(5)


def main() -> None:
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("dp",))
    train(mesh)
    sm.monitor.watchdog(timeout=1.0)  # only now: on a busy machine ranks start far apart
    if attempt == STOPS:
        threading.Thread(target=time.sleep, args=(600,)).start()
    if rank == 2 and attempt < LAST:
        go_wrong(attempt)
    while attempt == SWALLOWS:
        try:
            train(mesh)
        except WatchError:
            time.sleep(0.1)
    print(
        f"result {train(mesh)} monitor {'off' if mesh.world.monitor is None else 'on'}", flush=True
    )


def go_wrong(attempt: int) -> None:
    if attempt == SLEEPS:
        time.sleep(600)
    if attempt == STOPS:
        os.kill(os.getpid(), signal.SIGSTOP)
    raise ValueError(f"attempt {attempt}")


def train(mesh: sm.DeviceMesh) -> float:
    x = torch.tensor([1.0 + mesh.get_rank()])
    mesh.group().all_reduce(x)
    return x.item()


if __name__ == "__main__":
    main()
