"""Generation from plain ids, and adapters that are added after the model was laid out."""

from __future__ import annotations

import copy

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import colwise, fully_shard, parallelize, rowwise
from tests.models.tiny import IDS, PLANS, model

transformers = pytest.importorskip("transformers")

LLAMA = {"*.q_proj": colwise(), "*.k_proj": colwise(), "*.v_proj": colwise(), "*.o_proj": rowwise()}
SPLIT = {
    "llama": LLAMA | {"lm_head": colwise()},
    "gpt2": PLANS["gpt2"],
    # Logits split by vocabulary, and whole.
}
CALLS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 10, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3},
    "static cache": {
        "do_sample": False,
        "cache_implementation": "static",
        "repetition_penalty": 1.3,
    },
}


def generated(module, ids, **options):
    transformers.set_seed(3)
    return module.generate(
        ids, attention_mask=torch.ones_like(IDS), max_new_tokens=5, pad_token_id=0, **options
    )


def on_two_ranks(program):
    return sm.simulate(2)(lambda: program(sm.init_device_mesh("cpu", (2,), axis_names=("tp",))))()


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("name", SPLIT)
def test_plain_ids_give_plain_ids(name, how):
    def program(mesh):
        module = parallelize(model(name), mesh, SPLIT[name])
        tokens = generated(module, IDS, **CALLS[how])
        return type(tokens), tokens

    want = generated(model(name), IDS, **CALLS[how])
    for kind, tokens in on_two_ranks(program):
        assert kind is torch.Tensor
        assert torch.equal(tokens, want)


def test_scores_are_plain_and_whole():
    def program(mesh):
        module = parallelize(model("llama"), mesh, SPLIT["llama"])
        before = len(module._forward_hooks)
        result = generated(
            module, IDS, do_sample=False, return_dict_in_generate=True, output_scores=True
        )
        assert len(module._forward_hooks) == before
        assert isinstance(module(IDS).logits, sm.ShardedTensor)  # other calls gather nothing
        return [type(x) for x in result.scores], result.scores[0].shape

    for kinds, shape in on_two_ranks(program):
        assert set(kinds) == {torch.Tensor}
        assert shape == (4, 64)


def test_sharded_ids_give_sharded_ids():
    def program(mesh):
        module = parallelize(model("llama"), mesh, SPLIT["llama"])
        ids = sm.device_put(IDS, mesh, P())
        tokens = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=5,
            pad_token_id=0,
            do_sample=False,
        )
        assert isinstance(tokens, sm.ShardedTensor)
        return tokens.full_tensor()

    want = generated(model("llama"), IDS, do_sample=False)
    assert all(torch.equal(tokens, want) for tokens in on_two_ranks(program))


def test_copies_generate_with_their_own_parameters():
    def program(mesh):
        module = parallelize(model("llama"), mesh, SPLIT["llama"])
        twin = copy.deepcopy(module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        return generated(twin, IDS, do_sample=False)

    want = generated(model("llama"), IDS, do_sample=False)
    assert all(torch.equal(tokens, want) for tokens in on_two_ranks(program))


# -- adapters --------------------------------------------------------------------------------------


def adapted(module, dora):
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    names = ["q_proj", "o_proj", "embed_tokens"]
    config = peft.LoraConfig(
        r=2, target_modules=names[: 2 if dora else 3], init_lora_weights=False, use_dora=dora
    )
    return peft.get_peft_model(module, config).eval()


def whole(x):
    return x.full_tensor() if isinstance(x, sm.ShardedTensor) else x


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("how", ["tensor parallel", "some layers", "fsdp"])
def test_adapters_are_merged_into_a_model_that_was_laid_out_before(how, dora):
    """Merging comes before the first call of the model."""

    def laid_out(mesh):
        module = model("llama")
        if how == "fsdp":
            return fully_shard(module, mesh, units=type(module.model.layers[0]))
        return parallelize(module, mesh, "auto" if how == "tensor parallel" else LLAMA)

    def program(mesh):
        module = adapted(laid_out(mesh), dora)
        results = []
        for change in (module.merge_adapter, module.unmerge_adapter, lambda: None):
            change()
            results.append(whole(module(IDS).logits))
        module = module.merge_and_unload()
        weight = module.model.layers[0].self_attn.q_proj.weight
        assert isinstance(weight, sm.ShardedTensor)
        return [*results, whole(module(IDS).logits)]

    want = adapted(model("llama"), dora)(IDS).logits
    assert not torch.allclose(want, model("llama")(IDS).logits)
    for results in on_two_ranks(program):
        for logits in results:
            torch.testing.assert_close(logits, want)


def test_plain_tensors_elsewhere_still_raise():
    class Holder(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def add(self):
            self.inner.model.norm.weight.data += torch.ones(32)

    def program(mesh):
        with pytest.raises(RuntimeError, match="mixes a plain tensor"):
            Holder(fully_shard(model("llama"), mesh)).add()

    on_two_ranks(program)
