"""Compiled blocks in the stages of a pipeline: the same bits as eager blocks.

Backwards are whole or split.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh.parallel import pipeline
from tests.sharding.parallel.pipeline.pipeline_jobs import (
    FORMS,
    Block,
    batch,
    boundaries,
    make_model,
    whole,
)


class CountingBackend:
    """A backend of `torch.compile` that runs graphs as they are, and counts their calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


class RecomputedBlocks(nn.Module):
    """The model, with its blocks under `torch.utils.checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embedding(ids)
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.model.head(self.model.norm(x)).transpose(1, 2)


def replace_blocks(root: nn.Module, function: Any) -> None:
    for path, module in list(root.named_modules()):
        if isinstance(module, Block):
            parent, _, name = path.rpartition(".")
            setattr(root.get_submodule(parent), name, function(module))


def train(how: str, schedule: str, stages: int, form: str, recompute: bool) -> Any:
    """Return losses, gradients by name, and how many graphs were made or called."""
    axes = FORMS[form]
    mesh = sm.init_device_mesh("cpu", (2, *[2 for _ in axes]), axis_names=("pp", *axes))
    backend = CountingBackend()
    model: nn.Module = RecomputedBlocks() if recompute else make_model()
    if how == "jit":
        replace_blocks(model, functools.partial(sm.jit, backend="eager"))
    split = [f"model.{path}" if recompute else path for path in boundaries(stages)]
    pipe = pipeline(model, mesh, split=split, schedule=schedule, microbatches=3)
    if form == "fsdp":
        pipe.fully_shard(mesh["fsdp"], units=Block)
    for stage in pipe.stages.values():
        for module in stage.modules():
            if how == "compiled" and isinstance(module, Block):
                module.compile(backend=backend)
    data_rank = mesh.get_local_rank("fsdp") if form == "fsdp" else 0
    rows = [x[6 * data_rank : 6 * data_rank + 6] for x in batch()]
    losses: list[float] = []
    for _ in range(2):
        pipe.zero_grad()
        losses.append(pipe.step(*rows, loss_fn=F.cross_entropy).item())
    graphs = backend.calls
    for stage in pipe.stages.values():
        graphs += sum(len(getattr(m, "recorded", ())) for m in stage.modules())
    named = dict(pipe.named_parameters())
    grads = {name.replace("._orig_mod", ""): whole(x.grad) for name, x in named.items()}
    return losses, grads, graphs


CASES = [
    ("jit", False, "zb_v", 4),
    ("compiled", True, "zb_v", 4),
    ("jit", False, "1f1b", 2),
    ("compiled", False, "1f1b", 2),
    ("jit", True, "1f1b", 2),
    ("compiled", False, "zb_h1", 2),
    ("jit", False, "zb_h1", 2),
    ("jit", True, "zb_h1", 2),
]


@pytest.mark.one_in(7, each=["how"])
@pytest.mark.parametrize("form", ["fsdp", "none"])
@pytest.mark.parametrize(("how", "recompute", "schedule", "stages"), CASES)
def test_equal_to_eager(how: str, recompute: bool, schedule: str, stages: int, form: str) -> None:
    torch._dynamo.reset()  # else the limit of graphs for one function is reached
    ranks = 2 * 2 ** len(FORMS[form])
    eager = sm.simulate(ranks)(train)("eager", schedule, stages, form, recompute)
    compiled = sm.simulate(ranks)(train)(how, schedule, stages, form, recompute)
    for own, expected in zip(compiled, eager, strict=True):
        assert own[0] == expected[0]
        assert own[1].keys() == expected[1].keys()
        assert all(torch.equal(own[1][name], grad) for name, grad in expected[1].items())
        assert own[2] > 0
        assert expected[2] == 0


def test_a_stage_is_not_compiled_as_a_whole() -> None:
    def run() -> str:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        pipe = pipeline(make_model(), mesh, split=boundaries(2), microbatches=2)
        for number, stage in pipe.stages.items():
            pipe.stages[number] = sm.jit(stage, backend="eager")  # type: ignore[assignment]
        with pytest.raises(TypeError) as raised:
            pipe.step(*batch(), loss_fn=F.cross_entropy)
        return str(raised.value)

    first, second = sm.simulate(2)(run)()
    assert first == second
    assert "A stage is not compiled as a whole" in first


def test_blocks_are_replaced_in_the_model() -> None:
    def run() -> str:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        pipe = pipeline(make_model(), mesh, split=["blocks.2"], microbatches=2)
        for stage in pipe.stages.values():
            replace_blocks(stage, functools.partial(sm.jit, backend="eager"))
        pipe.step(*batch(), loss_fn=F.cross_entropy)
        return ""

    with pytest.raises(ValueError, match=r"'blocks.0' was replaced in a stage"):
        sm.simulate(2)(run)()
