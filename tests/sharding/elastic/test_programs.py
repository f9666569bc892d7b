"""The state of whole programs, before and after their first step: bit for bit by name, and the next
step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardmesh as sm
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.sharding.checkpoint.tree import leaves, name_of, without_stateful
from shardmesh.sharding.elastic.recovery import recover
from tests.device import DEVICE
from tests.sharding.elastic.states import (
    Build,
    State,
    assert_equals,
    mesh_over,
    on_ranks,
    whole_values,
)
from tests.tiers import slow


def sharded(model: nn.Module, mesh: sm.DeviceMesh) -> nn.Module:
    return sm.parallel.fully_shard(model, mesh, src_data_rank=None)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def loss_of(model: nn.Module) -> torch.Tensor:
    inputs = torch.arange(24.0, device=DEVICE).reshape(6, 4) / 10
    return model(inputs).square().mean()


def step(state: State) -> None:
    loss_of(state["model"]).backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def training(mesh: sm.DeviceMesh) -> State:
    """A model with all that a loop has next to it."""
    model = sharded(layers(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [2]),
        "scaler": sm.training.GradScaler(DEVICE, init_scale=8.0, growth_interval=1),
        "average": sm.training.EMA(model, 0.9),
    }


def training_step(state: State) -> None:
    state["scaler"].scale(loss_of(state["model"])).backward()
    state["scaler"].step(state["optimizer"])
    state["scaler"].update()
    state["optimizer"].zero_grad()
    state["schedule"].step()
    state["average"].update()


def plateau(mesh: sm.DeviceMesh) -> State:
    model = sharded(layers(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def plateau_step(state: State) -> None:
    step(state)
    state["schedule"].step(1.0)


class Tied(nn.Module):
    """The embedding is the head; a bias is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.body.bias.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(ids)))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def tied_and_frozen(mesh: sm.DeviceMesh) -> State:
    model = sharded(Tied(), mesh)
    return {"model": model, "optimizer": torch.optim.Adam(trained(model), lr=1e-2)}


def tied_step(state: State) -> None:
    ids = torch.arange(6, device=DEVICE)
    F.cross_entropy(state["model"](ids), ids).backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def lbfgs(mesh: sm.DeviceMesh) -> State:
    """Its history is of flat tensors of all parameters together."""
    model = sm.parallel.data_parallel(layers(), mesh, src_data_rank=None)
    return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)}


def lbfgs_step(state: State) -> None:
    def closure() -> torch.Tensor:
        state["optimizer"].zero_grad()
        loss = loss_of(state["model"])
        loss.backward()
        return loss

    state["optimizer"].step(closure)


def adafactor(mesh: sm.DeviceMesh) -> State:
    """Its state has the rows and columns of matrices."""
    model = sharded(layers(), mesh)
    return {"model": model, "optimizer": torch.optim.Adafactor(model.parameters(), lr=1e-2)}


def shampoo(mesh: sm.DeviceMesh) -> State:
    model = sharded(layers(), mesh)
    return {"model": model, "optimizer": sm.optim.Shampoo(model.parameters(), lr=1e-2)}


def groups(mesh: sm.DeviceMesh) -> State:
    model = sharded(layers(), mesh)
    first, *others = model.parameters()
    some = [{"params": [first], "lr": 0.1}, {"params": others}]
    return {"model": model, "optimizer": torch.optim.AdamW(some)}


def gpt2(mesh: sm.DeviceMesh) -> State:
    model = sharded(_gpt2(), mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def lora(mesh: sm.DeviceMesh) -> State:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    model = sharded(peft.get_peft_model(_gpt2(), config), mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(trained(model), lr=1e-2)}


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 17, "n_positions": 16}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens, **dropout))


def language_step(state: State) -> None:
    ids = torch.arange(12, device=DEVICE).reshape(2, 6)
    state["model"](input_ids=ids, labels=ids).loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


@pytest.mark.parametrize(
    ("build", "take_step", "steps"),
    [
        slow(training, training_step, 0),
        (training, training_step, 3),
        slow(plateau, plateau_step, 2),
        slow(tied_and_frozen, tied_step, 0),
        (tied_and_frozen, tied_step, 2),
        slow(lbfgs, lbfgs_step, 2),
        (adafactor, step, 2),
        slow(shampoo, step, 2),
        slow(groups, step, 2),
        slow(gpt2, language_step, 0),
        slow(gpt2, language_step, 2),
        slow(lora, language_step, 0),
        slow(lora, language_step, 2),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_programs(build: Build, take_step: Callable[[State], None], steps: int):
    def program() -> None:
        torch.manual_seed(0)
        state = build(mesh_over(range(4), (2, 2), "rs"))
        for _ in range(steps):
            take_step(state)
        expected, others = whole_values(state), other_values(state)
        if current_world().rank == 2:
            return
        torch.manual_seed(1)
        like = build(mesh_over([0, 1, 3], (3,), "s"))
        recover(state, like, [0, 1, 3])
        assert_equals(like, expected)
        assert other_values(like) == others
        take_step(like)

    on_ranks(4, program)


def other_values(state: State) -> dict[str, Any]:
    """Return what is no tensor, without settings that torch adds to a loaded optimizer."""
    named = {name_of(path): leaf for path, leaf in leaves(without_stateful(state))}
    return {
        name: leaf
        for name, leaf in named.items()
        if not isinstance(leaf, torch.Tensor) and not name.endswith(".differentiable")
    }
