"""Programs that call torch.distributed and the library's collectives; one rank's calls of torch
differ, or their order does.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.fault import fault
from tests.faults.rank_context import RankContext
from tests.faults.wrong_calls import SQUARE, SQUARE_MESH

# -- a call more, or fewer -------------------------------------------------------------------------


@fault(("mismatch", "left", "deadlock"), 0, says="all_reduce")
def torch_reduces_on_rank_0(ctx: RankContext) -> Any:
    """if rank == 0: dist.all_reduce(t), then the library's collectives"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    t = torch.ones(4)
    dist.all_reduce(t)
    if ctx.is_outlier():
        dist.all_reduce(t)  # <- outlier
    return x.full_tensor().sum().item()  # <- others


@fault("mismatch", 0, field="operation", says=("all_reduce", "barrier"))
def torch_reduces_on_rank_0_before_a_barrier(ctx: RankContext) -> Any:
    """if rank == 0: dist.all_reduce(t), then a barrier"""
    t = torch.ones(4)
    if ctx.is_outlier():
        dist.all_reduce(t)  # <- outlier
    dist.barrier()  # <- others
    return ctx.put(SQUARE, ctx.d.Shard(0)).full_tensor().sum().item()


@fault("mismatch", field="operation", says=("all_reduce", "barrier"))
def torch_skips_a_reduction(ctx: RankContext) -> Any:
    """A rank skips dist.all_reduce"""
    t = torch.ones(4)
    if not ctx.is_outlier():
        dist.all_reduce(t)  # <- others
    dist.barrier()  # <- outlier
    return t.tolist()


@fault("deadlock", 1, says=("barrier", "all_gather"))
def torch_skips_a_barrier(ctx: RankContext) -> Any:
    """A rank skips dist.barrier and calls the library"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    dist.barrier()
    if not ctx.is_outlier():
        dist.barrier()  # <- others
    return x.full_tensor().sum().item()  # <- outlier


@fault("mismatch", 3, field="shape", says="all_reduce")
def torch_skips_one_of_two_reductions(ctx: RankContext) -> Any:
    """A rank skips the first of two dist.all_reduce of different sizes"""
    small, large = torch.ones(2), torch.ones(64)
    if not ctx.is_outlier():
        dist.all_reduce(small)  # <- others
    dist.all_reduce(large)  # <- outlier
    return small.tolist()


@fault("mismatch", 1, field="operation", says=("broadcast", "all_gather"))
def torch_skips_a_broadcast(ctx: RankContext) -> Any:
    """A rank skips dist.broadcast"""
    t, out = torch.ones(4), [torch.zeros(4) for _ in range(4)]
    if not ctx.is_outlier():
        dist.broadcast(t, src=0)  # <- others
    dist.all_gather(out, t)  # <- outlier
    return t.tolist()


@fault(("left", "mismatch"), 2, says="barrier", ends="RankLostError")
def torch_calls_an_extra_barrier(ctx: RankContext) -> Any:
    """A rank calls one more dist.barrier at the end"""
    t = torch.ones(4)
    dist.all_reduce(t)
    if ctx.is_outlier():
        dist.barrier()  # <- outlier
    return t.tolist()


@fault("mismatch", 3, field="operation", says=("all_reduce", "all_gather"))
def torch_skips_a_turn_of_a_loop(ctx: RankContext) -> Any:
    """A rank skips dist.all_reduce in one iteration of a loop"""
    t, out = torch.ones(4), torch.zeros(16)
    for turn in range(20):
        if not (turn == 11 and ctx.is_outlier()):
            dist.all_reduce(t)  # <- others
        dist.all_gather_into_tensor(out, torch.ones(4))  # <- outlier
    return t.shape[0]


# -- .item() and .full_tensor() on one rank --------------------------------------------------------


@fault("deadlock", 0, says=("all_reduce", "barrier"))
def torch_item_during_a_barrier(ctx: RankContext) -> Any:
    """Rank 0 logs .item() while the others are in dist.barrier"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    if ctx.is_outlier():
        x.sum().full_tensor().item()  # <- outlier
    dist.barrier()  # <- others
    return 0


