"""Splits by the plan of a model of transformers: equal to the whole model, to the bit."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.sharding.parallel.pipeline.stages.model_plan import modules_of_plan
from tests.device import DEVICE
from tests.sharding.parallel.pipeline.stages.chained import assert_equal, run, stages_of, whole

transformers = pytest.importorskip("transformers")

# Of any of these attributes, a configuration gets those that it has.
_SIZES: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "kv_lora_rank": 16,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "pad_token_id": 0,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "rotary_dim": 4,
    "shared_expert_intermediate_size": 16,
    "topk_group": 1,
    "v_head_dim": 8,
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
# What is not split, and why.
_REFUSED = {"deepseek_v4": "needs a tensor that unit 'model.layers.0' of stage 0 computes"}
# Units are not called in the order of registration.
_NEED_EXAMPLE = ("embedding_gemma2_text", "gemma4_text", "mistral_large4_text")
# Linear attention in loops over the sequence, with thousands of operators to record.
_LONG = ("bailing_hybrid", "kimi_linear")
_LARGEST = 5_000_000  # parameters, of a configuration whose size is not among the attributes above


def with_plans() -> Iterator[tuple[str, Any]]:
    """Yield the configurations of transformers with a pipeline plan, by model type."""
    for name, cls in sorted(transformers.CONFIG_MAPPING.items()):
        if getattr(cls, "base_model_pp_plan", None) is not None:
            yield name, cls


def tiny_model(config_class: Any) -> tuple[nn.Module, Any] | None:
    """Return a model with a few thousand parameters, and its results and gradients.

    None where these sizes are none of the configuration, or there is no class of a language model.
    """
    auto = transformers.models.auto.modeling_auto
    fields = inspect.signature(config_class.__init__).parameters
    names = {*fields, *getattr(config_class, "attribute_map", {})}
    sizes = {name: size for name, size in _SIZES.items() if name in names}
    if "qk_rope_head_dim" in names:
        sizes.pop("head_dim", None)
    attempts = [sizes, sizes | {"rope_parameters": _MROPE}, sizes | {"num_key_value_heads": 4}]
    for options in attempts:
        try:
            model_class = auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
            model_class = model_class or auto.MODEL_MAPPING.get(config_class, None)
            if model_class is None:
                return None
            config = config_class(**options)
            with torch.device("meta"):
                parameters = sum(x.numel() for x in model_class(config).parameters())
            if parameters > _LARGEST:
                return None
            torch.manual_seed(0)
            model = model_class(config)
            torch.manual_seed(1)
            return model, whole(copy.deepcopy(model), [example()], loss_of)
        except Exception:  # configurations check their values in many ways
            continue
    return None


def example() -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = torch.arange(1, 13).view(2, 6)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    return (), {"input_ids": ids, "attention_mask": mask, "use_cache": False}


def loss_of(result: Any) -> Tensor:
    logits = result.logits if "logits" in result else result[0]
    return logits.float().square().mean()


def check(model: nn.Module, expected: Any, with_example: bool = False) -> None:
    """Compare two stages by the model's plan with the whole model."""
    inputs = example()
    options = {"example": inputs} if with_example else {}
    ranks = stages_of(lambda: copy.deepcopy(model), "auto", 2, [[0, 1]], **options)
    torch.manual_seed(1)
    assert_equal(run(ranks, [inputs], loss_of), expected)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gptj", "gemma3_text", "qwen3_moe", "phi"])
def test_a_plan(name: str) -> None:
    tiny = tiny_model(transformers.CONFIG_MAPPING[name])
    assert tiny is not None
    check(*tiny)


@pytest.mark.slow
def test_every_plan() -> None:
    split, problems = 0, {}
    for name, config_class in with_plans():
        tiny = None if name in _LONG else tiny_model(config_class)
        if tiny is None:
            continue
        try:
            check(*tiny, name in _NEED_EXAMPLE)
            split += 1
        except Exception as error:
            if _REFUSED.get(name, "no refusal") not in str(error):
                problems[name] = f"{type(error).__name__}: {error}"
    assert problems == {}
    assert split >= 90


# -- which modules are boundaries ------------------------------------------------------------------


class _Tower(nn.Module):
    """A model with a plan, and a list of layers that is not in it."""

    _pp_plan = {  # noqa: RUF012
        "embed": (["ids"], ["x"]),
        "drop": (["x"], ["x"]),
        "layers": (["x"], ["x"]),
        "norm": (["x"], ["x"]),
        "pooler": (["x"], ["x"]),  # which this configuration does not have
    }

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.embed, self.drop = nn.Embedding(11, 8), nn.Dropout(0.0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids))
        for layer in (*self.tower, *self.layers):
            x = x + layer(x)
        return self.norm(x)


def _starts(model: nn.Module, stages: int, **options: Any) -> list[list[str]]:
    """Return the names of the parameters in each stage of a simulated pipeline."""

    def program() -> list[str]:
        mesh = sm.init_device_mesh(DEVICE, (stages,), axis_names=("pp",))
        pipe = sm.parallel.pipeline(copy.deepcopy(model), mesh, **options)
        return [name for name, _ in pipe.named_parameters() if name.endswith("weight")]

    return sm.simulate(stages)(program)()


def test_the_modules_of_a_plan() -> None:
    assert modules_of_plan(_Tower()) == ["embed", "layers.0", "layers.1", "norm"]
    assert modules_of_plan(nn.Linear(1, 1)) == []


@pytest.mark.parametrize("options", [{}, {"split": "auto"}])
def test_a_plan_is_the_default(options: Any) -> None:
    tower = [f"tower.{number}.weight" for number in range(6)]
    first, second = _starts(_Tower(), 2, **options)
    assert first == [*tower, "embed.weight"]
    assert second == ["layers.0.weight", "layers.1.weight", "norm.weight"]


def test_even_ignores_a_plan() -> None:
    first, second = _starts(_Tower(), 2, split="even")
    assert first == [f"tower.{number}.weight" for number in range(len(first))]
    assert second[-1] == "norm.weight"


def test_with_adapters() -> None:
    peft = pytest.importorskip("peft")
    model, _ = tiny_model(transformers.CONFIG_MAPPING["llama"])  # type: ignore[misc]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert modules_of_plan(adapted)[:2] == [
        "base_model.model.lm_head",
        "base_model.model.model.embed_tokens",
    ]


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"Linear is missing\. Pass \"even\""):
        _starts(nn.Linear(1, 1), 1, split="auto")
    model: Any = nn.Sequential(nn.Linear(1, 1))
    model.pp_plan = {"layers": ([], [])}
    with pytest.raises(ValueError, match=r"matches none of its modules: \['layers'\]"):
        _starts(model, 1, split="auto")
    with pytest.raises(ValueError, match="the model has 4 blocks, fewer than the 5 stages"):
        _starts(_Tower(), 5)
