"""Tied weights: stored once in files and full states, and loaded under every name in a module."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import Layout, P
from shardmesh.sharding.checkpoint.tree import ties
from tests.sharding.ranks import collectives, launched, on_mesh


class TiedEmbedding(nn.Module):
    """An embedding and a head that are one parameter, and a buffer with two names."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.last = nn.Linear(3, 5, bias=False)
        self.head.weight = self.last.weight = self.embed.weight
        self.register_buffer("scale", torch.full((2,), 2.0))
        self.head.register_buffer("scale", self.scale)


def _tied(mesh, value):
    """Return the model with parameters sharded over all ranks, and this value in the tied one."""
    model = TiedEmbedding()
    nn.init.constant_(model.embed.weight, value)
    return sm.parallel.fully_shard(model, mesh)


def test_names():
    model = TiedEmbedding()
    expected = {"head.weight": "embed.weight", "last.weight": "embed.weight", "head.scale": "scale"}
    assert ties(model) == expected
    assert ties({"a": [model]}) == {f"a.0.{name}": f"a.0.{kept}" for name, kept in expected.items()}
    assert ties({"x": model.scale, "y": model.scale, "layout": nn.Linear(2, 2)}) == {}


def test_file_stores_tied_weights_once(tmp_path):
    path = tmp_path / "model.safetensors"

    def program(mesh):
        sm.checkpoint.save_safetensors(_tied(mesh, 4.0), path)
        model = _tied(mesh, 0.0)
        sm.checkpoint.load_safetensors(path, model)
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.last.weight.full_tensor(), torch.full((5, 3), 4.0))
        # No module: the file knows the name.
        like = {"last": {"weight": Layout.of(mesh, P("a"), (5, 3), torch.float32)}}
        return sm.checkpoint.load_safetensors(path, like)["last"]["weight"].full_tensor()

    assert all(torch.equal(found, torch.full((5, 3), 4.0)) for found in on_mesh((3,), program))
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert sorted(header) == ["__metadata__", "embed.weight", "head.bias", "scale"]
    assert header["__metadata__"]["format"] == "pt"
    library = pytest.importorskip("safetensors.torch")
    back = TiedEmbedding()
    library.load_model(back, path)
    assert torch.equal(back.head.weight, torch.full((5, 3), 4.0))


@pytest.mark.parametrize("stored", ["embed.weight", "head.weight", "last.weight"])
def test_files_may_have_any_of_the_tied_names(stored, tmp_path):
    library = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    library.save_file(
        {stored: torch.ones(5, 3), "head.bias": torch.ones(5), "scale": torch.ones(2)}, path
    )

    def program(mesh):
        return sm.checkpoint.full_state_dict(sm.checkpoint.load_safetensors(path, _tied(mesh, 0.0)))

    found = on_mesh((2,), program)[0]
    assert list(found) == list(TiedEmbedding().state_dict())
    assert all(torch.equal(x, torch.ones_like(x)) for x in found.values())


def test_full_state_has_tied_weights_once():
    def program(mesh):
        model = _tied(mesh, 4.0)
        with collectives() as records:
            whole = sm.checkpoint.full_state_dict({"m": model})
        assert launched(records).count("all_to_all") == 2  # embed.weight and head.bias
        return whole

    whole = on_mesh((3,), program)[0]["m"]
    assert whole["head.weight"] is whole["embed.weight"] is whole["last.weight"]
    assert list(whole) == list(TiedEmbedding().state_dict())
