"""A program of four ranks of which one is killed, for jobs of `tests/forked.py`."""

from __future__ import annotations

import os
import signal

import torch

import shardmesh as sm
from shardmesh.mesh.errors import RankLostError
from shardmesh.mesh.monitor.ledger.ledger import mark_step


def main() -> None:
    try:
        train()
    except RankLostError:
        os._exit(7)


def train() -> None:
    mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    x = sm.device_put(torch.arange(8.0), mesh, sm.P("dp"))
    for step in range(3):
        mark_step(step)
        x.redistribute(sm.P()).to_local()
        mesh.group("tp").all_reduce(torch.ones(3))
    if mesh.world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.group().all_reduce(torch.ones(5), "max")
