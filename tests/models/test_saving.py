"""Parallel Hugging Face models saved for programs without shardmesh, and loaded by
`from_pretrained`.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch

import shardmesh as sm
from tests.models.tiny import IDS, model, shard

transformers = pytest.importorskip("transformers")


def _mesh():
    return sm.init_device_mesh("cpu", (2, 2), axis_names=("fsdp", "tp"))


def _same(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # the head of GPT-2 is its embedding
def test_save_pretrained(name, tmp_path):
    def program():
        made = shard(name, model(name), _mesh(), "fsdp+tp")
        state = sm.checkpoint.full_state_dict(made)
        if _mesh().get_rank() == 0:
            made.save_pretrained(tmp_path, state_dict=state)

    sm.simulate(4)(program)()
    reference = model(name)
    _same(type(reference).from_pretrained(tmp_path).state_dict(), reference.state_dict())


@pytest.mark.parametrize("size", [None, "20KB"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_save_safetensors(name, size, tmp_path):
    def program():
        made = shard(name, model(name), _mesh(), "fsdp")
        sm.checkpoint.save_safetensors(made, tmp_path, max_shard_size=size)

    sm.simulate(4)(program)()
    reference = model(name)
    reference.config.save_pretrained(tmp_path)
    assert (len(os.listdir(tmp_path)) > 2) == (size is not None)
    _same(
        type(reference).from_pretrained(tmp_path, dtype=torch.float64).state_dict(),
        reference.state_dict(),
    )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("size", ["50GB", "20KB"])
def test_files_of_save_pretrained(name, size, tmp_path):
    """The file has no tied weights; several files have an index."""
    reference = model(name)
    reference.save_pretrained(tmp_path, max_shard_size=size)

    def program():
        made = shard(name, model(name), _mesh(), "fsdp")
        for x in made.parameters():
            x.data.zero_()
        return sm.checkpoint.full_state_dict(sm.checkpoint.load_safetensors(tmp_path, made))

    _same(sm.simulate(4)(program)()[0], reference.state_dict())


def test_adapters(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(0)
        return peft.get_peft_model(
            model("llama"),
            peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        )

    def program():
        made = adapted()
        sm.parallel.fully_shard(
            made, _mesh(), axes="fsdp", units=type(made.base_model.model.model.layers[0])
        )
        state = sm.checkpoint.full_state_dict(made)
        if _mesh().get_rank() == 0:
            made.save_pretrained(tmp_path, state_dict=state)

    sm.simulate(4)(program)()
    back = peft.PeftModel.from_pretrained(model("llama"), tmp_path).eval()
    torch.testing.assert_close(
        back(input_ids=IDS).logits, adapted().eval()(input_ids=IDS).logits, rtol=1e-6, atol=1e-7
    )


def test_storage_access_raises_and_suggests_saving(tmp_path):
    def program():
        made = shard("llama", model("llama"), _mesh(), "fsdp")
        advice = (
            r"sm\.checkpoint\.save_safetensors\(model, "
            r"path\).*sm\.checkpoint\.full_state_dict\(model\)"
        )
        for save in (
            made.save_pretrained,
            lambda path: torch.export.export(copy.deepcopy(made), (IDS,)),
        ):
            with pytest.raises(RuntimeError, match=advice):
                save(tmp_path)

    sm.simulate(4)(program)()
