"""torch's tutorial of 2-D parallelism with changed imports: tensor parallelism on one mesh slice,
`fully_shard` on the other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardmesh as sm
from shardmesh import Replicate, Shard, init_device_mesh
from shardmesh.compat import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from shardmesh.parallel import fully_shard
from tests.device import DEVICE


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, 4 * dim, bias=False)
        self.w2 = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class FeedForwardBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.feed_forward = nn.RMSNorm(dim), FeedForward(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed_forward(self.norm(x))


class TutorialModel(nn.Module):
    def __init__(self, vocab: int = 16, dim: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleDict({str(i): FeedForwardBlock(dim) for i in range(depth)})
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def parallelize(model: Any, mesh: sm.DeviceMesh, whole_model: bool) -> nn.Module:
    tp, dp = mesh["tp"], mesh["dp"]
    outside = Shard(1) if whole_model else Replicate()
    if whole_model:
        plan = {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        model = parallelize_module(model, tp, plan)
    for layer in model.layers.values():
        plan = {
            "feed_forward": PrepareModuleInput(
                input_layouts=(outside,), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=outside),
            "feed_forward.w3": ColwiseParallel(),
        }
        if whole_model:
            plan["norm"] = SequenceParallel()
        parallelize_module(layer, tp, plan)
        fully_shard(layer, mesh=dp)
    return fully_shard(model, mesh=dp)


@pytest.mark.parametrize("whole_model", [True, False])
def test_training_equals_one_process(whole_model):
    def program():
        torch.manual_seed(0)
        model, plain = TutorialModel(), TutorialModel()
        plain.load_state_dict(model.state_dict())
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
        parallel = parallelize(model, mesh, whole_model)
        optimizer, expected = (
            torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (parallel, plain)
        )
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            tokens = torch.randint(16, (4, 6), generator=generator)
            mine = tokens.chunk(2)[mesh["dp"].get_local_rank()]
            for net, step, x in ((parallel, optimizer, mine), (plain, expected, tokens)):
                F.cross_entropy(net(x).flatten(0, 1), x.flatten()).backward()
                step.step()
                step.zero_grad()
        for p, q in zip(parallel.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.detach().full_tensor(), q.detach(), rtol=1e-4, atol=1e-5)

    sm.simulate(4)(program)()
