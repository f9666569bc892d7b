"""Models of transformers in stages: results and gradients of the whole model, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.sharding.parallel.pipeline.stages.chained import assert_equal, run, stages_of, whole
from tests.tiers import slow

transformers = pytest.importorskip("transformers")

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_GPT2: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4}
_MOE: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
}
_T5: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
_VIT: dict[str, Any] = {"image_size": 16, "patch_size": 4}


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(**_SIZES, num_key_value_heads=2, **options)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(**_GPT2, n_positions=32, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def qwen2_moe() -> nn.Module:
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**_SIZES, **_MOE))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_SIZES))


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5, num_layers=3))


def vit() -> nn.Module:
    sizes = {name: size for name, size in _SIZES.items() if name != "vocab_size"}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **_VIT))


def inputs(name: str, rows: int = 2, length: int = 8) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(length)
    if name == "vit":
        return (), {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
    ids = torch.randint(1, 64, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, length - 2 :] = 0
    kwargs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if name == "t5":
        kwargs["decoder_input_ids"] = ids[:, :5].clone()
    if name in ("llama", "gpt2", "qwen2_moe"):
        kwargs["position_ids"] = torch.arange(length).expand(rows, length)
    return (), kwargs if name == "bert" else kwargs | {"use_cache": False}


def loss_of(result: Any) -> Tensor:
    return result.logits.square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "qwen2_moe": qwen2_moe,
    "bert": bert,
    "t5": t5,
    "vit": vit,
}
# A few boundaries, and one before each unit but the first.
SPLITS: dict[str, list[str]] = {
    "llama": ["model.layers.1", "model.layers.3"],
    "gpt2": ["transformer.h.1", "transformer.ln_f"],
    "qwen2_moe": ["model.layers.2", "model.norm"],
    "bert": ["bert.encoder.layer.1", "bert.encoder.layer.3.output", "cls"],
    "t5": ["encoder.block.1", "decoder.block.0", "decoder.block.2"],
    "vit": ["vit.layers.1", "vit.layers.3.mlp"],
}
ALL: dict[str, list[str]] = {
    "llama": [*(f"model.layers.{i}" for i in range(4)), "model.norm", "lm_head"],
    "gpt2": [
        "transformer.wpe",
        *(f"transformer.h.{i}" for i in range(4)),
        "transformer.ln_f",
        "lm_head",
    ],
    "t5": [
        *(f"encoder.block.{i}" for i in range(3)),
        "encoder.final_layer_norm",
        "decoder.embed_tokens",
        *(f"decoder.block.{i}" for i in range(3)),
        "decoder.final_layer_norm",
        "lm_head",
    ],
}


def model_of(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]().train()
    # Grouped products of experts have no kernel for float64.
    return model if name == "qwen2_moe" else model.double()


def double(name: str, example: Any) -> Any:
    args, kwargs = example
    if name == "vit":
        kwargs = {"pixel_values": kwargs["pixel_values"].double()}
    return args, kwargs


def check(
    name: str,
    split: list[str],
    own: list[list[int]] | None = None,
    examples: list[Any] | None = None,
    change: Callable[[nn.Module], object] = lambda model: None,
    with_example: bool = True,
) -> list[Any]:
    """Compare stages with the whole model; return the models of the ranks."""
    model = model_of(name)
    change(model)
    examples = [double(name, one) for one in examples or [inputs(name)]]
    ranks = stages_of(
        lambda: copy.deepcopy(model),
        split,
        len(split) + 1,
        own,
        example=examples[0] if with_example else None,
    )
    torch.manual_seed(1)
    actual = run(ranks, examples, loss_of)
    torch.manual_seed(1)
    expected = whole(model, examples, loss_of)
    # Gradients of tied parameters are summed in another order over microbatches.
    assert_equal(actual, expected, exact=len(examples) == 1)
    return ranks


@pytest.mark.parametrize(
    "name", [slow(name) if name in ("gpt2", "t5") else name for name in MODELS]
)
def test_stages_are_the_whole_model(name: str) -> None:
    check(name, SPLITS[name])


@pytest.mark.parametrize("name", [slow("llama"), "gpt2", slow("t5")])
def test_one_unit_in_each_stage(name: str) -> None:
    check(name, ALL[name])


@pytest.mark.parametrize("name", ["gpt2", slow("t5")])
def test_a_v_of_stages_with_tied_ends_on_one_rank(name: str) -> None:
    count = len(SPLITS[name]) + 1
    own = [sorted({stage, count - 1 - stage}) for stage in range((count + 1) // 2)]
    ranks = check(name, SPLITS[name], own)
    (tied,) = ranks[0].tied
    first, last = ranks[0].stages[0], ranks[0].stages[count - 1]
    copies = [
        x
        for stage in (first, last)
        for local, x in stage.named_parameters()
        if stage.model_names[local] == tied
    ]
    assert len(copies) == 2
    assert copies[0] is not copies[1]
    assert torch.equal(copies[0], copies[1])


@pytest.mark.parametrize("name", [slow("llama"), "gpt2", slow("bert"), slow("t5")])
def test_lengths_that_change(name: str) -> None:
    examples = [inputs(name), inputs(name, length=6), inputs(name, rows=1), inputs(name)]
    check(name, SPLITS[name], examples=examples)


@pytest.mark.parametrize("name", ["llama", slow("gpt2"), slow("t5")])
def test_without_an_example(name: str) -> None:
    check(name, SPLITS[name], with_example=False)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", slow("gpt2"), slow("t5")])
def test_with_recomputation(name: str, reentrant: bool) -> None:
    def change(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    check(name, SPLITS[name], change=change)


def test_eval_without_gradients() -> None:
    with torch.no_grad():
        check("gpt2", SPLITS["gpt2"], change=lambda model: model.eval())


def test_frozen_parameters() -> None:
    def change(model: Any) -> None:
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)

    check("llama", SPLITS["llama"], change=change)


def test_what_is_carried() -> None:
    """Of T5, whose stages have two streams."""
    ranks = check("t5", SPLITS["t5"])
    signature = ranks[0].signature(*inputs("t5"))
    shapes = [[tuple(x.shape) for x in ranks[0].boundary(signature, i)] for i in range(4)]
    assert shapes == [
        [],
        [(2, 8, 32), (1, 4, 8, 8)],  # the first block's output and its bias of positions
        [(2, 8, 32), (2, 5, 32)],  # the encoder's output, and embeddings of the decoder
        [(2, 8, 32), (1, 4, 5, 5), (1, 4, 5, 8), (2, 5, 32)],
    ]
    assert ranks[0].tied == {"shared.weight": (0, 1, 3)}
