"""Programs in which a rank calls a different collective, or the same one with different arguments."""

from __future__ import annotations

from typing import Any

import torch

from tests.faults.at import At
from tests.faults.fault import fault

SQUARE = torch.arange(64.0).reshape(8, 8)
SQUARE_MESH = {"dp": 2, "tp": 2}


# -- one call too few or too many --------------------------------------------------------------------------------------


@fault("mismatch", field="operation", says=("all_gather", "all_to_all"))
def skips_a_redistribute(at: At) -> Any:
    """A rank skips a redistribute"""
    x = at.put(SQUARE, at.d.Shard(0))
    if not at.odd():
        x.redistribute(at.mesh, [at.d.Replicate()])  # <- rest
    return x.redistribute(at.mesh, [at.d.Shard(1)]).to_local().sum().item()  # <- odd


@fault("mismatch", 1, field="operation", says=("all_gather", "all_to_all"))
def repeats_a_redistribute(at: At) -> Any:
    """A rank calls full_tensor twice"""
    x = at.put(SQUARE, at.d.Shard(0))
    whole = x.full_tensor()
    if at.odd():
        whole += x.full_tensor()  # <- odd
    part = x.redistribute(at.mesh, [at.d.Shard(1)])  # <- rest
    return whole.sum().item() + part.to_local().sum().item()


@fault("mismatch", 0, field="operation", says=("all_gather", "all_reduce"))
def prints_the_full_tensor_alone(at: At) -> Any:
    """Rank 0 prints full_tensor()"""
    x = at.put(SQUARE, at.d.Shard(0))
    if at.odd():
        print(x.full_tensor())  # <- odd
    total = x.sum().full_tensor()  # <- rest
    return total.item()


@fault("mismatch", 0, field="operation", says=("all_reduce", "all_gather"))
def reads_the_loss_alone(at: At) -> Any:
    """Rank 0 logs loss.item()"""
    x = at.put(SQUARE, at.d.Shard(0))
    loss = x.mean()
    if at.odd():
        print(loss.item())  # <- odd
    whole = x.full_tensor()  # <- rest
    return whole.sum().item()


@fault("mismatch", 0, field=("shape", "lineage"), says="all_gather")
def saves_the_weights_alone(at: At) -> Any:
    """Rank 0 gathers the state dict to save it, the others continue"""
    weights = [at.put(SQUARE[: 4 * n], at.d.Shard(0)) for n in (1, 2)]
    if at.odd():
        saved = [w.full_tensor() for w in weights]  # <- odd
        print(len(saved))
    step = weights[1].full_tensor()  # <- rest
    return step.sum().item()


@fault("mismatch", 3, field="lineage", says="all_gather")
def skips_one_of_several_weights(at: At) -> Any:
    """A rank skips one of four gathers of the same shape"""
    weights = [at.put(SQUARE + n, at.d.Shard(0)) for n in range(4)]
    total = 0.0
    for n, w in enumerate(weights):
        if n == 1 and at.odd():
            continue
        total += (n + 1) * w.full_tensor().sum().item()  # <- odd # <- rest
    return total


@fault("mismatch", field="lineage", says="all_gather")
def skips_a_step_of_a_loop(at: At) -> Any:
    """A rank skips the collective in one iteration of a loop"""
    x = at.put(SQUARE, at.d.Shard(0))
    total = 0.0
    for turn in range(5):
        x = x + 1
        if turn == 2 and at.odd():
            continue
        total += x.full_tensor()[0, 0].item()  # <- odd # <- rest
    return total


@fault("mismatch", field="operation", says=("broadcast", "all_reduce"))
def reduces_twice(at: At) -> Any:
    """A rank calls an all_reduce in place twice"""
    group, counts, best = at.group(), torch.ones(4), torch.full((4,), float(at.rank))
    group.all_reduce(counts)
    if at.odd():
        group.all_reduce(counts)  # <- odd
    group.broadcast(best, src=0)  # <- rest
    return counts.tolist() + best.tolist()


@fault("mismatch", 3, field="operation", says=("all_to_all", "all_reduce"))
def follows_its_own_data(at: At) -> Any:
    """A rank takes a branch that depends on its own part"""
    x = at.put(SQUARE, at.d.Shard(0))
    threshold = 1000 if at.odd() else -1
    if x.to_local()[0, 0].item() > threshold:
        x = x.redistribute(at.mesh, [at.d.Shard(1)])  # <- rest
    return x.sum().full_tensor().item()  # <- odd


