"""Sequences split over an axis inside of stages: ranks along "cp" have parts of each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import pipeline
from tests.tiers import slow

VOCABULARY, WIDTH, HEADS, ROWS, LENGTH = 12, 8, 2, 4, 7


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        q, k, v = qkv.unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(F.gelu(y.transpose(1, 2).flatten(-2)))


class Model(nn.Module):
    """Ids and positions to logits, with classes in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=random)
    targets = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=random)
    targets[0, :3] = -100
    targets[3, 5:] = -100
    return ids, torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous(), targets


@pytest.mark.parametrize(
    ("schedule", "split", "method", "layer"),
    [
        ("1f1b", ["blocks.1"], "ring", "fully_shard"),
        ("zb_v", ["blocks.0", "blocks.1", "head"], "all_gather", "data_parallel"),
        slow("zb_h1", ["blocks.2"], "all_to_all", "fully_shard"),
        slow("interleaved", ["blocks.0", "blocks.1", "head"], "ring", "data_parallel"),
        slow("dualpipe_v", ["blocks.0", "blocks.1", "head"], "ring", "fully_shard"),
    ],
)
def test_sequences_over_an_axis(schedule, split, method, layer):
    model = make_model()
    ids, positions, targets = batch()
    expected = F.cross_entropy(model(ids, positions), targets)
    expected.backward()

    def program() -> Any:
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("pp", "cp"))
        pipe = pipeline(make_model(), mesh, split=split, schedule=schedule, microbatches=4)
        getattr(pipe, layer)(mesh["cp"], units=Block)
        own = [sm.distribute_tensor(x, mesh["cp"], P(None, "cp")) for x in batch()]
        with sm.parallel.context_parallel("cp", method=method):
            loss = pipe.step((own[0], own[1]), own[2], loss_fn=F.cross_entropy)
        grads: Any = {name: x.grad for name, x in pipe.named_parameters()}
        return loss.item(), {name: grad.full_tensor() for name, grad in grads.items()}

    seen: set[str] = set()
    for loss, grads in sm.simulate(4)(program)():
        assert loss == pytest.approx(expected.item(), abs=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=0, atol=1e-12)
        seen |= set(grads)
    assert seen == set(dict(model.named_parameters()))
