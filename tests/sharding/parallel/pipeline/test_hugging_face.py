"""Steps and generation of transformers' models through a pipeline on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.parallel import load_balance_loss, pipeline
from tests.sharding.parallel.pipeline.stages.test_transformers import inputs, model_of
from tests.tiers import slow

transformers = pytest.importorskip("transformers")

VOCABULARY, ROWS, LENGTH = 64, 4, 8
SPLITS = {
    "bert": ["bert.encoder.layer.1", "bert.encoder.layer.3"],
    "t5": ["encoder.block.1", "decoder.block.1"],
}
# which divide the same modules, so that units are the same
OTHER_SPLITS = {"bert": ["bert.encoder.layer.2"], "t5": ["encoder.block.2", "decoder.block.2"]}


def loss_fn(result: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(result.logits.flatten(0, 1), targets.flatten())


def targets_of(length: int) -> Tensor:
    return torch.arange(ROWS * length).view(ROWS, length) * 7 % VOCABULARY


# -- dropout ---------------------------------------------------------------------------------------


def train(name: str, split: list[str], schedule: str) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of a step in train mode, with the models' own dropout."""
    mesh = sm.init_device_mesh("cpu", (len(split) + 1,), axis_names=("pp",))
    model = model_of(name)
    assert model.training
    assert any(module.p > 0 for module in model.modules() if isinstance(module, nn.Dropout))
    pipe = pipeline(model, mesh, split=split, schedule=schedule, microbatches=2)
    _, kwargs = inputs(name, rows=ROWS, length=LENGTH)
    targets = targets_of(5 if name == "t5" else LENGTH)
    torch.manual_seed(2)
    loss = pipe.step((), targets, loss_fn=loss_fn, weight=Tensor.numel, **kwargs)
    return loss.item(), {n: x.grad for n, x in pipe.named_parameters() if x.grad is not None}


@pytest.mark.parametrize(
    ("name", "schedule"), [("bert", "1f1b"), slow("bert", "zb_h1"), slow("t5", "zb_h1")]
)
def test_dropout_does_not_depend_on_the_split(name: str, schedule: str) -> None:
    other = OTHER_SPLITS[name]
    by_rank = sm.simulate(len(other) + 1)(train)(name, other, "1f1b")
    expected = by_rank[0][0]
    expected_grads: dict[str, Tensor] = {}
    for _, grads in by_rank:
        expected_grads |= grads
    seen: set[str] = set()
    for loss, grads in sm.simulate(3)(train)(name, SPLITS[name], schedule):
        assert loss == pytest.approx(expected, abs=1e-12)
        for parameter, grad in grads.items():
            torch.testing.assert_close(grad, expected_grads[parameter], rtol=0, atol=1e-12)
        seen |= set(grads)
    assert seen == set(expected_grads)


# -- generation ------------------------------------------------------------------------------------


def generate(pipe: Any, ids: Tensor, new_tokens: int) -> Tensor:
    """Return ids with the likeliest next tokens, the same on every rank; as in docs/pipeline.md."""
    length = ids.shape[1]
    ids = F.pad(ids, (0, new_tokens))  # one shape in all forwards; attention is causal
    group = pipe.mesh.group(pipe.axis)
    last = pipe.schedule.placement[-1]
    for position in range(length, length + new_tokens):
        results = pipe.forward(ids, use_cache=False)
        tokens = ids.new_empty(ids.shape[0])
        if results is not None:
            logits = torch.cat([result.logits[:, position - 1] for result in results])
            tokens = logits.argmax(-1)
        group.broadcast(tokens, src=last)
        ids[:, position] = tokens
    return ids


def test_generation_is_that_of_the_whole_model() -> None:
    _, kwargs = inputs("llama", rows=ROWS)
    ids = kwargs["input_ids"]
    model: Any = model_of("llama").eval()
    expected = model.generate(
        ids, max_new_tokens=3, do_sample=False, use_cache=False, eos_token_id=-1
    )

    def program() -> Tensor:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        model = model_of("llama").eval()
        return generate(pipeline(model, mesh, microbatches=2), ids, 3)

    for own in sm.simulate(2)(program)():
        assert torch.equal(own, expected)


# -- mixtures of experts ---------------------------------------------------------------------------


def add_balance(model: nn.Module, add_loss: Any) -> None:
    """Add the balance of each router to the loss, in the forward of its layer."""

    def hook(module: nn.Module, args: Any, routing: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, _, experts = routing
        add_loss(0.1 * load_balance_loss(logits, experts))

    for path, module in model.named_modules():
        if path.endswith("mlp.gate"):
            module.register_forward_hook(hook)


def moe_step() -> tuple[float, dict[str, Tensor]]:
    mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
    model = model_of("qwen2_moe")
    add_balance(model, lambda value: pipes[0].add_loss(value))
    pipes = [pipeline(model, mesh, split=["model.layers.1"], schedule="zb_h1", microbatches=2)]
    _, kwargs = inputs("qwen2_moe", rows=ROWS)
    loss = pipes[0].step((), targets_of(LENGTH), loss_fn=loss_fn, weight=Tensor.numel, **kwargs)
    named = pipes[0].named_parameters()
    return loss.item(), {n: x.grad for n, x in named if x.grad is not None}


def test_balance_of_routers_is_added_in_each_stage() -> None:
    model = model_of("qwen2_moe")
    balance: list[Tensor] = []
    add_balance(model, balance.append)
    _, kwargs = inputs("qwen2_moe", rows=ROWS)
    total = 0.0
    for rows in (slice(0, 2), slice(2, 4)):
        balance.clear()
        own = {name: x[rows] if isinstance(x, Tensor) else x for name, x in kwargs.items()}
        loss = loss_fn(model(**own), targets_of(LENGTH)[rows]) + torch.stack(balance).sum()
        (loss / 2).backward()
        total += loss.item() / 2
    expected = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    assert len(balance) == 4
    seen: set[str] = set()
    for loss, grads in sm.simulate(2)(moe_step)():
        assert loss == pytest.approx(total, rel=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-7)
        seen |= set(grads)
    assert seen == set(expected)


def test_router_logits_of_other_stages_are_an_error() -> None:
    """transformers collects them by hooks inside of the layers, which other stages do not run."""

    def program() -> str:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        pipe = pipeline(model_of("qwen2_moe"), mesh, split=["model.layers.1"], microbatches=2)
        _, kwargs = inputs("qwen2_moe", rows=ROWS)
        with pytest.raises(ValueError, match="needs a tensor") as raised:
            pipe.forward((), output_router_logits=True, **kwargs)
        return str(raised.value)

    first, second = sm.simulate(2)(program)()
    assert first == second
    assert "needs a tensor that unit 'model.layers.0' of stage 0 computes" in first