@fault("deadlock", 0, says=("all_gather", "barrier"))
def torch_full_tensor_during_a_barrier(ctx: RankContext) -> Any:
    """Rank 0 prints .full_tensor() while the others are in dist.barrier"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    dist.barrier()
    if ctx.is_outlier():
        print(x.full_tensor())  # <- outlier
    dist.barrier()  # <- others
    return 0


@fault("deadlock", 2, says=("all_gather", "all_reduce"))
def torch_full_tensor_during_a_reduction(ctx: RankContext) -> Any:
    """Only one rank gathers, while the others are in dist.all_reduce"""
    x, t = ctx.put(SQUARE, ctx.d.Shard(0)), torch.ones(4)
    if ctx.is_outlier():
        x.full_tensor()  # <- outlier
    dist.all_reduce(t)  # <- others
    return t.tolist()


@fault("deadlock", 0, says=("all_reduce", "all_gather"))
def torch_norm_during_object_gather(ctx: RankContext) -> Any:
    """Rank 0 computes a norm of sharded values while the others gather objects"""
    x, found = ctx.put(SQUARE, ctx.d.Shard(0)), [None] * 4
    if ctx.is_outlier():
        (x * x).sum().full_tensor()  # <- outlier
    dist.all_gather_object(found, ctx.rank)  # <- others
    return found


@fault("deadlock", 1, says=("all_reduce", "monitored_barrier"))
def torch_item_during_a_monitored_barrier(ctx: RankContext) -> Any:
    """A rank logs .item() while the others are in dist.monitored_barrier"""
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    if ctx.is_outlier():
        x.sum().full_tensor()  # <- outlier
    dist.monitored_barrier()  # <- others
    return 0


# -- another order ---------------------------------------------------------------------------------


@fault("mismatch", 2, field="operation", says=("all_reduce", "broadcast"))
def torch_swaps_two_calls(ctx: RankContext) -> Any:
    """A rank calls dist.all_reduce and dist.broadcast in a different order"""
    a, b = torch.ones(4), torch.ones(4)
    if ctx.is_outlier():
        dist.broadcast(b, src=0)  # <- outlier
        dist.all_reduce(a)
    else:
        dist.all_reduce(a)  # <- others
        dist.broadcast(b, src=0)
    return a.tolist()


@fault("mismatch", 3, field="shape", says="all_reduce")
def torch_iterates_in_another_order(ctx: RankContext) -> Any:
    """A rank reduces gradients in another order"""
    grads = {"a": torch.ones(4), "b": torch.ones(9), "c": torch.ones(16)}
    for name in ["b", "a", "c"] if ctx.is_outlier() else ["a", "b", "c"]:
        dist.all_reduce(grads[name])  # <- outlier # <- others
    return 0


@fault("mismatch", 0, field="shape", says="all_reduce")
def torch_starts_in_another_order(ctx: RankContext) -> Any:
    """A rank starts two asynchronous dist.all_reduce in a different order"""
    small, large = torch.ones(2), torch.ones(64)
    order = [large, small] if ctx.is_outlier() else [small, large]
    works = [dist.all_reduce(x, async_op=True) for x in order]  # <- outlier # <- others
    for work in works:
        work.wait()
    return small.tolist()


@fault("deadlock", 2, says=("all_gather", "all_reduce"))
def torch_swaps_with_full_tensor(ctx: RankContext) -> Any:
    """A rank calls dist.all_reduce after the library's gather, the others before it"""
    x, t = ctx.put(SQUARE, ctx.d.Shard(0)), torch.ones(4)
    if ctx.is_outlier():
        x.full_tensor()  # <- outlier
        dist.all_reduce(t)
    else:
        dist.all_reduce(t)  # <- others
        x.full_tensor()
    return t.tolist()


@fault("deadlock", 3, mesh=SQUARE_MESH, says=("all_reduce", "barrier"))
def torch_barrier_before_a_row(ctx: RankContext) -> Any:
    """A rank calls dist.barrier before its row's all_reduce"""
    x = torch.ones(4)
    if ctx.is_outlier():
        dist.barrier()  # <- outlier
    ctx.group("dp").all_reduce(x)  # <- others
    if not ctx.is_outlier():
        dist.barrier()
    return x.tolist()


@fault("deadlock", 1, says=("all_reduce", "barrier"))
def torch_swaps_groups(ctx: RankContext) -> Any:
    """A rank calls on a second group of all ranks first"""
    other, t = dist.new_group([0, 1, 2, 3]), torch.ones(4)
    if ctx.is_outlier():
        dist.all_reduce(t, group=other)  # <- outlier
        dist.barrier()
    else:
        dist.barrier()  # <- others
        dist.all_reduce(t, group=other)
    return t.tolist()


# -- something else --------------------------------------------------------------------------------


@fault("mismatch", 2, field="reduction", says=("max", "sum"))
def torch_takes_the_maximum(ctx: RankContext) -> Any:
    """A rank takes dist.ReduceOp.MAX where others sum"""
    t = torch.ones(4)
    operation = dist.ReduceOp.MAX if ctx.is_outlier() else dist.ReduceOp.SUM
    dist.all_reduce(t, op=operation)  # <- outlier # <- others
    return t.tolist()


