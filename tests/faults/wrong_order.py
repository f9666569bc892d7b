"""Programs in which a rank calls the right collectives in another order, or on another mesh axis."""

from __future__ import annotations

from typing import Any

import torch

from tests.faults.at import At
from tests.faults.fault import fault
from tests.faults.wrong_calls import SQUARE, SQUARE_MESH

# -- within one group --------------------------------------------------------------------------------------------------


@fault("mismatch", field="operation", says=("all_gather", "all_to_all"))
def swaps_two_collectives(at: At) -> Any:
    """A rank calls two collectives in a different order"""
    x = at.put(SQUARE, at.d.Shard(0))
    if at.odd():
        part = x.redistribute(at.mesh, [at.d.Shard(1)])  # <- odd
        whole = x.full_tensor()
    else:
        whole = x.full_tensor()  # <- rest
        part = x.redistribute(at.mesh, [at.d.Shard(1)])
    return whole.sum().item() + part.to_local().sum().item()


@fault("mismatch", field="lineage", says="all_gather")
def swaps_two_gathers(at: At) -> Any:
    """A rank gathers two tensors of the same shape in a different order"""
    x = at.put(SQUARE, at.d.Shard(0))
    a, b = x * 2, x + 1
    if at.odd():
        a, b = b, a
    found = a.full_tensor() - 2 * b.full_tensor()  # <- odd # <- rest
    return found.sum().item()


@fault("mismatch", 1, field="lineage", says="all_reduce")
def swaps_two_reductions(at: At) -> Any:
    """A rank reduces two pending values in a different order"""
    x = at.put(SQUARE, at.d.Shard(0))
    loss, norm = x.sum(), (x * x).sum()
    if at.odd():
        loss, norm = norm, loss
    return [loss.full_tensor().item(), norm.full_tensor().item()]  # <- odd # <- rest


@fault("mismatch", 3, field="lineage", says="all_gather")
def iterates_in_its_own_order(at: At) -> Any:
    """A rank iterates over the parameters in a different order, as with a set or a directory"""
    weights = {name: at.put(SQUARE + n, at.d.Shard(0)) for n, name in enumerate("abc")}
    names = ["b", "a", "c"] if at.odd() else ["a", "b", "c"]
    return {name: weights[name].full_tensor()[0, 0].item() for name in names}  # <- odd # <- rest


@fault("mismatch", 0, field="shape", says="all_reduce")
def starts_in_another_order(at: At) -> Any:
    """A rank starts two asynchronous collectives in a different order"""
    small, large = torch.ones(2), torch.ones(64)
    order = [large, small] if at.odd() else [small, large]
    works = [at.group().all_reduce(x, async_op=True) for x in order]  # <- odd # <- rest
    for work in works:
        work.wait()
    return small.tolist()


# -- over several groups -----------------------------------------------------------------------------------------------


@fault("deadlock", mesh=SQUARE_MESH, says="all_reduce")
def reduces_over_another_axis(at: At) -> Any:
    """A rank reduces over tp where others reduce over dp, then all ranks reduce"""
    x = torch.ones(4)
    at.group("tp" if at.odd() else "dp").all_reduce(x)  # <- odd # <- rest
    at.group().all_reduce(x)  # <- rest
    return x.tolist()


@fault("mismatch", blamed=(), mesh=SQUARE_MESH, field=("layout", "lineage"), says="all_reduce")
def takes_axes_in_another_order(at: At) -> Any:
    """A rank reduces over dp, then tp; the others over tp, then dp"""
    x = at.d.DTensor.from_local(SQUARE * at.rank, at.mesh, [at.d.Partial(), at.d.Partial()])
    between = [at.d.Replicate(), at.d.Partial()] if at.odd() else [at.d.Partial(), at.d.Replicate()]
    x = x.redistribute(at.mesh, between)  # <- odd # <- rest
    return x.full_tensor().sum().item()  # <- odd # <- rest


@fault("deadlock", (0, 3), blamed=(), mesh=SQUARE_MESH, says="all_gather")
def each_waits_for_the_next(at: At) -> Any:
    """Ranks wait for each other in a cycle: half gather over dp first, half over tp"""
    x = at.put(SQUARE, at.d.Shard(0), at.d.Shard(1))
    rows = [at.d.Replicate(), at.d.Shard(1)]
    columns = [at.d.Shard(0), at.d.Replicate()]
    for there in (columns, rows) if at.odd() else (rows, columns):
        x.redistribute(at.mesh, there)  # <- odd # <- rest
    return x.to_local().sum().item()


@fault("deadlock", 3, mesh=SQUARE_MESH, says=("barrier", "all_reduce"))
def meets_all_too_early(at: At) -> Any:
    """A rank calls the barrier of all ranks before its group's all_reduce"""
    x = torch.ones(4)
    if at.odd():
        at.group().barrier()  # <- odd
    at.group("dp").all_reduce(x)  # <- rest
    if not at.odd():
        at.group().barrier()
    return x.tolist()


@fault("mismatch", 1, blamed=(), field="operation", mesh=SQUARE_MESH, says=("all_gather", "all_reduce"))
def differs_in_a_group_of_two(at: At) -> Any:
    """One of the two ranks of a tp group gathers where its partner reduces"""
    x, out = torch.ones(4), torch.zeros(8)
    if at.odd():
        at.group("tp").all_gather(out, x)  # <- odd
    else:
        at.group("tp").all_reduce(x)  # <- rest
    at.group("dp").all_reduce(x)
    return x.tolist()


@fault("mismatch", blamed=(), mesh=SQUARE_MESH, field=("operation", "layout", "shape"), says="all_gather")
def gathers_over_another_axis(at: At) -> Any:
    """A rank gathers over tp instead of dp in a redistribute of all ranks"""
    x = at.put(SQUARE, at.d.Shard(0), at.d.Shard(1))
    there = [at.d.Shard(0), at.d.Replicate()] if at.odd() else [at.d.Replicate(), at.d.Shard(1)]
    y = x.redistribute(at.mesh, there)  # <- odd # <- rest
    return y.full_tensor().sum().item()  # <- rest
