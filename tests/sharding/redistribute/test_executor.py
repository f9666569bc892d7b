"""Plans compiled for a rank: one tensor is a list of one, and several share collectives."""

from __future__ import annotations

import weakref

import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.redistribute.executor import executor, executor_of_many
from tests.sharding.ranks import every_rank


def layouts(mesh, before, after, shape=(8, 4)):
    src = sm.Layout.of(mesh, before, shape)
    return src, src.replace(after)


@every_rank(4)
def test_a_list_of_one_is_the_single_case(mesh):
    src, dst = layouts(mesh, P("a"), P(None, "a"))
    assert executor_of_many([(src, dst)]) is executor(src, dst)
    local = torch.arange(32.0, device=mesh.device).view(8, 4)[src.box[0][0] : src.box[0][1]]
    tensors = [local]
    pending = executor(src, dst).start(tensors)
    assert tensors == []
    (moved,) = pending.wait()
    assert torch.equal(moved, executor(src, dst)(local))
    assert torch.equal(
        moved, torch.arange(32.0, device=mesh.device).view(8, 4)[:, dst.box[1][0] : dst.box[1][1]]
    )


@every_rank(4)
def test_averages_and_sums_share_a_reduce_scatter(mesh):
    """Averages alone are divided while packing; next to a sum, before it. The values are
    the same.
    """
    average, total = (layouts(mesh, P(unreduced={"a": kind}), P("a")) for kind in ("avg", "sum"))
    part = torch.full((8, 4), float(mesh.world.rank), device=mesh.device)
    for pairs in ([average, average], [average, total]):
        compiled = executor_of_many(pairs)
        assert compiled.launches == 1
        found = compiled.start([part, part]).wait()
        expected = [
            torch.full((2, 4), 1.5 if pair is average else 6.0, device=mesh.device)
            for pair in pairs
        ]
        assert all(map(torch.equal, found, expected))


@every_rank(4)
def test_parts_can_be_freed_once_they_are_packed(mesh):
    pairs = [layouts(mesh, P("a"), P(None, "a")), layouts(mesh, P("a"), P(None, "a"), (4, 8))]
    parts = [torch.ones(src.local_shape, device=mesh.device) for src, _ in pairs]
    alive = [weakref.ref(part) for part in parts]
    pending = executor_of_many(pairs).start(parts, donate=True)
    assert [ref() for ref in alive] == [None, None]
    assert [tuple(x.shape) for x in pending.wait()] == [(8, 1), (4, 2)]
