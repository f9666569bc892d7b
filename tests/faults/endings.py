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

from tests.faults.at import At
from tests.faults.fault import fault
from tests.faults.wrong_calls import SQUARE, SQUARE_MESH

# -- death -------------------------------------------------------------------------------------------------------------


def _kill(number: int) -> None:
    os.kill(os.getpid(), number)


@fault("lost", ends=-signal.SIGKILL, says="all_gather")
def is_killed(at: At) -> Any:
    """A rank is killed (SIGKILL), as when memory runs out"""
    x = at.put(SQUARE, at.d.Shard(0))
    x.full_tensor()  # <- odd
    if at.odd():
        _kill(signal.SIGKILL)
    return x.full_tensor().sum().item()  # <- rest


@fault("lost", 1, ends=3, says="all_gather")
def leaves_without_a_word(at: At) -> Any:
    """A rank calls os._exit(3)"""
    x = at.put(SQUARE, at.d.Shard(0))
    x.full_tensor()  # <- odd
    if at.odd():
        os._exit(3)
    return x.full_tensor().sum().item()  # <- rest


@fault("lost", 3, ends=-signal.SIGSEGV, says="all_reduce")
def crashes(at: At) -> Any:
    """A rank crashes (SIGSEGV)"""
    x = torch.ones(8)
    at.group().all_reduce(x)  # <- odd
    if at.odd():
        _kill(signal.SIGSEGV)
    at.group().all_reduce(x)  # <- rest
    return x.tolist()


@fault("lost", 0, ends=-signal.SIGABRT, says="broadcast")
def aborts(at: At) -> Any:
    """Rank 0 aborts (SIGABRT)"""
    x = torch.full((8,), float(at.rank))
    at.group().all_reduce(x)  # <- odd
    if at.odd():
        os.abort()
    at.group().broadcast(x, src=0)  # <- rest
    return x.tolist()


@fault("lost", ends=-signal.SIGKILL, says="all_reduce")
def dies_in_the_middle_of_a_transfer(at: At) -> Any:
    """A rank is killed while 64 MB are being sent"""
    x = torch.ones(16 * 1024 * 1024)
    at.group().all_reduce(torch.ones(1))
    if at.odd():
        threading.Timer(0.02, _kill, [signal.SIGKILL]).start()
    for _ in range(50):
        at.group().all_reduce(x, "max")  # <- rest # <- odd
    return x[0].item()


@fault("lost", 1, ends=-signal.SIGKILL, mesh=SQUARE_MESH, says="all_reduce")
def dies_before_its_group_is_made(at: At) -> Any:
    """A rank dies before the first collective of a group"""
    if at.odd():
        _kill(signal.SIGKILL)
    x = torch.ones(4)
    at.group("tp").all_reduce(x)  # <- rest
    at.group("dp").all_reduce(x)  # <- rest
    return x.tolist()


@fault("lost", 3, ends=-signal.SIGKILL, mesh=SQUARE_MESH, says="all_reduce")
def dies_round_the_corner(at: At) -> Any:
    """A rank dies; a rank that shares no group with it waits for one that waits for it"""
    x = torch.ones(4)
    for axis in ("tp", "dp"):
        at.group(axis).all_reduce(x)  # <- odd
    if at.odd():
        _kill(signal.SIGKILL)
    if at.rank != 0:
        at.group("dp").all_reduce(x)  # <- rest
        at.group("tp").all_reduce(x)
        return x.tolist()
    at.group("tp").all_reduce(x)  # <- rest
    return x.tolist()


@fault("lost", ends=-signal.SIGKILL, says="all_reduce")
def dies_while_others_compute(at: At) -> Any:
    """A rank dies while the others compute for a while"""
    x = torch.ones(4)
    at.group().all_reduce(x)  # <- odd
    if at.odd():
        _kill(signal.SIGKILL)
    time.sleep(0.2)
    at.group().all_reduce(x)  # <- rest
    return x.tolist()


@fault("lost", (1, 3), ends=-signal.SIGKILL, says="all_reduce")
def two_die(at: At) -> Any:
    """Two ranks are killed"""
    x = torch.ones(4)
    at.group().all_reduce(x)  # <- odd
    if at.odd():
        _kill(signal.SIGKILL)
    time.sleep(0.1)
    at.group().all_reduce(x)  # <- rest
    return x.tolist()


# -- the end of the program --------------------------------------------------------------------------------------------


@fault("left", ends=0, says="all_gather")
def exits_early(at: At) -> Any:
    """A rank calls sys.exit(0)"""
    x = at.put(SQUARE, at.d.Shard(0))
    x.full_tensor()  # <- odd
    if at.odd():
        sys.exit(0)
    return x.full_tensor().sum().item()  # <- rest


@fault(("left", "raised"), 1, ends=1, says="all_gather")
def exits_with_a_message(at: At) -> Any:
    """A rank calls sys.exit("bad configuration")"""
    x = at.put(SQUARE, at.d.Shard(0))
    x.full_tensor()  # <- odd
    if at.odd():
        sys.exit("bad configuration")
    return x.full_tensor().sum().item()  # <- rest


@fault("left", 3, ends=0, says="all_reduce")
def returns_early(at: At) -> Any:
    """A rank returns from its program early"""
    x = torch.ones(4)
    for _ in range(2 if at.odd() else 3):
        at.group().all_reduce(x)  # <- rest # <- odd
    return x.tolist()


@fault("left", 0, ends="RankLostError", says="all_gather")
def saves_at_the_end_alone(at: At) -> Any:
    """Rank 0 gathers the result to save it, the others have ended"""
    x = at.put(SQUARE, at.d.Shard(0))
    total = x.sum().full_tensor().item()  # <- rest
    if at.odd():
        print(x.full_tensor())  # <- odd
    return total


@fault("left", says="all_reduce", ends=0)
def destroys_its_groups(at: At) -> Any:
    """A rank calls destroy_process_group() and continues with something else"""
    x = torch.ones(4)
    at.group().all_reduce(x)  # <- odd
    if at.odd():
        dist.destroy_process_group()
        time.sleep(0.5)
        return x.tolist()
    at.group().all_reduce(x)  # <- rest
    return x.tolist()


# -- signals -----------------------------------------------------------------------------------------------------------


@fault("raised", says="KeyboardInterrupt", ends="KeyboardInterrupt")
def is_interrupted(at: At) -> Any:
    """One rank gets Ctrl-C"""
    x = torch.ones(4)
    at.group().all_reduce(x)
    if at.odd():
        _kill(signal.SIGINT)  # <- odd
        time.sleep(1)  # <- odd
    at.group().all_reduce(x)
    return x.tolist()


@fault(("lost", "left", "raised"), 3, ends=(143, -signal.SIGTERM), says="all_reduce")
def is_terminated(at: At) -> Any:
    """One rank gets SIGTERM, as from a scheduler"""
    x = torch.ones(4)
    at.group().all_reduce(x)
    if at.odd():
        _kill(signal.SIGTERM)
        time.sleep(1)
    at.group().all_reduce(x)  # <- rest
    return x.tolist()
