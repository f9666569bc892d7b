"""Plans through memory that ranks share: four processes, CPU memory, kernels in Triton's
interpreter.
"""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh import current_world
from shardmesh.mesh.comm import symmetric_memory
from shardmesh.mesh.topology import Link
from shardmesh.sharding.redistribute.plan.traffic import plan_bytes_received
from tests.device import DEVICE
from tests.kernels import shared_memory
from tests.sharding import reference
from tests.sharding.ranks import collectives, launched

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="shares CPU memory")

FREE = Link(1e-9, 1e15)  # so that shared memory is always the cheapest
SPECS = (
    P("s"),
    P("t", "s"),
    P(None, "t"),
    P(("t", "s")),
    P(("s", "t"), None),
    P(),
    P(unreduced={"s"}),
    P("t", unreduced={"s"}),
    P(None, "s", unreduced={"t"}),
    P(unreduced={"s", "t"}),
)

GROUP_OP = {"all_to_all_v": "all_to_all", "all_to_all_reduce": "all_to_all"}


@pytest.fixture(scope="module")
def folder(world4):
    """Folder for the files of groups; groups that share memory exist only during the test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as path:
        yield path
        world4(share_nothing)


def share_nothing() -> None:
    symmetric_memory.PROVIDERS.pop("cpu", None)
    for group in current_world()._groups.values():
        group.shared.clear()
    share_cpu_memory.cache_clear()


@cache
def share_cpu_memory(folder: str) -> None:
    """Make the groups of this process share memory in files, one per group."""
    share_nothing()

    def provide(group, device, tag):
        path = Path(folder, "-".join(map(str, group.ranks)))
        if group.rank == 0:
            with path.open("wb") as file:
                file.truncate(group.size * ((1 << 22) + shared_memory.PAD_BYTES))
        group.barrier()
        return shared_memory.peers_of(
            shared_memory.SharedMemory(str(path), group.size, 1 << 22, 1 << 18, 1e-4), group.rank
        )

    shared_memory.sleep_after_polls()
    shared_memory.speed_up_interpreter()
    shared_memory.set_pause(lambda: 1e-4)
    symmetric_memory.PROVIDERS["cpu"] = provide


def meshes(folder):
    """Return the same ranks as a mesh with shared memory and as one without."""
    share_cpu_memory(folder)
    shared, plain = (
        sm.init_device_mesh("cpu", (2, 2), axis_names=names) for names in (("s", "t"), ("a", "b"))
    )
    shared.topology = replace(shared.topology, symmetric=FREE)
    for axes in ("s", "t", ("s", "t")):
        symmetric_memory.peers_of(shared.group(axes), shared.device)  # communicates the first time
    return shared, plain


def on_plain(spec):
    """Return the same spec on the axes of the other mesh."""
    name = {"s": "a", "t": "b"}
    dims = [
        tuple(name[a] for a in (dim if isinstance(dim, tuple) else (dim,) if dim else ()))
        for dim in spec.dims
    ]
    return P(*dims, unreduced={name[a]: kind for a, kind in spec.unreduced})


def any_move(folder, seed):
    shared, plain = meshes(folder)
    rng = random.Random(seed)
    for _ in range(14):
        shape = (rng.choice([1, 5, 6, 8]), rng.choice([2, 3, 16]))
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float64])
        src, dst = rng.sample(SPECS, 2)
        before, after = (sm.Layout.of(shared, spec, shape, dtype) for spec in (src, dst))
        other = [sm.Layout.of(plain, on_plain(spec), shape, dtype) for spec in (src, dst)]
        local = reference.local_part(
            reference.contributions(shared, before.spec, shape, seed), before
        ).to(dtype)
        explained = sm.debug.explain(before, after)
        moves = [step for step in explained.steps if not step.is_local]
        assert all(step.symmetric is not None for step in moves)
        assert not moves or "in shared memory" in str(explained)
        with collectives() as records:
            x = sm.ShardedTensor.from_local(local, shared, src, shape=shape).redistribute(dst)
        assert launched(records) == [GROUP_OP.get(step.op, step.op) for step in moves]
        y = sm.ShardedTensor.from_local(local, plain, other[0].spec, shape=shape).redistribute(
            other[1].spec
        )
        exact = dtype != torch.bfloat16 or not before.pending
        torch.testing.assert_close(
            x._local,
            y._local,
            **({"rtol": 1e-6, "atol": 1e-6} if exact else {"rtol": 2e-2, "atol": 2e-2}),
        )
        if not before.pending:
            assert torch.equal(x._local, y._local)
    return True


@pytest.mark.one_in(7)
@pytest.mark.parametrize("seed", range(4))
def test_any_move(world4, folder, seed):
    assert all(world4(any_move, folder, seed))


def buckets_and_gradients(folder):
    shared, _ = meshes(folder)
    torch.manual_seed(0)
    tensors = [torch.randn(4, n) for n in (2, 3, 8)]
    xs = [
        sm.distribute_tensor(t, shared, P("s"), src_data_rank=None).requires_grad_()
        for t in tensors
    ]
    with collectives() as records:
        whole = sm.redistribute_many(xs, [P(None, "s")] * 3)
    assert launched(records) == ["all_to_all"]
    assert records[0].bytes_received == sum(
        plan_bytes_received(sm.debug.explain(sm.typeof(x), P(None, "s")).plan, shared.coordinate)
        for x in xs
    )
    assert all(torch.equal(w.full_tensor(), t) for w, t in zip(whole, tensors, strict=True))
    sum((w * w).sum() for w in whole).backward()
    assert all(torch.equal(x.grad.full_tensor(), 2 * t) for x, t in zip(xs, tensors, strict=True))
    replicated = sm.distribute_tensor(tensors[2], shared, P(), src_data_rank=None).requires_grad_()
    batch = sm.distribute_tensor(torch.ones(4, 4), shared, P("s"), src_data_rank=None)
    with collectives() as records:
        (batch @ replicated).sum().backward()
    assert launched(records)[-1] == "all_reduce"
    assert torch.equal(replicated.grad.full_tensor(), torch.full((4, 8), 4.0))
    return True


def test_buckets_and_gradients(world4, folder):
    assert all(world4(buckets_and_gradients, folder))


def options(folder):
    shared, _ = meshes(folder)
    t = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    pending = sm.ShardedTensor.from_local(t, shared, P(unreduced={"s"}))
    into = sm.empty((6, 8), device_mesh=shared, placements=P())
    for y in (
        pending.redistribute(P(), async_op=True).wait(),
        pending.redistribute(P(), out=into),
        (pending * 1).redistribute(P(), donate=True),
    ):
        assert torch.equal(y._local, 2 * t)
    assert into._local.eq(2 * t).all()
    assert pending._local.eq(t).all()
    low = pending.redistribute(P("s"), forward_dtype=torch.bfloat16)
    assert torch.equal(
        low._local, (2 * t.bfloat16())[sm.typeof(low).box[0][0] : sm.typeof(low).box[0][1]]
    )
    large = sm.Layout.of(shared, P("s"), (1 << 13, 1 << 13), torch.float32)
    # Too large to stage.
    assert all(
        step.symmetric is None for step in sm.debug.plan(large, large.replace(P(None, "s"))).steps
    )
    return True


def test_options(world4, folder):
    assert all(world4(options, folder))


def calibrated(folder):
    share_cpu_memory(folder)
    # The interpreter is slow.
    sys.modules[sm.topology.calibrate.__module__]._LARGEST["cpu"] = 1 << 14
    again = sm.init_device_mesh("cpu", (2, 2), axis_names=("u", "v"))
    assert again.topology.symmetric is None
    sm.topology.calibrate(again, seconds=0.05)
    assert again.topology.symmetric is not None
    assert "shared memory" in str(again.topology)
    return again.topology


def test_calibrate_measures_it(world4, folder):
    assert len(set(world4(calibrated, folder))) == 1


def without(folder):
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("w",))
    mesh.topology = replace(mesh.topology, symmetric=FREE)
    provider, group = symmetric_memory.PROVIDERS.pop("cpu", None), mesh.group()
    group.shared.clear()
    try:
        with pytest.raises(sm.mesh.errors.CollectiveError, match="share none on 'cpu'"):
            sm.distribute_tensor(torch.ones(8), mesh, P("w")).redistribute(P())
    finally:
        mesh.topology = replace(mesh.topology, symmetric=None)
        if provider is not None:
            symmetric_memory.PROVIDERS["cpu"] = provider
        group.shared.clear()
    return True


def test_plan_without_symmetric_memory(world4, folder):
    assert all(world4(without, folder))
