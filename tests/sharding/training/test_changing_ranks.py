"""Each sample of an epoch once, whatever the number of ranks from step to step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.training.batches import batches
from shardmesh.sharding.training.global_batches import GlobalBatchSampler
from shardmesh.sharding.training.sampler import DistributedSampler
from shardmesh.sharding.training.stream import DistributedStream
from tests.sharding.ranks import every_rank, on_mesh, same_error
from tests.tiers import examples


class Stream(IterableDataset[int]):
    """Samples in an order of the epoch, of unknown length."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        random.Random(self.epoch).shuffle(order)
        yield from order


def sampler_on(mesh: sm.DeviceMesh, length: int, **options: Any) -> DistributedSampler:
    return DistributedSampler(range(length), mesh=mesh, axes="a", seed=3, **options)


def some_steps(source: Any, steps: Iterator[Any], count: int) -> tuple[list[list[int]], Any]:
    """Take steps; return the samples of each of them and the state after the last, as committed."""
    state = source.state_dict()
    taken: list[list[int]] = []
    for _ in range(count):
        step = next(steps, None)
        if step is None:
            break
        micro_batches = step if isinstance(step, list) else [step]
        samples: list[int] = []
        for batch in micro_batches:
            samples += batch.full_tensor().tolist()
        taken.append(samples)
        state = source.state_dict()
    return taken, state


def schedule_of(rng: random.Random) -> list[tuple[int, int]]:
    """Return the ranks of some meshes and the steps taken on each; the last ends the epochs."""
    return [(rng.randint(1, 4), rng.randint(0, 4)) for _ in range(rng.randint(1, 4))] + [(2, 40)]


def assert_each_once(taken: list[list[int]], length: int, epochs: int = 1) -> None:
    counts = Counter(sample for step in taken for sample in step)
    assert counts == dict.fromkeys(range(length), epochs)


# -- samplers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(examples(40)))
def test_batches_per_rank(seed: int):
    """The batch of a rank stays, so that of a step follows the number of ranks."""
    rng = random.Random(seed)
    length, rows = rng.randint(1, 40), rng.randint(1, 4)
    state: Any = None
    taken: list[list[int]] = []
    for ranks, steps in schedule_of(rng):
        before = state

        def program(mesh: sm.DeviceMesh, before: Any = before, steps: int = steps) -> Any:
            sampler = sampler_on(mesh, length)
            if before is not None:
                sampler.load_state_dict(before)
            if sampler.epoch > 0:
                return [], sampler.state_dict()
            loader = DataLoader(range(length), batch_size=rows, sampler=sampler)  # type: ignore[arg-type]
            return some_steps(sampler, iter(batches(loader, mesh, P("a"))), steps)

        some, state = on_mesh((ranks,), program)[0]
        assert all(len(step) == rows * ranks for step in some[:-1])
        taken += some
    assert_each_once(taken, length)


@pytest.mark.parametrize("seed", range(examples(40)))
def test_the_same_global_batches(seed: int):
    """Every step has the samples that it has on one rank."""
    rng = random.Random(seed)
    length, batch_size = rng.randint(1, 40), rng.randint(1, 9)
    drop_last = rng.random() < 0.5
    order = sampler_on_one(length)
    expected = [sorted(order[i : i + batch_size]) for i in range(0, length, batch_size)]
    if drop_last:
        expected = [samples for samples in expected if len(samples) == batch_size]
    state: Any = None
    taken: list[list[int]] = []
    for ranks, steps in schedule_of(rng):
        before, most = state, rng.choice([None, 1, 2, 3])

        def program(
            mesh: sm.DeviceMesh, before: Any = before, steps: int = steps, most: Any = most
        ) -> Any:
            global_batches = GlobalBatchSampler(
                sampler_on(mesh, length), batch_size, micro_batch=most, drop_last=drop_last
            )
            if before is not None:
                global_batches.load_state_dict(before)
            if global_batches.sampler.epoch > 0:
                return [], global_batches.state_dict()
            loader = DataLoader(range(length), batch_sampler=global_batches)  # type: ignore[arg-type]
            sharded = batches(loader, mesh, P("a"))
            assert len(sharded) == len(global_batches.rows())
            assert all(max(rows) <= (most or 40) for rows in global_batches.rows())
            return some_steps(global_batches, global_batches.grouped(sharded), steps)

        some, state = on_mesh((ranks,), program)[0]
        taken += some
    assert [sorted(samples) for samples in taken] == expected


def sampler_on_one(length: int) -> list[int]:
    return list(DistributedSampler(range(length), 1, 0, seed=3))


