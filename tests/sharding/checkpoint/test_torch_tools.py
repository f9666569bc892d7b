"""Compatibility with torch.distributed.checkpoint: torch's tools read our checkpoints, and we read
those of DTensors.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardmesh as sm
from shardmesh import Layout, P
from shardmesh.sharding.checkpoint.load import load
from shardmesh.sharding.checkpoint.save import save
from shardmesh.sharding.checkpoint.state import load_state_dict, state_dict
from tests.device import DEVICE
from tests.sharding.ranks import on_mesh, place

X = torch.arange(35.0).reshape(7, 5)
LAYOUTS = [
    [Shard(0), Shard(1)],
    [Replicate(), Shard(0)],
    [Shard(0), Shard(0)],
    [Replicate(), Replicate()],
]
SPECS = [P("a", "b"), P("b"), P(None, ("b", "a")), P("a", sizes={"a": (0, 7)}), P()]


def _mesh() -> sm.DeviceMesh:
    return sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))


def _to_dtensors(folder: Path) -> None:
    """Load our checkpoint into DTensors and plain tensors with `dcp.load`."""
    mesh = _mesh()
    ours = {
        str(i): sm.distribute_tensor(X + i, mesh, spec, src_data_rank=None)
        for i, spec in enumerate(SPECS)
    }
    path = save({"model": ours, "half": X.bfloat16(), "step": 7}, folder).path
    for placements in LAYOUTS:
        found: Any = {
            "model": {
                name: distribute_tensor(torch.zeros(7, 5), mesh.to_torch(), placements)
                for name in ours
            },
            "half": torch.zeros(7, 5, dtype=torch.bfloat16),
            "step": 0,
        }
        dcp.load(found, checkpoint_id=path)
        assert found["step"] == 7
        assert torch.equal(found["half"], X.bfloat16())
        for i, x in enumerate(found["model"].values()):
            assert isinstance(x, DTensor)
            assert torch.equal(x.full_tensor(), X + i)


def test_torch_loads_ours(world4, tmp_path):
    world4(_to_dtensors, tmp_path)


def _from_dtensors(folder: Path) -> None:
    """Load what torch saved from DTensors into any of our layouts, with the state of an
    optimizer.
    """
    mesh = _mesh()
    torch.manual_seed(0)
    model = nn.Linear(5, 7)
    whole = model.weight.detach().clone()
    model.weight = nn.Parameter(
        distribute_tensor(model.weight.detach(), mesh.to_torch(), LAYOUTS[2])
    )
    optimizer = torch.optim.AdamW([model.weight], lr=0.25)
    model.weight.grad = model.weight.detach() * 0 + 1
    optimizer.step()
    after = model.weight.detach().full_tensor()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": of_model, "optimizer": of_optimizer, "n": [1, 2]}, checkpoint_id=folder)
    for spec in SPECS:
        found = load(
            folder,
            {"model": {"weight": Layout.of(mesh, spec, (7, 5)), "bias": torch.empty(7)}, "n": None},
        )
        assert found["model"]["weight"].spec == Layout.of(mesh, spec, (7, 5)).spec
        assert torch.equal(found["model"]["weight"].full_tensor(), after)
        assert torch.equal(found["model"]["bias"], model.bias.detach())
        assert found["n"] == [1, 2]
    ours = nn.Linear(5, 7)
    ours.weight = nn.Parameter(sm.distribute_tensor(whole, mesh, P("b"), src_data_rank=None))
    stepped = torch.optim.AdamW([ours.weight], lr=9.0)
    load_state_dict(ours, load(folder, state_dict(ours, stepped)), stepped)
    assert stepped.param_groups[0]["lr"] == 0.25
    average = stepped.state[ours.weight]["exp_avg"]
    assert sm.typeof(average) is sm.typeof(ours.weight)
    assert torch.equal(
        average.full_tensor(), optimizer.state[model.weight]["exp_avg"].full_tensor()
    )
    assert torch.equal(ours.weight.detach().full_tensor(), after)


def test_ours_loads_dtensors(world4, tmp_path):
    world4(_from_dtensors, tmp_path)


def test_converted_to_one_torch_file(tmp_path):
    """`dcp_to_torch_save`, without any process group."""

    def program(mesh):
        rows, columns = (place(mesh, X).redistribute(spec) for spec in (P("a"), P(None, "a")))
        return save(
            {"model": {"w": rows, "deep": [{"x": columns}, 2]}, 3: {"e": 1.5}}, tmp_path
        ).path

    path = on_mesh((3,), program)[0]
    dcp_to_torch_save(path, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(found["model"]["w"], X)
    assert torch.equal(found["model"]["deep"][0]["x"], X)
    assert found["model"]["deep"][1] == 2
    assert found["3"] == {"e": 1.5}


@pytest.mark.parametrize("folder", ["torch", "torch/nested"])
def test_plain_tensors_that_torch_saved(folder, tmp_path):
    tree = {"a": {"x": X, "empty": torch.empty(0, 2)}, "l": [1, {"y": X.t()}], "n": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=tmp_path / folder, no_dist=True)

    def program(mesh):
        like = {
            "a": {"x": Layout.of(mesh, P(None, "a"), (7, 5)), "empty": torch.empty(0, 2)},
            "l": [0, {"y": torch.empty(5, 7)}],
            "n": 0,
        }
        found = load(tmp_path / folder, like)
        assert torch.equal(found["a"]["x"].full_tensor(), X)
        assert torch.equal(found["l"][1]["y"], X.t())
        assert (found["l"][0], found["n"]) == (1, 3)

    on_mesh((2,), program)
