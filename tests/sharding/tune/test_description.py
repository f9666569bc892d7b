"""What `tune` counts of a model, next to formulas written for Llama."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh.sharding.tune.description import Description, stage_layers
from shardmesh.sharding.tune.form import Form, why_not
from shardmesh.sharding.tune.repeated import Repetition, shorten
from shardmesh.sharding.tune.step_time import model_flops
from tests.sharding.tune import tiny

_BLOCK_PRODUCTS = (
    tiny.WIDTH * tiny.WIDTH * 2
    + 2 * tiny.WIDTH * tiny.WIDTH * tiny.KEY_HEADS // tiny.HEADS
    + 3 * tiny.WIDTH * tiny.HIDDEN
)


@pytest.fixture(scope="module")
def llama():
    return tiny.description()


def test_flops(llama):
    costs = llama.costs(1)
    pairs = tiny.POSITIONS * (tiny.POSITIONS + 1) // 2
    assert costs.block.forward.matmul == 2 * tiny.POSITIONS * _BLOCK_PRODUCTS
    assert costs.block.backward.matmul == 2 * costs.block.forward.matmul
    assert costs.block.forward.attention == 4 * pairs * tiny.WIDTH
    assert costs.block.backward.attention == 10 * pairs * tiny.WIDTH
    assert costs.edges.forward.matmul == 2 * tiny.POSITIONS * tiny.WIDTH * tiny.VOCABULARY


def test_flops_of_a_step_are_those_of_publications(llama):
    """6 (parameters without the embedding) + 12 layers heads head_dim sequence per token, but for
    the weights of norms, which are no products.
    """
    norms = (2 * tiny.LAYERS + 1) * tiny.WIDTH
    per_token = 6 * (llama.parameters - llama.table - norms)
    per_token += 12 * tiny.LAYERS * tiny.WIDTH * tiny.POSITIONS
    assert model_flops(llama) == tiny.ROWS * tiny.POSITIONS * per_token


def test_tensor_parallelism_splits_products_and_sends_four_sums(llama):
    whole, half = llama.costs(1), llama.costs(2)
    assert half.block.forward.matmul == whole.block.forward.matmul / 2
    assert half.block.backward.attention == whole.block.backward.attention / 2
    assert half.block.parameters == (_BLOCK_PRODUCTS / 2) + 2 * tiny.WIDTH
    stream = tiny.POSITIONS * tiny.WIDTH * 2
    assert whole.stream == half.stream == stream
    assert half.block.forward.communication == {"all_reduce": (2, 2 * stream)}
    launches, received = half.block.backward.communication["all_reduce"]
    assert launches == 2
    assert received == 2 * stream + 2 * tiny.WIDTH * 2  # and the gradients of two norms
    assert whole.block.forward.communication == {}


@pytest.mark.parametrize("key_heads", [tiny.KEY_HEADS, tiny.HEADS])
def test_attention_counts_with_grouped_heads_and_without(key_heads):
    described = tiny.description(num_key_value_heads=key_heads)
    whole, half = described.costs(1).block, described.costs(2).block
    assert half.forward.attention == whole.forward.attention / 2 > 0
    assert half.backward.attention == whole.backward.attention / 2
    assert half.keys_and_values == whole.keys_and_values / 2 > 0


def test_sequence_parallelism_splits_the_stream(llama):
    half, split = llama.costs(2), llama.costs(2, True)
    assert split.stream == half.stream / 2
    assert split.block.saved < half.block.saved
    received = sum(size for _, size in split.block.forward.communication.values())
    assert received == half.block.forward.communication["all_reduce"][1]
    assert split.block.forward.communication.keys() == {"all_gather", "reduce_scatter"}


def test_tied_embeddings():
    assert tiny.description(tie_word_embeddings=True).costs(1).tied
    assert not tiny.description().costs(1).tied


def test_a_plain_module_of_two_kinds_of_blocks():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 8)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(8, n), nn.ReLU(), nn.Linear(n, 8)) for n in (16, 32, 32)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            return x

    with torch.device("meta"):
        described = Description(Model(), torch.empty(6, 4))
        costs = described.costs(1)
    assert described.layers == 3
    assert costs.edges.parameters == costs.first == 4 * 8 + 8
    sizes = [2 * 8 * n + n + 8 for n in (16, 32, 32)]
    assert costs.block.parameters == pytest.approx(sum(sizes) / 3)
    assert costs.largest_block() == sizes[1]
    assert costs.block.forward.matmul == pytest.approx(2 * 2 * 8 * (16 + 32 + 32) / 3)


class Pair(NamedTuple):
    """A batch with names."""

    x: torch.Tensor
    scale: torch.Tensor


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * scale
        return x


@pytest.mark.parametrize("kind", [Pair, lambda x, scale: UserDict(x=x, scale=scale)])
def test_batches_with_names(kind):
    """Named tuples, and mappings such as those of tokenizers."""
    with torch.device("meta"):
        described = Description(Scaled(), kind(torch.empty(6, 4), torch.empty(6, 4)))
        assert described.costs(1).block.forward.matmul == 2 * 4 * 4
    assert described.rows == 6


def test_stage_layers():
    assert stage_layers(126, 16) == [7, *[8] * 14, 7]
    assert stage_layers(5, 4) == [1, 2, 1, 1]
    assert stage_layers(3, 1) == [3]


def test_a_model_without_blocks_is_an_error():
    with pytest.raises(ValueError, match="tune: Linear neither names its blocks"):
        Description(nn.Linear(2, 2, device="meta"), torch.empty(1, 2, device="meta"))


def test_a_model_that_reads_values_is_an_error():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x) * x.sum().item()

    with torch.device("meta"):
        described = Description(Reads(), torch.empty(1, 2))
    with pytest.raises(ValueError, match="Reads cannot run without values, which counting needs"):
        described.costs(1)


def language_model(kind: str, **options: Any) -> Any:
    import transformers

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    config = getattr(transformers, kind)(**sizes | options)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dense_blocks_before_mixtures_are_split_over_tp(sequence_parallel):
    """The plan has entries of shared experts, which the copy with a dense block has not."""
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    model = language_model("Glm4MoeConfig", **sizes, head_dim=8, first_k_dense_replace=1, n_group=1)
    described = Description(model, tiny.ids())
    assert described.why_not_tp(2, sequence_parallel) is None
    whole, half = described.costs(1), described.costs(2, sequence_parallel)
    assert half.kinds[0].forward.matmul == whole.kinds[0].forward.matmul / 2
    # of a mixture the router is computed by each rank
    router = 2 * tiny.POSITIONS * 32 * 4
    assert half.kinds[1].forward.matmul - router == pytest.approx(
        (whole.kinds[1].forward.matmul - router) / 2
    )


def test_an_entry_of_a_plan_that_matches_nothing_is_an_error():
    described = Description(tiny.model(), tiny.ids(), plan={"model.layers.*.nothing": "colwise"})
    with pytest.raises(ValueError, match=r"'model\.layers\.\*\.nothing' matches no module"):
        described.why_not_tp(2)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("LlamaConfig", {}, None),
        ("LlamaConfig", {"attention_dropout": 0.1}, "attention has dropout"),
        ("MistralConfig", {"sliding_window": 8}, "attention has a mask"),
        ("GptOssConfig", {"num_local_experts": 4, "head_dim": 8}, "do not call it"),
    ],
)
def test_sequences_that_cannot_be_split(kind, options, message):
    """Ring attention takes neither masks nor dropout, and no attention that is not an operator."""
    described = Description(language_model(kind, **options), tiny.ids())
    reason = why_not(Form(cp=2, rows=tiny.ROWS), described)
    assert reason is None if message is None else message in str(reason)


def test_a_model_that_is_in_evaluation_mode_is_counted_as_it_trains():
    """Programs call `train()`; in evaluation attention has no dropout, and saves less."""
    model = tiny.model(attention_dropout=0.1).eval()
    described = Description(model, tiny.ids())
    assert "attention has dropout" in str(why_not(Form(cp=2, rows=tiny.ROWS), described))
    assert described.costs(1).block == tiny.description(attention_dropout=0.1).costs(1).block
    assert not model.training


def test_a_plan_that_does_not_run_leaves_the_forms_without_it(monkeypatch):
    counted = Description.costs

    def costs(
        self: Description, tp: int, sequence_parallel: bool = False, *args: Any, **options: Any
    ) -> Any:
        if sequence_parallel:
            raise ValueError("tune: the model cannot run without values as a rank of tp=2")
        return counted(self, tp, sequence_parallel, *args, **options)

    monkeypatch.setattr(Description, "costs", costs)
    model = tiny.model()
    reason = why_not(
        Form(tp=2, rows=tiny.ROWS, sequence_parallel=True), Description(model, tiny.ids())
    )
    assert reason == "tp=2: the model cannot run without values as a rank of tp=2"
    best = sm.tune(model, tiny.ids(), devices=2, fix={"tp": 2}, check=0).best.form
    assert (best.tp, best.sequence_parallel) == (2, False)
    with pytest.raises(ValueError, match="tp=2: the model cannot run without values"):
        sm.tune(model, tiny.ids(), devices=2, fix={"tp": 2, "sequence_parallel": True}, check=0)


def test_a_sum_over_tp_may_be_written_in_place():
    """Llama 4 adds its experts' result to that of the shared one in place."""
    sizes = {"intermediate_size_mlp": 48, "num_local_experts": 4, "head_dim": 8}
    described = Description(language_model("Llama4TextConfig", **sizes), tiny.ids())
    assert described.why_not_tp(2, sequence_parallel=True) is None


