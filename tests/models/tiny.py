"""Hugging Face models with a few thousand parameters in float64, and their training, for
comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import colwise, fully_shard, parallelize, rowwise

transformers = pytest.importorskip("transformers")

VOCABULARY, ROWS, STEPS = 64, 4, 2
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
_GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def llama(**options: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES | _HEADS | options))


def gpt2(**options: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        **_GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | options,
    )
    return transformers.GPT2LMHeadModel(config)


def mixtral(**options: Any) -> nn.Module:
    config = transformers.MixtralConfig(
        **_SIZES | _HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2} | options
    )
    config._experts_implementation = "eager"
    return transformers.MixtralForCausalLM(config)


def qwen3_moe(**options: Any) -> nn.Module:
    moe = {"moe_intermediate_size": 16, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2}
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**_SIZES | _HEADS | moe | options)
    )


MODELS: dict[str, Callable[..., nn.Module]] = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral}
PLANS: dict[str, Any] = {
    "llama": "auto",
    "gpt2": {
        "*.c_attn": colwise(),
        "*.attn.c_proj": rowwise(),
        "*.c_fc": colwise(),
        "*.mlp.c_proj": rowwise(),
    },
    "mixtral": "auto",
}


def model(name: str, **options: Any) -> nn.Module:
    """Return the model with the same values in each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name](**options).double()


IDS = torch.randint(1, VOCABULARY, (ROWS, 8), generator=torch.Generator().manual_seed(1))


def loss_of(module: nn.Module, ids: Any) -> Any:
    """Return the loss in float64; the models' own loss is in float32."""
    logits = module(input_ids=ids, use_cache=False).logits
    if isinstance(logits, sm.ShardedTensor) and not isinstance(ids, sm.ShardedTensor):
        ids = sm.from_local(ids, logits.mesh, P())
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(
    module: nn.Module, ids: Any, loss: Callable[[nn.Module, Any], Any] = loss_of
) -> dict[str, Tensor]:
    """Train; return the gradients of the first step, and the parameters and the loss of the
    last.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    results: dict[str, Tensor] = {}
    for step in range(STEPS):
        last = loss(module, ids)
        last.backward()
        if step == 0:
            results |= {
                f"gradient of {name}": whole(x.grad) for name, x in module.named_parameters()
            }
        optimizer.step()
        optimizer.zero_grad()
    results |= {name: whole(x) for name, x in module.named_parameters()}
    return {**results, "loss": whole(last)}


def whole(x: Any) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, sm.ShardedTensor) else x.detach().clone()


def shard(name: str, module: nn.Module, mesh: sm.DeviceMesh, parallelism: str) -> nn.Module:
    """Apply "fsdp", "tp" or "fsdp+tp" to the model, on a mesh with these axes."""
    if "tp" in parallelism:
        parallelize(module, mesh, PLANS[name])
    if "fsdp" in parallelism:
        fully_shard(module, mesh, axes="fsdp", units=module._no_split_modules)
    return module


def mesh_for(parallelism: str) -> sm.DeviceMesh:
    shapes = {"fsdp": (4,), "tp": (4,), "fsdp+tp": (2, 2)}
    return sm.init_device_mesh("cpu", shapes[parallelism], axis_names=tuple(parallelism.split("+")))


def rows(mesh: sm.DeviceMesh, sharded: bool) -> Any:
    """Return the batch as a sharded tensor, or this rank's rows of it."""
    split = "fsdp" in mesh.axis_names
    if sharded:
        return sm.device_put(IDS, mesh, P("fsdp") if split else P())
    return IDS.chunk(mesh.size("fsdp"))[mesh.get_local_rank("fsdp")] if split else IDS


def same(
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    tolerance: float,
    skip_loss: bool = False,
) -> None:
    """Assert equality up to rounding, relative to the largest value of each tensor."""
    assert actual.keys() == expected.keys()
    for name in expected.keys() - ({"loss"} if skip_loss else set()):
        scale = expected[name].abs().max().item() + 1e-3
        difference = (actual[name] - expected[name]).abs().max().item()
        assert difference <= tolerance * scale, f"{name}: {difference} of {scale}"
