"""Collectives, bytes and memory of a graph before and after a pass, for the tests here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import shardmesh as sm
from shardmesh.mesh.comm.group import CollectiveRecord
from shardmesh.sharding.jit.passes.alias import MemoryUse, live_bytes
from tests.device import DEVICE
from tests.sharding.jit.passes.programs import OFF
from tests.sharding.parallel.compositions import (
    EVEN,
    Composition,
    adamw,
    batch,
    loss_of,
    parallelized,
    whole,
)
from tests.sharding.ranks import collectives

TP_SP = Composition("ddp", "sp", "global", EVEN, (1, 2))
HSDP = Composition("hsdp", "", "plain", EVEN, (2, 2))
FSDP = Composition("fsdp", "", "global", EVEN, (2,))


class Counted(NamedTuple):
    launches: int
    bytes: int
    peak: int
    values: list[Tensor]


def step_of(case: Composition, options: Any, autocast: bool = False, **layer: Any) -> Counted:
    """Train a composition with clipping; count the last call. `layer` are options of data
    parallelism.
    """
    mesh = sm.init_device_mesh(DEVICE, case.shape, axis_names=case.names)
    model = parallelized(case, mesh, **layer)
    model = model.float() if autocast else model
    optimizer = adamw(model)

    def step(inputs: Any, targets: Any) -> tuple[Any, Any]:
        with torch.autocast(DEVICE, torch.bfloat16, autocast):
            loss = loss_of(model(inputs), targets)
        loss.backward()
        norm = sm.training.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    return counted(
        step,
        options,
        [batch(case, mesh, i) for i in range(4)],
        lambda: [whole(p) for p in model.parameters()],
    )


def counted(
    f: Callable[..., Any],
    options: Any,
    calls: list[Any],
    state: Callable[[], list[Tensor]] = lambda: [],
) -> Counted:
    jitted = sm.jit(f, backend="eager", compiler_options=options)
    values, launches, received = [], 0, 0
    with collectives() as seen:
        for args in calls:
            seen.clear()
            result = jitted(*args)
            own = [record for record in seen if not is_agreement(record)]
            launches, received = len(own), sum(record.bytes_received for record in own)
            values += [whole(x) if isinstance(x, sm.ShardedTensor) else x for x in result]
    graph = jitted.recorded[-1].graph
    return Counted(
        launches, received, max(live_bytes(graph, MemoryUse(graph))), [*values, *state()]
    )


def is_agreement(record: CollectiveRecord) -> bool:
    """Return whether ranks agree by it on the graph of a call."""
    return record.op == "all_reduce" and record.dtype == torch.int64


def compared(
    case: Composition, name: str, value: Any = True, **how: Any
) -> tuple[Counted, Counted]:
    """Return the counts of rank 0 without and with a pass; check that values are equal."""
    simulated = sm.simulate(math.prod(case.shape))
    before = simulated(step_of)(case, OFF, **how)
    after = simulated(step_of)(case, OFF | {name: value}, **how)
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.values, other.values, strict=True))
    return before[0], after[0]


def on(
    size: int, f: Callable[..., list[Any]], name: str, value: Any = True, **more: Any
) -> tuple[Counted, Counted]:
    """Return the counts of `f(mesh, x)` without and with a pass, on ranks of one axis "a"; check
    that values are equal.
    """

    def main(options: Any) -> Counted:
        mesh = sm.init_device_mesh(DEVICE, (size,), axis_names=("a",))
        calls = [(torch.arange(12.0) + i + mesh.world.rank,) for i in range(3)]
        return counted(lambda x: f(mesh.group(), x), options, calls)

    before = sm.simulate(size)(main)(OFF)
    after = sm.simulate(size)(main)(OFF | {name: value} | more)
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.values, other.values, strict=True))
    return before[0], after[0]


def reduced(group: Any, x: Tensor) -> Tensor:
    out = x.clone()
    group.all_reduce(out)
    return out
