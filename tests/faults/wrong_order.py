"""Programs in which a rank calls the right collectives in another order, or on another mesh
axis.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.faults.fault import fault
from tests.faults.rank_context import RankContext
from tests.faults.wrong_calls import SQUARE, SQUARE_MESH

# -- within one group ------------------------------------------------------------------------------


@fault("mismatch", field="operation", says=("all_gather", "all_to_all"))
def swaps_two_collectives(ctx: RankContext) -> Any:
    """A rank calls two collectives in a different order"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    if ctx.is_outlier():
        part = x.redistribute(ctx.mesh, [ctx.d.Shard(1)])  # <- outlier
        whole = x.full_tensor()
    else:
        whole = x.full_tensor()  # <- others
        part = x.redistribute(ctx.mesh, [ctx.d.Shard(1)])
    return whole.sum().item() + part.to_local().sum().item()


@fault("mismatch", field="lineage", says="all_gather")
def swaps_two_gathers(ctx: RankContext) -> Any:
    """A rank gathers two tensors of the same shape in a different order"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    a, b = x * 2, x + 1
    if ctx.is_outlier():
        a, b = b, a
    found = a.full_tensor() - 2 * b.full_tensor()  # <- outlier # <- others
    return found.sum().item()


@fault("mismatch", 1, field="lineage", says="all_reduce")
def swaps_two_reductions(ctx: RankContext) -> Any:
    """A rank reduces two pending values in a different order"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    loss, norm = x.sum(), (x * x).sum()
    if ctx.is_outlier():
        loss, norm = norm, loss
    return [loss.full_tensor().item(), norm.full_tensor().item()]  # <- outlier # <- others


@fault("mismatch", 3, field="lineage", says="all_gather")
def iterates_in_another_order(ctx: RankContext) -> Any:
    """A rank iterates over the parameters in a different order, as with a set or a directory"""
    weights = {name: ctx.put(SQUARE + n, ctx.d.Shard(0)) for n, name in enumerate("abc")}
    names = ["b", "a", "c"] if ctx.is_outlier() else ["a", "b", "c"]
    wholes = [weights[name].full_tensor() for name in names]  # <- outlier # <- others
    return [whole[0, 0].item() for whole in wholes]


@fault("mismatch", 0, field="shape", says="all_reduce")
def starts_in_another_order(ctx: RankContext) -> Any:
    """A rank starts two asynchronous collectives in a different order"""
    small, large = torch.ones(2), torch.ones(64)
    order = [large, small] if ctx.is_outlier() else [small, large]
    works = [ctx.group().all_reduce(x, async_op=True) for x in order]  # <- outlier # <- others
    for work in works:
        work.wait()
    return small.tolist()


# -- over several groups ---------------------------------------------------------------------------


@fault("deadlock", mesh=SQUARE_MESH, says="all_reduce")
def reduces_over_another_axis(ctx: RankContext) -> Any:
    """A rank reduces over tp where others reduce over dp, then all ranks reduce"""
    x = torch.ones(4)
    ctx.group("tp" if ctx.is_outlier() else "dp").all_reduce(x)  # <- outlier # <- others
    ctx.group().all_reduce(x)  # <- others
    return x.tolist()


@fault("mismatch", named=(), mesh=SQUARE_MESH, field=("layout", "lineage"), says="all_reduce")
def takes_axes_in_another_order(ctx: RankContext) -> Any:
    """A rank reduces over dp, then tp; the others over tp, then dp"""
    x = ctx.d.DTensor.from_local(SQUARE * ctx.rank, ctx.mesh, [ctx.d.Partial(), ctx.d.Partial()])
    between = (
        [ctx.d.Replicate(), ctx.d.Partial()]
        if ctx.is_outlier()
        else [ctx.d.Partial(), ctx.d.Replicate()]
    )
    x = x.redistribute(ctx.mesh, between)  # <- outlier # <- others
    return x.full_tensor().sum().item()  # <- outlier # <- others


@fault("deadlock", (0, 3), named=(), mesh=SQUARE_MESH, says="all_gather")
def each_waits_for_the_next(ctx: RankContext) -> Any:
    """Ranks wait for each other in a cycle: half gather over dp first, half over tp"""
    x = ctx.put(SQUARE, ctx.d.Shard(0), ctx.d.Shard(1))
    rows = [ctx.d.Replicate(), ctx.d.Shard(1)]
    columns = [ctx.d.Shard(0), ctx.d.Replicate()]
    for there in (columns, rows) if ctx.is_outlier() else (rows, columns):
        x.redistribute(ctx.mesh, there)  # <- outlier # <- others
    return x.to_local().sum().item()


@fault("deadlock", 3, mesh=SQUARE_MESH, says=("barrier", "all_reduce"))
def calls_global_barrier_early(ctx: RankContext) -> Any:
    """A rank calls the barrier of all ranks before its group's all_reduce"""
    x = torch.ones(4)
    if ctx.is_outlier():
        ctx.group().barrier()  # <- outlier
    ctx.group("dp").all_reduce(x)  # <- others
    if not ctx.is_outlier():
        ctx.group().barrier()
    return x.tolist()


@fault(
    "mismatch", 1, named=(), field="operation", mesh=SQUARE_MESH, says=("all_gather", "all_reduce")
)
def differs_in_a_group_of_two(ctx: RankContext) -> Any:
    """One of the two ranks of a tp group gathers where its partner reduces"""
    x, out = torch.ones(4), torch.zeros(8)
    if ctx.is_outlier():
        ctx.group("tp").all_gather(out, x)  # <- outlier
    else:
        ctx.group("tp").all_reduce(x)  # <- others
    ctx.group("dp").all_reduce(x)
    return x.tolist()


@fault(
    "mismatch",
    named=(),
    mesh=SQUARE_MESH,
    field=("operation", "layout", "shape"),
    says="all_gather",
)
def gathers_over_another_axis(ctx: RankContext) -> Any:
    """A rank gathers over tp instead of dp in a redistribute of all ranks"""
    x = ctx.put(SQUARE, ctx.d.Shard(0), ctx.d.Shard(1))
    there = (
        [ctx.d.Shard(0), ctx.d.Replicate()]
        if ctx.is_outlier()
        else [ctx.d.Replicate(), ctx.d.Shard(1)]
    )
    y = x.redistribute(ctx.mesh, there)  # <- outlier # <- others
    return y.full_tensor().sum().item()  # <- others
