"""Hugging Face models built on "meta": initial values, buffers, and weights from files."""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from tests.models.tiny import IDS, MODELS, model, shard, whole


def _on_meta(name, form, mesh):
    with torch.device("meta"):
        made = MODELS[name]()
    return shard(name, made, mesh, form)


def _mesh():
    return sm.init_device_mesh("cpu", (2, 2), axis_names=("fsdp", "tp"))


@pytest.mark.parametrize("name", MODELS)
def test_initial_values(name):
    def program(form):
        sm.random.manual_seed(0)
        made = sm.parallel.materialize(_on_meta(name, form, _mesh()))
        return {key: whole(x) for key, x in [*made.named_parameters(), *made.named_buffers()]}

    by_form = [sm.simulate(4)(program)(form)[0] for form in ("fsdp+tp", "tp")]
    torch.manual_seed(0)
    reference = MODELS[name]()
    buffers = dict(reference.named_buffers())
    for key, x in [*reference.named_parameters(), *buffers.items()]:
        assert torch.equal(by_form[0][key], by_form[1][key]), key  # the same numbers in every form
        if key in buffers or x.std() == 0:
            assert torch.equal(by_form[0][key], x), key
        else:
            assert by_form[0][key].std().item() == pytest.approx(x.std().item(), rel=0.3), key


def test_weights_from_files(tmp_path):
    def program():
        made = sm.parallel.materialize(_on_meta("llama", "fsdp+tp", _mesh()).double())
        sm.checkpoint.load_safetensors(tmp_path, like=made)
        return whole(
            made(input_ids=sm.device_put(IDS, _mesh(), sm.P("fsdp")), use_cache=False).logits
        )

    reference = model("llama")
    reference.save_pretrained(tmp_path)
    expected = reference(input_ids=IDS, use_cache=False).logits.detach()
    for found in sm.simulate(4)(program)():
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
