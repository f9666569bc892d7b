"""A model, its batches and training by a pipeline or in one process, for tests of pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import Pipeline, colwise, pipeline, prepare_inputs, rowwise

WIDTH, VOCABULARY, ROWS, LENGTH = 8, 20, 16, 5
STEPS = 3

# forms inside of a stage: the axes of the mesh after "pp"
FORMS: dict[str, tuple[str, ...]] = {
    "none": (),
    "ddp": ("dp",),
    "zero1": ("dp",),
    "fsdp": ("fsdp",),
    "tp": ("tp",),
    "sp": ("tp",),  # tensor parallelism, with what blocks return split along the sequence
    "hsdp": ("dp", "fsdp"),
    "fsdp and tp": ("fsdp", "tp"),
}


class Block(nn.Module):
    """A residual block; `hidden` and `down` are what tensor parallelism splits."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Ids to logits, with classes in dim 1."""

    def __init__(self, blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


def make_model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).double()


def batch() -> tuple[Tensor, Tensor]:
    """Return ids, and targets of which some count nothing: unevenly over rows."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=random)
    targets = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=random)
    targets[0, :3] = -100
    targets[5] = -100
    targets[9:11, 1:] = -100
    return ids, targets


def boundaries(stages: int, blocks: int = 4) -> list[str]:
    """Return boundaries of stages; of more than `blocks` stages embedding and head are ones."""
    splits = {
        1: [],
        2: ["blocks.1"],  # uneven
        3: ["blocks.1", "norm"],
        4: ["blocks.1", "blocks.2", "blocks.3"],
        6: ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm"],
    }
    return splits[stages]


@dataclass
class Trained:
    """Losses of steps, gradients of the last one, and the parameters after it."""

    losses: list[float]
    grads: dict[str, Tensor]
    parameters: dict[str, Tensor]
    evaluated: float


def one_process(steps: int = STEPS) -> Trained:
    """Train on the whole batch."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, targets = batch()
    losses: list[float] = []
    grads: dict[str, Tensor] = {}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids), targets)
        loss.backward()
        grads = {name: x.grad.clone() for name, x in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    evaluated = F.cross_entropy(model(ids), targets).item()
    return Trained(losses, grads, detached(model.named_parameters()), evaluated)


def make_pipeline(
    form: str, schedule: str, ranks: int, microbatches: int, stages: int, **options: Any
) -> Pipeline:
    axes = FORMS[form]
    mesh = sm.init_device_mesh("cpu", (ranks, *[2 for _ in axes]), axis_names=("pp", *axes))
    pipe = pipeline(
        make_model(),
        mesh,
        split=boundaries(stages),
        schedule=schedule,
        microbatches=microbatches,
        **options,
    )
    if "tp" in axes:
        plan: dict[str, Any] = {"*.up": colwise(), "*.down": rowwise()}
        if form == "sp":
            plan["*.down"] = rowwise(out=P(None, "tp", None))
            plan["head"] = prepare_inputs(P())
        pipe.parallelize(plan, mesh["tp"])
    if "fsdp" in axes:
        pipe.fully_shard(mesh[tuple(axis for axis in axes if axis != "tp")], units=Block)
    if form == "ddp":
        pipe.data_parallel()
    if form == "zero1":
        pipe.data_parallel(optimizer="dp")
    return pipe


def own_rows(mesh: sm.DeviceMesh, *tensors: Tensor) -> list[Tensor]:
    """Return this rank's rows of a batch: another number on each data-parallel rank."""
    data = [axis for axis in mesh.axis_names if axis in ("dp", "fsdp")]
    rank = 0
    for axis in data:
        rank = rank * mesh.size(axis) + mesh.get_local_rank(axis)
    rows = {1: [16], 2: [7, 9], 4: [3, 4, 4, 5]}[2 ** len(data)]
    return [x.split(rows)[rank] for x in tensors]


def train(
    form: str,
    schedule: str,
    ranks: int,
    microbatches: int,
    stages: int,
    *,
    steps: int = STEPS,
    **options: Any,
) -> Trained:
    """Train by a pipeline, on one rank of it."""
    pipe = make_pipeline(form, schedule, ranks, microbatches, stages, **options)
    ids, targets = own_rows(pipe.mesh, *batch())
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses: list[float] = []
    grads: dict[str, Tensor] = {}
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pipe.step(ids, targets, loss_fn=F.cross_entropy).item())
        grads = {name: whole(x.grad) for name, x in pipe.named_parameters()}
        optimizer.step()
    evaluated = pipe.eval(ids, targets, loss_fn=F.cross_entropy).item()
    return Trained(losses, grads, detached(pipe.named_parameters()), evaluated)


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, sm.ShardedTensor) else x.clone()


def detached(named: Any) -> dict[str, Tensor]:
    return {name: whole(x.detach()) for name, x in named}


def check_equal(by_rank: Sequence[Trained], expected: Trained, tolerance: float = 1e-12) -> None:
    """Compare all ranks with one process: losses, gradients and parameters of all stages."""
    parameters: set[str] = set()
    for trained in by_rank:
        for ours, theirs in zip(trained.losses, expected.losses, strict=True):
            assert abs(ours - theirs) <= tolerance
        assert abs(trained.evaluated - expected.evaluated) <= tolerance
        for name, grad in trained.grads.items():
            assert (grad - expected.grads[name]).abs().max() <= tolerance, name
        for name, parameter in trained.parameters.items():
            assert (parameter - expected.parameters[name]).abs().max() <= tolerance, name
            parameters.add(name)
    assert parameters == set(expected.parameters)
