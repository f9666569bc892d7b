"""Autocast and mixed precision in stages have the bits of one stage, and of FSDP without any."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.parallel import MixedPrecisionPolicy, fully_shard, pipeline

VOCABULARY, WIDTH, ROWS, LENGTH = 12, 8, 8, 4


class Block(nn.Module):
    """Adds a weighted mean over positions; a row that is masked everywhere has equal weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        weights = (self.up(x).mean(-1) + bias).softmax(-1)
        return x + weights.unsqueeze(-1) * self.up(x)


class Model(nn.Module):
    """Makes a mask between units, with the smallest value of the dtype of the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = embedded = self.embedding(ids)
        bias = torch.zeros(ids.shape, dtype=embedded.dtype)
        bias = bias.masked_fill(mask == 0, torch.finfo(embedded.dtype).min)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(x).transpose(1, 2)


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[2] = 0
    mask[5, 2:] = 0
    return ids, mask


Trained = tuple[float, dict[str, Tensor]]


def train(schedule: str, split: Sequence[str], policy: Any, has_autocast: bool) -> list[Trained]:
    """Return loss and gradients of each rank for one step."""
    ranks = 1 if not split else 2
    axes = () if policy is None else ("fsdp",)

    def program() -> Trained:
        mesh = sm.init_device_mesh("cpu", (ranks, *[2 for _ in axes]), axis_names=("pp", *axes))
        pipe = pipeline(make_model(), mesh, split=split, schedule=schedule, microbatches=4)
        if policy is not None:
            pipe.fully_shard(mesh["fsdp"], units=Block, mp_policy=policy)
        ids, mask = batch()
        with torch.autocast("cpu", torch.bfloat16) if has_autocast else nullcontext():
            loss = pipe.step(ids, ids, loss_fn=F.cross_entropy, mask=mask)
        return loss.item(), {name: whole(x.grad) for name, x in pipe.named_parameters()}

    return sm.simulate(ranks * 2 ** len(axes))(program)()


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, sm.ShardedTensor) else x


def check_bits(actual: list[Trained], expected: list[Trained]) -> None:
    loss, grads = expected[0]
    seen: set[str] = set()
    for own_loss, own_grads in actual:
        assert own_loss == loss
        for name, grad in own_grads.items():
            assert grad.dtype == grads[name].dtype
            assert torch.equal(grad, grads[name]), name
        seen |= set(own_grads)
    assert seen == set(grads)


SCHEDULES = [
    ("1f1b", ["blocks.1"]),
    ("zb_h1", ["head"]),
    ("zb_v", ["blocks.0", "blocks.2", "head"]),
]


@pytest.mark.parametrize(("schedule", "split"), SCHEDULES)
def test_autocast(schedule, split):
    expected = train("gpipe", [], None, True)
    check_bits(train(schedule, split, None, True), expected)
    ids, mask = batch()
    model = make_model()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(ids, mask), ids)
    assert abs(loss.item() - expected[0][0]) < 1e-2


def fsdp_without_pipeline(policy: MixedPrecisionPolicy) -> Trained:
    def program() -> Trained:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("fsdp",))
        model = fully_shard(make_model(), mesh, units=Block, mp_policy=policy)
        ids, mask = batch()
        losses: list[Tensor] = []
        with sm.accumulate_grads():
            for own_ids, own_mask in zip(ids.split(2), mask.split(2), strict=True):
                logits = model(own_ids, mask=own_mask)
                losses.append(F.cross_entropy(logits, own_ids, reduction="sum") / ids.numel())
                losses[-1].backward()
        grads = {name: whole(x.grad) for name, x in model.named_parameters()}
        return torch.stack(losses).sum().item(), grads

    return sm.simulate(2)(program)()[0]


@pytest.mark.one_in(3, each=["schedule"])
@pytest.mark.parametrize("casts_inputs", [True, False])
@pytest.mark.parametrize("output_dtype", [None, torch.float32])
@pytest.mark.parametrize(("schedule", "split"), SCHEDULES)
def test_mixed_precision(schedule, split, output_dtype, casts_inputs):
    policy = MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, output_dtype, cast_forward_inputs=casts_inputs
    )
    loss, grads = fsdp_without_pipeline(policy)
    assert all(x.isfinite().all() for x in grads.values())
    trained = train(schedule, split, policy, False)
    for own_loss, own_grads in trained:
        assert own_loss == pytest.approx(loss, rel=1e-5 if output_dtype else 1e-2)
        for name, grad in own_grads.items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-5, atol=1e-7)
