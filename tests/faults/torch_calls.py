"""Programs that call torch.distributed and the library's collectives; one rank's calls of torch differ, or their order does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.faults.at import At
from tests.faults.fault import fault
from tests.faults.wrong_calls import SQUARE, SQUARE_MESH

# -- a call more, or fewer ---------------------------------------------------------------------------------------------


@fault(("mismatch", "left", "deadlock"), 0, says="all_reduce")
def torch_reduces_on_rank_0(at: At) -> Any:
    """if rank == 0: dist.all_reduce(t), then the library's collectives"""
    x = at.put(SQUARE, at.d.Shard(0))
    t = torch.ones(4)
    dist.all_reduce(t)
    if at.odd():
        dist.all_reduce(t)  # <- odd
    return x.full_tensor().sum().item()  # <- rest


@fault("mismatch", 0, field="operation", says=("all_reduce", "barrier"))
def torch_reduces_on_rank_0_before_a_barrier(at: At) -> Any:
    """if rank == 0: dist.all_reduce(t), then a barrier"""
    t = torch.ones(4)
    if at.odd():
        dist.all_reduce(t)  # <- odd
    dist.barrier()  # <- rest
    return at.put(SQUARE, at.d.Shard(0)).full_tensor().sum().item()


@fault("mismatch", field="operation", says=("all_reduce", "barrier"))
def torch_skips_a_reduction(at: At) -> Any:
    """A rank skips dist.all_reduce"""
    t = torch.ones(4)
    if not at.odd():
        dist.all_reduce(t)  # <- rest
    dist.barrier()  # <- odd
    return t.tolist()


@fault("deadlock", 1, says=("barrier", "all_gather"))
def torch_skips_a_barrier(at: At) -> Any:
    """A rank skips dist.barrier and goes on with the library"""
    x = at.put(SQUARE, at.d.Shard(0))
    dist.barrier()
    if not at.odd():
        dist.barrier()  # <- rest
    return x.full_tensor().sum().item()  # <- odd


@fault("mismatch", 3, field="shape", says="all_reduce")
def torch_skips_one_of_two_reductions(at: At) -> Any:
    """A rank skips the first of two dist.all_reduce of different sizes"""
    small, large = torch.ones(2), torch.ones(64)
    if not at.odd():
        dist.all_reduce(small)  # <- rest
    dist.all_reduce(large)  # <- odd
    return small.tolist()


@fault("mismatch", 1, field="operation", says=("broadcast", "all_gather"))
def torch_skips_a_broadcast(at: At) -> Any:
    """A rank skips dist.broadcast"""
    t, out = torch.ones(4), [torch.zeros(4) for _ in range(4)]
    if not at.odd():
        dist.broadcast(t, src=0)  # <- rest
    dist.all_gather(out, t)  # <- odd
    return t.tolist()


@fault(("left", "mismatch"), 2, says="barrier", ends="RankLostError")
def torch_calls_one_barrier_more(at: At) -> Any:
    """A rank calls one more dist.barrier at the end"""
    t = torch.ones(4)
    dist.all_reduce(t)
    if at.odd():
        dist.barrier()  # <- odd
    return t.tolist()


@fault("mismatch", 3, field="operation", says=("all_reduce", "all_gather"))
def torch_skips_a_turn_of_a_loop(at: At) -> Any:
    """A rank skips dist.all_reduce in one iteration of a loop"""
    t, out = torch.ones(4), torch.zeros(16)
    for turn in range(20):
        if not (turn == 11 and at.odd()):
            dist.all_reduce(t)  # <- rest
        dist.all_gather_into_tensor(out, torch.ones(4))  # <- odd
    return t.shape[0]


# -- .item() and .full_tensor() on one rank ----------------------------------------------------------------------------


@fault("deadlock", 0, says=("all_reduce", "barrier"))
def torch_item_beside_a_barrier(at: At) -> Any:
    """Rank 0 logs .item() while the others are in dist.barrier"""
    x = at.put(SQUARE, at.d.Shard(0))
    if at.odd():
        x.sum().full_tensor().item()  # <- odd
    dist.barrier()  # <- rest
    return 0


@fault("deadlock", 0, says=("all_gather", "barrier"))
def torch_full_tensor_beside_a_barrier(at: At) -> Any:
    """Rank 0 prints .full_tensor() while the others are in dist.barrier"""
    x = at.put(SQUARE, at.d.Shard(0))
    dist.barrier()
    if at.odd():
        print(x.full_tensor())  # <- odd
    dist.barrier()  # <- rest
    return 0


