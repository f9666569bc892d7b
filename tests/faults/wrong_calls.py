"""Programs in which a rank calls a different collective, or the same one with different
arguments.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.faults.fault import fault
from tests.faults.rank_context import RankContext

SQUARE = torch.arange(64.0).reshape(8, 8)
SQUARE_MESH = {"dp": 2, "tp": 2}


# -- one call too few or too many ------------------------------------------------------------------


@fault("mismatch", field="operation", says=("all_gather", "all_to_all"))
def skips_a_redistribute(ctx: RankContext) -> Any:
    """A rank skips a redistribute"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    if not ctx.is_outlier():
        x.redistribute(ctx.mesh, [ctx.d.Replicate()])  # <- others
    return x.redistribute(ctx.mesh, [ctx.d.Shard(1)]).to_local().sum().item()  # <- outlier


@fault("mismatch", 1, field="operation", says=("all_gather", "all_to_all"))
def repeats_a_redistribute(ctx: RankContext) -> Any:
    """A rank calls full_tensor twice"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    whole = x.full_tensor()
    if ctx.is_outlier():
        whole += x.full_tensor()  # <- outlier
    part = x.redistribute(ctx.mesh, [ctx.d.Shard(1)])  # <- others
    return whole.sum().item() + part.to_local().sum().item()


@fault("mismatch", 0, field="operation", says=("all_gather", "all_reduce"))
def prints_the_full_tensor_alone(ctx: RankContext) -> Any:
    """Rank 0 prints full_tensor()"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    if ctx.is_outlier():
        print(x.full_tensor())  # <- outlier
    total = x.sum().full_tensor()  # <- others
    return total.item()


@fault("mismatch", 0, field="operation", says=("all_reduce", "all_gather"))
def reads_the_loss_alone(ctx: RankContext) -> Any:
    """Rank 0 logs loss.item()"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    loss = x.mean()
    if ctx.is_outlier():
        print(loss.item())  # <- outlier
    whole = x.full_tensor()  # <- others
    return whole.sum().item()


@fault("mismatch", 0, field=("shape", "lineage"), says="all_gather")
def saves_the_weights_alone(ctx: RankContext) -> Any:
    """Rank 0 gathers the state dict to save it, the others continue"""
    weights = [ctx.put(SQUARE[: 4 * n], ctx.d.Shard(0)) for n in (1, 2)]
    if ctx.is_outlier():
        saved = [w.full_tensor() for w in weights]  # <- outlier
        print(len(saved))
    step = weights[1].full_tensor()  # <- others
    return step.sum().item()


@fault("mismatch", 3, field="lineage", says="all_gather")
def skips_one_of_several_weights(ctx: RankContext) -> Any:
    """A rank skips one of four gathers of the same shape"""
    weights = [ctx.put(SQUARE + n, ctx.d.Shard(0)) for n in range(4)]
    total = 0.0
    for n, w in enumerate(weights):
        if n == 1 and ctx.is_outlier():
            continue
        total += (n + 1) * w.full_tensor().sum().item()  # <- outlier # <- others
    return total


@fault("mismatch", field="lineage", says="all_gather")
def skips_a_step_of_a_loop(ctx: RankContext) -> Any:
    """A rank skips the collective in one iteration of a loop"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    total = 0.0
    for turn in range(5):
        x = x + 1
        if turn == 2 and ctx.is_outlier():
            continue
        total += x.full_tensor()[0, 0].item()  # <- outlier # <- others
    return total


@fault("mismatch", field="operation", says=("broadcast", "all_reduce"))
def reduces_twice(ctx: RankContext) -> Any:
    """A rank calls an all_reduce in place twice"""
    group, counts, best = ctx.group(), torch.ones(4), torch.full((4,), float(ctx.rank))
    group.all_reduce(counts)
    if ctx.is_outlier():
        group.all_reduce(counts)  # <- outlier
    group.broadcast(best, src=0)  # <- others
    return counts.tolist() + best.tolist()


