"""Programs that call torch.distributed alone: they make no mesh, and turn the monitor on by
`sm.monitor.start()`.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import shardmesh as sm
from tests.faults.fault import fault, healthy
from tests.faults.rank_context import RankContext, TorchRankContext


def _start(ctx: RankContext) -> None:
    if not isinstance(ctx, TorchRankContext):
        dist.init_process_group("gloo")
        sm.monitor.start()


# -- messages --------------------------------------------------------------------------------------


@fault("deadlock", (0, 1), named=(), mesh={}, says=("recv", "rank 1"))
def alone_both_receive(ctx: RankContext) -> Any:
    """Two ranks receive from each other"""
    _start(ctx)
    t = torch.ones(4)
    if ctx.rank == 0 and not ctx.is_outlier():
        dist.send(t, 1)
    if ctx.rank < 2:
        dist.recv(t, 1 - ctx.rank)  # <- outlier
    if ctx.rank == 1 and not ctx.is_outlier():
        dist.send(t, 0)
    dist.barrier()
    return 0


@fault(("deadlock", "left"), 2, named=(), mesh={}, says=("recv", "rank 1"))
def alone_receives_from_another(ctx: RankContext) -> Any:
    """A rank passes a wrong src to dist.recv"""
    _start(ctx)
    t = torch.ones(4)
    if ctx.rank == 0:
        dist.send(t, 2)
    if ctx.rank == 2:
        dist.recv(t, 1 if ctx.is_outlier() else 0)  # <- outlier
    dist.barrier()  # <- others
    return 0


@fault("mismatch", 1, named=(), mesh={}, field="shape", says=("send", "recv", "32 bytes"))
def alone_sends_more_in_a_pair(ctx: RankContext) -> Any:
    """A rank sends more than its receiver expects in dist.batch_isend_irecv"""
    _start(ctx)
    sent, received = torch.ones(8 if ctx.is_outlier() else 4), torch.zeros(4)
    pair = [
        dist.P2POp(dist.isend, sent, (ctx.rank + 1) % 4),
        dist.P2POp(dist.irecv, received, (ctx.rank - 1) % 4),
    ]
    for work in dist.batch_isend_irecv(pair):  # <- outlier # <- others
        work.wait()
    return received.tolist()


# -- groups ----------------------------------------------------------------------------------------


@fault("deadlock", (0, 1, 2, 3), named=(), mesh={}, says="all_reduce")
def alone_groups_in_a_circle(ctx: RankContext) -> Any:
    """Each rank reduces in the group with the next rank first, then in the one with the
    rank before
    """
    _start(ctx)
    t = torch.ones(4)
    groups = [dist.new_group([rank, (rank + 1) % 4]) for rank in range(4)]
    ends = [groups[ctx.rank], groups[ctx.rank - 1]]
    if ctx.rank == 0 and not ctx.is_outlier():
        ends.reverse()
    for group in ends:
        dist.all_reduce(t, group=group)  # <- outlier
    return 0


@fault("deadlock", 1, mesh={}, says=("new_group", "all_reduce"))
def alone_does_not_make_a_group(ctx: RankContext) -> Any:
    """A rank does not call dist.new_group"""
    _start(ctx)
    t = torch.ones(4)
    if not ctx.is_outlier():
        dist.new_group([0, 1, 2, 3])  # <- others
    dist.all_reduce(t)  # <- outlier
    return 0


@fault("deadlock", 3, mesh={}, says="new_group")
def alone_makes_another_group(ctx: RankContext) -> Any:
    """A rank calls dist.new_group with other ranks"""
    _start(ctx)
    dist.barrier()  # so that all vote: of two ranks that wait for each other none would be named
    dist.new_group([2, 3] if ctx.is_outlier() else [0, 1, 2, 3])  # <- outlier # <- others
    dist.barrier()
    return 0


@fault("left", 0, mesh={}, ends=0, says="new_group")
def alone_ends_before_a_group_is_made(ctx: RankContext) -> Any:
    """A rank ends while the others are in dist.new_group"""
    _start(ctx)
    dist.barrier()  # <- outlier
    if not ctx.is_outlier():
        dist.new_group([0, 1, 2, 3])  # <- others
    return 0


# -- a rank that dies, a child that is no rank -----------------------------------------------------


def _kill_outlier(ctx: RankContext) -> None:
    if ctx.is_outlier():
        time.sleep(0.3)  # the others wait
        os.kill(os.getpid(), signal.SIGKILL)


@fault("lost", 2, mesh={}, ends=-signal.SIGKILL, says="all_reduce")
def alone_dies_while_others_reduce(ctx: RankContext) -> Any:
    """A rank is killed while the others wait in dist.all_reduce"""
    _start(ctx)
    t = torch.ones(4)
    dist.barrier()  # <- outlier
    _kill_outlier(ctx)
    dist.all_reduce(t)  # <- others
    return 0


@fault("lost", 0, mesh={}, ends=-signal.SIGKILL, says="all_reduce")
def alone_dies_while_others_reduce_by_an_operator(ctx: RankContext) -> Any:
    """A rank is killed while the others wait in a functional all_reduce"""
    _start(ctx)
    t = torch.ones(4)
    dist.barrier()  # <- outlier
    _kill_outlier(ctx)
    return (functional.all_reduce(t, "sum", dist.group.WORLD) + 0).tolist()  # <- others


@fault("raised", 1, mesh={}, ends="RuntimeError", says=("CollectiveError", "has forked"))
def alone_communicates_in_a_child(ctx: RankContext) -> Any:
    """A rank's forked child calls dist.all_reduce"""
    _start(ctx)
    dist.barrier()
    if ctx.is_outlier():
        raise RuntimeError(_said_by_child(lambda: dist.all_reduce(torch.ones(4))))  # <- outlier
    dist.barrier()
    return 0


def _said_by_child(call: Any) -> str:
    """Return the error of a call in a forked child; "it hangs" after some seconds."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python, since there are threads
        child = os.fork()
    if child == 0:
        try:
            call()
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writing)
    for _ in range(1000):
        if os.waitpid(child, os.WNOHANG)[0]:
            return os.read(reading, 4096).decode()
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "it hangs"


@healthy(mesh={})
def alone_groups_of_some_ranks(ctx: RankContext) -> Any:
    """Groups that all ranks make, one that only its members make, and groups made twice; a child
    that does not communicate
    """
    _start(ctx)
    t = torch.ones(4)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.all_reduce(t, group=halves[ctx.rank // 2])
    again = dist.new_group([3, 2, 1, 0])
    dist.all_reduce(t, group=again)
    if ctx.rank == 2:
        assert _said_by_child(lambda: None) == ""
    dist.barrier()
    if ctx.rank > 1:  # the last one: torch numbers groups by how many this rank has made
        dist.all_reduce(t, group=dist.new_group([2, 3]))
    return t.tolist()
