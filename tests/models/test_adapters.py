"""`parallelize(model, mesh, "auto")` of models that peft has put adapters into."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh.parallel import fully_shard, parallelize
from tests.models.tiny import IDS, model

peft = pytest.importorskip("peft")

PROJECTIONS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def adapted(config: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        base = model("llama", num_key_value_heads=4)
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return peft.get_peft_model(base, config).double()

    return make


def lora(**options: Any) -> Callable[[], nn.Module]:
    return adapted(
        peft.LoraConfig(
            **{"r": 4, "target_modules": PROJECTIONS, "init_lora_weights": False} | options
        )
    )


def injected() -> nn.Module:
    """Return a model with adapters, without peft's wrapper around it."""
    base: Any = model("llama", num_key_value_heads=4)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    return peft.inject_adapter_in_model(config, base).double()


def with_another_adapter() -> nn.Module:
    base: Any = lora()()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    base.add_adapter("another", config)
    base.set_adapter("another")
    return base.double()


# model, names of layers that are split, of LoRA matrices that are split
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "LoRA": (lora(), 16, 10),
    "DoRA": (lora(use_dora=True), 16, 0),
    "of all layers": (lora(target_modules="all-linear"), 16, 14),
    "of embeddings": (lora(target_modules=["embed_tokens", "lm_head", "q_proj"]), 16, 3),
    "with a head of its own": (lora(modules_to_save=["lm_head"]), 17, 10),
    "two adapters": (with_another_adapter, 16, 12),
    "without a wrapper": (injected, 16, 4),
    "IA3": (
        adapted(
            peft.IA3Config(
                target_modules=["k_proj", "down_proj"],
                feedforward_modules=["down_proj"],
                init_ia3_weights=False,
            )
        ),
        16,
        0,
    ),
}


def losses_and_gradients(module: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    loss = module(input_ids=IDS, labels=IDS).loss
    loss.backward()
    grads = {
        name: p.grad.full_tensor() if isinstance(p, sm.ShardedTensor) else p.grad
        for name, p in module.named_parameters()
        if p.grad is not None
    }
    return loss.item(), grads


def check(module: nn.Module, expected: tuple[float, dict[str, torch.Tensor]]) -> None:
    loss, grads = losses_and_gradients(module)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert grads.keys() == expected[1].keys()
    for name, grad in expected[1].items():  # norms are computed in float32
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_layers_under_adapters_are_split_by_the_plan(kind: str) -> None:
    make, layers, matrices = MODELS[kind]
    expected = losses_and_gradients(make())

    def program() -> None:
        mesh = sm.init_device_mesh("cpu", (4,), axis_names=("tp",))
        module = parallelize(make(), mesh, "auto")
        split = [name for name, p in module.named_parameters() if any(p.spec)]
        assert sum("lora_" in name for name in split) == matrices
        assert len(split) == layers + matrices
        check(module, expected)

    sm.simulate(4)(program)()


def test_with_fully_shard() -> None:
    expected = losses_and_gradients(lora()())

    def program() -> None:
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
        module = parallelize(lora()(), mesh, "auto")
        check(fully_shard(module, mesh, axes="dp", units="auto"), expected)

    sm.simulate(4)(program)()


def test_generation_gives_plain_ids() -> None:
    options: dict[str, Any] = {
        "input_ids": IDS,
        "attention_mask": torch.ones_like(IDS),
        "max_new_tokens": 4,
        "do_sample": False,
    }
    expected = lora()().eval().generate(**options)  # type: ignore[operator]

    def program() -> None:
        mesh = sm.init_device_mesh("cpu", (4,), axis_names=("tp",))
        module = lora()().eval()
        plan = {**module.tp_plan, "lm_head": "colwise"}  # type: ignore[dict-item]
        tokens = parallelize(module, mesh, plan).generate(**options)  # type: ignore[operator]
        assert type(tokens) is torch.Tensor
        torch.testing.assert_close(tokens, expected)

    sm.simulate(4)(program)()


@pytest.mark.one_in(2, each=["adapters", "shape"])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_generation_after_finetuning(shape: tuple[int, int], adapters: bool) -> None:
    """Plain ids give plain ids on every mesh. Peft's `generate` calls a module inside of its own.

    Its buffers are those of the outer unit.
    """

    def built() -> Any:
        return (lora()() if adapters else model("llama")).eval()

    mask = torch.ones_like(IDS)
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = built().generate(input_ids=IDS, **options)

    def program() -> torch.Tensor:
        mesh = sm.init_device_mesh("cpu", shape, axis_names=("fsdp", "tp"))
        module: Any = parallelize(built(), mesh, "auto")
        fully_shard(module, mesh, axes="fsdp", units="auto")
        return module.generate(input_ids=IDS, **options)

    for tokens in sm.simulate(shape[0] * shape[1])(program)():
        assert type(tokens) is torch.Tensor
        assert torch.equal(tokens, expected)


def test_a_plan_that_matches_nothing_raises() -> None:
    class Other(nn.Module):
        _tp_plan = {"layers.*.q_proj": "colwise"}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

    def program() -> None:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("tp",))
        with pytest.raises(ValueError, match="no pattern of the plan of Other matches"):
            parallelize(Other(), mesh, "auto")

    sm.simulate(2)(program)()
