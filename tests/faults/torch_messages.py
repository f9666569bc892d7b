"""Programs that use the library and torch's groups, messages, object and functional collectives; one rank diverges."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.faults.at import At
from tests.faults.fault import fault
from tests.faults.wrong_calls import SQUARE

# -- another group -----------------------------------------------------------------------------------------------------


@fault("deadlock", 2, says="all_reduce")
def torch_calls_on_another_group(at: At) -> Any:
    """A rank calls on another group of all ranks"""
    other, t = dist.new_group([0, 1, 2, 3]), torch.ones(4)
    dist.all_reduce(t, group=other if at.odd() else None)  # <- odd # <- rest
    dist.barrier()  # <- odd # <- rest
    return 0


@fault(("deadlock", "left"), (2, 3), blamed=(), says="all_reduce")
def torch_mixes_up_halves(at: At) -> Any:
    """Two ranks reduce over their half where the others reduce over all"""
    halves, t = [dist.new_group([0, 1]), dist.new_group([2, 3])], torch.ones(4)
    dist.all_reduce(t)
    if not at.odd():
        dist.all_reduce(t)  # <- rest
    dist.all_reduce(t, group=halves[at.rank // 2])
    if at.odd():
        at.put(SQUARE, at.d.Shard(0)).full_tensor()
    return 0


@fault("mismatch", 1, blamed=(), field="operation", says=("all_reduce", "broadcast"))
def torch_differs_in_a_group_of_two(at: At) -> Any:
    """In one of torch's groups of two ranks, one broadcasts where the other reduces"""
    halves, t = [dist.new_group([0, 1]), dist.new_group([2, 3])], torch.ones(4)
    group = halves[at.rank // 2]
    if at.odd():
        dist.broadcast(t, src=0, group=group)  # <- odd
    else:
        dist.all_reduce(t, group=group)  # <- rest
    dist.barrier()
    return 0


# -- messages ----------------------------------------------------------------------------------------------------------


@fault(("deadlock", "mismatch", "left"), 0, blamed=(), says=("send", "rank 1"))
def torch_sends_without_a_receiver(at: At) -> Any:
    """A rank sends what nobody receives"""
    if at.odd():
        dist.send(torch.ones(4), 1)  # <- odd
    dist.barrier()  # <- rest
    return 0


@fault(("deadlock", "mismatch", "left"), 1, blamed=(), says=("send", "rank 1"))
def torch_does_not_receive(at: At) -> Any:
    """A rank does not receive what another sends"""
    t = torch.ones(4)
    if at.rank == 0:
        dist.send(t, 1)  # <- rest
    if at.rank == 1 and not at.odd():
        dist.recv(t, 0)
    dist.barrier()  # <- odd
    return t.tolist()


@fault(("deadlock", "mismatch", "left"), 2, blamed=(), says=("recv", "rank 3"))
def torch_receives_what_nobody_sends(at: At) -> Any:
    """A rank receives from another that does not send"""
    t = torch.ones(4)
    if at.odd():
        dist.recv(t, 3)  # <- odd
    dist.all_reduce(t)  # <- rest
    return t.tolist()


@fault(("deadlock", "mismatch", "left"), 2, says=("recv", "send"))
def torch_leaves_the_ring(at: At) -> Any:
    """A rank takes no part in a ring of messages"""
    t, found = torch.ones(4), torch.zeros(4)
    if not at.odd():
        work = dist.isend(t, (at.rank + 1) % 4)
        dist.recv(found, (at.rank - 1) % 4)  # <- rest
        work.wait()
    dist.barrier()  # <- odd
    return found.tolist()


@fault("mismatch", 0, blamed=(), field="shape", says=("send", "recv"))
def torch_sends_too_much(at: At) -> Any:
    """A rank sends more than the other has room for"""
    if at.rank == 0:
        dist.send(torch.ones(8 if at.odd() else 4), 1)  # <- odd
    if at.rank == 1:
        dist.recv(torch.zeros(4), 0)  # <- rest
    dist.barrier()
    return 0


@fault(("deadlock", "mismatch"), 3, blamed=(), says="recv")
def torch_sends_to_another(at: At) -> Any:
    """A rank sends to another one than the one that waits for it"""
    t = torch.ones(4)
    if at.rank == 3:
        dist.send(t, 1 if at.odd() else 2)  # <- odd
    if at.rank == 2:
        dist.recv(t, 3)  # <- rest
    dist.barrier()
    return t.tolist()


# -- objects and functional collectives --------------------------------------------------------------------------------


@fault("mismatch", 1, field=("operation", "dtype"), says=("all_gather", "barrier"))
def torch_skips_objects(at: At) -> Any:
    """A rank skips dist.all_gather_object"""
    found = [None] * 4
    if not at.odd():
        dist.all_gather_object(found, {"rank": at.rank})  # <- rest
    dist.barrier()  # <- odd
    return found


@fault("mismatch", 0, field="operation", says=("broadcast", "all_gather"))
def torch_broadcasts_objects_where_others_gather(at: At) -> Any:
    """A rank calls dist.broadcast_object_list where others call dist.all_gather_object"""
    found = [None] * 4
    if at.odd():
        dist.broadcast_object_list(found, src=0)  # <- odd
    else:
        dist.all_gather_object(found, at.rank)  # <- rest
    return 0


@fault("mismatch", 2, field=("operation", "dtype", "shape"), says=("broadcast", "all_reduce"))
def torch_skips_objects_before_a_reduction(at: At) -> Any:
    """A rank skips dist.broadcast_object_list"""
    found, t = [at.rank], torch.ones(4)
    if not at.odd():
        dist.broadcast_object_list(found, src=0)  # <- rest
    dist.all_reduce(t)  # <- odd
    return found


@fault("mismatch", 3, field="operation", says=("all_reduce", "all_gather"))
def torch_functional_calls_differ(at: At) -> Any:
    """A rank calls another functional collective"""
    t = torch.ones(4)
    if at.odd():
        found = functional.all_gather_tensor(t, 0, dist.group.WORLD)  # <- odd
    else:
        found = functional.all_reduce(t, "sum", dist.group.WORLD)  # <- rest
    return (found + 0).shape[0]


@fault("mismatch", 1, field="operation", says=("all_reduce", "barrier"))
def torch_skips_a_functional_call(at: At) -> Any:
    """A rank skips a functional all_reduce"""
    t = torch.ones(4)
    if not at.odd():
        t = functional.all_reduce(t, "sum", dist.group.WORLD) + 0  # <- rest
    dist.barrier()  # <- odd
    return t.shape[0]


@fault("mismatch", 2, field="shape", says="all_reduce")
def torch_functional_shape_differs(at: At) -> Any:
    """A rank's tensor in a functional all_reduce is longer"""
    t = torch.ones(6 if at.odd() else 4)
    return (functional.all_reduce(t, "sum", dist.group.WORLD) + 0).dim()  # <- odd # <- rest


@fault("deadlock", 0, says=("all_gather", "all_reduce"))
def torch_functional_beside_the_library(at: At) -> Any:
    """Rank 0 gathers with the library while the others are in a functional all_reduce"""
    x, t = at.put(SQUARE, at.d.Shard(0)), torch.ones(4)
    if at.odd():
        x.full_tensor()  # <- odd
    found = functional.all_reduce(t, "sum", dist.group.WORLD)  # <- rest
    return (found + 0).tolist()