@fault("mismatch", 3, field="operation", says=("all_to_all", "all_reduce"))
def branches_on_local_data(ctx: RankContext) -> Any:
    """A rank takes a branch that depends on its own part"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    threshold = 1000 if ctx.is_outlier() else -1
    if x.to_local()[0, 0].item() > threshold:
        x = x.redistribute(ctx.mesh, [ctx.d.Shard(1)])  # <- others
    return x.sum().full_tensor().item()  # <- outlier


@fault("mismatch", 1, field="lineage", says="all_gather")
def drops_a_layer(ctx: RankContext) -> Any:
    """Layers are dropped at random, and one rank draws different numbers"""
    kept = (1, 3) if ctx.is_outlier() else (1, 2)
    layers = {n: ctx.put(torch.eye(8) * n, ctx.d.Shard(0)) for n in (1, 2, 3)}
    x = ctx.put(SQUARE / 64, ctx.d.Shard(0))
    for n in kept:
        x = x @ layers[n]  # <- outlier # <- others
    return x.to_local().sum().item()


# -- the same call with other arguments ------------------------------------------------------------


@fault("mismatch", field=("operation", "layout"), says=("all_gather", "all_to_all"))
def redistributes_elsewhere(ctx: RankContext) -> Any:
    """A rank passes another placement"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    where = ctx.d.Shard(1) if ctx.is_outlier() else ctx.d.Replicate()
    return x.redistribute(ctx.mesh, [where]).to_local().sum().item()  # <- outlier # <- others


@fault("mismatch", field="layout", says="reduce_scatter")
def scatters_another_dim(ctx: RankContext) -> Any:
    """A rank reduces into Shard(1) instead of Shard(0)"""
    x = ctx.d.DTensor.from_local(SQUARE, ctx.mesh, [ctx.d.Partial()])
    dim = 1 if ctx.is_outlier() else 0
    scattered = x.redistribute(ctx.mesh, [ctx.d.Shard(dim)])  # <- outlier # <- others
    return scattered.to_local().sum().item()


@fault("mismatch", 1, field=("layout", "lineage"), says="all_gather")
def gathers_another_dim(ctx: RankContext) -> Any:
    """A rank holds columns, the others rows"""
    dim = 1 if ctx.is_outlier() else 0
    x = ctx.put(SQUARE, ctx.d.Shard(dim))
    return x.full_tensor().sum().item()  # <- outlier # <- others


@fault("mismatch", field="dtype", says=("bfloat16", "float32"))
def gathers_another_dtype(ctx: RankContext) -> Any:
    """A rank's tensor is bfloat16"""
    dtype = torch.bfloat16 if ctx.is_outlier() else torch.float32
    x = ctx.put(SQUARE.to(dtype), ctx.d.Shard(0))
    return x.full_tensor().sum().item()  # <- outlier # <- others


@fault("mismatch", 3, field="dtype", says="all_reduce")
def reduces_another_dtype(ctx: RankContext) -> Any:
    """A rank's buffer is int32 instead of float32: as many bytes"""
    x = torch.ones(16, dtype=torch.int32 if ctx.is_outlier() else torch.float32)
    ctx.group().all_reduce(x)  # <- outlier # <- others
    return x.tolist()


@fault("mismatch", 1, field="dtype", says="all_reduce")
def casts_in_autocast(ctx: RankContext) -> Any:
    """Only one rank computes the loss in float64"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    if ctx.is_outlier():
        x = x.double()
    return x.sum().full_tensor().item()  # <- outlier # <- others


@fault("mismatch", field="reduction", says=("max", "sum"))
def reduces_by_maximum(ctx: RankContext) -> Any:
    """A rank takes the maximum where others sum"""
    x = torch.arange(4.0) * ctx.rank
    ctx.group().all_reduce(x, "max" if ctx.is_outlier() else "sum")  # <- outlier # <- others
    return x.tolist()


@fault("mismatch", 0, field=("reduction", "layout"), says="all_reduce")
def declares_a_maximum(ctx: RankContext) -> Any:
    """A rank declares its part Partial("max") instead of Partial("sum")"""
    kind = "max" if ctx.is_outlier() else "sum"
    x = ctx.d.DTensor.from_local(SQUARE * (ctx.rank + 1), ctx.mesh, [ctx.d.Partial(kind)])
    return x.full_tensor().sum().item()  # <- outlier # <- others


@fault("mismatch", 3, field=("reduction", "layout"), says="all_reduce")
def declares_an_average(ctx: RankContext) -> Any:
    """A rank declares Partial("avg") instead of Partial("sum")"""
    kind = "avg" if ctx.is_outlier() else "sum"
    x = ctx.d.DTensor.from_local(SQUARE, ctx.mesh, [ctx.d.Partial(kind)])
    return x.full_tensor().sum().item()  # <- outlier # <- others


@fault("mismatch", field="shape", says="all_reduce")
def reduces_fewer_elements(ctx: RankContext) -> Any:
    """A rank's buffer is shorter"""
    x = torch.ones(24 if ctx.is_outlier() else 32)
    ctx.group().all_reduce(x)  # <- outlier # <- others
    return x.sum().item()


@fault("mismatch", 1, field="shape", says="all_gather")
def gathers_another_shape(ctx: RankContext) -> Any:
    """A rank's tensor is [4, 16] instead of [8, 8]: as many elements"""
    shape = (4, 16) if ctx.is_outlier() else (8, 8)
    x = ctx.put(SQUARE.reshape(shape), ctx.d.Shard(0))
    return x.full_tensor()[0].tolist()  # <- outlier # <- others


