"""Backward in two parts of models of transformers: the bits of a whole backward.

Models are plain, parallelized and under `fully_shard`.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import (
    Experts,
    MixedPrecisionPolicy,
    colwise,
    fully_shard,
    parallelize,
    rowwise,
    top_k_routing,
)
from shardmesh.sharding.parallel.data.unit import units_in
from shardmesh.sharding.parallel.pipeline.split_backward import SplitBackward
from tests.models import tiny
from tests.sharding.parallel.data import training
from tests.sharding.parallel.pipeline.split_steps import (
    LATE_WEIGHTS,
    ZERO_BUBBLE,
    assert_same_bits,
    run_step,
)

transformers = pytest.importorskip("transformers")

IDS = [tiny.IDS, (tiny.IDS * 3) % 61 + 1]
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _qwen2_moe():
    return transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **_SIZES,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            num_key_value_heads=2,
        )
    )


def _bert():
    config = transformers.BertConfig(
        **_SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM(config)


MODELS = {
    "llama": lambda: tiny.model("llama"),
    "tied llama": lambda: tiny.model("llama", tie_word_embeddings=True),
    "gpt2": lambda: tiny.model("gpt2"),
    "mixtral": lambda: tiny.model("mixtral"),
    "qwen2_moe": _qwen2_moe,
    "bert": _bert,
}


def logits(module, ids):
    return module(ids).logits


def compare(make, inputs, order=ZERO_BUBBLE, **options):
    """Compare both steps; return how many products are in I, and how many in W."""
    expected = run_step(make(), inputs, order, split=False, **options)
    step = run_step(make(), inputs, order, split=True, **options)
    assert_same_bits(step, expected)
    in_i, in_w = step.products
    assert sorted(in_i + in_w) == sorted(expected.products[0])
    return len(in_i), len(in_w)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, recomputes):
    def make():
        torch.manual_seed(0)
        model = MODELS[name]().train()
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    _, in_w = compare(make, IDS, forward=logits)
    assert in_w >= 2 * 11


@pytest.mark.one_in(12, each=["name", "parallelism", "sharded", "recomputes", "accumulates"])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("parallelism", ["tp", "fsdp", "fsdp+tp"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_models_on_a_mesh(name, parallelism, sharded, recomputes, accumulates):
    """Some parts are empty: four ranks split two heads of keys."""

    def program():
        mesh = tiny.mesh_for(parallelism)
        split = "fsdp" in mesh.axis_names
        inputs = IDS
        if sharded:
            inputs = [sm.device_put(x, mesh, P("fsdp") if split else P()) for x in IDS]
        elif split:
            rank, count = mesh.get_local_rank("fsdp"), mesh.size("fsdp")
            inputs = [x.chunk(count)[rank] for x in IDS]

        def make():
            model = tiny.model(name).train()
            if recomputes:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            return tiny.shard(name, model, mesh, parallelism)

        return compare(make, inputs, forward=logits, accumulates=accumulates)

    for _, in_w in sm.simulate(4)(program)():
        assert in_w > 0


@pytest.mark.one_in(12, each=["form", "shape", "recomputes", "accumulates"])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("form", training.FORMS)
def test_forms_of_data_parallelism(form, shape, recomputes, accumulates):
    if form == "hybrid" and len(shape) == 1:
        pytest.skip("it has two axes")

    def program(mesh):
        first = sum(mesh.coordinate)
        inputs = [training.TOKENS[first + i : first + i + 2] for i in range(3)]

        def forward(module, x):
            return checkpoint(module, x, use_reentrant=False) if recomputes else module(x)

        return compare(
            lambda: training.FORMS[form](training.model(), mesh),
            inputs,
            LATE_WEIGHTS,
            forward=forward,
            accumulates=accumulates,
        )

    for in_i, in_w in training.on_ranks(shape, program):
        assert in_w == 3 * 6
        assert in_i == 3 * (9 if recomputes else 5)


def test_precision_policy():
    def program():
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("dp",))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

        def make():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
            return fully_shard(model, mesh, units=nn.Linear, mp_policy=policy)

        return compare(make, [torch.randn(4, 5), torch.randn(4, 5)], accumulates=True)

    assert sm.simulate(2)(program)() == [(4, 4)] * 2


@pytest.mark.parametrize("shards", [False, True])
def test_experts(shards):
    def program():
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("dp", "ep"))

        class Mixture(nn.Module):
            def __init__(self):
                super().__init__()
                self.router = nn.Linear(8, 4)
                each = [nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8)) for _ in range(4)]
                self.experts = Experts(each, mesh)

            def forward(self, x):
                return self.experts(x, top_k_routing(self.router(x), 2))

        def make():
            torch.manual_seed(0)
            model = parallelize(Mixture(), mesh, {})
            return fully_shard(model, mesh, axes="dp") if shards else model

        inputs = [sm.device_put(torch.randn(4, 5, 8), mesh, P()) for _ in range(2)]
        return compare(make, inputs)

    for _, in_w in sm.simulate(4)(program)():
        assert in_w == 2 * (1 + 2 * 2)  # of the router, and of two layers of two experts


def test_function_of_jit():
    """It is one operator: its whole backward is in I."""

    def program():
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("tp",))

        def make():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
            return parallelize(model, mesh, {"0": colwise(), "2": rowwise()})

        function = sm.jit(lambda module, x: module(x))
        order = ("F0", "I0", "W0", "F1", "I1", "W1")
        return compare(make, [torch.randn(4, 8)] * 2, order, forward=function)

    assert [in_w for _, in_w in sm.simulate(2)(program)()] == [0, 0]


@pytest.mark.parametrize("reshards", [False, True])
def test_units_are_freed_in_the_backward_for_inputs(reshards):
    """At most the unit that computes and the next one are gathered, and after I none is."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return x + self.b(torch.tanh(self.a(x)))

    def program():
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("dp",))
        model = nn.Sequential(*[Block() for _ in range(5)])
        fully_shard(model, mesh, units=Block, reshard_after_forward=reshards)
        units, counts = units_in(model)[1:], []

        def count(_):
            counts.append(sum(unit.plan.is_gathered for unit in units))

        def watch(_, __, output):
            output.register_hook(count)

        for block in model:
            block.register_forward_hook(watch)
        split = SplitBackward()
        with split.recording():
            y = model(torch.randn(3, 8, requires_grad=True))
        split.backward_input([y], [torch.ones_like(y)])
        at_end = sum(unit.plan.is_gathered for unit in units)
        split.backward_weight()
        return counts, at_end

    for counts, at_end in sm.simulate(2)(program)():
        assert at_end == 0
        assert max(counts) <= 2 if reshards else counts[-1] <= 2


def _on_processes(shape):
    mesh = sm.init_device_mesh("cpu", shape, axis_names=("fsdp", "tp"))
    inputs = [x.chunk(shape[0])[mesh.get_local_rank("fsdp")] for x in IDS]
    return compare(
        lambda: tiny.shard("llama", tiny.model("llama"), mesh, "fsdp+tp"),
        inputs,
        forward=logits,
        accumulates=True,
    )


def test_on_processes(world4):
    for _, in_w in world4(_on_processes, (2, 2)):
        assert in_w > 0
