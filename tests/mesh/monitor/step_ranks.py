"""Programs of ranks that mark steps, or wait for work; see `forked.py`."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import shardmesh as sm
from shardmesh.parallel import colwise, parallelize, rowwise
from tests.mesh.monitor.forked_ranks import rank

LATE_S = 1.5  # until ranks that wait print a warning; on a busy machine they start far apart
IDLE_S = 4.0


def make_mesh(size: int) -> sm.DeviceMesh:
    return sm.init_device_mesh("cpu", (size,), axis_names=("tp",))


def serves_requests(size: int) -> None:
    """Rank 1 cannot read request 1, and goes on to the next one."""
    mesh = make_mesh(size)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize(model, mesh, {"0": colwise(), "2": rowwise()})
    for request in range(4):
        sm.monitor.mark_step(request)
        try:
            if rank() == 1 and request == 1:
                raise ValueError("unreadable")
            model(torch.full((1, 4), float(request)))
            print("answered", request)
        except ValueError:
            pass
        except sm.errors.CollectiveMismatchError as error:
            print(error)
            break


def calls_torch(size: int) -> None:
    """Rank 1 skips a step; some calls come before the first mark, and some are messages."""
    make_mesh(size)
    x = torch.ones(4)
    dist.all_reduce(x)
    for step in range(4):
        sm.monitor.mark_step(step)
        if rank() == 1 and step == 2:
            continue
        try:
            dist.all_reduce(x)
        except sm.errors.CollectiveMismatchError as error:
            print(error)
            break


def sends_ahead(size: int) -> None:
    """Messages may be received in a later step than they are sent in."""
    make_mesh(size)
    x = torch.ones(4)
    for step in range(2):
        sm.monitor.mark_step(step)
        if rank() == 0:
            dist.send(x, 1)
    for step in range(2 if rank() == 1 else 0):
        sm.monitor.mark_step(10 + step)
        dist.recv(x, 0)
    print("received")


def waits_for_work(size: int, how: str) -> None:
    """Rank 0 is idle for longer than ranks may wait, twice; the groups have a short timeout of
    their own.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=IDLE_S - 1))
    mesh = make_mesh(size)
    sm.monitor.watchdog(warn=LATE_S, timeout=LATE_S + 0.5)
    for number in range(2):
        if rank() == 0:
            try:
                with sm.monitor.idle(), sm.monitor.idle():
                    time.sleep(IDLE_S)
                    if how == "raises":
                        raise KeyError("no request")
            except KeyError:
                pass
        x = torch.full((2,), float(number + 10 * rank()))
        mesh.group("tp").broadcast(x, 0)
        print("request", x.tolist())
    if how == "then stalls":
        if rank() == 0:
            time.sleep(60)
        mesh.group("tp").broadcast(x, 0)


def dies_while_another_is_idle(size: int) -> None:
    """Nobody waits in a collective: the only other rank is dead."""
    mesh = make_mesh(size)
    mesh.group("tp").barrier()
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with sm.monitor.idle():
            time.sleep(60)
    except sm.errors.RankLostError as error:
        print(error)