@fault("mismatch", 0, field="shape", says="all_reduce")
def has_another_width(ctx: RankContext) -> Any:
    """A rank read a different configuration: its model is wider"""
    width = 16 if ctx.is_outlier() else 8
    x = ctx.put(torch.ones(8, width), ctx.d.Shard(1))
    w = ctx.put(torch.ones(width, width), ctx.d.Shard(0))
    return (x @ w).full_tensor().sum().item()  # <- outlier # <- others


@fault("mismatch", field="source", says="broadcast")
def broadcasts_from_itself(ctx: RankContext) -> Any:
    """A rank passes itself as the source of a broadcast"""
    x = torch.full((4,), float(ctx.rank))
    ctx.group().broadcast(x, src=ctx.rank if ctx.is_outlier() else 0)  # <- outlier # <- others
    return x.tolist()


@fault("mismatch", field=("source", "destination", "route"), says="permute")
def sends_in_the_other_direction(ctx: RankContext) -> Any:
    """A rank sends around the ring in the other direction"""
    turn = -1 if ctx.is_outlier() else 1
    out, x = torch.zeros(4), torch.full((4,), float(ctx.rank))
    dst, src = (ctx.rank + turn) % 4, (ctx.rank - turn) % 4
    ctx.group().permute(out, x, dst=dst, src=src)  # <- outlier # <- others
    return out.tolist()


@fault("mismatch", 1, field=("shape", "splits"), says="all_to_all")
def sends_other_sizes(ctx: RankContext) -> Any:
    """A rank sends more tokens to an expert than the expert's rank expects"""
    sizes = [1, 1, 2, 0] if ctx.is_outlier() else [1, 1, 1, 1]
    out = torch.zeros(4)
    ctx.group().all_to_all(out, torch.ones(4), [1, 1, 1, 1], sizes)  # <- outlier # <- others
    return out.tolist()


@fault("mismatch", field="operation", says=("barrier", "all_reduce"))
def waits_at_a_barrier(ctx: RankContext) -> Any:
    """A rank calls a barrier where others reduce"""
    x = torch.ones(8)
    if ctx.is_outlier():
        ctx.group().barrier()  # <- outlier
    ctx.group().all_reduce(x)  # <- others
    return x.sum().item()


@fault("mismatch", 1, field="operation", says=("reduce_scatter", "all_reduce"))
def scatters_instead(ctx: RankContext) -> Any:
    """A rank calls reduce_scatter where others all_reduce"""
    x, part = torch.ones(8), torch.zeros(2)
    if ctx.is_outlier():
        ctx.group().reduce_scatter(part, x)  # <- outlier
    else:
        ctx.group().all_reduce(x)  # <- others
    return x.sum().item()


@fault("mismatch", 3, field="operation", says=("all_gather_object", "broadcast"))
def exchanges_objects_alone(ctx: RankContext) -> Any:
    """A rank gathers objects where others broadcast"""
    x = torch.ones(4)
    if ctx.is_outlier():
        ctx.group().all_gather_object({"rank": ctx.rank})  # <- outlier
    ctx.group().broadcast(x, src=0)  # <- others
    return x.tolist()


# -- equal votes -----------------------------------------------------------------------------------


@fault("mismatch", (2, 3), named=(), field="operation", says=("all_gather", "all_to_all"))
def two_against_two(ctx: RankContext) -> Any:
    """Two ranks redistribute to another layout than the other two"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    if ctx.is_outlier():
        x = x.redistribute(ctx.mesh, [ctx.d.Shard(1)])  # <- outlier
    else:
        x = x.redistribute(ctx.mesh, [ctx.d.Replicate()])  # <- others
    return x.to_local().sum().item()


@fault("mismatch", (1, 3), named=(), field="dtype", says="all_reduce")
def two_dtypes(ctx: RankContext) -> Any:
    """Two ranks reduce float64, two float32"""
    x = torch.ones(4, dtype=torch.float64 if ctx.is_outlier() else torch.float32)
    ctx.group().all_reduce(x)  # <- outlier # <- others
    return x.tolist()


@fault("mismatch", 1, named=(), field="reduction", says="all_reduce", mesh=SQUARE_MESH)
def one_against_one(ctx: RankContext) -> Any:
    """In a group of two ranks, one reduces by product"""
    x = torch.full((4,), 3.0)
    group = ctx.group("tp")
    group.all_reduce(x, "product" if ctx.is_outlier() else "sum")  # <- outlier # <- others
    ctx.group().all_reduce(x)
    return x.tolist()
