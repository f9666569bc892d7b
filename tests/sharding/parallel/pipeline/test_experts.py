"""Mixtures of experts in stages: loops over experts, experts over an axis, losses of balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import Experts, Routing, load_balance_loss, pipeline, top_k_routing
from tests.tiers import slow

VOCABULARY, WIDTH, COUNT, CHOICES, ROWS, LENGTH = 12, 6, 4, 2, 8, 3
AddLoss = Callable[[Tensor], object]


class Loop(nn.ModuleList):
    """Experts one after the other; which rows they get depends on values."""

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        chosen, weights = (t.reshape(-1, CHOICES) for t in routing)
        result = torch.zeros_like(rows)
        for number, expert in enumerate(self):
            tokens, choices = torch.where(chosen == number)
            if len(tokens):
                scaled = expert(rows[tokens]) * weights[tokens, choices].unsqueeze(-1)
                result = result.index_add(0, tokens, scaled)
        return result.view_as(x)


class Block(nn.Module):
    """Adds what experts make of each token, and their balance to the loss."""

    def __init__(self, add_loss: AddLoss) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, COUNT, bias=False)
        self.experts: nn.Module = Loop(
            [
                nn.Sequential(nn.Linear(WIDTH, 8), nn.SiLU(), nn.Linear(8, WIDTH))
                for _ in range(COUNT)
            ]
        )
        self.add_loss = add_loss

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        routing = top_k_routing(logits, CHOICES)
        self.add_loss(0.1 * load_balance_loss(logits, routing.experts))
        return x + self.experts(x, routing)


class Model(nn.Module):
    """Ids to logits, with classes in dim 1."""

    def __init__(self, add_loss: AddLoss, recompute: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(add_loss) for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.recompute = recompute

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(x).transpose(1, 2)


def make_model(add_loss: AddLoss, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Model(add_loss, **options).double()


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=random)
    targets = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=random)
    targets[2] = -100
    targets[5, 1:] = -100
    return ids, targets


Trained = tuple[float, dict[str, Tensor]]


def one_process(microbatches: Sequence[Sequence[int]]) -> Trained:
    """Return loss and gradients of the rows of each microbatch, one after the other."""
    balance: list[Tensor] = []
    model = make_model(balance.append)
    ids, targets = batch()
    valid = (targets != -100).double()
    total = 0.0
    for rows in microbatches:
        balance.clear()
        share = valid[rows].sum() / valid.sum()
        loss = F.cross_entropy(model(ids[rows]), targets[rows], reduction="sum") / valid.sum()
        loss = loss + share * torch.stack(balance).sum()
        loss.backward()
        total += loss.item()
    return total, {name: x.grad for name, x in model.named_parameters()}  # type: ignore[misc]


def check(trained: Sequence[Trained], expected: Trained) -> None:
    seen: set[str] = set()
    for loss, grads in trained:
        assert loss == pytest.approx(expected[0], abs=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[1][name], rtol=0, atol=1e-12)
        seen |= set(grads)
    assert seen == set(expected[1])


class Pipes(list[Any]):
    """Refers to a pipeline from its model."""

    def add_loss(self, value: Tensor) -> None:
        self[0].add_loss(value)


CASES = [
    ("1f1b", ["blocks.1"]),
    slow("zb_h1", ["blocks.2"]),
    slow("interleaved", ["blocks.0", "blocks.1", "head"]),
    ("zb_v", ["blocks.0", "blocks.2", "head"]),
]


@pytest.mark.parametrize("recompute", [None, False])
@pytest.mark.parametrize(("schedule", "split"), CASES)
def test_loops_over_experts(schedule, split, recompute):
    def program() -> Trained:
        pipes = Pipes()
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        model = make_model(lambda value: pipes.add_loss(value), recompute=recompute)
        pipe = pipeline(model, mesh, split=split, schedule=schedule, microbatches=4)
        pipes.append(pipe)
        loss = pipe.step(*batch(), loss_fn=F.cross_entropy)
        return loss.item(), {name: x.grad for name, x in pipe.named_parameters()}  # type: ignore[misc]

    check(sm.simulate(2)(program)(), one_process([[0, 1], [2, 3], [4, 5], [6, 7]]))


@pytest.mark.parametrize(("schedule", "split"), CASES)
def test_experts_over_an_axis(schedule, split):
    """Tokens are split over the axis as well; the experts of a stage replace its loops."""

    def program() -> Trained:
        pipes = Pipes()
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("pp", "ep"))
        model = make_model(lambda value: pipes.add_loss(value))
        pipe = pipeline(model, mesh, split=split, schedule=schedule, microbatches=4)
        pipes.append(pipe)
        for stage in pipe.stages.values():
            for block in list(stage.modules()):
                if isinstance(block, Block):
                    block.experts = Experts(list(block.experts.children()), mesh["ep"])
        pipe.data_parallel(mesh["ep"])
        own = [sm.distribute_tensor(x, mesh["ep"], P("ep")) for x in batch()]
        loss = pipe.step(*own, loss_fn=F.cross_entropy)
        grads: dict[str, Tensor] = {}
        for name, x in pipe.named_parameters():
            grad: Any = x.grad
            if "experts.each." in name:
                each = enumerate(grad.full_tensor())
                grads |= {name.replace("each", str(number)): part for number, part in each}
            else:
                grads[name] = grad.full_tensor()
        return loss.item(), grads

    check(sm.simulate(4)(program)(), one_process([[0, 4], [1, 5], [2, 6], [3, 7]]))


def errors_of(adds_between: bool, recompute: bool | None) -> list[str]:
    def program() -> str:
        pipes = Pipes()

        class Adds(Model):
            def forward(self, ids: Tensor) -> Tensor:
                logits = super().forward(ids)
                if adds_between:
                    pipes.add_loss(logits.square().mean())
                return logits

        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        model = Adds(lambda value: pipes.add_loss(value), recompute).double()
        pipe = pipeline(model, mesh, split=["blocks.1"])
        pipes.append(pipe)
        with pytest.raises(RuntimeError, match="add_loss") as raised:
            pipe.step(*batch(), loss_fn=F.cross_entropy)
        return str(raised.value)

    return sm.simulate(2)(program)()


def test_a_loss_between_units_is_an_error_on_all_ranks():
    first, second = errors_of(True, None)
    assert first == second
    assert "called between units, which every stage computes" in first


def test_a_loss_in_a_reentrant_checkpoint_is_an_error():
    first, second = errors_of(False, True)
    assert first == second
    assert "use_reentrant=False" in first


@pytest.mark.parametrize("split", ["model.layers.1", "model.layers.2"])
def test_experts_of_transformers(split):
    """Their implementation "eager" is a loop; it works in float64 as well."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )

    def make() -> Any:
        torch.manual_seed(0)
        model = transformers.Qwen2MoeForCausalLM(config).double().train()
        model.set_experts_implementation("eager")
        return model

    def loss_fn(result: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(result.logits.flatten(0, 1), targets.flatten())

    ids, targets = batch()
    mask = torch.ones_like(ids)
    mask[1, 2:] = 0
    model = make()
    expected = loss_fn(model(ids, attention_mask=mask), targets)
    expected.backward()

    def program() -> Trained:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        pipe = pipeline(make(), mesh, split=[split], schedule="zb_h1", microbatches=2)
        loss = pipe.step(
            ids,
            targets,
            loss_fn=loss_fn,
            weight=lambda t: (t != -100).sum(),
            attention_mask=mask,
        )
        return loss.item(), {name: x.grad for name, x in pipe.named_parameters()}  # type: ignore[misc]

    grads = {name: x.grad for name, x in model.named_parameters()}
    check(sm.simulate(2)(program)(), (expected.item(), grads))
