"""Programs that use the library and torch's groups, messages, object and functional collectives;
one rank diverges.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.faults.fault import fault
from tests.faults.rank_context import RankContext
from tests.faults.wrong_calls import SQUARE

# -- another group ---------------------------------------------------------------------------------


@fault("deadlock", 2, says="all_reduce")
def torch_calls_on_another_group(ctx: RankContext) -> Any:
    """A rank calls on another group of all ranks"""
    other, t = dist.new_group([0, 1, 2, 3]), torch.ones(4)
    dist.all_reduce(t, group=other if ctx.is_outlier() else None)  # <- outlier # <- others
    dist.barrier()  # <- outlier # <- others
    return 0


@fault(("deadlock", "left"), (2, 3), named=(), says="all_reduce")
def torch_confuses_groups(ctx: RankContext) -> Any:
    """Two ranks reduce over their half where the others reduce over all"""
    halves, t = [dist.new_group([0, 1]), dist.new_group([2, 3])], torch.ones(4)
    dist.all_reduce(t)
    if not ctx.is_outlier():
        dist.all_reduce(t)  # <- others
    dist.all_reduce(t, group=halves[ctx.rank // 2])
    if ctx.is_outlier():
        ctx.put(SQUARE, ctx.d.Shard(0)).full_tensor()
    return 0


@fault("mismatch", 1, named=(), field="operation", says=("all_reduce", "broadcast"))
def torch_differs_in_a_group_of_two(ctx: RankContext) -> Any:
    """In one of torch's groups of two ranks, one broadcasts where the other reduces"""
    halves, t = [dist.new_group([0, 1]), dist.new_group([2, 3])], torch.ones(4)
    group = halves[ctx.rank // 2]
    if ctx.is_outlier():
        dist.broadcast(t, src=0, group=group)  # <- outlier
    else:
        dist.all_reduce(t, group=group)  # <- others
    dist.barrier()
    return 0


# -- messages --------------------------------------------------------------------------------------


@fault(("deadlock", "mismatch", "left"), 0, named=(), says=("send", "rank 1"))
def torch_sends_without_a_receiver(ctx: RankContext) -> Any:
    """A rank sends without a receiver"""
    if ctx.is_outlier():
        dist.send(torch.ones(4), 1)  # <- outlier
    dist.barrier()  # <- others
    return 0


@fault(("deadlock", "mismatch", "left"), 1, named=(), says=("send", "rank 1"))
def torch_does_not_receive(ctx: RankContext) -> Any:
    """A rank does not receive what another sends"""
    t = torch.ones(4)
    if ctx.rank == 0:
        dist.send(t, 1)  # <- others
    if ctx.rank == 1 and not ctx.is_outlier():
        dist.recv(t, 0)
    dist.barrier()  # <- outlier
    return t.tolist()


@fault(("deadlock", "mismatch", "left"), 2, named=(), says=("recv", "rank 3"))
def torch_receives_what_nobody_sends(ctx: RankContext) -> Any:
    """A rank receives from another that does not send"""
    t = torch.ones(4)
    if ctx.is_outlier():
        dist.recv(t, 3)  # <- outlier
    dist.all_reduce(t)  # <- others
    return t.tolist()


@fault(("deadlock", "mismatch", "left"), 2, says=("recv", "send"))
def torch_leaves_the_ring(ctx: RankContext) -> Any:
    """A rank does not take part in a ring of messages"""
    t, found = torch.ones(4), torch.zeros(4)
    if not ctx.is_outlier():
        work = dist.isend(t, (ctx.rank + 1) % 4)
        dist.recv(found, (ctx.rank - 1) % 4)  # <- others
        work.wait()
    dist.barrier()  # <- outlier
    return found.tolist()


@fault("mismatch", 0, named=(), field="shape", says=("send", "recv"))
def torch_sends_too_much(ctx: RankContext) -> Any:
    """A rank sends more than the receive buffer holds"""
    if ctx.rank == 0:
        dist.send(torch.ones(8 if ctx.is_outlier() else 4), 1)  # <- outlier
    if ctx.rank == 1:
        dist.recv(torch.zeros(4), 0)  # <- others
    dist.barrier()
    return 0


@fault(("deadlock", "mismatch"), 3, named=(), says="recv")
def torch_sends_to_another(ctx: RankContext) -> Any:
    """A rank sends to another rank than the one that receives"""
    t = torch.ones(4)
    if ctx.rank == 3:
        dist.send(t, 1 if ctx.is_outlier() else 2)  # <- outlier
    if ctx.rank == 2:
        dist.recv(t, 3)  # <- others
    dist.barrier()
    return t.tolist()


# -- objects and functional collectives ------------------------------------------------------------


@fault("mismatch", 1, field=("operation", "dtype"), says=("all_gather", "barrier"))
def torch_skips_objects(ctx: RankContext) -> Any:
    """A rank skips dist.all_gather_object"""
    found = [None] * 4
    if not ctx.is_outlier():
        dist.all_gather_object(found, {"rank": ctx.rank})  # <- others
    dist.barrier()  # <- outlier
    return found


@fault("mismatch", 0, field="operation", says=("broadcast", "all_gather"))
def torch_broadcasts_objects_where_others_gather(ctx: RankContext) -> Any:
    """A rank calls dist.broadcast_object_list where others call dist.all_gather_object"""
    found = [None] * 4
    if ctx.is_outlier():
        dist.broadcast_object_list(found, src=0)  # <- outlier
    else:
        dist.all_gather_object(found, ctx.rank)  # <- others
    return 0


@fault("mismatch", 2, field=("operation", "dtype", "shape"), says=("broadcast", "all_reduce"))
def torch_skips_objects_before_a_reduction(ctx: RankContext) -> Any:
    """A rank skips dist.broadcast_object_list"""
    found, t = [ctx.rank], torch.ones(4)
    if not ctx.is_outlier():
        dist.broadcast_object_list(found, src=0)  # <- others
    dist.all_reduce(t)  # <- outlier
    return found


@fault("mismatch", 3, field="operation", says=("all_reduce", "all_gather"))
def torch_functional_calls_differ(ctx: RankContext) -> Any:
    """A rank calls another functional collective"""
    t = torch.ones(4)
    if ctx.is_outlier():
        found = functional.all_gather_tensor(t, 0, dist.group.WORLD)  # <- outlier
    else:
        found = functional.all_reduce(t, "sum", dist.group.WORLD)  # <- others
    return (found + 0).shape[0]


@fault("mismatch", 1, field="operation", says=("all_reduce", "barrier"))
def torch_skips_a_functional_call(ctx: RankContext) -> Any:
    """A rank skips a functional all_reduce"""
    t = torch.ones(4)
    if not ctx.is_outlier():
        t = functional.all_reduce(t, "sum", dist.group.WORLD) + 0  # <- others
    dist.barrier()  # <- outlier
    return t.shape[0]


@fault("mismatch", 2, field="shape", says="all_reduce")
def torch_functional_shape_differs(ctx: RankContext) -> Any:
    """A rank's tensor in a functional all_reduce is longer"""
    t = torch.ones(6 if ctx.is_outlier() else 4)
    return (functional.all_reduce(t, "sum", dist.group.WORLD) + 0).dim()  # <- outlier # <- others


@fault("deadlock", 0, says=("all_gather", "all_reduce"))
def torch_gather_during_a_functional_reduction(ctx: RankContext) -> Any:
    """Rank 0 gathers with the library while the others are in a functional all_reduce"""
    x, t = ctx.put(SQUARE, ctx.d.Shard(0)), torch.ones(4)
    if ctx.is_outlier():
        x.full_tensor()  # <- outlier
    found = functional.all_reduce(t, "sum", dist.group.WORLD)  # <- others
    return (found + 0).tolist()
