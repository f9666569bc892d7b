"""A rank that leaves out a call of the training step that others make: what says so."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import shardmesh as sm
from shardmesh.errors import CollectiveMismatchError, DeadlockError
from shardmesh.parallel import colwise, data_parallel, fully_shard, parallelize, pipeline, rowwise


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


LAYERS: dict[str, Callable[[sm.DeviceMesh], nn.Module]] = {
    "fsdp": lambda mesh: fully_shard(make_model(), mesh),
    "hsdp": lambda mesh: fully_shard(make_model(), mesh, axes=("x", "y")),
    "ddp": lambda mesh: data_parallel(make_model(), mesh),
    "tp": lambda mesh: parallelize(make_model(), mesh, {"0": colwise(), "2": rowwise()}),
}
AXES = {"hsdp": {"x": 2, "y": 2}, "pp": {"pp": 4}}
AXES |= {form: {"pp": 2, "x": 2} for form in ("pp and ddp", "pp and fsdp")}


def train(form: str, skipped: str, ranks: tuple[int, ...], **options: Any) -> None:
    """Run steps; in the second one some ranks leave out a call."""
    axes = AXES.get(form, {"x": 4})
    mesh = sm.init_device_mesh("cpu", tuple(axes.values()), axis_names=tuple(axes))
    model: Any
    if form in LAYERS:
        model = LAYERS[form](mesh)
    else:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        split = ["1", "2", "3"] if form == "pp" else ["2"]
        model = pipeline(layers, mesh, split=split, microbatches=4)
        if form == "pp and ddp":
            model.data_parallel(mesh["x"])
        elif form == "pp and fsdp":
            model.fully_shard(mesh["x"])
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)
    for number in range(4):
        sm.monitor.mark_step(10 + number)
        skips = skipped if number == 1 and mesh.get_rank() in ranks else ""
        x = torch.linspace(-1, 1, 16).view(4, 4) + number
        if form in LAYERS:
            F.mse_loss(model(x), x).backward()
        else:
            model.step(x, x, loss_fn=F.mse_loss)
        if skips != "clip":
            sm.training.clip_grad_norm_(parameters, 1.0)
        if skips != "step":
            optimizer.step()
        if skips != "zero_grad":
            optimizer.zero_grad()


@pytest.mark.one_in(3, each=["form", "options"])
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("form", ["fsdp", "hsdp", "ddp", "tp", "pp and ddp", "pp and fsdp"])
def test_optimizer_step(form: str, options: dict[str, Any]) -> None:
    with pytest.raises(
        CollectiveMismatchError, match="Call step\\(\\) of the optimizers"
    ) as caught:
        sm.simulate(4)(train)(form, "step", (3,), **options)
    assert caught.value.verdict.field == "lineage"
    text = " ".join(str(caught.value).split())
    assert "rank 3: 1)" in text
    assert "2: 2; rank 3" in text
    # two ranks have no majority
    assert caught.value.ranks in ((3,), ())


def test_numbers_of_marked_steps() -> None:
    """They are in the same header as the number of steps of optimizers."""

    def numbers() -> list[int]:
        (ledger,) = sm.monitor.ledger().ranks.values()
        return [step.number for step in ledger.steps]

    def program() -> tuple[list[int], list[int]]:
        train("fsdp", "", ())
        before, last = numbers(), []
        for step in range(40):
            sm.monitor.mark_step(step)
            last.append(numbers()[-1])
        return before, last

    assert sm.simulate(4)(program)() == [(list(range(10, 14)), list(range(40)))] * 4


@pytest.mark.parametrize("form", ["fsdp", "hsdp", "ddp", "tp", "pp and ddp", "pp and fsdp"])
def test_zero_grad(form: str) -> None:
    with pytest.raises(CollectiveMismatchError, match="Look for a call before that was skipped"):
        sm.simulate(4)(train)(form, "zero_grad", (3,))


@pytest.mark.parametrize("form", ["fsdp", "hsdp", "ddp", "tp", "pp", "pp and ddp", "pp and fsdp"])
def test_clipping(form: str) -> None:
    with pytest.raises((CollectiveMismatchError, DeadlockError)) as caught:
        sm.simulate(4)(train)(form, "clip", (3,))
    if form != "ddp":  # norms of replicas need no communication
        assert "for sum over" in str(caught.value)
        assert f"{__file__}:" in str(caught.value).replace("\n      ", "")


# -- stages, which have parameters of their own ----------------------------------------------------


@pytest.mark.one_in(3, each=["form", "options"])
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize(
    ("form", "ranks", "stages"),
    [
        ("pp", (3,), "stage 3"),
        ("pp", (0, 2), "stages 0, 2"),
        ("pp and ddp", (2, 3), "stage 1"),
        ("pp and fsdp", (0, 1), "stage 0"),
    ],
)
def test_optimizer_step_of_a_stage(
    form: str, ranks: tuple[int, ...], stages: str, options: dict[str, Any]
) -> None:
    with pytest.warns(UserWarning, match="pipeline: between two steps") as caught:
        sm.simulate(4)(train)(form, "step", ranks, **options)
    texts = [str(one.message) for one in caught]
    assert len(texts) == 4  # on each rank, once
    for text in texts:
        assert f"the parameters of {stages} were not changed" in text
        assert "Call optimizer.step() on every rank" in text
    assert {one.filename for one in caught} == {__file__}


@pytest.mark.parametrize("form", ["pp", "pp and ddp", "pp and fsdp"])
def test_steps_that_all_ranks_leave_out(form: str) -> None:
    sm.simulate(4)(train)(form, "step", (0, 1, 2, 3))


def test_a_frozen_stage() -> None:
    def program() -> None:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        model = make_model()
        model[0].requires_grad_(False)
        pipe = pipeline(model, mesh, split=["2"], microbatches=2)
        trained = [x for x in pipe.parameters() if x.requires_grad]
        for _ in range(3):
            pipe.step(torch.ones(4, 4), torch.ones(4, 4), loss_fn=F.mse_loss)
            if trained:
                torch.optim.SGD(trained, lr=0.1).step()

    sm.simulate(2)(program)()


def test_a_pipeline_that_is_collected_while_hooks_of_a_step_run() -> None:
    """Such as the one before, in a notebook."""

    collected: list[int] = []

    def program() -> None:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        pipes: Any = [pipeline(make_model(), mesh, split=["2"], microbatches=2) for _ in range(2)]
        pipes[0].itself = pipes[0]
        del pipes[0]
        pipes[0].step(torch.ones(4, 4), torch.ones(4, 4), loss_fn=F.mse_loss)
        torch.optim.SGD(pipes[0].parameters(), lr=0.1).step()

    hook = register_optimizer_step_post_hook(lambda *_: collected.append(gc.collect()))
    gc.disable()
    try:
        sm.simulate(2)(program)()
    finally:
        gc.enable()
        hook.remove()
    assert max(collected) > 0
