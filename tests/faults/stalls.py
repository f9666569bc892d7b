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

from tests.faults.at import At
from tests.faults.fault import fault
from tests.faults.wrong_calls import SQUARE, SQUARE_MESH

_LONG_S = 60.0


@fault("stall", ends="frozen", says=("all_gather", "stopped"))
def is_frozen(at: At) -> Any:
    """A rank is frozen (SIGSTOP)"""
    x = at.put(SQUARE, at.d.Shard(0))
    x.full_tensor()  # <- odd
    if at.odd():
        os.kill(os.getpid(), signal.SIGSTOP)
    return x.full_tensor().sum().item()  # <- rest


@fault("stall", 1, ends="busy", says=("all_gather", "busy"))
def sleeps(at: At) -> Any:
    """A rank sleeps"""
    x = at.put(SQUARE, at.d.Shard(0))
    x.full_tensor()
    if at.odd():
        time.sleep(_LONG_S)  # <- odd
    return x.full_tensor().sum().item()  # <- rest


@fault("stall", 3, ends="busy", says=("all_reduce", "busy"))
def loops_for_ever(at: At) -> Any:
    """A rank is in an endless loop"""
    x = torch.ones(4)
    at.group().all_reduce(x)
    stuck = at.odd()
    while stuck:  # <- odd
        time.monotonic()  # <- odd
    at.group().all_reduce(x)  # <- rest
    return x.tolist()


@fault("stall", ends="busy", says=("all_reduce", "frozen"))
def keeps_the_interpreter(at: At) -> Any:
    """A rank is in a C call that holds the GIL"""
    x = torch.ones(4)
    at.group().all_reduce(x)  # <- odd
    if at.odd():
        sum(repeat(1, 700_000_000))
    at.group().all_reduce(x)  # <- rest
    return x.tolist()


@fault("stall", 0, ends="busy", says=("broadcast", "busy"))
def waits_for_its_loader(at: At) -> Any:
    """Rank 0 waits for a batch that its loader never delivers"""
    batches: queue.Queue[Any] = queue.Queue()
    x = torch.ones(4)
    at.group().all_reduce(x)
    if at.odd():
        x = batches.get()  # <- odd
    at.group().broadcast(x, src=0)  # <- rest
    return x.tolist()


@fault("stall", ends="busy", says=("all_reduce", "busy"))
def reads_a_pipe(at: At) -> Any:
    """A rank reads from a pipe that nobody writes to"""
    x = torch.ones(4)
    reading, _ = os.pipe()
    at.group().all_reduce(x)
    if at.odd():
        os.read(reading, 1)  # <- odd
    at.group().all_reduce(x)  # <- rest
    return x.tolist()


@fault("stall", 1, ends="busy", says=("all_reduce", "busy"))
def waits_for_a_lock(at: At) -> Any:
    """A rank waits for a lock that it holds itself"""
    lock, x = threading.Lock(), torch.ones(4)
    at.group().all_reduce(x)
    if at.odd():
        lock.acquire()
        lock.acquire()  # <- odd
    at.group().all_reduce(x)  # <- rest
    return x.tolist()


@fault("stall", 3, ends="busy", mesh=SQUARE_MESH, says=("all_reduce", "busy"))
def stalls_round_the_corner(at: At) -> Any:
    """A rank sleeps; a rank that shares no group with it waits for one that waits for it"""
    x = torch.ones(4)
    for axis in ("tp", "dp"):
        at.group(axis).all_reduce(x)
    if at.odd():
        time.sleep(_LONG_S)  # <- odd
    for axis in ("dp", "tp"):
        at.group(axis).all_reduce(x)  # <- rest
    return x.tolist()


@fault("stall", says="barrier", ends="busy")
def never_comes_to_the_barrier(at: At) -> Any:
    """A rank works on something else while the others are at a barrier"""
    at.group().barrier()
    if at.odd():
        threading.Event().wait(_LONG_S)  # <- odd
    at.group().barrier()  # <- rest
    return 0
