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
from shardmesh.sharding.elastic.pipelines import load_named, named, whole_tree
from shardmesh.sharding.elastic.recovery import StateLostError, plan_recovery, recover
from shardmesh.sharding.elastic.redundancy import Redundancy
from shardmesh.sharding.elastic.snapshot import Snapshot, missing_parts
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


# -- in a job, which keeps a snapshot of each committed step ---------------------------------------


def job_state(form: Form, ranks: Sequence[int], seed: int = 0) -> dict[str, Any]:
    model, optimizer = form.build(ranks, seed)
    return {"model": model, "optimizers": [optimizer], "ema": sm.training.EMA(model, 0.5)}


def committed(form: Form, size: int) -> list[Any]:
    """Return each rank's tree of a snapshot, its collectives, and the whole state."""

    def program() -> Any:
        state = job_state(form, range(size))
        model, (optimizer,) = state["model"], state["optimizers"]
        before = Snapshot(state)
        train(model, optimizer)
        state["ema"].update()
        whole = whole_state(model, optimizer), sm.checkpoint.full_state_dict(state["ema"])
        counted: list[str] = []
        current_world().observers.append(lambda record: counted.append(record.op))
        tree = Snapshot(state, before).tree()
        current_world().observers.clear()
        for stage in model.stages.values():  # as a step does that is given up
            for name, buffer in stage.named_buffers():
                if name.endswith("count"):
                    buffer += 1
        return tree, counted, whole

    return sm.simulate(size)(program)()


@pytest.mark.parametrize(
    ("lost", "after"),
    [
        ((1,), Form((3, 1), "pd")),
        slow((0, 3), Form((2, 1), "pd")),
        slow((2,), Form((1, 3), "pd")),
    ],
    ids=str,
)
def test_ranks_tell_each_other_of_their_stages_after_a_loss(lost: Sequence[int], after: Form):
    held = committed(Form((2, 2), "pd"), 4)
    assert [counted for _, counted, _ in held] == [[]] * 4
    alive = [rank for rank in range(4) if rank not in lost]

    def program() -> Any:
        like = job_state(after, range(len(alive)), seed=1)
        number = alive[current_world().rank]
        assert not missing_parts(held[number][0], alive)
        everybody = current_world().group(range(len(alive)))
        state = whole_tree(held[number][0], everybody, number)
        result = load_named(like, recover(state, named(like), alive))
        assert result["model"] is like["model"]
        (optimizer,) = result["optimizers"]
        whole = whole_state(like["model"], optimizer)
        return whole, sm.checkpoint.full_state_dict(result["ema"])

    whole, ema = sm.simulate(len(alive))(program)()[0]
    expected_whole, expected_ema = held[0][2]
    check_same(whole, expected_whole)
    assert ema["updates"] == expected_ema["updates"] == 1
    assert ema["average"].keys() == expected_ema["average"].keys()
    for name, average in ema["average"].items():
        assert torch.equal(average, expected_ema["average"][name]), name


def test_a_rank_knows_what_is_lost_with_a_stage():
    held = committed(Form((2, 2), "pd"), 4)
    missing = missing_parts(held[2][0], [2, 3])
    assert any(text.startswith("model.blocks.0.up.weight[") for text in missing)
    assert not any("blocks.2" in text for text in missing)


def test_a_pipeline_itself_is_refused():
    def program() -> None:
        model, _ = Form((2,), "p").build(range(2))
        with pytest.raises(ValueError, match=r"'model' is a pipeline, whose ranks ask"):
            recover({"model": model}, {"model": model}, [0, 1])

    sm.simulate(2)(program)()
