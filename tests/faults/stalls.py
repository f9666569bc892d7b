"""Programs in which a live rank does not arrive."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from itertools import repeat
from typing import Any

import torch

from tests.faults.fault import fault
from tests.faults.rank_context import RankContext
from tests.faults.wrong_calls import SQUARE, SQUARE_MESH

_LONG_S = 60.0


@fault("stall", ends="frozen", says=("all_gather", "stopped"))
def is_frozen(ctx: RankContext) -> Any:
    """A rank is frozen (SIGSTOP)"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    x.full_tensor()  # <- outlier
    if ctx.is_outlier():
        os.kill(os.getpid(), signal.SIGSTOP)
    return x.full_tensor().sum().item()  # <- others


@fault("stall", 1, ends="busy", says=("all_gather", "busy"))
def sleeps(ctx: RankContext) -> Any:
    """A rank sleeps"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    x.full_tensor()
    if ctx.is_outlier():
        time.sleep(_LONG_S)  # <- outlier
    return x.full_tensor().sum().item()  # <- others


@fault("stall", 3, ends="busy", says=("all_reduce", "busy"))
def loops_forever(ctx: RankContext) -> Any:
    """A rank is in an endless loop"""
    x = torch.ones(4)
    ctx.group().all_reduce(x)
    stuck = ctx.is_outlier()
    while stuck:  # <- outlier
        time.monotonic()  # <- outlier
    ctx.group().all_reduce(x)  # <- others
    return x.tolist()


@fault("stall", ends="busy", says=("all_reduce", "frozen"))
def holds_the_gil(ctx: RankContext) -> Any:
    """A rank is in a C call that holds the GIL"""
    x = torch.ones(4)
    ctx.group().all_reduce(x)  # <- outlier
    if ctx.is_outlier():
        sum(repeat(1, 3_000_000_000))
    ctx.group().all_reduce(x)  # <- others
    return x.tolist()


@fault("stall", 0, ends="busy", says=("broadcast", "busy"))
def waits_for_its_loader(ctx: RankContext) -> Any:
    """Rank 0 waits for a batch that its loader never delivers"""
    batches: queue.Queue[Any] = queue.Queue()
    x = torch.ones(4)
    ctx.group().all_reduce(x)
    if ctx.is_outlier():
        x = batches.get()  # <- outlier
    ctx.group().broadcast(x, src=0)  # <- others
    return x.tolist()


@fault("stall", ends="busy", says=("all_reduce", "busy"))
def reads_a_pipe(ctx: RankContext) -> Any:
    """A rank reads from a pipe without a writer"""
    x = torch.ones(4)
    reading, _ = os.pipe()
    ctx.group().all_reduce(x)
    if ctx.is_outlier():
        os.read(reading, 1)  # <- outlier
    ctx.group().all_reduce(x)  # <- others
    return x.tolist()


@fault("stall", 1, ends="busy", says=("all_reduce", "busy"))
def waits_for_a_lock(ctx: RankContext) -> Any:
    """A rank waits for a lock that it holds itself"""
    lock, x = threading.Lock(), torch.ones(4)
    ctx.group().all_reduce(x)
    if ctx.is_outlier():
        lock.acquire()
        lock.acquire()  # <- outlier
    ctx.group().all_reduce(x)  # <- others
    return x.tolist()


@fault("stall", 3, ends="busy", mesh=SQUARE_MESH, says=("all_reduce", "busy"))
def stalls_in_another_group(ctx: RankContext) -> Any:
    """A rank sleeps; a rank that shares no group with it waits for one that waits for it"""
    x = torch.ones(4)
    for axis in ("tp", "dp"):
        ctx.group(axis).all_reduce(x)
    if ctx.is_outlier():
        time.sleep(_LONG_S)  # <- outlier
    for axis in ("dp", "tp"):
        ctx.group(axis).all_reduce(x)  # <- others
    return x.tolist()


@fault("stall", says="barrier", ends="busy")
def misses_the_barrier(ctx: RankContext) -> Any:
    """A rank is busy while the others are at a barrier"""
    ctx.group().barrier()
    if ctx.is_outlier():
        threading.Event().wait(_LONG_S)  # <- outlier
    ctx.group().barrier()  # <- others
    return 0
