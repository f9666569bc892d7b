"""Ranks that pass plain tensors of other shapes than other ranks: no call hangs or raises, and
results have the bits of eager code.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.mesh.comm.current_world import current_world
from tests.device import DEVICE
from tests.pool import Pool
from tests.sharding.jit.steps import runs
from tests.sharding.jit.test_values import package
from tests.sharding.ranks import collectives, launched

# Numbers of rows on even and odd ranks, by call.
Lengths = list[tuple[int, int]]
ONE_SHORT_BATCH: Lengths = [(3, 3)] * 3 + [(3, 2)] + [(3, 3)] * 2 + [(2, 2)] * 2
OTHER_ROWS_ALWAYS: Lengths = [(3, 5)] * 5
RAGGED: Lengths = [(3, 3), (3, 3), (5, 5), (3, 5), (3, 7), (4, 3), (5, 3), (3, 3), (6, 2), (3, 6)]


class Trained(NamedTuple):
    """What a rank has seen of a training.

    Attributes:
        losses: of all calls.
        ops: the collectives of each call.
        recorded: the number of recordings.
        graphs: the number of calls that ran one.
    """

    losses: list[float]
    ops: list[list[str]]
    recorded: int
    graphs: int


def train(lengths: Lengths, jit: bool, outside: bool = False) -> Trained:
    """Train with rows of a rank's own.

    Args:
        outside: whether `backward` and the optimizer run outside of the function.
    """
    world = current_world()
    mesh = sm.init_device_mesh(DEVICE, (world.size,), axis_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(DEVICE)
    sm.parallel.fully_shard(model, mesh, axes="dp", units=None if outside else nn.Linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward(x: Tensor) -> Tensor:
        return model(x).square().mean()

    def update(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def step(x: Tensor) -> Tensor:
        loss = forward(x)
        update(loss)
        return loss.detach()

    function: Any = forward if outside else step
    f: Any = sm.jit(function, backend="eager") if jit else function
    losses, ops = [], []
    for i, each in enumerate(lengths):
        generator = torch.Generator().manual_seed(world.size * i + world.rank)
        x = torch.randn(each[world.rank % 2], 4, generator=generator).to(DEVICE)
        with collectives() as records:
            loss = f(x)
            if outside:
                update(loss)
        losses.append(loss.item())
        ops.append(launched(records))
    return Trained(losses, ops, len(f.recorded) if jit else 0, runs(f))


def trained(lengths: Lengths, outside: bool = False) -> tuple[list[Trained], list[Trained]]:
    """Return what two ranks have seen under `sm.jit` and in eager mode; losses are equal."""
    eager = sm.simulate(2)(train)(lengths, False, outside)
    jitted = sm.simulate(2)(train)(lengths, True, outside)
    for one, other in zip(jitted, eager, strict=True):
        assert one.losses == other.losses
    return jitted, eager


def test_a_short_batch_on_one_rank_runs_eagerly() -> None:
    """Passes stay on for the others."""
    jitted, eager = trained(ONE_SHORT_BATCH)
    for one, other in zip(jitted, eager, strict=True):
        assert (one.recorded, one.graphs) == (2, 4)
        assert one.ops[3] == ["all_reduce", *other.ops[3]]
        assert len(one.ops[4][1:]) < len(other.ops[4])
        assert one.ops[4] == one.ops[2] == one.ops[7]


def test_ranks_with_other_shapes_record_together() -> None:
    jitted, eager = trained(OTHER_ROWS_ALWAYS)
    for one, other in zip(jitted, eager, strict=True):
        assert (one.recorded, one.graphs) == (1, 3)
        assert len(one.ops[-1][1:]) < len(other.ops[-1])


@pytest.mark.parametrize("outside", [False, True])
def test_ranks_that_differ_often_record_by_themselves(
    outside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "shardmesh"):
        jitted, eager = trained(RAGGED + RAGGED[-2:], outside)
    for one, other in zip(jitted, eager, strict=True):
        assert one.recorded
        assert one.ops[-2:] == other.ops[-2:]
    texts = [record.getMessage() for record in caplog.records]
    assert sum("such calls run eagerly" in text for text in texts) == (not outside)
    assert sum("4 of 5 calls; each rank records by itself" in text for text in texts) == (
        not outside
    )


def test_an_instance_that_a_mixed_call_returns_has_no_history() -> None:
    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.losses = [loss]

    def main() -> int:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
        model = nn.Linear(4, 4).to(DEVICE)
        sm.parallel.data_parallel(model, mesh)

        @sm.jit(backend="eager")
        def step(x: Tensor) -> Output:
            loss = model(x).square().mean()
            loss.backward()
            return Output(loss)

        for lengths in [(3, 3), (3, 3), (3, 3), (3, 2)]:
            x = torch.ones(lengths[mesh.get_rank()], 4, device=DEVICE)
            (loss,) = step(x).losses
            with pytest.raises(RuntimeError, match="by a graph that has no backward"):
                loss.backward()
        return runs(step)

    assert sm.simulate(2)(main)() == [1, 1]


def test_ranks_that_have_read_values_part() -> None:
    """None agrees on a call any more, whether it has recorded the signature anew or not."""

    def main() -> list[float]:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
        torch.manual_seed(0)
        model, is_full = nn.Linear(4, 4).to(DEVICE), package("is_full")
        sm.parallel.data_parallel(model, mesh)

        @sm.jit(backend="eager")
        def step(x: Tensor, mask: Tensor) -> Tensor:
            y = model(x)
            loss = (y if is_full(mask) else -y).square().mean()
            loss.backward()
            return loss

        losses = []
        for lengths in [(4, 4), (4, 4), (3, 3), (3, 3)] + [(4, 3)] * 5 + [(4, 4), (3, 4), (3, 3)]:
            n = lengths[mesh.get_rank()]
            mask = torch.ones(n, dtype=torch.bool, device=DEVICE)
            losses.append(step(torch.ones(n, 4, device=DEVICE), mask).item())
        return losses

    first, other = sm.simulate(2)(main)()
    assert len(first) == len(other) == 12


def test_the_state_of_one_rank_changes_where_values_take_collectives() -> None:
    """All ranks record, before any of them computes what was read."""

    def main() -> tuple[list[float], int]:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
        config, is_full = {"name": "a"}, package("is_full")

        @sm.jit(backend="eager")
        def f(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
            y = x.sum() if is_full(mask) else -x.sum()
            return y + w.sum().full_tensor() * len(config["name"])

        values = []
        for i in range(6):
            if i == 3 and mesh.get_rank() == 0:
                config["name"] = "other"
            w = sm.ones(4, device_mesh=mesh, placements=sm.P("dp"))
            values.append(f(torch.ones(3, device=DEVICE), w, w.bool()).item())
        return values, runs(f)

    # The other rank's recording is replaced, with its two runs.
    assert sm.simulate(2)(main)() == [([7.0] * 3 + [23.0] * 3, 4), ([7.0] * 6, 2)]


def test_arguments_that_are_the_same_on_all_ranks_take_no_agreement() -> None:
    def main() -> list[list[str]]:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
        f = sm.jit(lambda x, scale: (x * scale).sum().full_tensor(), backend="eager")
        ops = []
        for _ in range(3):
            with collectives() as records:
                f(sm.ones(4, device_mesh=mesh, placements=sm.P("dp")), torch.tensor(2.0))
            ops.append(launched(records))
        return ops

    for ops in sm.simulate(2)(main)():
        assert ops[1:] == [["all_reduce"]] * 2


def test_functions_of_several_meshes() -> None:
    """A function that is called with tensors of another mesh agrees over that one."""

    def main() -> list[float]:
        world = current_world()
        whole = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("dp", "tp"))
        f = sm.jit(lambda w, x: w.sum().full_tensor() * x.sum(), backend="eager")
        values = []
        for i in range(4):
            for mesh, lengths in ((whole, (3, 3)), (whole["tp"], (3, 3 + i // 2))):
                w = sm.ones(4, device_mesh=mesh, placements=sm.P("tp"))
                if mesh is whole or world.rank < 2:
                    values.append(f(w, torch.ones(lengths[world.rank % 2])).item())
        return values

    results = sm.simulate(4)(main)()
    assert results[0] == [12.0] * 8
    assert results[1] == [12.0] * 5 + [16.0, 12.0, 16.0]
    assert results[2] == results[3] == [12.0] * 4


def test_meshes_that_overlap_in_a_chain() -> None:
    """All ranks of the chain agree on a call, also those without a mesh in common."""

    def main() -> tuple[list[float], int, int]:
        rank = current_world().rank
        meshes = [
            sm.DeviceMesh(DEVICE, ranks, axis_names=("dp",))
            for ranks in ([0, 1], [1, 2], [2, 3])
            if rank in ranks
        ]
        weights = [sm.ones(4, device_mesh=mesh, placements=sm.P("dp")) for mesh in meshes]
        f = sm.jit(lambda x: sum(w.sum().full_tensor() for w in weights) * x.sum(), backend="eager")
        values = []
        for length in (3, 3, 5, 3, 3):
            x = torch.ones(length if rank == 3 else 3, device=DEVICE)
            values.append(f(x).item() / len(x) / len(weights))
        return values, len(f.recorded), runs(f)

    assert sm.simulate(4)(main)() == [([4.0] * 5, 1, 3)] * 4


def test_processes(world4: Pool) -> None:
    jitted, eager = world4(train, RAGGED, True), world4(train, RAGGED, False)
    assert [one.losses for one in jitted] == [one.losses for one in eager]
