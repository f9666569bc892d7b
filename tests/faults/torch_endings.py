"""Programs in which a rank raises, dies, ends or hangs while the others are in torch.distributed
calls.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.faults.fault import fault
from tests.faults.rank_context import RankContext
from tests.faults.wrong_calls import SQUARE

_LONG_S = 60.0


@fault("raised", 2, ends="ValueError", says="no such file")
def torch_raises_before_a_barrier(ctx: RankContext) -> Any:
    """A rank raises while the others are in dist.barrier"""
    dist.barrier()
    if ctx.is_outlier():
        raise ValueError("no such file")  # <- outlier
    dist.barrier()
    return 0


@fault("raised", 0, ends="KeyError", says="loss")
def torch_raises_before_a_reduction(ctx: RankContext) -> Any:
    """Rank 0 raises while the others are in dist.all_reduce"""
    t, logs = torch.ones(4), {}
    dist.all_reduce(t)
    if ctx.is_outlier():
        print(logs["loss"])  # <- outlier
    dist.all_reduce(t)
    return 0


@fault("raised", 1, ends="ValueError", says="not to be sent")
def torch_raises_before_a_message(ctx: RankContext) -> Any:
    """A rank raises while another waits for its message"""
    t = torch.ones(4)
    dist.barrier()
    if ctx.is_outlier():
        raise ValueError("not to be sent")  # <- outlier
    if ctx.rank == 1:
        dist.send(t, 2)
    if ctx.rank == 2:
        dist.recv(t, 1)
    dist.barrier()
    return 0


@fault("lost", 3, ends=-signal.SIGKILL, says="barrier")
def torch_dies_before_a_barrier(ctx: RankContext) -> Any:
    """A rank is killed while the others are in dist.barrier"""
    dist.barrier()  # <- outlier
    if ctx.is_outlier():
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # <- others
    return 0


@fault("lost", 1, ends=3, says="broadcast")
def torch_dies_before_objects(ctx: RankContext) -> Any:
    """A rank calls os._exit while the others are in dist.broadcast_object_list"""
    found = [ctx.rank]
    dist.barrier()  # <- outlier
    if ctx.is_outlier():
        os._exit(3)
    dist.broadcast_object_list(found, src=1)  # <- others
    return 0


@fault("lost", 2, ends=-signal.SIGSEGV, says="all_reduce")
def torch_dies_before_a_functional_call(ctx: RankContext) -> Any:
    """A rank crashes while the others are in a functional all_reduce"""
    t = torch.ones(4)
    dist.barrier()  # <- outlier
    if ctx.is_outlier():
        os.kill(os.getpid(), signal.SIGSEGV)
    return (functional.all_reduce(t, "sum", dist.group.WORLD) + 0).tolist()  # <- others


@fault("left", 2, ends=0, says="all_reduce")
def torch_returns_early(ctx: RankContext) -> Any:
    """A rank returns from its program while the others are in dist.all_reduce"""
    t = torch.ones(4)
    dist.all_reduce(t)  # <- outlier
    if ctx.is_outlier():
        return 0
    dist.all_reduce(t)  # <- others
    return 0


@fault("left", 1, ends=0, says="barrier")
def torch_exits_early(ctx: RankContext) -> Any:
    """A rank calls sys.exit(0) while the others are in dist.barrier"""
    dist.barrier()  # <- outlier
    if ctx.is_outlier():
        sys.exit(0)
    dist.barrier()  # <- others
    return 0


@fault("stall", 2, ends="busy", says=("barrier", "busy"))
def torch_sleeps_before_a_barrier(ctx: RankContext) -> Any:
    """A rank sleeps while the others are in dist.barrier"""
    dist.barrier()
    if ctx.is_outlier():
        time.sleep(_LONG_S)  # <- outlier
    dist.barrier()  # <- others
    return 0


@fault("stall", 0, ends="busy", says=("broadcast", "busy"))
def torch_waits_for_its_loader(ctx: RankContext) -> Any:
    """Rank 0 hangs while the others wait for its objects"""
    found = [ctx.rank]
    dist.barrier()
    if ctx.is_outlier():
        threading.Event().wait(_LONG_S)  # <- outlier
    dist.broadcast_object_list(found, src=0)  # <- others
    return 0


@fault("stall", 3, ends="busy", says=("recv", "busy"))
def torch_never_sends(ctx: RankContext) -> Any:
    """A rank hangs while another waits for its message"""
    t = torch.ones(4)
    dist.barrier()
    if ctx.is_outlier():
        time.sleep(_LONG_S)  # <- outlier
    if ctx.rank == 3:
        dist.send(t, 0)
    if ctx.rank == 0:
        dist.recv(t, 3)  # <- others
    dist.barrier()
    return 0


@fault("stall", 1, ends="busy", says=("monitored_barrier", "busy"))
def torch_misses_a_monitored_barrier(ctx: RankContext) -> Any:
    """A rank misses the timeout of dist.monitored_barrier"""
    dist.barrier()
    if ctx.is_outlier():
        time.sleep(_LONG_S)  # <- outlier
    dist.monitored_barrier(timeout=timedelta(seconds=5))  # <- others
    return 0


@fault("stall", 2, ends="frozen", says=("all_reduce", "stopped"))
def torch_is_frozen(ctx: RankContext) -> Any:
    """A rank is frozen (SIGSTOP) while the others are in dist.all_reduce"""
    t = torch.ones(4)
    dist.all_reduce(t)  # <- outlier
    if ctx.is_outlier():
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(t)  # <- others
    return 0


@fault("raised", 3, ends="ValueError", says="gone wrong")
def torch_raises_while_others_use_the_library(ctx: RankContext) -> Any:
    """A rank raises before dist.barrier, which the others have not reached yet"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    x.full_tensor()
    if ctx.is_outlier():
        raise ValueError("gone wrong")  # <- outlier
    dist.barrier()
    return x.full_tensor().sum().item()
