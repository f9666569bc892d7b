"""Pipelines with replicas of their stages are recovered with other stages, or with none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.sharding.elastic.recovery import StateLostError, plan_recovery, recover
from shardmesh.sharding.elastic.redundancy import Redundancy
from tests.sharding.elastic.states import mesh_over
from tests.sharding.parallel.pipeline.stateful_model import (
    Block,
    make_model,
    make_optimizer,
    whole_state,
)
from tests.sharding.parallel.pipeline.test_state import check_same
from tests.tiers import slow

SPLITS: dict[int, list[str]] = {1: [], 2: ["blocks.1"], 3: ["blocks.1", "norm"]}


@dataclass(frozen=True)
class Form:
    """A pipeline on a mesh.

    Attributes:
        shape: of the mesh: stages, and replicas or parts of a stage.
        axes: "pd" with replicas, "ps" with FSDP in a stage; "s" for FSDP without a pipeline.
    """

    shape: tuple[int, ...]
    axes: str

    def __str__(self) -> str:
        return f"{self.axes}{self.shape}"

    def build(self, ranks: Sequence[int], seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
        mesh = mesh_over(ranks, self.shape, self.axes)
        if "p" not in self.axes:
            model: Any = sm.parallel.fully_shard(make_model(seed=seed), mesh, src_data_rank=None)
            return model, make_optimizer(model)
        split = SPLITS[self.shape[0]]
        pipe = sm.parallel.pipeline(
            make_model(seed=seed), mesh, axis="p", split=split, schedule="1f1b", microbatches=2
        )
        if "s" in self.axes:
            pipe.fully_shard(mesh["s"], units=Block)
        return pipe, make_optimizer(pipe)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Take steps with gradients that depend on the names of parameters alone."""
    for number in range(steps):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, len(name) + number + 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if not isinstance(model, nn.Module):
            model.whole.refresh_copies()


def tree_and_whole(form: Form, size: int) -> list[Any]:
    """Return each rank's tree, and the whole state."""

    def program() -> Any:
        model, optimizer = form.build(range(size))
        train(model, optimizer)
        return sm.checkpoint.state_dict(model, optimizer), whole_state(model, optimizer)

    return sm.simulate(size)(program)()


@pytest.mark.parametrize(
    ("before", "lost", "after"),
    [
        (Form((2, 2), "pd"), (1,), Form((3,), "p")),
        slow(Form((2, 2), "pd"), (0, 3), Form((1, 2), "pd")),
        slow(Form((2, 2), "pd"), (0, 3), Form((2, 1), "ps")),
        (Form((2, 2), "pd"), (2,), Form((3,), "s")),
        slow(Form((3, 2), "pd"), (0, 3, 5), Form((3,), "p")),
        slow(Form((3, 2), "pd"), (0, 3), Form((2, 2), "ps")),
    ],
    ids=str,
)
def test_stages_with_replicas(before: Form, lost: Sequence[int], after: Form):
    size = before.shape[0] * before.shape[1]
    alive = [rank for rank in range(size) if rank not in lost]
    held = tree_and_whole(before, size)

    def program() -> Any:
        model, optimizer = after.build(range(len(alive)), seed=1)
        state, _ = held[alive[current_world().rank]]
        like = sm.checkpoint.state_dict(model, optimizer)
        assert not plan_recovery(state, like, alive).lost
        result = recover(state, like, alive)
        sm.checkpoint.load_state_dict(model, result, optimizer)
        recovered = whole_state(model, optimizer)
        train(model, optimizer, 1)
        return recovered

    recovered = sm.simulate(len(alive))(program)()[0]
    check_same(recovered, held[0][1])


def test_a_stage_without_replicas_is_lost():
    held = tree_and_whole(Form((2, 2), "pd"), 4)

    def program() -> Any:
        model, optimizer = Form((2,), "p").build(range(2), seed=1)
        like = sm.checkpoint.state_dict(model, optimizer)
        with pytest.raises(StateLostError) as error:
            recover(held[2 + current_world().rank][0], like, [2, 3])
        return error.value.lost

    lost = sm.simulate(2)(program)()[0]
    assert {name for name in lost if name.startswith("model.")} >= {
        "model.embedding.weight",
        "model.blocks.0.up.weight",
    }
    assert not any("blocks.2" in name for name in lost)


def test_a_host_with_a_stage_without_replicas():
    """Two stages with FSDP inside, each on a host; the copies are on the other one."""

    def program() -> Any:
        mesh = mesh_over(range(4), (2, 2), "ps")
        mesh.topology = replace(mesh.topology, node_size=2)
        model, optimizer = Form((2, 2), "ps").build(range(4))
        train(model, optimizer)
        redundancy = Redundancy(mesh)
        redundancy.refresh(sm.checkpoint.state_dict(model, optimizer), 2)
        expected = whole_state(model, optimizer)
        train(model, optimizer, 1)
        return redundancy.version(redundancy.steps[0]), expected

    held = sm.simulate(4)(program)()

    def after() -> Any:
        model, optimizer = Form((2,), "p").build(range(2), seed=1)
        like = sm.checkpoint.state_dict(model, optimizer)
        result = recover(held[2 + current_world().rank][0], like, [2, 3])
        sm.checkpoint.load_state_dict(model, result, optimizer)
        return whole_state(model, optimizer)

    check_same(sm.simulate(2)(after)()[0], held[0][1])


def test_a_pipeline_itself_is_refused():
    def program() -> None:
        model, _ = Form((2,), "p").build(range(2))
        with pytest.raises(ValueError, match=r"'model' is a pipeline, whose ranks ask"):
            recover({"model": model}, {"model": model}, [0, 1])

    sm.simulate(2)(program)()
