"""Programs in which a rank dies, ends or is interrupted while others continue."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.fault import fault
from tests.faults.rank_context import RankContext
from tests.faults.wrong_calls import SQUARE, SQUARE_MESH

# -- death -----------------------------------------------------------------------------------------


def _kill(number: int) -> None:
    os.kill(os.getpid(), number)


@fault("lost", ends=-signal.SIGKILL, says="all_gather")
def is_killed(ctx: RankContext) -> Any:
    """A rank is killed (SIGKILL), as when memory runs out"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    x.full_tensor()  # <- outlier
    if ctx.is_outlier():
        _kill(signal.SIGKILL)
    return x.full_tensor().sum().item()  # <- others


@fault("lost", 1, ends=3, says="all_gather")
def calls_os_exit(ctx: RankContext) -> Any:
    """A rank calls os._exit(3)"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    x.full_tensor()  # <- outlier
    if ctx.is_outlier():
        os._exit(3)
    return x.full_tensor().sum().item()  # <- others


@fault("lost", 3, ends=-signal.SIGSEGV, says="all_reduce")
def crashes(ctx: RankContext) -> Any:
    """A rank crashes (SIGSEGV)"""
    x = torch.ones(8)
    ctx.group().all_reduce(x)  # <- outlier
    if ctx.is_outlier():
        _kill(signal.SIGSEGV)
    ctx.group().all_reduce(x)  # <- others
    return x.tolist()


@fault("lost", 0, ends=-signal.SIGABRT, says="broadcast")
def aborts(ctx: RankContext) -> Any:
    """Rank 0 aborts (SIGABRT)"""
    x = torch.full((8,), float(ctx.rank))
    ctx.group().all_reduce(x)  # <- outlier
    if ctx.is_outlier():
        os.abort()
    ctx.group().broadcast(x, src=0)  # <- others
    return x.tolist()


@fault("lost", ends=-signal.SIGKILL, says="all_reduce")
def dies_during_a_transfer(ctx: RankContext) -> Any:
    """A rank is killed while 64 MB are being sent"""
    x = torch.ones(16 * 1024 * 1024)
    ctx.group().all_reduce(torch.ones(1))
    if ctx.is_outlier():
        threading.Timer(0.02, _kill, [signal.SIGKILL]).start()
    for _ in range(50):
        ctx.group().all_reduce(x, "max")  # <- others # <- outlier
    return x[0].item()


@fault("lost", 1, ends=-signal.SIGKILL, mesh=SQUARE_MESH, says="all_reduce")
def dies_before_group_creation(ctx: RankContext) -> Any:
    """A rank dies before the first collective of a group"""
    if ctx.is_outlier():
        _kill(signal.SIGKILL)
    x = torch.ones(4)
    ctx.group("tp").all_reduce(x)  # <- others
    ctx.group("dp").all_reduce(x)  # <- others
    return x.tolist()


@fault("lost", 3, ends=-signal.SIGKILL, mesh=SQUARE_MESH, says="all_reduce")
def dies_in_another_group(ctx: RankContext) -> Any:
    """A rank dies; a rank that shares no group with it waits for one that waits for it"""
    x = torch.ones(4)
    for axis in ("tp", "dp"):
        ctx.group(axis).all_reduce(x)  # <- outlier
    if ctx.is_outlier():
        _kill(signal.SIGKILL)
    if ctx.rank != 0:
        ctx.group("dp").all_reduce(x)  # <- others
        ctx.group("tp").all_reduce(x)
        return x.tolist()
    ctx.group("tp").all_reduce(x)  # <- others
    return x.tolist()


@fault("lost", ends=-signal.SIGKILL, says="all_reduce")
def dies_while_others_compute(ctx: RankContext) -> Any:
    """A rank dies while the others compute for a while"""
    x = torch.ones(4)
    ctx.group().all_reduce(x)  # <- outlier
    if ctx.is_outlier():
        _kill(signal.SIGKILL)
    time.sleep(0.2)
    ctx.group().all_reduce(x)  # <- others
    return x.tolist()


@fault("lost", (1, 3), ends=-signal.SIGKILL, says="all_reduce")
def two_die(ctx: RankContext) -> Any:
    """Two ranks are killed"""
    x = torch.ones(4)
    ctx.group().all_reduce(x)  # <- outlier
    if ctx.is_outlier():
        _kill(signal.SIGKILL)
    time.sleep(0.1)
    ctx.group().all_reduce(x)  # <- others
    return x.tolist()


# -- the end of the program ------------------------------------------------------------------------


@fault("left", ends=0, says="all_gather")
def exits_early(ctx: RankContext) -> Any:
    """A rank calls sys.exit(0)"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    x.full_tensor()  # <- outlier
    if ctx.is_outlier():
        sys.exit(0)
    return x.full_tensor().sum().item()  # <- others


@fault(("left", "raised"), 1, ends=1, says="all_gather")
def exits_with_a_message(ctx: RankContext) -> Any:
    """A rank calls sys.exit("bad configuration")"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    x.full_tensor()  # <- outlier
    if ctx.is_outlier():
        sys.exit("bad configuration")
    return x.full_tensor().sum().item()  # <- others


@fault("left", 3, ends=0, says="all_reduce")
def returns_early(ctx: RankContext) -> Any:
    """A rank returns from its program early"""
    x = torch.ones(4)
    for _ in range(2 if ctx.is_outlier() else 3):
        ctx.group().all_reduce(x)  # <- others # <- outlier
    return x.tolist()


@fault("left", 0, ends="RankLostError", says="all_gather")
def gathers_after_others_ended(ctx: RankContext) -> Any:
    """Rank 0 gathers the result to save it after the others have ended"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    total = x.sum().full_tensor().item()  # <- others
    if ctx.is_outlier():
        print(x.full_tensor())  # <- outlier
    return total


@fault("left", says="all_reduce", ends=0)
def destroys_its_groups(ctx: RankContext) -> Any:
    """A rank calls destroy_process_group() and continues with something else"""
    x = torch.ones(4)
    ctx.group().all_reduce(x)  # <- outlier
    if ctx.is_outlier():
        dist.destroy_process_group()
        time.sleep(0.5)
        return x.tolist()
    ctx.group().all_reduce(x)  # <- others
    return x.tolist()


# -- signals ---------------------------------------------------------------------------------------


@fault(
    "raised", field="KeyboardInterrupt", says="was interrupted (Ctrl-C)", ends="KeyboardInterrupt"
)
def is_interrupted(ctx: RankContext) -> Any:
    """One rank gets Ctrl-C"""
    x = torch.ones(4)
    ctx.group().all_reduce(x)
    if ctx.is_outlier():
        _kill(signal.SIGINT)  # <- outlier
        time.sleep(1)  # <- outlier
    ctx.group().all_reduce(x)
    return x.tolist()


@fault(("lost", "left", "raised"), 3, ends=(143, -signal.SIGTERM), says="all_reduce")
def is_terminated(ctx: RankContext) -> Any:
    """One rank gets SIGTERM, as from a scheduler"""
    x = torch.ones(4)
    ctx.group().all_reduce(x)
    if ctx.is_outlier():
        _kill(signal.SIGTERM)
        time.sleep(1)
    ctx.group().all_reduce(x)  # <- others
    return x.tolist()
