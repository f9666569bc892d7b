"""Along which dim the tensors of a buffer are split."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P, compat
from shardmesh.parallel import data_parallel, fully_shard
from shardmesh.sharding.parallel.data.storage.flat import _dims_and_layout
from shardmesh.sharding.parallel.data.unit import unit_of

# A block of a mixture, with 1/32 of the width of Mixtral 8x7B.
EXPERTS = [(8, 896, 128), (8, 128, 448)]
BLOCK = [(128,), (128, 128), (32, 128), (32, 128), (128, 128), (8, 128), *EXPERTS]


@pytest.mark.parametrize("parts", [2, 3, 4, 8, 16])
def test_stacks_of_experts_need_little_padding(parts):
    dims, layout = _dims_and_layout(BLOCK, None, parts)
    assert layout.length <= 1.07 * sum(map(math.prod, BLOCK))
    assert set(dims[:-2]) == {0}
    given, padded = _dims_and_layout(BLOCK, [0] * len(BLOCK), parts)
    assert given == (0,) * len(BLOCK)
    assert layout.length <= padded.length


def test_a_stack_is_not_split_into_more_parts_than_it_has_matrices():
    assert _dims_and_layout(EXPERTS, None, 16)[0] == (1, 1)
    assert _dims_and_layout([(16, 6, 4)], None, 16)[0] == (0,)
    assert _dims_and_layout([(3, 2, 4)], None, 16)[0] == (0,)  # it has fewer rows than matrices


def test_the_layout_is_that_of_the_dims():
    rng = random.Random(0)
    for _ in range(200):
        shapes = [
            tuple(rng.randint(0, 6) for _ in range(rng.randint(1, 4)))
            for _ in range(rng.randint(1, 4))
        ]
        parts = rng.randint(1, 6)
        dims, layout = _dims_and_layout(shapes, None, parts)
        for i, (shape, dim) in enumerate(zip(shapes, dims, strict=True)):
            rows = [layout.rows_of(i, part, shape[dim]) for part in range(parts)]
            assert sum(stop - start for start, stop in rows) == shape[dim]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 12, 6, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(2, 6, 12, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.bmm(x, self.up.mT).relu(), self.down.mT)


def test_a_stack_that_is_split_by_rows_trains_as_on_one_rank():
    def steps(model, x):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def made():
        torch.manual_seed(0)
        return Experts(), torch.randn(2, 8, 6, dtype=torch.float64)

    def rank():
        model, x = made()
        mesh = sm.init_device_mesh("cpu", (3,), axis_names=("dp",))
        fully_shard(model, mesh, axes="dp")
        assert all(x.spec.dims[:2] == ((), ("dp",)) for x in model.parameters())
        assert sum(x.to_local().numel() for x in model.parameters()) == 2 * 2 * 12 * 6 / 3
        losses = steps(model, sm.device_put(x, mesh, P(None, "dp")))
        return losses, [x.full_tensor().detach() for x in model.parameters()]

    model, x = made()
    losses = steps(model, x)
    for own, parameters in sm.simulate(3)(rank)():
        assert own == pytest.approx(losses)
        torch.testing.assert_close(parameters, [x.detach() for x in model.parameters()])


class GatedExperts(nn.Module):
    """One stack is split along dim 1, the other one and the bias along dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 48, 6, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(4, 6, 12, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(48, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.bmm(x, self.up.mT) + self.bias
        return torch.bmm(hidden.view(4, -1, 12), self.down.mT)


def test_gradients_hold_no_more_memory_than_a_piece_of_the_buffer():
    """Live bytes: a copy of one gradient must not leave the piece of all of them in memory."""

    def made():
        torch.manual_seed(0)
        return GatedExperts(), torch.randn(2, 8, 6, dtype=torch.float64)

    def rank():
        model, x = made()
        mesh = sm.init_device_mesh("cpu", (4,), axis_names=("dp",))
        fully_shard(model, mesh, axes="dp")
        specs = [x.spec for x in model.parameters()]
        model(x).square().mean().backward()
        grads = [x.grad for x in model.parameters()]
        memory = {x._local.untyped_storage().data_ptr(): x._local for x in grads}
        live = sum(x.untyped_storage().nbytes() for x in memory.values())
        (bucket,) = unit_of(model).plan.buckets
        return specs, live, bucket.storage.shard.nbytes, [x.full_tensor() for x in grads]

    model, x = made()
    model(x).square().mean().backward()
    for specs, live, piece, grads in sm.simulate(4)(rank)():
        assert [spec.dims.index(("dp",)) for spec in specs] == [1, 0, 0]
        assert live <= piece
        torch.testing.assert_close(grads, [x.grad for x in model.parameters()])


def test_only_fully_shard_chooses_the_dim():
    """`compat.fully_shard` splits what torch splits, and ZeRO-1 whole matrices."""

    def rank():
        mesh = sm.init_device_mesh("cpu", (3,), axis_names=("dp",))
        models = [Experts() for _ in range(5)]
        fully_shard(models[0], mesh, axes="dp")
        data_parallel(models[1], mesh, optimizer="dp")
        compat.fully_shard(models[2], mesh=mesh)
        for model, function in (
            (models[3], lambda x: None),
            (models[4], lambda x: compat.Shard(1)),
        ):
            compat.fully_shard(model, mesh=mesh, shard_placement_fn=function)
        return [model.up.spec.dims.index(("dp",)) for model in models]

    assert sm.simulate(3)(rank)()[0] == [1, 0, 0, 0, 1]
