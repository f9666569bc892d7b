"""Hugging Face models in training mode, with masks, dropout and their own losses, under `sm.jit`:
bit for bit what eager code gives, and none is refused.

`python -m tests.models.test_jit` prints the table of docs/jit.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import colwise, fully_shard, parallelize, rowwise
from tests.models.tiny import whole

tf = pytest.importorskip("transformers")

VOCABULARY, ROWS, LENGTH, STEPS = 64, 4, 8, 5
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _causal(name: str, **config: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(tf, f"{name}ForCausalLM")(getattr(tf, f"{name}Config")(**config))


def _gpt2(layers: int = 2) -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 32}
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes)
    )


def _bert(layers: int = 2) -> nn.Module:
    sizes = _SIZES | {"num_hidden_layers": layers}
    return tf.BertForMaskedLM(tf.BertConfig(**sizes, max_position_embeddings=32))


def _t5(layers: int = 2) -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": layers, "num_heads": 4}
    config = tf.T5Config(
        vocab_size=VOCABULARY, pad_token_id=0, decoder_start_token_id=0, eos_token_id=1, **sizes
    )
    return tf.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    sizes = {k: v for k, v in _SIZES.items() if k not in ("vocab_size", "pad_token_id")}
    return tf.ViTForImageClassification(
        tf.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=5)
    )


def _whisper() -> nn.Module:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    widths = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return tf.WhisperForConditionalGeneration(
        tf.WhisperConfig(
            vocab_size=VOCABULARY, max_source_positions=8, max_target_positions=16,
            suppress_tokens=None, begin_suppress_tokens=None, **sizes, **heads, **widths, **tokens,
        )
    )  # fmt: skip


def _lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(_causal("Llama", **_GROUPED)(), config)


_OPT = {"word_embed_proj_dim": 32, "ffn_dim": 48, "max_position_embeddings": 32}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": _causal("Llama", **_GROUPED),
    "Llama with LoRA": _lora,
    "Qwen2": _causal("Qwen2", **_GROUPED),
    "Gemma2": _causal("Gemma2", **_GROUPED, head_dim=8),
    "GPT-2": _gpt2,
    "GPT-NeoX": _causal("GPTNeoX", **_SIZES, max_position_embeddings=32),
    "OPT": _causal("OPT", **{k: v for k, v in _SIZES.items() if k != "intermediate_size"}, **_OPT),
    "Falcon": _causal("Falcon", **{k: v for k, v in _SIZES.items() if k != "intermediate_size"}),
    "Phi-3": _causal("Phi3", **_GROUPED),
    "Bloom": _causal("Bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "OLMo2": _causal("Olmo2", **_GROUPED),
    "BERT": _bert,
    "T5": _t5,
    "ViT": _vit,
    "Whisper": _whisper,
    "Mixtral": _causal("Mixtral", **_GROUPED, **_EXPERTS),
    "Qwen2-MoE": _causal(
        "Qwen2Moe", **_GROUPED, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        num_experts=4, num_experts_per_tok=2,
    ),
    "DeepSeek-V3": _causal(
        "DeepseekV3", **_SIZES, moe_intermediate_size=16, n_routed_experts=4, n_group=2,
        topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=8,
        q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    ),
    "gpt-oss": _causal("GptOss", **_GROUPED, **_EXPERTS, head_dim=8),
    "Mamba2": _causal(
        "Mamba2", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_heads=8,
        head_dim=8, n_groups=1, state_size=8, chunk_size=4, pad_token_id=0,
    ),
}  # fmt: skip


ONE_LAYER = _GROUPED | {"num_hidden_layers": 1}
OF_ONE_LAYER: dict[str, Callable[[], nn.Module]] = {  # Inductor compiles each for minutes
    "Llama": _causal("Llama", **ONE_LAYER),
    "GPT-2": lambda: _gpt2(1),
    "BERT": lambda: _bert(1),
    "T5": lambda: _t5(1),
    "Mixtral": _causal("Mixtral", **ONE_LAYER, **_EXPERTS),
}


def batch(name: str, step: int) -> dict[str, torch.Tensor]:
    """Return the whole batch of a step; every other one has padding."""
    generator = torch.Generator().manual_seed(step)
    if name == "ViT":
        pixels = torch.randn(ROWS, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 5, (ROWS,), generator=generator)}
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    if name == "Whisper":
        features = torch.randn(ROWS, 8, 16, generator=generator)
        return {"input_features": features, "labels": ids}
    mask = torch.ones_like(ids)
    if step % 2:
        mask[::2, LENGTH // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


FORMS = ("fsdp", "tp", "fsdp+tp")
_COLUMNS_AND_ROWS: dict[str, tuple[str, str]] = {
    "GPT-2": ("c_attn|c_fc", "c_proj"),
    "GPT-NeoX": ("query_key_value|dense_h_to_4h", "dense|dense_4h_to_h"),
    "OPT": ("q_proj|k_proj|v_proj|fc1", "out_proj|fc2"),
    "Falcon": ("dense_h_to_4h", "dense_4h_to_h"),
    "Bloom": ("query_key_value|dense_h_to_4h", "dense|dense_4h_to_h"),
    "BERT": ("query|key|value|intermediate.dense", "output.dense"),
    "T5": ("q|k|v|wi", "o|wo"),
    "ViT": ("q_proj|k_proj|v_proj|fc1", "o_proj|fc2"),
    "Whisper": ("q_proj|k_proj|v_proj|fc1", "out_proj|fc2"),
}


def plan_of(name: str) -> Any:
    """Return a plan by patterns for models without one of their own."""
    if name not in _COLUMNS_AND_ROWS:
        return "auto"
    columns, rows = _COLUMNS_AND_ROWS[name]
    return {f"*.{x}": colwise() for x in columns.split("|")} | {
        f"*.{x}": rowwise() for x in rows.split("|")
    }


def train(
    name: str,
    form: str,
    inputs: str,
    jit: bool,
    backend: str = "eager",
    models: dict[str, Callable[[], nn.Module]] = MODELS,
) -> dict[str, Any]:
    """Return the losses, the parameters, and the numbers of graphs and of parts."""
    axes = tuple(form.split("+"))
    mesh = sm.init_device_mesh("cpu", (2,) * len(axes), axis_names=axes)
    torch.manual_seed(0)
    model = models[name]()
    if "tp" in axes:
        parallelize(model, mesh, plan_of(name))
    if "fsdp" in axes:
        units: Any = model._no_split_modules or "auto"
        fully_shard(model, mesh, axes="fsdp", units=units)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def step(values: Any) -> Any:
        loss = model(**values).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    f, losses = (sm.jit(step, backend=backend) if jit else step), []
    for i in range(STEPS):
        values: dict[str, Any] = batch(name, i)
        if inputs == "sharded":
            spec = P("fsdp") if "fsdp" in axes else P()
            values = {k: sm.device_put(v, mesh, spec) for k, v in values.items()}
        elif "fsdp" in axes:
            values = {k: v.chunk(2)[mesh.get_local_rank("fsdp")] for k, v in values.items()}
        torch.manual_seed(i)
        sm.random.manual_seed(i)
        losses.append(whole(f(values)))
    parts = getattr(f, "parts", {})
    return {
        "losses": losses,
        "parameters": [whole(p) for p in model.parameters()],
        "graphs": len(f.recorded) if jit else 0,
        "parts": len(parts),
    }


CASES = [(form, inputs) for form in FORMS for inputs in ("sharded", "plain")]


def runs(name: str, form: str) -> bool:
    """Return whether the model has a plan, if the form needs one."""
    return form == "fsdp" or name != "Mamba2"


def ranks_of(form: str) -> int:
    return 2 ** len(form.split("+"))


@pytest.mark.one_in(30, each=["form", "inputs"])
@pytest.mark.parametrize(("form", "inputs"), CASES)
@pytest.mark.parametrize("name", MODELS)
def test_five_steps_have_the_bits_of_eager(name: str, form: str, inputs: str) -> None:
    if not runs(name, form):
        pytest.skip("the model has no plan")
    expected = sm.simulate(ranks_of(form))(train)(name, form, inputs, False)
    for values, other in zip(
        sm.simulate(ranks_of(form))(train)(name, form, inputs, True), expected, strict=True
    ):
        for key in ("losses", "parameters"):
            for one, two in zip(values[key], other[key], strict=True):
                assert torch.equal(one, two), key
        assert not values["parts"]
        assert str(values["graphs"]) == documented()[name][FORMS.index(form)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", OF_ONE_LAYER)
def test_inductor_has_the_losses_of_eager(name: str) -> None:
    expected = sm.simulate(2)(train)(name, "fsdp", "sharded", False, models=OF_ONE_LAYER)
    compiled = sm.simulate(2)(train)(name, "fsdp", "sharded", True, "inductor", models=OF_ONE_LAYER)
    for values, other in zip(compiled, expected, strict=True):
        losses, eager = torch.stack(values["losses"]), torch.stack(other["losses"])
        torch.testing.assert_close(losses, eager, rtol=1e-4, atol=0)
        assert not values["parts"]
        assert str(values["graphs"]) == documented()[name][0]


def tensors_of(x: Any) -> list[torch.Tensor]:
    """Return the tensors of an output of a model, also those of its cache."""
    if isinstance(x, torch.Tensor):
        return [x]
    if hasattr(x, "__dict__") and not isinstance(x, (dict, type)):
        return tensors_of(vars(x))
    children = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    return [tensor for child in children for tensor in tensors_of(child)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5", "Gemma2", "Mixtral", "Mamba2"])
def test_a_model_that_returns_its_cache_is_one_graph(name: str) -> None:
    """`use_cache` is on by default: each call makes a cache and returns it."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    jitted = sm.jit(model, backend="eager")
    for i in range(0, 6, 2):  # without padding
        values = batch(name, i)
        one, other = jitted(**values), model(**values)
        gradients = []
        for out in (one, other):
            model.zero_grad()
            out.loss.backward()
            gradients.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, *gradients))
        assert len(tensors_of(other)) > 2
        assert type(one) is type(other)
        assert all(map(torch.equal, tensors_of(one), tensors_of(other)))
    assert len(jitted.recorded) == 1
    assert jitted.recorded[0].entry.calls == 2


def documented() -> dict[str, list[str]]:
    """Return the numbers of graphs in the table of docs/jit.md."""
    page = (Path(__file__).parents[2] / "docs" / "jit.md").read_text()
    section = page.partition("## Hugging Face models\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return {name.strip(): [x.strip() for x in numbers] for name, *numbers in rows[1:]}


def test_every_model_is_in_the_table() -> None:
    assert list(documented()) == list(MODELS)


def table() -> list[str]:
    """Return the rows of the table."""
    lines = []
    for name in MODELS:
        cells = []
        for form in FORMS:
            numbers = {
                sm.simulate(ranks_of(form))(train)(name, form, inputs, True)[0]["graphs"]
                for inputs in ("sharded", "plain")
                if runs(name, form)
            }
            cells.append(", ".join(map(str, sorted(numbers))))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(table()) + "\n")
