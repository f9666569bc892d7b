"""Healthy programs that call torch.distributed: an error in one of them is a false alarm."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.faults.fault import WARN_S, healthy
from tests.faults.rank_context import RankContext
from tests.faults.torch_training import BATCHES, ddp, fsdp, step
from tests.faults.wrong_calls import SQUARE


@healthy()
def torch_passes_different_arguments(ctx: RankContext) -> Any:
    """Roots pass other arguments, objects have other sizes, splits are uneven"""
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, "x" * 100 * ctx.rank)
    objects = ["y" * 1000] if ctx.rank == 0 else [None]
    dist.broadcast_object_list(objects, src=0)
    dist.scatter_object_list(
        objects, ["z" * 10 * rank for rank in range(4)] if ctx.rank == 0 else None
    )
    dist.gather_object("w" * ctx.rank, [None] * 4 if ctx.rank == 0 else None)
    t = torch.ones(4)
    dist.scatter(t, [torch.full((4,), float(rank)) for rank in range(4)] if ctx.rank == 0 else None)
    dist.gather(t, [torch.zeros(4) for _ in range(4)] if ctx.rank == 0 else None)
    dist.reduce(t, dst=2)
    sent, expected = [ctx.rank + 1] * 4, [1, 2, 3, 4]
    dist.all_to_all_single(torch.zeros(10), torch.ones(sum(sent)), expected, sent)
    dist.all_to_all([torch.zeros(2) for _ in range(4)], [torch.ones(2) for _ in range(4)])
    return len(found[3])


@healthy()
def torch_calls_in_some_ranks(ctx: RankContext) -> Any:
    """Some ranks use separate groups, also in threads"""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    first = dist.new_group([0, 1, 2])
    t = torch.ones(4)
    for _ in range(ctx.rank // 2 + 1):
        dist.barrier(group=halves[ctx.rank // 2])
    if ctx.rank < 3:
        dist.all_reduce(t, group=first)
    own = dist.new_group([0, 1, 2, 3])

    def load() -> None:
        for _ in range(5):
            dist.all_reduce(torch.ones(8), group=own)

    thread = threading.Thread(target=load)
    thread.start()
    x = ctx.put(SQUARE, ctx.d.Shard(0)).full_tensor()
    dist.all_reduce(t)
    thread.join()
    return x.sum().item()


@healthy()
def torch_sends_messages(ctx: RankContext) -> Any:
    """Rings, pipelines, tags, larger buffers, receives from any rank, and sends without a wait"""
    t, found = torch.full((4,), float(ctx.rank)), torch.zeros(4)
    for _ in range(3):
        ops = [
            dist.P2POp(dist.isend, t, (ctx.rank + 1) % 4),
            dist.P2POp(dist.irecv, found, (ctx.rank - 1) % 4),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    if ctx.rank == 0:
        dist.send(t, 1, tag=7)
        kept = dist.isend(t, 1, tag=8)
        time.sleep(0.1)
        kept.wait()
    if ctx.rank == 1:
        dist.recv(torch.zeros(8), 0, tag=7)
        dist.recv(found, 0, tag=8)
    if ctx.rank == 2:
        for _ in range(2):
            dist.recv(found)
    elif ctx.rank in (1, 3):
        dist.send(t, 2)
    ctx.put(SQUARE, ctx.d.Shard(0)).full_tensor()
    dist.barrier()
    return 0


@healthy()
def torch_waits_in_another_order(ctx: RankContext) -> Any:
    """Asynchronous calls are waited for in another order on each rank, or by their future"""
    xs = [torch.full((2,), float(n)) for n in range(4)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    for n in range(4):
        works[(n + ctx.rank) % 4].wait()
    other = dist.new_group([0, 1, 2, 3])
    two = [
        dist.all_reduce(xs[0], async_op=True),
        dist.all_reduce(xs[1], group=other, async_op=True),
    ][:: 1 if ctx.rank else -1]
    for work in two:
        work.get_future().wait()
    work = dist.all_reduce(xs[0], async_op=True)
    work.wait(timedelta(seconds=20))
    return [x.shape[0] for x in xs]


@healthy()
def torch_finishes_early(ctx: RankContext) -> Any:
    """A rank finishes its part long before the others arrive"""
    ctx.set_short_warning()
    t = torch.ones(4)
    if ctx.rank:
        time.sleep(2 * WARN_S)
    dist.broadcast(t, src=0)
    kept = dist.all_reduce(t, async_op=True)
    dist.barrier()
    time.sleep(0.1)
    kept.wait()
    if ctx.rank == 3:
        time.sleep(2 * WARN_S)
    dist.monitored_barrier()
    return t.shape[0]


@healthy()
def torch_refuses_a_call(ctx: RankContext) -> Any:
    """Torch rejects calls, and the program continues"""
    for _ in range(20):
        with contextlib.suppress(ValueError, RuntimeError):
            dist.all_reduce(torch.ones(4, 4).t())
        with contextlib.suppress(ValueError, RuntimeError):
            dist.broadcast(torch.ones(4), src=9)
    dist.barrier()
    return 0


@healthy()
def torch_functional_calls(ctx: RankContext) -> Any:
    """Functional collectives, waited for late"""
    t = torch.ones(4)
    late = functional.all_reduce(t, "sum", dist.group.WORLD)
    parts = functional.reduce_scatter_tensor(torch.ones(8), "sum", 0, dist.group.WORLD)
    whole = functional.all_gather_tensor(parts, 0, dist.group.WORLD)
    dist.barrier()
    return [(late + whole[:4]).tolist(), (whole + 0).tolist()]


@healthy()
def ddp_and_fsdp(ctx: RankContext) -> Any:
    """DDP and FSDP2 train next to the library"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    for model, optimizer in (ddp(), ddp(find_unused_parameters=True), fsdp()):
        for n, batch in enumerate(BATCHES):
            step(model, optimizer, batch * (ctx.rank + n))
            x.full_tensor()
    return x.sum().full_tensor().item()


@healthy()
def ddp_leaves_parameters_unused(ctx: RankContext) -> Any:
    """DDP: parameters that are unused on some ranks, and steps without synchronization"""
    model, optimizer = ddp(find_unused_parameters=True)
    for n, batch in enumerate(BATCHES):
        step(model, optimizer, batch, skip=ctx.rank == n)
    with model.no_sync():
        model(BATCHES[0]).sum().backward()
    model(BATCHES[0]).sum().backward()
    return 0


@healthy()
def torch_groups_come_and_go(ctx: RankContext) -> Any:
    """Groups are created and destroyed, finally the default group"""
    for n in range(6):
        group = dist.new_group([0, 1, 2, 3])
        t = torch.ones(n + 1)
        dist.all_reduce(t, group=group)
        functional.all_reduce(t, "sum", group) + 0
        dist.destroy_process_group(group)
    dist.barrier()
    dist.destroy_process_group()
    return 0
