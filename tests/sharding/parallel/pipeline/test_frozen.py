"""Stages in which few parameters are trained, or none: adapters, frozen blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.parallel import pipeline
from tests.sharding.parallel.pipeline.pipeline_jobs import Block, batch, make_model, whole
from tests.tiers import slow

Trained = tuple[float, dict[str, Tensor | None]]

# schedule, with the boundaries before blocks
SCHEDULES = [
    ("1f1b", [1]),
    ("zb_h1", [1]),
    ("interleaved", [1, 2, 3]),
    ("zb_v", [1, 2, 3]),
    ("dualpipe_v", [1, 2, 3]),
]


def train(
    make: Callable[[], nn.Module],
    schedule: str,
    split: Sequence[str],
    form: str,
    units: Any,
    loss_fn: Callable[[Any, Tensor], Tensor],
    **kwargs: Tensor,
) -> list[Trained]:
    """Return loss, gradients and the names in the state of each rank after one step."""
    axes = () if form == "none" else (form,)

    def program() -> Any:
        mesh = sm.init_device_mesh("cpu", (2, *[2 for _ in axes]), axis_names=("pp", *axes))
        pipe = pipeline(make(), mesh, split=split, schedule=schedule, microbatches=4)
        if form == "fsdp":
            pipe.fully_shard(units=units)
        ids, targets = batch()
        loss = pipe.step(
            ids, targets, loss_fn=loss_fn, weight=lambda t: (t != -100).sum(), **kwargs
        )
        grads = {n: None if x.grad is None else whole(x.grad) for n, x in pipe.named_parameters()}
        return loss.item(), grads, list(pipe.state_dict())

    return sm.simulate(2 * 2 ** len(axes))(program)()


def check(trained: Sequence[Any], model: nn.Module, loss: Tensor) -> None:
    loss.backward()
    expected = dict(model.named_parameters())
    seen: set[str] = set()
    for own_loss, grads, names in trained:
        assert own_loss == pytest.approx(loss.item(), abs=1e-12)
        assert names == list(model.state_dict())
        for name, grad in grads.items():
            assert (grad is None) == (expected[name].grad is None), name
            if grad is not None:
                torch.testing.assert_close(grad, expected[name].grad, rtol=0, atol=1e-12)
        seen |= set(grads)
    assert seen == set(expected)


# which parts are trained
PARTS: dict[str, Callable[[str], bool]] = {
    "not the first": lambda name: not name.startswith(("embedding", "blocks.0")),
    "not the middle": lambda name: not name.startswith(("blocks.1", "blocks.2")),
    "only the first": lambda name: name.startswith("embedding"),
    "only the last": lambda name: name.startswith("head"),
}


@pytest.mark.one_in(5, each=["part", "schedule"])
@pytest.mark.parametrize("form", ["none", "fsdp"])
@pytest.mark.parametrize(("schedule", "blocks"), SCHEDULES)
@pytest.mark.parametrize("part", PARTS)
def test_frozen_parts(part, schedule, blocks, form):
    def make() -> nn.Module:
        model = make_model()
        for name, x in model.named_parameters():
            x.requires_grad_(PARTS[part](name))
        return model

    split = [f"blocks.{i}" for i in blocks]
    model = make()
    ids, targets = batch()
    loss = F.cross_entropy(model(ids), targets)
    check(train(make, schedule, split, form, Block, F.cross_entropy), model, loss)


def with_adapters() -> nn.Module:
    """Return a Llama of transformers with LoRA of peft: the base is frozen."""
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora).double().train()


def causal_loss(result: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(result.logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("schedule", "blocks", "form"),
    [
        ("zb_v", [0, 2, 3], "none"),  # the first stage has an embedding only, without gradients
        ("1f1b", [2], "fsdp"),
        slow("zb_h1", [1], "none"),
        slow("dualpipe_v", [0, 2, 3], "fsdp"),
        slow("interleaved", [1, 2, 3], "none"),
    ],
)
def test_adapters_of_peft(schedule, blocks, form):
    ids, targets = batch()
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0
    model = with_adapters()
    loss = causal_loss(model(ids, attention_mask=mask), targets)
    split = [f"base_model.model.model.layers.{i}" for i in blocks]
    trained = train(
        with_adapters, schedule, split, form, "*.layers.*", causal_loss, attention_mask=mask
    )
    check(trained, model, loss)
    assert {name for name, x in model.named_parameters() if x.grad is not None} == {
        name for name in model.state_dict() if "lora_" in name
    }
