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
from shardmesh.parallel import colwise, pipeline, rowwise
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


# -- stages as a whole -----------------------------------------------------------------------------


class WithDropout(nn.Module):
    """The model, with dropout in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.drop = nn.Dropout(0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embedding(ids)
        for block in self.model.blocks:
            x = self.drop(block(x))
        return self.model.head(self.model.norm(x)).transpose(1, 2)


def train_stages(how: str, schedule: str, stages: int, form: str, drops: bool) -> Any:
    """Return losses, gradients by name, and the names of what graphs were recorded of."""
    axes = FORMS[form]
    mesh = sm.init_device_mesh("cpu", (2, *[2 for _ in axes]), axis_names=("pp", *axes))
    model: nn.Module = WithDropout() if drops else make_model()
    split = [f"model.{path}" if drops else path for path in boundaries(stages)]
    pipe = pipeline(model, mesh, split=split, schedule=schedule, microbatches=3)
    if "tp" in axes:
        pipe.parallelize({"*.up": colwise(), "*.down": rowwise()}, mesh["tp"])
    if form == "fsdp":
        pipe.fully_shard(mesh["fsdp"])
    compiled: list[Any] = []
    for number, stage in pipe.stages.items():
        if how == "jit":
            compiled.append(sm.jit(stage, backend="eager"))
            pipe.stages[number] = compiled[-1]
        assert pipe.stages[number] is stage
    data_rank = mesh.get_local_rank("fsdp") if form == "fsdp" else 0
    rows = [x[6 * data_rank : 6 * data_rank + 6] for x in batch()]
    losses: list[float] = []
    for _ in range(3):
        pipe.zero_grad()
        losses.append(pipe.step(*rows, loss_fn=F.cross_entropy).item())
    losses.append(pipe.eval(*rows, loss_fn=F.cross_entropy).item())
    grads = {name: whole(x.grad) for name, x in pipe.named_parameters()}
    names = [graph.entry.recording.program.name for one in compiled for graph in one.recorded]
    return losses, grads, names


STAGES = [
    ("1f1b", 2, "none", False, {"Stage"}),
    ("zb_v", 4, "none", False, {"Stage"}),
    ("interleaved", 4, "tp", False, {"Stage"}),
    ("1f1b", 2, "fsdp", False, {"Stage"}),
    ("1f1b", 2, "none", True, {"Block"}),  # seeds between units are not in a graph
]


@pytest.mark.one_in(3, each=["drops"])
@pytest.mark.parametrize(("schedule", "stages", "form", "drops", "graphs"), STAGES)
def test_stages_as_graphs(
    schedule: str, stages: int, form: str, drops: bool, graphs: set[str]
) -> None:
    ranks = 2 * 2 ** len(FORMS[form])
    eager = sm.simulate(ranks)(train_stages)("eager", schedule, stages, form, drops)
    compiled = sm.simulate(ranks)(train_stages)("jit", schedule, stages, form, drops)
    for own, expected in zip(compiled, eager, strict=True):
        assert own[0] == expected[0]
        assert own[1].keys() == expected[1].keys()
        assert all(torch.equal(own[1][name], grad) for name, grad in expected[1].items())
        assert set(own[2]) == graphs


def test_what_is_no_stage_is_not_assigned() -> None:
    def run() -> list[str]:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        pipe = pipeline(make_model(), mesh, split=boundaries(2), microbatches=2)
        (number,) = pipe.stages
        texts: list[str] = []
        compiled: Any = torch.compile(pipe.stages[number])
        for module in (compiled, nn.Linear(1, 1)):
            with pytest.raises(TypeError) as raised:
                pipe.stages[number] = module
            texts.append(str(raised.value))
        return texts

    for compiled, other in sm.simulate(2)(run)():
        assert "OptimizedModule: assign sm.jit of the stage" in compiled
        assert "Linear: assign sm.jit of the stage" in other


def test_added_losses_are_not_in_graphs() -> None:
    def run() -> None:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        model = make_model()
        pipe = pipeline(model, mesh, split=boundaries(2), microbatches=2)
        model.blocks[0].register_forward_hook(lambda _, args, y: pipe.add_loss(y.square().mean()))
        for number, stage in pipe.stages.items():
            pipe.stages[number] = sm.jit(stage, backend="eager")
        pipe.step(*batch(), loss_fn=F.cross_entropy)

    with pytest.raises(RuntimeError, match=r"add_loss: called in what sm\.jit"):
        sm.simulate(2)(run)()


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
