"""Samples by rank and batches as sharded tensors: each sample once, on any number of ranks, from
any point of an epoch.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.errors import MeshError
from shardmesh.sharding.training.batches import batches
from shardmesh.sharding.training.sampler import DistributedSampler
from tests.device import DEVICE
from tests.sharding.ranks import collectives, every_rank, on_mesh, same_error


class Rows:
    """A dataset of samples that know their number."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return {"x": torch.full((4,), float(i)), "y": i, "text": f"sample {i}"}


def loader_of(sampler, batch_size, **options):
    return DataLoader(sampler.dataset, batch_size=batch_size, sampler=sampler, **options)


# -- the sampler -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_equals_torch_except_for_repeated_samples(shuffle, drop_last):
    for rank in range(3):
        for epoch in (0, 1):
            ours = DistributedSampler(range(10), 3, rank, shuffle, 5, drop_last)
            theirs = torch.utils.data.DistributedSampler(range(10), 3, rank, shuffle, 5, drop_last)
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            samples = list(theirs)
            # Torch repeats two of ten samples, to make them twelve.
            mine = samples if drop_last or rank == 0 else samples[:3]
            assert (list(ours), len(ours)) == (mine, len(mine))


@given(length=st.integers(0, 40), ranks=st.integers(1, 5), drop_last=st.booleans())
def test_every_sample_once(length, ranks, drop_last):
    samplers = [
        DistributedSampler(range(length), ranks, r, drop_last=drop_last) for r in range(ranks)
    ]
    dealt = [list(s) for s in samplers]
    assert [len(d) for d in dealt] == samplers[0].lengths()
    counts = Counter(i for some in dealt for i in some)
    assert all(n == 1 for n in counts.values())
    assert len(counts) == (length - length % ranks if drop_last else length)


@every_rank(2, 2)
def test_ranks_by_mesh_axes(mesh):
    places = {
        "a": mesh.coordinate[0],
        ("a", "b"): mesh.world.rank,
        ("b", "a"): mesh.coordinate[1] * 2 + mesh.coordinate[0],
    }
    for axes, place in places.items():
        sampler = DistributedSampler(range(9), mesh=mesh, axes=axes, shuffle=False)
        assert list(sampler) == list(range(9))[place :: sampler.num_replicas]
    with mesh["b"]:
        assert DistributedSampler(range(9)).rank == mesh.coordinate[1]


def test_errors_of_the_sampler():
    for options, said in [
        ({"num_replicas": 2}, "rank=None"),
        ({"num_replicas": 2, "rank": 2}, "ranks are 0 to 1"),
    ]:
        with pytest.raises(ValueError, match=said):
            DistributedSampler(range(4), **options)
    text = same_error((2, 2), lambda mesh: DistributedSampler(range(4), mesh=mesh), MeshError)
    assert "axes='a'" in text
    text = same_error((2,), lambda mesh: DistributedSampler(range(4), 2, 0, mesh=mesh), ValueError)
    assert "or a mesh and axes" in text
    state = DistributedSampler(range(5), 1, 0).state_dict()
    with pytest.raises(
        ValueError, match=r"has 4 samples, but the state is of one with 5.*set_epoch\(1\)"
    ):
        DistributedSampler(range(4), 1, 0).load_state_dict(state)


# -- batches ---------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    length=st.integers(0, 30),
    mesh_shape=st.sampled_from([(1,), (2,), (3,), (2, 2)]),
    size=st.integers(1, 4),
    drop_last=st.booleans(),
    loader_drops=st.booleans(),
    workers=st.just(0),
)
def test_epoch(length, mesh_shape, size, drop_last, loader_drops, workers):
    """Every sample once, in equally many steps on all ranks, without communication."""

    def program(mesh):
        sampler = DistributedSampler(Rows(length), mesh=mesh, axes="a", drop_last=drop_last)
        data = batches(
            loader_of(sampler, size, drop_last=loader_drops, num_workers=workers), mesh, P("a")
        )
        steps = len(data)
        with sm.debug.comm_budget(launches=0):
            found = list(data)
        assert len(found) == steps
        assert (sampler.epoch, sampler.consumed) == (1, 0)
        for batch in found:
            assert batch["x"].spec.dims == (("a",), ())
            assert torch.equal(
                batch["x"].full_tensor()[:, 0].long().cpu(), batch["y"].full_tensor().cpu()
            )
            assert isinstance(batch["text"], list)
        return [batch["y"].full_tensor().tolist() for batch in found]

    results = on_mesh(mesh_shape, program)
    assert all(result == results[0] for result in results)
    counts = Counter(i for batch in results[0] for i in batch)
    assert all(n == 1 for n in counts.values())
    if not drop_last and not loader_drops:
        assert len(counts) == length
    assert all(len(batch) == size * mesh_shape[0] for batch in results[0][:-1])


def test_worker_processes_that_prefetch():
    test_epoch.hypothesis.inner_test(
        length=11, mesh_shape=(2,), size=2, drop_last=False, loader_drops=False, workers=1
    )


