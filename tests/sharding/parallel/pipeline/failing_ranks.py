"""Pipelines of which a rank dies, hangs or raises inside of a stage, for jobs of `forked.py`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.parallel import pipeline


class Failing(nn.Module):
    """Fails in the forward or the backward of one microbatch.

    Args:
        how: "dies", "hangs", "raises", or "meets": waits for all ranks, which it must not.
        kind: "forward" or "backward".
        microbatch: the number of the call that fails; calls are counted from 0.
    """

    def __init__(self, how: str, kind: str, microbatch: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.how, self.kind, self.microbatch = how, kind, microbatch
        self.calls = {"forward": 0, "backward": 0}
        self.meet: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:  # the recording of the split
            return self.linear(x)
        self._count("forward")
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: self._count("backward"))
        return y

    def _count(self, kind: str) -> None:
        number = self.calls[kind]
        self.calls[kind] += 1
        if kind != self.kind or number != self.microbatch:
            return
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "raises":
            raise ArithmeticError("a bad row")
        if self.how == "meets":
            self.meet()
        time.sleep(60)


def step(schedule: str, how: str, kind: str, microbatch: int) -> float:
    """Run a step of four stages, of which stage 2 fails."""
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("pp",))
    torch.manual_seed(0)
    stages: list[Any] = [nn.Linear(4, 4) for _ in range(4)]
    stages[2] = Failing(how, kind, microbatch)
    stages[2].meet = lambda: mesh.group().all_reduce(torch.zeros(1))
    pipe = pipeline(stages, mesh, schedule=schedule, microbatches=4)
    x = torch.ones(8, 4)
    if how == "hangs":  # a step before, since on a busy machine ranks start far apart
        stages[2].microbatch += 4
        pipe.step(x, x, loss_fn=F.mse_loss)
        mesh.group().barrier()
        sm.monitor.watchdog(timeout=4)
    try:
        return pipe.step(x, x, loss_fn=F.mse_loss).item()
    finally:
        if how == "raises" and dist.is_initialized():  # not in a simulated world
            dist.destroy_process_group()


def step_in_detail(schedule: str) -> float:
    """Run a step in which nothing fails, where torch compares ranks when a collective begins."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    return step(schedule, "dies", "forward", 4)
