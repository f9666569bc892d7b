"""Correct programs in which ranks do different things: an error in one of them is a false alarm."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.fault import WARN_S, healthy
from tests.faults.rank_context import RankContext
from tests.faults.training import batches, replicated, sharded
from tests.faults.wrong_calls import SQUARE, SQUARE_MESH


@healthy()
def waits_in_another_order(ctx: RankContext) -> Any:
    """Asynchronous collectives are waited for in another order on each rank"""
    xs = [torch.full((2,), float(n)) for n in range(4)]
    works = [ctx.group().all_reduce(x, async_op=True) for x in xs]
    for n in range(4):
        works[(n + ctx.rank) % 4].wait()
    return [x[0].item() for x in xs]


@healthy()
def calls_from_different_lines(ctx: RankContext) -> Any:
    """The same collective is called in two branches"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    if ctx.rank == 0:
        whole = x.full_tensor()
        print(whole)
    else:
        whole = x.full_tensor()
    return whole.sum().item()


@healthy()
def creates_local_tensors(ctx: RankContext) -> Any:
    """Rank 0 creates more tensors and computes with them, without communication"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    if ctx.rank == 0:
        more = ctx.put(SQUARE, ctx.d.Shard(0)) * 2
        print(more.to_local().sum(), x.to_local().mean(), (x + 1).to_local())
    y = ctx.put(SQUARE + 1, ctx.d.Shard(0))
    return (x * 2 + y).full_tensor().sum().item()


@healthy(mesh=SQUARE_MESH)
def works_in_separate_groups(ctx: RankContext) -> Any:
    """Each row of the mesh does something else, as pipeline stages do"""
    x = torch.ones(4)
    for _ in range(3 if ctx.rank < 2 else 5):
        ctx.group("tp").all_reduce(x, "max" if ctx.rank < 2 else "sum")
    if ctx.rank >= 2:
        ctx.group("tp").barrier()
    ctx.group("dp").all_reduce(x)
    return x.tolist()


@healthy(mesh=SQUARE_MESH)
def differs_between_rows(ctx: RankContext) -> Any:
    """Rows of the mesh reduce other shapes and dtypes"""
    x = torch.ones(4 + 4 * (ctx.rank // 2), dtype=torch.float32 if ctx.rank < 2 else torch.float64)
    ctx.group("tp").all_reduce(x)
    return x.tolist()


@healthy()
def is_late(ctx: RankContext) -> Any:
    """A rank is slow, and the others wait"""
    x = torch.ones(4)
    for turn in range(4):
        if ctx.rank == turn:
            time.sleep(0.3)
        ctx.group().all_reduce(x)
    return x.tolist()


@healthy()
def starts_late(ctx: RankContext) -> Any:
    """A rank is late for its first collective"""
    if ctx.rank == 2:
        time.sleep(1.0)
    return ctx.put(SQUARE, ctx.d.Shard(0)).full_tensor().sum().item()


@healthy()
def ends_early(ctx: RankContext) -> Any:
    """Ranks end long before others that do not need them any more"""
    x = torch.ones(4)
    ctx.group().all_reduce(x)
    if ctx.rank in (1, 3):
        time.sleep(0.6)
    return x.tolist()


@healthy(mesh=SQUARE_MESH)
def one_row_ends_first(ctx: RankContext) -> Any:
    """The ranks of one group end while the others continue"""
    x = torch.ones(4)
    ctx.group().all_reduce(x)
    for _ in range(1 if ctx.rank < 2 else 20):
        ctx.group("tp").all_reduce(x, "max")
        time.sleep(0.01 * (ctx.rank >= 2))
    return x.tolist()


@healthy()
def handles_an_error(ctx: RankContext) -> Any:
    """A rank raises and catches an error"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    if ctx.rank == 1:
        try:
            raise ValueError("no such file, never mind")
        except ValueError:
            time.sleep(0.1)
    return x.full_tensor().sum().item()


@healthy()
def raises_everywhere(ctx: RankContext) -> Any:
    """All ranks raise the same error, and catch it"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    try:
        x @ ctx.put(torch.ones(5, 5), ctx.d.Replicate())
    except RuntimeError:
        return x.full_tensor().sum().item()
    return None


@healthy()
def forks_a_child(ctx: RankContext) -> Any:
    """A rank forks a child that exits, as data loaders do, and runs a program"""
    x = torch.ones(4)
    ctx.group().all_reduce(x)
    if ctx.rank == 2:
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        os.waitpid(pid, 0)
        subprocess.run([sys.executable, "-S", "-c", "raise SystemExit(3)"], check=False)
    ctx.group().all_reduce(x)
    return x.tolist()


@healthy()
def loads_in_workers(ctx: RankContext) -> Any:
    """Batches come from worker processes; all ranks stop iterating early"""
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, num_workers=1)
    total = torch.zeros(1)
    for n, batch in enumerate(loader):
        if n == 2:
            break
        total += batch.sum()
        ctx.group().all_reduce(total, "max")
    return total.item()


@healthy()
def raises_in_a_thread(ctx: RankContext) -> Any:
    """A thread of a rank, which does not communicate, ends with an error"""
    x = torch.ones(4)

    def fail() -> None:
        raise ValueError("in a thread of logging")

    if ctx.rank == 1:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    ctx.group().all_reduce(x)
    return x.tolist()


@healthy()
def starts_again(ctx: RankContext) -> Any:
    """The default group is destroyed and created again"""
    x = torch.ones(4)
    ctx.group().all_reduce(x)
    ctx.group().barrier()
    dist.destroy_process_group()
    ctx.start({"x": 4})
    ctx.group().all_reduce(x)
    return x.tolist()


@healthy()
def trains(ctx: RankContext) -> Any:
    """Training with replicated and with sharded weights, losses printed by rank 0"""
    found = []
    for make in (replicated, sharded):
        model, optimizer = make(ctx)
        for x in batches(ctx):
            loss = model(x).square().mean().full_tensor()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if ctx.rank == 0:
                print(loss.item())
            found.append(round(loss.item(), 5))
    return found


@healthy()
def has_uneven_parts(ctx: RankContext) -> Any:
    """Parts of different sizes, some of them empty"""
    found = []
    for rows in (1, 3, 5, 7):
        x = ctx.put(torch.arange(rows * 3.0).reshape(rows, 3), ctx.d.Shard(0))
        found.append(
            x.full_tensor().sum().item()
            + x.redistribute(ctx.mesh, [ctx.d.Shard(1)]).full_tensor().sum().item()
        )
    return found


@healthy()
def prints_its_tensors(ctx: RankContext) -> Any:
    """Rank 0 prints its tensors, layouts and parameters"""
    model, _ = sharded(ctx)
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    if ctx.rank == 0:
        print(model, x.placements, x.shape, [p.to_local().shape for p in model.parameters()])
    return x.full_tensor().sum().item()


@healthy()
def calls_many_times(ctx: RankContext) -> Any:
    """Thousands of small collectives, with ranks running ahead"""
    x = torch.ones(4)
    for turn in range(1500):
        ctx.group().broadcast(x, src=turn % 4)
        if turn % 500 == ctx.rank:
            time.sleep(0.02)
    return x.tolist()


@healthy()
def is_slow_within_the_limit(ctx: RankContext) -> Any:
    """A rank is so late that the others print a warning"""
    ctx.set_short_warning()
    x = torch.ones(4)
    ctx.group().all_reduce(x)
    if ctx.rank == 3:
        time.sleep(2 * WARN_S)
    ctx.group().all_reduce(x)
    return x.tolist()