@settings(max_examples=15)
@given(
    length=st.integers(1, 40),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    steps=st.integers(0, 6),
)
def test_resuming_with_another_number_of_ranks(length, before, after, sizes, steps):
    """Samples before and after make up the epoch; then the next epoch starts."""

    def first(mesh):
        sampler = DistributedSampler(Rows(length), mesh=mesh, seed=7)
        sampler.set_epoch(3)
        used = []
        for i, batch in enumerate(batches(loader_of(sampler, sizes[0]), mesh, P("a"))):
            if i == steps:
                break  # before it was trained on: the state of the step before counts
            used += batch["y"].full_tensor().tolist()
            state = sampler.state_dict()
        return (
            (used, state) if steps else (used, {**sampler.state_dict(), "consumed": 0, "epoch": 3})
        )

    def second(mesh):
        sampler = DistributedSampler(Rows(length), mesh=mesh)
        sampler.load_state_dict(state)
        sampler.set_epoch(sampler.epoch)
        data = batches(loader_of(sampler, sizes[1]), mesh, P("a"))
        epochs = []
        for _ in range(2):
            epoch, expected = sampler.epoch, len(data)
            rows = [batch["y"].full_tensor().tolist() for batch in data]
            assert len(rows) == expected
            epochs.append((epoch, [i for some in rows for i in some]))
        return epochs

    used, state = on_mesh((before,), first)[0]
    (epoch, rest), (following, whole) = on_mesh((after,), second)[0]
    finished = len(used) == length
    assert sorted(rest if finished else used + rest) == list(range(length))
    assert (epoch, following) == ((4, 5) if finished else (3, 4))
    assert sorted(whole) == list(range(length))


@every_rank(2)
def test_abandoned_iteration_restarts(mesh):
    sampler = DistributedSampler(Rows(8), mesh=mesh, shuffle=False)
    data = batches(loader_of(sampler, 2), mesh, P("a"))
    for _ in range(2):
        for batch in data:
            assert batch["y"].full_tensor().tolist() == [0, 2, 1, 3]
            assert sampler.consumed == 4
            break


@every_rank(2, 2)
def test_other_dims_and_types_in_a_batch(mesh):
    """Sequences sharded over another axis are sliced; arrays become tensors; anything else is
    unchanged.
    """
    rows = [{"tokens": np.arange(5) + 10 * i, "label": i, "n": torch.tensor(1.0)} for i in range(3)]

    def collate(some):
        arrays = np.stack([r["tokens"] for r in some])
        return {
            "tokens": arrays,
            "label": torch.tensor([r["label"] for r in some]),
            "scale": torch.tensor(2.0),
            "name": "n",
        }

    sampler = DistributedSampler(rows, mesh=mesh, axes="a", shuffle=False)
    (batch,) = batches(loader_of(sampler, 2, collate_fn=collate), mesh, P("a", "b"))
    assert batch["tokens"].spec == P("a", "b")
    assert batch["tokens"].full_tensor().tolist() == [rows[i]["tokens"].tolist() for i in (0, 2, 1)]
    assert batch["label"].spec == P("a")
    assert (batch["scale"].item(), batch["name"], type(batch["scale"])) == (2.0, "n", torch.Tensor)


def test_loaders_of_any_kind():
    """Lists of other lengths on other ranks: they tell each other; a rank without batches has empty
    parts.
    """

    def program(mesh):
        lengths = [3, 1, 0][mesh.coordinate[0]]
        loader = [torch.full((2, 3), 10.0 * mesh.coordinate[0] + i) for i in range(lengths)]
        with collectives() as records:
            found = list(batches(loader, mesh, P("a")))
        assert {record.op for record in records} == {"all_gather", "all_gather_object"}
        return [x.full_tensor()[:, 0].tolist() for x in found], [x._local.shape[0] for x in found]

    expected = [[0.0, 0.0, 10.0, 10.0], [1.0, 1.0], [2.0, 2.0]]
    rows = [[2, 2, 2], [2, 0, 0], [0, 0, 0]]
    assert on_mesh((3, 2), program) == [(expected, rows[rank // 2]) for rank in range(6)]


@every_rank(2)
def test_unsharded_batches(mesh):
    found = list(batches([torch.ones(3, 2), torch.ones(1, 2)], mesh, P(None, "a")))
    assert [(tuple(x.shape), x.spec) for x in found] == [
        ((3, 2), P(None, "a")),
        ((1, 2), P(None, "a")),
    ]
    with mesh:
        assert len(batches([torch.ones(3, 2)], P())) == 1


def test_errors_of_batches():
    def of(mesh, axes="a", spec=P("a"), **options):
        return batches(
            loader_of(DistributedSampler(Rows(4), mesh=mesh, axes=axes), 2, **options), mesh, spec
        )

    text = same_error((2, 2), lambda mesh: of(mesh, ("a", "b")), ValueError)
    assert "for 4 ranks along ('a', 'b'), but the batch dim is split over 2 along ('a',)" in text
    text = same_error((2, 2), lambda mesh: of(mesh, "b"), ValueError)
    assert "mesh=mesh, axes=('a',)" in text
    assert "spec must be a P" in same_error((2,), lambda mesh: of(mesh, spec="a"), TypeError)
    assert "not pending" in same_error(
        (2,), lambda mesh: of(mesh, spec=P("a", unreduced={"b"})), ValueError
    )
    assert "'c'" in same_error((2,), lambda mesh: of(mesh, spec=P("c")), MeshError)
    packed = {"collate_fn": lambda rows: {"x": torch.zeros(len(rows), 2), "packed": torch.zeros(5)}}
    text = same_error((2,), lambda mesh: list(of(mesh, **packed)), ValueError)
    assert "batch['packed'] of shape [5] has 5 rows, but this rank's batch has 2 samples" in text
    assert "no tensor with rows" in same_error(
        (2,), lambda mesh: list(batches([{"n": 1}], mesh, P())), TypeError
    )


def _on_processes():
    mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("a",))
    sampler = DistributedSampler(Rows(9), mesh=mesh)
    found = [batch["x"].mean().item() for batch in batches(loader_of(sampler, 2), mesh, P("a"))]
    return found, [
        batch.sum().item() for batch in batches([torch.ones(mesh.world.rank + 1)], mesh, P("a"))
    ]


def test_on_processes(world4):
    for means, sums in world4(_on_processes):
        assert len(means) == 2
        assert math.isclose(8 * means[0] + means[1], 36, rel_tol=1e-6)
        assert sums == [10.0]
