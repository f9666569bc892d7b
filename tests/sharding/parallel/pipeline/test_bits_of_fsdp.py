"""FSDP in the stages of a pipeline and FSDP alone: which bits are equal.

    FSDP alone                                            the same bits in a pipeline
    a backward per microbatch, in `accumulate_grads`      gather="microbatch"
    gradients whole until the last backward               gather="step"

The loss of a microbatch is the sum of its targets' over their number in the whole batch, scaled
before backward. Losses are added in float64, and rounded once to the dtype that the model returns.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardmesh as sm
from shardmesh import compat
from shardmesh.parallel import MixedPrecisionPolicy, pipeline
from tests.sharding.parallel.pipeline.pipeline_jobs import Block, batch, make_model

FSDP, MICROBATCHES = 2, 4
Grads = dict[str, Tensor]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}
SCHEDULES = {
    "gpipe": ["blocks.1"],
    "1f1b": ["blocks.2"],
    "zb_h1": ["blocks.1", "norm"],
    "interleaved": ["blocks.1", "blocks.2", "blocks.3"],
}


def own_microbatches(mesh: sm.DeviceMesh) -> list[tuple[Tensor, Tensor]]:
    ids, targets = (x.chunk(FSDP)[mesh.index_along(("fsdp",))] for x in batch())
    return list(zip(ids.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True))


def grads_of(parameters: Any) -> Grads:
    return {name: x.grad.full_tensor() for name, x in parameters}


def alone(dtype: torch.dtype, options: dict[str, Any], reduces_once: bool) -> tuple[float, Grads]:
    def program() -> tuple[Tensor, torch.dtype, Grads]:
        mesh = sm.init_device_mesh("cpu", (FSDP,), axis_names=("fsdp",))
        model: Any = make_model().to(dtype)
        for block in model.blocks:
            compat.fully_shard(block, mesh=mesh, **options)
        compat.fully_shard(model, mesh=mesh, **options)
        count = (batch()[1] != -100).sum().double()
        total = torch.zeros((), dtype=torch.float64)
        parts = own_microbatches(mesh)
        loss = total
        with nullcontext() if reduces_once else sm.accumulate_grads():
            for number, (ids, targets) in enumerate(parts):
                if reduces_once:
                    model.set_requires_gradient_sync(number == len(parts) - 1)
                loss = F.cross_entropy(model(ids), targets, reduction="sum")
                (loss * (FSDP / count).to(loss.dtype)).backward()
                total += loss.detach() * (FSDP / count)
        return total / FSDP, loss.dtype, grads_of(model.named_parameters())

    results = sm.simulate(FSDP)(program)()
    total, loss_dtype, grads = results[0]
    for other, _, _ in results[1:]:
        total = total + other
    return total.to(loss_dtype).item(), grads


def piped(
    dtype: torch.dtype, options: dict[str, Any], schedule: str, gather: Any
) -> list[tuple[float, Grads]]:
    split = SCHEDULES[schedule]
    ranks = 2 if schedule == "interleaved" else len(split) + 1

    def program() -> tuple[float, Grads]:
        mesh = sm.init_device_mesh("cpu", (ranks, FSDP), axis_names=("pp", "fsdp"))
        pipe = pipeline(
            make_model().to(dtype),
            mesh,
            split=split,
            schedule=schedule,
            microbatches=MICROBATCHES,
            gather=gather,
        )
        pipe.fully_shard(mesh["fsdp"], units=Block, **options)
        ids, targets = (torch.cat(x) for x in zip(*own_microbatches(mesh["fsdp"]), strict=True))
        loss = pipe.step(ids, targets, loss_fn=F.cross_entropy)
        return loss.item(), grads_of(pipe.named_parameters())

    return sm.simulate(ranks * FSDP)(program)()


@pytest.mark.one_in(6, each=["schedule"])
@pytest.mark.parametrize("gather", ["microbatch", "step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", OPTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_fsdp_alone(schedule: str, form: str, dtype: torch.dtype, gather: str) -> None:
    options = OPTIONS[form]
    loss, grads = alone(dtype, options, reduces_once=gather == "step")
    seen: set[str] = set()
    for own_loss, own_grads in piped(dtype, options, schedule, gather):
        assert own_loss == pytest.approx(loss, rel=1e-15)
        for name, grad in own_grads.items():
            assert torch.equal(grad, grads[name]), name
        seen |= own_grads.keys()
    assert seen == grads.keys()