@fault("mismatch", 1, field="shape", says="all_reduce")
def torch_has_a_shorter_buffer(ctx: RankContext) -> Any:
    """A rank's buffer in dist.all_reduce is shorter"""
    t = torch.ones(3 if ctx.is_outlier() else 4)
    dist.all_reduce(t)  # <- outlier # <- others
    return 0


@fault("mismatch", 3, field="dtype", says=("int32", "float32"))
def torch_has_another_dtype(ctx: RankContext) -> Any:
    """A rank's buffer in dist.all_reduce is int32"""
    t = torch.ones(4, dtype=torch.int32 if ctx.is_outlier() else torch.float32)
    dist.all_reduce(t)  # <- outlier # <- others
    return 0


@fault("mismatch", 0, field="dtype", says=("bfloat16", "float32"))
def torch_gathers_another_dtype(ctx: RankContext) -> Any:
    """A rank gathers bfloat16 where others gather float32"""
    t = torch.ones(4, dtype=torch.bfloat16 if ctx.is_outlier() else torch.float32)
    dist.all_gather_into_tensor(t.new_zeros(16), t)  # <- outlier # <- others
    return 0


@fault("mismatch", 2, field="shape", says="all_gather")
def torch_gathers_another_shape(ctx: RankContext) -> Any:
    """A rank's part in dist.all_gather is larger"""
    t = torch.ones(5 if ctx.is_outlier() else 4)
    dist.all_gather([torch.zeros_like(t) for _ in range(4)], t)  # <- outlier # <- others
    return 0


@fault("mismatch", 3, field="source", says="broadcast")
def torch_takes_itself_for_the_source(ctx: RankContext) -> Any:
    """A rank passes itself as the source of dist.broadcast"""
    t = torch.ones(4)
    dist.broadcast(t, src=ctx.rank if ctx.is_outlier() else 0)  # <- outlier # <- others
    return t.tolist()


@fault("mismatch", 2, field="operation", says=("reduce_scatter", "all_reduce"))
def torch_scatters_where_others_reduce(ctx: RankContext) -> Any:
    """A rank calls dist.reduce_scatter_tensor where others call dist.all_reduce"""
    t = torch.ones(8)
    if ctx.is_outlier():
        dist.reduce_scatter_tensor(torch.zeros(2), t)  # <- outlier
    else:
        dist.all_reduce(t)  # <- others
    return 0


@fault("mismatch", 1, field="reduction", says="reduce")
def torch_reduces_to_another_root(ctx: RankContext) -> Any:
    """A rank reduces to another root"""
    t = torch.ones(4)
    dist.reduce(t, dst=1 if ctx.is_outlier() else 0)  # <- outlier # <- others
    dist.barrier()
    return 0


@fault("mismatch", 3, field="operation", says=("gather", "barrier"))
def torch_does_not_gather(ctx: RankContext) -> Any:
    """A rank calls dist.barrier where others gather to rank 0"""
    t = torch.ones(4)
    if ctx.is_outlier():
        dist.barrier()  # <- outlier
    else:
        dist.gather(t, [torch.zeros(4) for _ in range(4)] if ctx.rank == 0 else None)  # <- others
        dist.barrier()
    return 0


@fault("mismatch", 2, field="operation", says=("scatter", "broadcast"))
def torch_does_not_scatter(ctx: RankContext) -> Any:
    """A rank calls dist.broadcast where others scatter"""
    t = torch.ones(4)
    if ctx.is_outlier():
        dist.broadcast(t, src=0)  # <- outlier
    else:
        dist.scatter(t, [torch.ones(4)] * 4 if ctx.rank == 0 else None)  # <- others
    dist.barrier()
    return 0


@fault("mismatch", 1, field="splits", says="all_to_all")
def torch_sends_more_than_expected(ctx: RankContext) -> Any:
    """A rank sends more in dist.all_to_all_single than the receiver expects"""
    sent = [3, 1, 3, 3] if ctx.is_outlier() else [1, 1, 1, 1]
    received, t = torch.zeros(4), torch.ones(sum(sent))
    if ctx.rank > 1:
        time.sleep(1.0)  # of two ranks alone neither is known to be wrong
    dist.all_to_all_single(received, t, None, sent)  # <- outlier # <- others
    return 0


@fault("mismatch", 0, field="operation", says=("all_to_all", "all_gather"))
def torch_gathers_where_others_exchange(ctx: RankContext) -> Any:
    """A rank calls dist.all_gather_into_tensor where others call dist.all_to_all_single"""
    t = torch.ones(4)
    if ctx.is_outlier():
        dist.all_gather_into_tensor(torch.zeros(16), t)  # <- outlier
    else:
        dist.all_to_all_single(torch.zeros(4), t)  # <- others
    return 0