@given(
    count=st.integers(1, 30),
    ranks=st.integers(1, 6),
    most=st.one_of(st.none(), st.integers(1, 8)),
)
@settings(max_examples=50)
def test_micro_batches(count: int, ranks: int, most: int | None):
    """Shares differ by one row at most; no microbatch is empty, nor larger than it may be."""
    sampler = DistributedSampler(range(count), ranks, 0)
    (step,) = GlobalBatchSampler(sampler, count, micro_batch=most).steps()
    shares = [sum(rows[rank] for rows in step) for rank in range(ranks)]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1
    assert all(0 < max(rows) <= (most or count) for rows in step)
    assert len(step) == (1 if most is None else -(-max(shares) // most))


def test_gradients_do_not_depend_on_the_ranks():
    """A step of 8 samples on 1, 2 and 3 ranks, in microbatches; sums in another order."""

    def program(mesh: sm.DeviceMesh) -> list[torch.Tensor]:
        torch.manual_seed(0)
        inputs = torch.randn(8, 3, dtype=torch.float64)
        model = sm.parallel.data_parallel(torch.nn.Linear(3, 2).double(), mesh)
        steps = GlobalBatchSampler(sampler_on(mesh, 8), 8, micro_batch=2)
        loader = DataLoader(inputs, batch_sampler=steps)  # type: ignore[arg-type]
        for micro_batches in steps.grouped(batches(loader, mesh, P("a"))):
            rows = sum(len(x) for x in micro_batches)
            with sm.accumulate_grads():
                for x in micro_batches:
                    (model(x).square().mean() * (len(x) / rows)).backward()
        return [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]

    expected = on_mesh((1,), program)[0]
    for ranks in (2, 3):
        grads = on_mesh((ranks,), program)[0]
        torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)


# -- streams ---------------------------------------------------------------------------------------


def stream_steps(mesh: sm.DeviceMesh, length: int, rows: int, workers: int, before: Any) -> Any:
    stream = DistributedStream(Stream(length), rows, mesh=mesh, axes="a")
    if before is not None:
        stream.load_state_dict(before)
    loader = DataLoader(stream, batch_size=rows, num_workers=workers)
    return stream, batches(loader, mesh, P("a"))


@pytest.mark.parametrize("seed", range(examples(40)))
def test_a_stream(seed: int):
    rng = random.Random(seed)
    length = rng.randint(1, 40)
    state: Any = None
    taken: list[list[int]] = []
    for ranks, steps in schedule_of(rng):
        before, rows = state, rng.randint(1, 4)

        def program(
            mesh: sm.DeviceMesh, before: Any = before, steps: int = steps, rows: int = rows
        ) -> Any:
            stream, sharded = stream_steps(mesh, length, rows, 0, before)
            if stream.epoch > 0:
                return [], stream.state_dict()
            return some_steps(stream, iter(sharded), steps)

        some, state = on_mesh((ranks,), program)[0]
        assert all(len(step) == rows * ranks for step in some[:-1])
        taken += some
    assert_each_once(taken, length)


def test_a_stream_with_workers_that_change():
    """Batches come in the order of the stream, from 2 workers and then from 1."""
    expected = list(Stream(23))

    def first(mesh: sm.DeviceMesh) -> Any:
        stream, sharded = stream_steps(mesh, 23, 2, 2, None)
        return some_steps(stream, iter(sharded), 2)

    taken, state = on_mesh((2,), first)[0]
    assert state == {"epoch": 0, "consumed": 8}
    assert [sorted(step) for step in taken] == [sorted(expected[:4]), sorted(expected[4:8])]

    def second(mesh: sm.DeviceMesh) -> Any:
        stream, sharded = stream_steps(mesh, 23, 2, 1, state)
        rest, _ = some_steps(stream, iter(sharded), 40)
        following, _ = some_steps(stream, iter(sharded), 40)
        return rest, following, stream.state_dict()

    rest, following, end = on_mesh((1,), second)[0]
    assert [sample for step in rest for sample in step] == expected[8:]
    assert_each_once(following, 23)
    assert end == {"epoch": 2, "consumed": 0}


# -- errors ----------------------------------------------------------------------------------------


def test_errors():
    sampler = DistributedSampler(range(4), 1, 0, drop_last=True)
    with pytest.raises(ValueError, match="pass drop_last to GlobalBatchSampler"):
        GlobalBatchSampler(sampler, 2)
    with pytest.raises(ValueError, match="micro_batch=0"):
        GlobalBatchSampler(DistributedSampler(range(4), 1, 0), 2, micro_batch=0)
    text = same_error((2,), lambda mesh: DistributedStream([], 0, mesh=mesh), ValueError)
    assert "DistributedStream(batch_size=0)" in text


@every_rank(2, 2)
def test_errors_of_loaders(mesh: sm.DeviceMesh):
    stream = DistributedStream(range(8), 2, mesh=mesh, axes="a")
    with pytest.raises(ValueError, match="batch_size=4, but its DistributedStream has batch_size"):
        batches(DataLoader(stream, batch_size=4), mesh, P("a"))
    with pytest.raises(ValueError, match=r"the stream is for 2 ranks along .* batch dim is split"):
        batches(DataLoader(stream, batch_size=2), mesh, P(("a", "b")))