@fault("mismatch", 1, field="lineage", says="all_gather")
def drops_a_layer(at: At) -> Any:
    """Layers are dropped at random, and one rank draws different numbers"""
    kept = (1, 3) if at.odd() else (1, 2)
    layers = {n: at.put(torch.eye(8) * n, at.d.Shard(0)) for n in (1, 2, 3)}
    x = at.put(SQUARE / 64, at.d.Shard(0))
    for n in kept:
        x = x @ layers[n]  # <- odd # <- rest
    return x.to_local().sum().item()


# -- the same call with other arguments --------------------------------------------------------------------------------


@fault("mismatch", field=("operation", "layout"), says=("all_gather", "all_to_all"))
def redistributes_elsewhere(at: At) -> Any:
    """A rank passes another placement"""
    x = at.put(SQUARE, at.d.Shard(0))
    where = at.d.Shard(1) if at.odd() else at.d.Replicate()
    return x.redistribute(at.mesh, [where]).to_local().sum().item()  # <- odd # <- rest


@fault("mismatch", field="layout", says="reduce_scatter")
def scatters_another_dim(at: At) -> Any:
    """A rank reduces into Shard(1) instead of Shard(0)"""
    x = at.d.DTensor.from_local(SQUARE, at.mesh, [at.d.Partial()])
    dim = 1 if at.odd() else 0
    return x.redistribute(at.mesh, [at.d.Shard(dim)]).to_local().sum().item()  # <- odd # <- rest


@fault("mismatch", 1, field=("layout", "lineage"), says="all_gather")
def gathers_another_dim(at: At) -> Any:
    """A rank holds columns, the others rows"""
    dim = 1 if at.odd() else 0
    x = at.put(SQUARE, at.d.Shard(dim))
    return x.full_tensor().sum().item()  # <- odd # <- rest


@fault("mismatch", field="dtype", says=("bfloat16", "float32"))
def gathers_another_dtype(at: At) -> Any:
    """A rank's tensor is bfloat16"""
    dtype = torch.bfloat16 if at.odd() else torch.float32
    x = at.put(SQUARE.to(dtype), at.d.Shard(0))
    return x.full_tensor().sum().item()  # <- odd # <- rest


@fault("mismatch", 3, field="dtype", says="all_reduce")
def reduces_another_dtype(at: At) -> Any:
    """A rank's buffer is int32 instead of float32: as many bytes"""
    x = torch.ones(16, dtype=torch.int32 if at.odd() else torch.float32)
    at.group().all_reduce(x)  # <- odd # <- rest
    return x.tolist()


@fault("mismatch", 1, field="dtype", says="all_reduce")
def casts_in_autocast(at: At) -> Any:
    """A rank alone computes the loss in float64"""
    x = at.put(SQUARE, at.d.Shard(0))
    if at.odd():
        x = x.double()
    return x.sum().full_tensor().item()  # <- odd # <- rest


@fault("mismatch", field="reduction", says=("max", "sum"))
def reduces_by_maximum(at: At) -> Any:
    """A rank takes the maximum where others sum"""
    x = torch.arange(4.0) * at.rank
    at.group().all_reduce(x, "max" if at.odd() else "sum")  # <- odd # <- rest
    return x.tolist()


@fault("mismatch", 0, field=("reduction", "layout"), says="all_reduce")
def declares_a_maximum(at: At) -> Any:
    """A rank declares its part Partial("max") instead of Partial("sum")"""
    kind = "max" if at.odd() else "sum"
    x = at.d.DTensor.from_local(SQUARE * (at.rank + 1), at.mesh, [at.d.Partial(kind)])
    return x.full_tensor().sum().item()  # <- odd # <- rest


@fault("mismatch", 3, field=("reduction", "layout"), says="all_reduce")
def declares_an_average(at: At) -> Any:
    """A rank declares Partial("avg") instead of Partial("sum")"""
    kind = "avg" if at.odd() else "sum"
    x = at.d.DTensor.from_local(SQUARE, at.mesh, [at.d.Partial(kind)])
    return x.full_tensor().sum().item()  # <- odd # <- rest


@fault("mismatch", field="shape", says="all_reduce")
def reduces_fewer_elements(at: At) -> Any:
    """A rank's buffer is shorter"""
    x = torch.ones(24 if at.odd() else 32)
    at.group().all_reduce(x)  # <- odd # <- rest
    return x.sum().item()