def test_blocks_with_another_attention_are_another_kind():
    """Of the sliding ones a mask leaves no causal kernel, with the same parameters."""
    layers = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    options = {"num_hidden_layers": 4, "sliding_window": 8, "head_dim": 8, "layer_types": layers}
    described = Description(language_model("Gemma3TextConfig", **options), tiny.ids())
    assert described.kinds == 2
    sliding, full = (kind.forward.attention for kind in described.costs(1).kinds)
    square, triangle = tiny.POSITIONS**2, tiny.POSITIONS * (tiny.POSITIONS + 1) / 2
    assert sliding / full == pytest.approx(square / triangle)
    short = described.shortened([1, 3])
    assert short.config.layer_types == ["full_attention", "sliding_attention"]


def test_a_list_of_the_numbers_of_blocks_makes_no_kinds():
    """Llama 4 has `moe_layers`, here of all blocks."""
    sizes = {"intermediate_size_mlp": 48, "num_local_experts": 4, "head_dim": 8}
    model = language_model("Llama4TextConfig", num_hidden_layers=4, **sizes)
    assert model.config.moe_layers == [0, 1, 2, 3]
    assert Description(model, tiny.ids()).kinds == 2  # rotated positions, and none in the last


def test_sequence_parallelism_of_a_plan_that_gathers_packed_projections():
    """Phi-3's o_proj and down_proj are "rowwise_split_input": their sums are split, too."""
    config = tiny.transformers.Phi3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, pad_token_id=0,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = tiny.transformers.AutoModelForCausalLM.from_config(config)
    described = Description(model, tiny.ids())
    assert described.why_not_tp(2, True) is None
    split, whole = described.costs(2, True), described.costs(2)
    assert split.stream == whole.stream / 2
    assert split.block.saved < whole.block.saved
    assert split.block.forward.communication["reduce_scatter"][0] == 2
    assert "all_reduce" not in split.block.forward.communication