@fault("deadlock", 2, says=("all_gather", "all_reduce"))
def torch_full_tensor_beside_a_reduction(at: At) -> Any:
    """A rank alone gathers while the others are in dist.all_reduce"""
    x, t = at.put(SQUARE, at.d.Shard(0)), torch.ones(4)
    if at.odd():
        x.full_tensor()  # <- odd
    dist.all_reduce(t)  # <- rest
    return t.tolist()


@fault("deadlock", 0, says=("all_reduce", "all_gather"))
def torch_item_beside_objects(at: At) -> Any:
    """Rank 0 computes a norm of sharded values while the others collect objects"""
    x, found = at.put(SQUARE, at.d.Shard(0)), [None] * 4
    if at.odd():
        (x * x).sum().full_tensor()  # <- odd
    dist.all_gather_object(found, at.rank)  # <- rest
    return found


@fault("deadlock", 1, says=("all_reduce", "monitored_barrier"))
def torch_item_beside_a_monitored_barrier(at: At) -> Any:
    """A rank logs .item() while the others are in dist.monitored_barrier"""
    x = at.put(SQUARE, at.d.Shard(0))
    if at.odd():
        x.sum().full_tensor()  # <- odd
    dist.monitored_barrier()  # <- rest
    return 0


# -- another order -----------------------------------------------------------------------------------------------------


@fault("mismatch", 2, field="operation", says=("all_reduce", "broadcast"))
def torch_swaps_two_calls(at: At) -> Any:
    """A rank calls dist.all_reduce and dist.broadcast in a different order"""
    a, b = torch.ones(4), torch.ones(4)
    if at.odd():
        dist.broadcast(b, src=0)  # <- odd
        dist.all_reduce(a)
    else:
        dist.all_reduce(a)  # <- rest
        dist.broadcast(b, src=0)
    return a.tolist()


@fault("mismatch", 3, field="shape", says="all_reduce")
def torch_iterates_in_its_own_order(at: At) -> Any:
    """A rank reduces gradients in another order"""
    grads = {"a": torch.ones(4), "b": torch.ones(9), "c": torch.ones(16)}
    for name in ["b", "a", "c"] if at.odd() else ["a", "b", "c"]:
        dist.all_reduce(grads[name])  # <- odd # <- rest
    return 0


@fault("mismatch", 0, field="shape", says="all_reduce")
def torch_starts_in_another_order(at: At) -> Any:
    """A rank starts two asynchronous dist.all_reduce in a different order"""
    small, large = torch.ones(2), torch.ones(64)
    works = [dist.all_reduce(x, async_op=True) for x in ([large, small] if at.odd() else [small, large])]  # <- odd # <- rest
    for work in works:
        work.wait()
    return small.tolist()


@fault("deadlock", 2, says=("all_gather", "all_reduce"))
def torch_swaps_with_the_library(at: At) -> Any:
    """A rank calls dist.all_reduce after a gather of the library's, the others before"""
    x, t = at.put(SQUARE, at.d.Shard(0)), torch.ones(4)
    if at.odd():
        x.full_tensor()  # <- odd
        dist.all_reduce(t)
    else:
        dist.all_reduce(t)  # <- rest
        x.full_tensor()
    return t.tolist()


@fault("deadlock", 3, mesh=SQUARE_MESH, says=("all_reduce", "barrier"))
def torch_barrier_before_a_row(at: At) -> Any:
    """A rank goes to dist.barrier before its row's all_reduce"""
    x = torch.ones(4)
    if at.odd():
        dist.barrier()  # <- odd
    at.group("dp").all_reduce(x)  # <- rest
    if not at.odd():
        dist.barrier()
    return x.tolist()


@fault("deadlock", 1, says=("all_reduce", "barrier"))
def torch_swaps_groups(at: At) -> Any:
    """A rank calls on a second group of all ranks first"""
    other, t = dist.new_group([0, 1, 2, 3]), torch.ones(4)
    if at.odd():
        dist.all_reduce(t, group=other)  # <- odd
        dist.barrier()
    else:
        dist.barrier()  # <- rest
        dist.all_reduce(t, group=other)
    return t.tolist()


# -- something else ----------------------------------------------------------------------------------------------------


@fault("mismatch", 2, field="reduction", says=("max", "sum"))
def torch_takes_the_maximum(at: At) -> Any:
    """A rank takes dist.ReduceOp.MAX where others sum"""
    t = torch.ones(4)
    dist.all_reduce(t, op=dist.ReduceOp.MAX if at.odd() else dist.ReduceOp.SUM)  # <- odd # <- rest
    return t.tolist()