@fault("mismatch", 1, field="shape", says="all_gather")
def gathers_another_shape(at: At) -> Any:
    """A rank's tensor is [4, 16] instead of [8, 8]: as many elements"""
    shape = (4, 16) if at.odd() else (8, 8)
    x = at.put(SQUARE.reshape(shape), at.d.Shard(0))
    return x.full_tensor()[0].tolist()  # <- odd # <- rest


@fault("mismatch", 0, field="shape", says="all_reduce")
def has_another_width(at: At) -> Any:
    """A rank read a different configuration: its model is wider"""
    width = 16 if at.odd() else 8
    x, w = at.put(torch.ones(8, width), at.d.Shard(1)), at.put(torch.ones(width, width), at.d.Shard(0))
    return (x @ w).full_tensor().sum().item()  # <- odd # <- rest


@fault("mismatch", field="source", says="broadcast")
def broadcasts_from_itself(at: At) -> Any:
    """A rank passes itself as the source of a broadcast"""
    x = torch.full((4,), float(at.rank))
    at.group().broadcast(x, src=at.rank if at.odd() else 0)  # <- odd # <- rest
    return x.tolist()


@fault("mismatch", field=("source", "destination", "route"), says="permute")
def sends_the_other_way(at: At) -> Any:
    """A rank sends round the ring in the other direction"""
    turn = -1 if at.odd() else 1
    out, x = torch.zeros(4), torch.full((4,), float(at.rank))
    at.group().permute(out, x, dst=(at.rank + turn) % 4, src=(at.rank - turn) % 4)  # <- odd # <- rest
    return out.tolist()


@fault("mismatch", 1, field=("shape", "splits"), says="all_to_all")
def sends_other_sizes(at: At) -> Any:
    """A rank sends more tokens to an expert than that one expects"""
    sizes = [1, 1, 2, 0] if at.odd() else [1, 1, 1, 1]
    out = torch.zeros(4)
    at.group().all_to_all(out, torch.ones(4), [1, 1, 1, 1], sizes)  # <- odd # <- rest
    return out.tolist()


@fault("mismatch", field="operation", says=("barrier", "all_reduce"))
def waits_at_a_barrier(at: At) -> Any:
    """A rank calls a barrier where others reduce"""
    x = torch.ones(8)
    if at.odd():
        at.group().barrier()  # <- odd
    at.group().all_reduce(x)  # <- rest
    return x.sum().item()


@fault("mismatch", 1, field="operation", says=("reduce_scatter", "all_reduce"))
def scatters_instead(at: At) -> Any:
    """A rank calls reduce_scatter where others all_reduce"""
    x, part = torch.ones(8), torch.zeros(2)
    if at.odd():
        at.group().reduce_scatter(part, x)  # <- odd
    else:
        at.group().all_reduce(x)  # <- rest
    return x.sum().item()


@fault("mismatch", 3, field="operation", says=("all_gather_object", "broadcast"))
def exchanges_objects_alone(at: At) -> Any:
    """A rank collects objects where others broadcast"""
    x = torch.ones(4)
    if at.odd():
        at.group().all_gather_object({"rank": at.rank})  # <- odd
    at.group().broadcast(x, src=0)  # <- rest
    return x.tolist()


# -- equal votes -------------------------------------------------------------------------------------------------------


@fault("mismatch", (2, 3), blamed=(), field="operation", says=("all_gather", "all_to_all"))
def two_against_two(at: At) -> Any:
    """Two ranks redistribute to another layout than the other two"""
    x = at.put(SQUARE, at.d.Shard(0))
    if at.odd():
        x = x.redistribute(at.mesh, [at.d.Shard(1)])  # <- odd
    else:
        x = x.redistribute(at.mesh, [at.d.Replicate()])  # <- rest
    return x.to_local().sum().item()


@fault("mismatch", (1, 3), blamed=(), field="dtype", says="all_reduce")
def two_dtypes(at: At) -> Any:
    """Two ranks reduce float64, two float32"""
    x = torch.ones(4, dtype=torch.float64 if at.odd() else torch.float32)
    at.group().all_reduce(x)  # <- odd # <- rest
    return x.tolist()


@fault("mismatch", 1, blamed=(), field="reduction", says="all_reduce", mesh=SQUARE_MESH)
def one_against_one(at: At) -> Any:
    """In a group of two ranks, one reduces by product"""
    x = torch.full((4,), 3.0)
    group = at.group("tp")
    group.all_reduce(x, "product" if at.odd() else "sum")  # <- odd # <- rest
    at.group().all_reduce(x)
    return x.tolist()
