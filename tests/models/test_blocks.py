"""`units="auto"`, Muon of experts, tied files and resizing, with Hugging Face models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh.parallel import data_parallel, fully_shard, parallelize
from shardmesh.sharding.parallel.data.unit import units_in
from tests.models.tiny import IDS, model

BLOCKS = {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block", "mixtral": "MixtralDecoderLayer"}


def _mesh():
    return sm.init_device_mesh("cpu", (2,), axis_names=("dp",))


def _shard(made, spread):
    return (
        fully_shard(made, _mesh(), units="auto")
        if spread == "fully_shard"
        else parallelize(made, _mesh(), "auto")
    )


def _whole(p):
    return p.full_tensor().detach() if isinstance(p, sm.ShardedTensor) else p.detach()


def _unit_names(module):
    return sorted(unit.plan.name for unit in units_in(module))


@pytest.mark.parametrize("wrap", [fully_shard, data_parallel])
@pytest.mark.parametrize("name", BLOCKS)
def test_auto_is_the_blocks_that_the_model_names(name, wrap):
    def program():
        auto, named = (wrap(model(name), _mesh(), units=units) for units in ("auto", BLOCKS[name]))
        losses = [made(input_ids=IDS, labels=IDS).loss.item() for made in (auto, named)]
        return _unit_names(auto), _unit_names(named), losses

    expected = model(name)(input_ids=IDS, labels=IDS).loss.item()
    for auto, named, losses in sm.simulate(2)(program)():
        assert auto == named
        assert len(auto) == 3
        assert losses == pytest.approx([expected] * 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


class Stages(nn.Module):
    """Two lists of blocks, one of them in a dict and compiled, and lists that are none."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(Block() for _ in range(2))
        self.later = nn.ModuleDict(
            {"blocks": nn.ModuleList(torch.compile(Block(), backend="eager") for _ in range(2))}
        )
        self.mixed = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])
        self.activations = nn.ModuleList([nn.ReLU(), nn.ReLU()])


def test_auto_is_repeated_blocks_of_other_models():
    def program():
        found = _unit_names(fully_shard(Stages(), _mesh(), units="auto"))
        with pytest.raises(
            ValueError,
            match=r'units="auto": Sequential neither names its blocks, .* such as units=Block',
        ) as raised:
            fully_shard(nn.Sequential(nn.Linear(4, 4)), _mesh(), units="auto")
        assert raised
        return found

    expected = ["", "first.0", "first.1", "later.blocks.0", "later.blocks.1"]
    assert sm.simulate(2)(program)() == [expected] * 2


@pytest.mark.parametrize("spread", ["fully_shard", "parallelize"])
def test_muon_of_mixtral_is_that_of_one_process(spread):
    """Its experts are stacks [experts, m, n]."""

    def trained(made):
        optimizer = sm.optim.Muon(
            made.named_parameters(),
            lr=0.01,
            adamw=["*embed*", "lm_head*"],
            adamw_lr=0.001,
            adamw_eps=0.01,
            # AdamW with a small eps makes large steps of gradients that are rounding
            ns_dtype=torch.float64,
        )
        for _ in range(2):
            made(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return made

    def program():
        made = _shard(model("mixtral"), spread)
        return {name: _whole(p) for name, p in trained(made).named_parameters()}

    expected = dict(trained(model("mixtral")).named_parameters())
    assert sum(p.ndim == 3 for p in expected.values()) == 4
    for found in sm.simulate(2)(program)():
        for name, p in expected.items():
            # After steps of 1e-2 along gradients that have passed a router, which computes in
            # float32.
            torch.testing.assert_close(
                found[name],
                p.detach(),
                rtol=0,
                atol=1e-6,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def test_a_tied_model_is_loaded_by_its_state(tmp_path):
    reference = model("llama", tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)

    def program():
        made = fully_shard(model("llama", tie_word_embeddings=True), _mesh(), units="auto")
        nn.init.zeros_(made.lm_head.weight)
        state = sm.checkpoint.load_safetensors(tmp_path, sm.checkpoint.state_dict(made)["model"])
        sm.checkpoint.load_state_dict(made, {"model": state})
        return made.lm_head.weight.full_tensor()

    for found in sm.simulate(2)(program)():
        assert torch.equal(found, reference.lm_head.weight)


@pytest.mark.parametrize("spread", ["fully_shard", "parallelize"])
def test_resizing_comes_before_sharding(spread):
    def program():
        made = model("llama", tie_word_embeddings=True)
        _shard(made, spread)
        with pytest.raises(
            TypeError,
            match=(
                "resize_token_embeddings, comes before fully_shard, data_parallel and parallelize"
            ),
        ):
            made.resize_token_embeddings(70, mean_resizing=False)
        assert made.get_input_embeddings().weight.shape[0] == 64
        resized = model("llama", tie_word_embeddings=True)
        resized.resize_token_embeddings(70, mean_resizing=False)
        return _shard(resized, spread)(input_ids=IDS, labels=IDS).logits.shape[-1]

    assert sm.simulate(2)(program)() == [70] * 2
