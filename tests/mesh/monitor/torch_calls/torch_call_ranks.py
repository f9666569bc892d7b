"""Programs of ranks whose own calls of torch.distributed are recorded, or not; see `forked.py`."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import shardmesh as sm
from shardmesh.mesh.monitor.torch_calls import cpp_calls, hooks
from tests.mesh.monitor.forked_ranks import rank

CLASSES = (dist.ProcessGroup, dist.Work, dist.Reducer, dist, functional)


def make_mesh() -> sm.DeviceMesh:
    return sm.init_device_mesh(
        "cpu", (dist.get_world_size() if dist.is_initialized() else 2,), axis_names=("x",)
    )


def world() -> Any:
    return dist.group.WORLD


def own_calls() -> list[tuple[str, str, int]]:
    """Return (group, call, sequence number) of this rank's calls on torch's groups."""
    return [
        (e.group, e.text, e.sequence)
        for e in sm.monitor.ledger().ranks[rank()].entries
        if "torch's" in e.group
    ]


def notes_everything_down() -> None:
    make_mesh()
    t = torch.ones(4)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    dist.broadcast(t, src=1)
    dist.barrier()
    (functional.all_reduce(t, "sum", world()) + 0).tolist()
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    work = dist.all_reduce(t, async_op=True)
    assert work is not None
    is_under_way = sm.monitor.ledger().ranks[rank()].entries[-1].end is None
    work.wait()
    is_over = sm.monitor.ledger().ranks[rank()].entries[-1].end is not None
    if rank() == 0:
        dist.send(t, 1, tag=3)
    else:
        dist.recv(torch.zeros(4), 0, tag=3)
    for group, text, sequence in own_calls():
        print(f"{sequence} {text} over {group}")
    print("under way", is_under_way, "over", is_over)


def is_put_back(how: str) -> None:
    """Check that torch is unchanged after the monitor has ended, or without one."""
    before = [dict(vars(owner)) for owner in CLASSES]
    mesh = make_mesh()
    patched = [
        name
        for owner, old in zip(CLASSES, before, strict=True)
        for name in old
        if vars(owner)[name] is not old[name]
    ]
    t = torch.ones(4)
    dist.all_reduce(t)
    if how != "destroyed":  # torch keeps groups on which functional collectives were called
        (functional.all_reduce(t, "sum", world()) + 0).tolist()
    if how == "stopped":
        hooks.stop()
    if how == "destroyed":
        group = weakref.ref(world())
        dist.destroy_process_group()
        assert mesh.world.monitor is not None
        mesh.world.monitor.close()
        assert group() is None, "the group lives on"
    else:
        dist.all_reduce(t)
    same = all(
        vars(owner)[name] is old[name]
        for owner, old in zip(CLASSES, before, strict=True)
        for name in old
    )
    print("patched", len(patched) > 20, "as before", same, "inner groups", len(cpp_calls._inner))


def shares_a_mesh_of_torchs() -> None:
    """Check that the library's collectives on torch's groups are recorded once."""
    theirs = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    sm.init_device_mesh("cpu", (2,), axis_names=("x",))
    group: Any = dist.new_group([0, 1])
    mesh = sm.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    x = torch.ones(4)
    for _ in range(3):
        mesh.group("dp").all_reduce(x)
    dist.all_reduce(x, group=group)
    print(
        "library",
        len(sm.monitor.ledger().ranks[rank()].entries) - len(own_calls()),
        "torch",
        len(own_calls()),
        theirs.ndim,
    )


def compiles() -> None:
    """Check that functional collectives in a graph of torch.compile are recorded, with the line
    that calls the graph.
    """
    make_mesh()
    group = world()
    f = torch.compile(
        lambda x: functional.all_reduce(x, "sum", group) + 1, backend="aot_eager", fullgraph=True
    )
    print("compiled", f(torch.ones(2)).tolist(), "calls", len(own_calls()))
    print(
        "at", [e.place for e in sm.monitor.ledger().ranks[rank()].entries if "torch's" in e.group]
    )


def goes_on_after_the_watch_has_given_up() -> None:
    mesh = make_mesh()
    monitor = mesh.world.monitor  # None as soon as the other rank has given up
    assert monitor is not None
    dist.all_reduce(torch.ones(4))
    monitor.give_up("a test")
    mesh.group("x").barrier()
    dist.all_reduce(torch.ones(4))
    print("went on")