@fault("mismatch", 1, field="shape", says="all_reduce")
def torch_has_a_shorter_buffer(at: At) -> Any:
    """A rank's buffer in dist.all_reduce is shorter"""
    t = torch.ones(3 if at.odd() else 4)
    dist.all_reduce(t)  # <- odd # <- rest
    return 0


@fault("mismatch", 3, field="dtype", says=("int32", "float32"))
def torch_has_another_dtype(at: At) -> Any:
    """A rank's buffer in dist.all_reduce is int32"""
    t = torch.ones(4, dtype=torch.int32 if at.odd() else torch.float32)
    dist.all_reduce(t)  # <- odd # <- rest
    return 0


@fault("mismatch", 0, field="dtype", says=("bfloat16", "float32"))
def torch_gathers_another_dtype(at: At) -> Any:
    """A rank gathers bfloat16 where others gather float32"""
    t = torch.ones(4, dtype=torch.bfloat16 if at.odd() else torch.float32)
    dist.all_gather_into_tensor(t.new_zeros(16), t)  # <- odd # <- rest
    return 0


@fault("mismatch", 2, field="shape", says="all_gather")
def torch_gathers_another_shape(at: At) -> Any:
    """A rank's part in dist.all_gather is larger"""
    t = torch.ones(5 if at.odd() else 4)
    dist.all_gather([torch.zeros_like(t) for _ in range(4)], t)  # <- odd # <- rest
    return 0


@fault("mismatch", 3, field="source", says="broadcast")
def torch_takes_itself_for_the_source(at: At) -> Any:
    """A rank passes itself as the source of dist.broadcast"""
    t = torch.ones(4)
    dist.broadcast(t, src=at.rank if at.odd() else 0)  # <- odd # <- rest
    return t.tolist()


@fault("mismatch", 2, field="operation", says=("reduce_scatter", "all_reduce"))
def torch_scatters_where_others_reduce(at: At) -> Any:
    """A rank calls dist.reduce_scatter_tensor where others call dist.all_reduce"""
    t = torch.ones(8)
    if at.odd():
        dist.reduce_scatter_tensor(torch.zeros(2), t)  # <- odd
    else:
        dist.all_reduce(t)  # <- rest
    return 0


@fault("mismatch", 1, field="reduction", says="reduce")
def torch_reduces_to_another_root(at: At) -> Any:
    """A rank reduces to another root"""
    t = torch.ones(4)
    dist.reduce(t, dst=1 if at.odd() else 0)  # <- odd # <- rest
    dist.barrier()
    return 0


@fault("mismatch", 3, field="operation", says=("gather", "barrier"))
def torch_does_not_gather(at: At) -> Any:
    """A rank calls dist.barrier where others gather to rank 0"""
    t = torch.ones(4)
    if at.odd():
        dist.barrier()  # <- odd
    else:
        dist.gather(t, [torch.zeros(4) for _ in range(4)] if at.rank == 0 else None)  # <- rest
        dist.barrier()
    return 0


@fault("mismatch", 2, field="operation", says=("scatter", "broadcast"))
def torch_does_not_scatter(at: At) -> Any:
    """A rank calls dist.broadcast where others scatter"""
    t = torch.ones(4)
    if at.odd():
        dist.broadcast(t, src=0)  # <- odd
    else:
        dist.scatter(t, [torch.ones(4)] * 4 if at.rank == 0 else None)  # <- rest
    dist.barrier()
    return 0


@fault("mismatch", 1, field="splits", says="all_to_all")
def torch_sends_more_than_expected(at: At) -> Any:
    """A rank sends more to another in dist.all_to_all_single than that one expects"""
    sent = [3, 1, 3, 3] if at.odd() else [1, 1, 1, 1]
    dist.all_to_all_single(torch.zeros(4), torch.ones(sum(sent)), None, sent)  # <- odd # <- rest
    return 0


@fault("mismatch", 0, field="operation", says=("all_to_all", "all_gather"))
def torch_gathers_where_others_exchange(at: At) -> Any:
    """A rank calls dist.all_gather_into_tensor where others call dist.all_to_all_single"""
    t = torch.ones(4)
    if at.odd():
        dist.all_gather_into_tensor(torch.zeros(16), t)  # <- odd
    else:
        dist.all_to_all_single(torch.zeros(4), t)  # <- rest
    return 0
