"""Compiled blocks in the stages of a pipeline: the same bits as eager blocks.

Backwards are whole or split.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh.parallel import colwise, pipeline, rowwise
from shardmesh.sharding.parallel.pipeline.gathering import Gather
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
    """The model, with dropout between its blocks, or at its end alone."""

    def __init__(self, at_end: bool = False) -> None:
        super().__init__()
        self.model = make_model()
        self.drop = nn.Dropout(0.3)
        self.at_end = at_end

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embedding(ids)
        for block in self.model.blocks:
            x = block(x) if self.at_end else self.drop(block(x))
        y = self.model.head(self.model.norm(x))
        return (self.drop(y) if self.at_end else y).transpose(1, 2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": make_model,
    "dropout": WithDropout,
    "dropout at the end": functools.partial(WithDropout, at_end=True),
    "checkpoints": RecomputedBlocks,
}


def noisy_loss(y: Tensor, target: Tensor) -> Tensor:
    """Return a loss that draws random numbers."""
    return F.cross_entropy(F.dropout(y, 0.2), target)


def train_stages(
    how: str, schedule: str, stages: int, form: str, model: str, gather: Gather = "microbatch"
) -> Any:
    """Return losses, gradients by name, and the names of what graphs were recorded of."""
    axes = FORMS[form]
    mesh = sm.init_device_mesh("cpu", (2, *[2 for _ in axes]), axis_names=("pp", *axes))
    split = [path if model == "plain" else f"model.{path}" for path in boundaries(stages)]
    pipe = pipeline(
        MODELS[model](), mesh, split=split, schedule=schedule, microbatches=3, gather=gather
    )
    if "tp" in axes:
        plan = {"*.up": colwise(), "*.down": rowwise()}
        if model == "dropout at the end":  # so that what is dropped is a ShardedTensor
            plan["*head"] = colwise()
        pipe.parallelize(plan, mesh["tp"])
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
        losses.append(pipe.step(*rows, loss_fn=noisy_loss).item())
    losses.append(pipe.eval(*rows, loss_fn=F.cross_entropy).item())
    grads = {name: whole(x.grad) for name, x in pipe.named_parameters()}
    names = [graph.entry.recording.program.name for one in compiled for graph in one.recorded]
    return losses, grads, names


STAGES = [
    ("1f1b", 2, "none", "plain", "microbatch", {"Stage"}),
    ("zb_v", 4, "none", "plain", "microbatch", {"Stage"}),
    ("interleaved", 4, "tp", "plain", "microbatch", {"Stage"}),
    ("1f1b", 2, "fsdp", "plain", "microbatch", {"Stage"}),
    ("zb_h1", 2, "fsdp", "plain", "step", {"Stage"}),
    ("1f1b", 2, "none", "dropout", "microbatch", {"Block"}),  # no graph has seeds between units
    ("zb_h1", 2, "none", "checkpoints", "microbatch", {"Stage"}),
]


@pytest.mark.one_in(3, each=["model", "gather"])
@pytest.mark.parametrize(("schedule", "stages", "form", "model", "gather", "graphs"), STAGES)
def test_stages_as_graphs(
    schedule: str, stages: int, form: str, model: str, gather: Gather, graphs: set[str]
) -> None:
    ranks = 2 * 2 ** len(FORMS[form])
    eager = sm.simulate(ranks)(train_stages)("eager", schedule, stages, form, model, gather)
    compiled = sm.simulate(ranks)(train_stages)("jit", schedule, stages, form, model, gather)
    for own, expected in zip(compiled, eager, strict=True):
        assert own[0] == expected[0]
        assert own[1].keys() == expected[1].keys()
        assert all(torch.equal(own[1][name], grad) for name, grad in expected[1].items())
        assert set(own[2]) == graphs


def test_sharded_random_numbers_after_the_last_unit_are_in_no_graph() -> None:
    case = "1f1b", 2, "tp", "dropout at the end"
    eager = sm.simulate(4)(train_stages)("eager", *case)
    compiled = sm.simulate(4)(train_stages)("jit", *case)
    for own, expected in zip(compiled, eager, strict=True):
        assert own[0] == expected[0]
        assert all(torch.equal(own[1][name], grad) for name, grad in expected[1].items())
    assert [set(own[2]) for own in compiled] == [{"Stage"}, {"Stage"}, {"Block"}, {"Block"}]


def test_stages_are_copied() -> None:
    def run() -> None:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        pipe = pipeline(make_model(), mesh, split=boundaries(2), microbatches=2)
        (number,) = pipe.stages
        stage = pipe.stages[number]
        copies: list[nn.Module] = [copy.deepcopy(stage), copy.deepcopy(pipe.stages)[number]]
        copies.append(AveragedModel(stage).module)
        for copied in copies:
            assert copied is not stage
            own = dict(copied.named_parameters())
            assert own.keys() == dict(stage.named_parameters()).keys()
            assert all(torch.equal(own[name], x) for name, x in stage.named_parameters())

    sm.simulate(2)(run)()


def test_every_way_to_assign_a_stage() -> None:
    def run() -> None:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        pipe = pipeline(make_model(), mesh, split=boundaries(2), microbatches=2)
        (number,) = pipe.stages
        other: Any = nn.Linear(1, 1)
        with pytest.raises(TypeError, match=r"assign sm\.jit of the stage"):
            pipe.stages.update({number: other})
        with pytest.raises(TypeError, match="the stages of a rank are fixed"):
            pipe.stages.clear()
        compiled: Any = sm.jit(pipe.stages[number], backend="eager")
        pipe.stages.update({number: compiled})
        assert pipe.stages.calls == {number: compiled}
        assert list(pipe.stages.values()) == [pipe.stages[number]]

    sm.simulate(2)(run)()


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
