"""A model for tests of state, trained by a pipeline or in one process.

It has what state has to get right: tied weights, buffers, parameters without dims, parts of uneven
and no length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh.parallel import Pipeline, colwise, pipeline, rowwise

WIDTH, VOCABULARY, ROWS, LENGTH = 6, 15, 12, 4

FORMS: dict[str, tuple[str, ...]] = {
    "none": (),
    "fsdp": ("fsdp",),
    "tp": ("tp",),
    "fsdp and tp": ("fsdp", "tp"),
}
BOUNDARIES = {1: [], 2: ["blocks.1"], 4: ["blocks.1", "blocks.2", "norm"]}


class Block(nn.Module):
    """A residual block with a buffer, and a parameter with one row less than ranks."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Ids to logits, with classes in dim 1; the embedding is the head as well."""

    temperature: Tensor

    def __init__(self, tied: bool = True, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("temperature", torch.tensor([1.5], dtype=torch.float64))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return (self.head(self.norm(x)) / self.temperature).transpose(1, 2)


def make_model(tied: bool = True, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = Model(tied).double()
    for number, block in enumerate(model.blocks):
        block.count.fill_(number + 10 * seed)  # type: ignore[operator]
    return model


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=random)
    targets = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=random)
    targets[0, :3] = -100
    targets[5] = -100
    return ids, targets


@dataclass(frozen=True)
class Setup:
    """How a model is divided.

    Attributes:
        form: of the layers inside of a stage.
        schedule, ranks, stages: of the pipeline.
    """

    form: str
    schedule: str
    ranks: int
    stages: int

    @property
    def size(self) -> int:
        return self.ranks * 2 ** len(FORMS[self.form])

    def __str__(self) -> str:
        return f"{self.form}-{self.schedule}-{self.ranks}-{self.stages}"

    def pipe(self, tied: bool = True, seed: int = 0) -> Pipeline:
        axes = FORMS[self.form]
        mesh = sm.init_device_mesh(
            "cpu", (self.ranks, *[2 for _ in axes]), axis_names=("pp", *axes)
        )
        pipe = pipeline(
            make_model(tied, seed),
            mesh,
            split=BOUNDARIES[self.stages],
            schedule=self.schedule,
            microbatches=2,
        )
        if "tp" in axes:
            pipe.parallelize({"*.up": colwise(), "*.down": rowwise()}, mesh["tp"])
        if "fsdp" in axes:
            pipe.fully_shard(mesh["fsdp"], units=Block)
        return pipe


SETUPS = [
    Setup(form, schedule, ranks, stages)
    for form in FORMS
    for schedule, ranks, stages in [
        ("1f1b", 1, 1),
        ("1f1b", 2, 2),
        ("interleaved", 2, 4),
        ("zb_v", 2, 4),
        ("1f1b", 4, 4),
    ]
    if not (form == "fsdp and tp" and ranks == 4)
]


def own_rows(mesh: sm.DeviceMesh, *tensors: Tensor) -> list[Tensor]:
    """Return this rank's rows of a batch."""
    if "fsdp" not in mesh.axis_names:
        return list(tensors)
    return [x.split([5, ROWS - 5])[mesh.get_local_rank("fsdp")] for x in tensors]


def groups_of(named: Any) -> list[dict[str, Any]]:
    """Return two parameter groups; some stages have parameters of one of them only."""
    named = list(named)
    groups = [
        {"params": [x for name, x in named if "up" in name], "weight_decay": 0.1, "lr": 2e-2},
        {"params": [x for name, x in named if "up" not in name], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups_of(model.named_parameters()), lr=1e-2)


def step(model: Pipeline | Model, optimizer: torch.optim.Optimizer) -> float:
    """Take one step; return the loss."""
    optimizer.zero_grad()
    if isinstance(model, Pipeline):
        loss = model.step(*own_rows(model.mesh, *batch()), loss_fn=F.cross_entropy)
    else:
        ids, targets = batch()
        loss = F.cross_entropy(model(ids), targets)
        loss.backward()
    optimizer.step()
    return loss.item()


def whole_state(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return the state with whole tensors on rank 0, {} on the others."""
    return sm.checkpoint.full_state_dict(sm.checkpoint.state_dict(model, optimizer))


def check_same(state: Any, other: Any, tolerance: float = 0.0) -> None:
    """Compare the values of two whole states, by default bit for bit."""
    named, others = named_leaves(state), named_leaves(other)
    assert named.keys() == others.keys()
    for name, x in named.items():
        if not isinstance(x, Tensor):
            assert x == others[name], name
        elif tolerance:
            torch.testing.assert_close(x, others[name], rtol=0, atol=tolerance)
        else:
            assert torch.equal(x, others[name]), name


def named_leaves(state: Any) -> dict[str, Any]:
    """Return the leaves of a state by name; of parameter groups the settings by parameter."""
    named: dict[str, Any] = {}
    for path, leaf in pytree.tree_flatten_with_path(state["model"])[0]:
        named[f"model{pytree.keystr(path)}"] = leaf
    for path, leaf in pytree.tree_flatten_with_path(state["optimizer"]["state"])[0]:
        named[f"state{pytree.keystr(path)}"] = leaf
    for group in state["optimizer"]["param_groups"]:
        settings = {key: value for key, value in group.items() if key != "params"}
        named.update({f"group of {name}": settings for name in group["params"]})
    return named