def test_a_short_copy_shares_its_configuration_with_its_blocks():
    """Experts read there which function computes them, which a program sets on the model."""
    model = language_model("MixtralConfig", num_local_experts=4)
    short = shorten(model, {"model.layers": [0, 1]})
    configs = [inner.config for inner in short.modules() if hasattr(inner, "config")]
    assert any("Experts" in type(inner).__name__ for inner in short.modules())
    assert all(config is short.config for config in configs)
    assert short.config is not model.config
    blocks = short.model.layers
    assert blocks[0].mlp.gate.weight is not blocks[1].mlp.gate.weight


@pytest.mark.parametrize(
    ("kinds", "before", "period", "short"),
    [
        ("aaaaaa", 0, 1, "aa"),
        ("aabbbbbb", 2, 1, "aabb"),
        ("ssfssfssfss", 0, 3, "ssfssfss"),
        ("dsfsfsfs", 1, 2, "dsfsfs"),
        ("a", 0, 1, "a"),
    ],
)
def test_how_kinds_of_blocks_repeat(kinds, before, period, short):
    repetition = Repetition.of(kinds)
    assert (repetition.before, repetition.period) == (before, period)
    assert before + period * repetition.periods <= len(kinds)
    blocks = repetition.blocks_of(min(2, repetition.periods))
    assert "".join(kinds[i] for i in blocks) == short
    assert repetition.blocks_of(repetition.periods) == list(range(len(kinds)))
